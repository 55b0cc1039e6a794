"""The weight cache: codes are cast once per optimizer step, and a stale one is never used."""

import copy
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from octavo import fp8
from octavo.fp8.kernels import capture


def layer(**kwargs):
    torch.manual_seed(0)
    m = nn.Sequential(nn.Linear(64, 32, bias=False, **kwargs))
    return fp8.apply(m, fp8.plan(m, "blockwise"))


X = torch.randn(5, 64, generator=torch.Generator().manual_seed(1))


def casts(m):
    return m[0]._site.codes.casts


def fresh(m, x=X):
    """What the layer must give: no cache at all."""
    return fp8.linear(x, m[0].weight.detach(), m[0].bias)


def assert_right(m, x=X):
    assert torch.equal(m(x), fresh(m, x))


OPTIMIZERS = {
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "adamw_foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "adamw_loop": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=False),
    "sgd_fused": lambda p: torch.optim.SGD(p, lr=0.1, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_step_invalidates_codes(name):
    m = layer()
    optimizer = OPTIMIZERS[name](m.parameters())
    for step in range(3):
        for _ in range(4):
            assert_right(m)
            m(X.clone().requires_grad_()).square().sum().backward()
        assert casts(m) == step + 1
        before = m[0].weight.detach().clone()
        optimizer.step()
        optimizer.zero_grad()
        assert not torch.equal(before, m[0].weight)
    assert_right(m)


def test_fused_adamw_does_not_change_version_counter():
    """The reason for the weight version. Should torch change this, it stays harmless."""
    p = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.AdamW([p], lr=0.1, fused=True)
    p.grad = torch.ones(4)
    version, value = p._version, p.detach().clone()
    optimizer.step()
    assert not torch.equal(p, value)
    if p._version != version:
        pytest.skip("this torch counts the write of fused AdamW")


def in_place(m):
    with torch.no_grad():
        m[0].weight.mul_(2)


def data_assignment(m):
    m[0].weight.data = m[0].weight.data * 2


def state_dict(m):
    m.load_state_dict({k: v * 2 for k, v in m.state_dict().items()})


def state_dict_assigned(m):
    m.load_state_dict({k: v * 2 for k, v in m.state_dict().items()}, assign=True)


def new_parameter(m):
    m[0].weight = nn.Parameter(m[0].weight.detach() * 2)


def parameter_behind_the_back(m):
    m[0]._parameters["weight"] = nn.Parameter(m[0].weight.detach() * 2)


def data_written_then_invalidated(m):
    m[0].weight.data.mul_(2)
    fp8.invalidate(m)


def copied_in(m):
    with torch.no_grad():
        m[0].weight.copy_(torch.randn(32, 64))


def reinitialised(m):
    nn.init.normal_(m[0].weight)


def swapped_data_twice(m):
    # The freed storage of the first may be reused by the last: addresses alone would see no change.
    old = m[0].weight.data
    m[0].weight.data = torch.zeros_like(old)
    del old
    m[0].weight.data = torch.randn(32, 64)


def vector_to_parameters(m):
    nn.utils.vector_to_parameters(torch.randn(32 * 64), m.parameters())


WRITES = [
    in_place, data_assignment, state_dict, state_dict_assigned, new_parameter, parameter_behind_the_back,
    data_written_then_invalidated, copied_in, reinitialised, swapped_data_twice, vector_to_parameters,
]  # fmt: skip


@pytest.mark.parametrize("write", WRITES, ids=lambda f: f.__name__)
def test_writes_invalidate_codes(write):
    m = layer()
    assert_right(m)
    before = m[0].weight.detach().clone()
    write(m)
    assert not torch.equal(before, m[0].weight)
    assert_right(m)


@pytest.mark.parametrize("move", [lambda m: m.to(torch.bfloat16), lambda m: m.half(), lambda m: m.double().float()])
def test_dtype_changes_invalidate_codes(move):
    m = layer()
    assert_right(m)
    move(m)
    x = X.to(m[0].weight.dtype)
    assert_right(m, x)


def test_reused_storage_address_invalidates_codes():
    m = layer()
    for _ in range(20):
        m[0].weight.data = torch.randn(32, 64)
        assert_right(m)
        pointer = m[0].weight.data_ptr()
        m[0].weight.data = torch.empty(0, 64)
        again = torch.randn(32, 64)
        m[0].weight.data = again
        assert_right(m)
        del again, pointer


def test_invalidate_drops_codes_after_hidden_write():
    m = layer()
    m(X)
    m[0].weight.data.mul_(2)
    assert not torch.equal(m(X), fresh(m)), "a hidden write became visible: update the documentation of invalidate"
    fp8.invalidate(m)
    assert_right(m)


def test_meta_weight_is_loaded_later():
    with torch.device("meta"):
        m = nn.Sequential(nn.Linear(64, 32, bias=False))
    fp8.apply(m, fp8.plan(m, "delayed"))
    m.load_state_dict({"0.weight": torch.randn(32, 64)}, assign=True)
    assert m(X.requires_grad_()).isfinite().all()
    with torch.device("meta"):
        n = nn.Sequential(nn.Linear(64, 32, bias=False))
    fp8.apply(n, fp8.plan(n, "delayed")).to_empty(device="cpu")
    nn.init.ones_(n[0].weight)
    assert n(X).isfinite().all()
    assert all(not t.any() for k, t in fp8.scaling_state(n).items() if "_dy" in k)


def test_tied_layers_and_copies_have_correct_codes():
    m = layer()
    twin = copy.deepcopy(m)
    twin[0].weight.data = twin[0].weight.data * 3
    for _ in range(2):
        assert_right(m)
        assert_right(twin)


def test_rowwise_has_two_layouts_and_blockwise_one():
    for recipe, count in (("blockwise", 1), ("tensorwise", 1), ("rowwise", 2), ("mxfp8", 2)):
        m = nn.Sequential(nn.Linear(64, 32))
        fp8.apply(m, fp8.plan(m, recipe))
        for _ in range(3):
            m(X.clone().requires_grad_()).sum().backward()
        assert casts(m) == len(m[0]._site.codes) == count
        assert count * 32 * 64 < fp8.weight_cache_bytes(m) <= count * (32 * 64 + 4 * 64)
        fp8.invalidate(m)
        assert fp8.weight_cache_bytes(m) == 0


def test_offloaded_weight_is_cast_in_backward():
    m = layer()
    x = X.detach().clone().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        m(x).sum().backward()
    want = x.grad.clone()
    assert casts(m) == 2 and len(m[0]._site.codes) == 1
    x.grad = None
    m(x).sum().backward()
    assert casts(m) == 2 and torch.equal(x.grad, want)


def test_different_slice_of_same_memory_has_separate_codes():
    """The same storage, at the same version: only the address tells them apart."""
    base = torch.randn(2, 32, 64)
    m = layer()
    m[0].weight.data = base[0]
    assert_right(m)
    version = m[0].weight._version
    m[0].weight.data = base[1]
    assert m[0].weight._version == version
    assert_right(m)


def test_what_counts_as_capturing(monkeypatch):
    on_gpu, on_cpu = torch.device("cuda", 0), torch.device("cpu")
    monkeypatch.setitem(sys.modules, "torch._inductor.cudagraph_trees", None)
    for capturing in (True, False):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda now=capturing: now)
        assert capture.is_capturing(on_gpu) is capturing and not capture.is_capturing(on_cpu)
    for manager in (object(), None):  # of Inductor's graphs, which run and capture on streams of their own
        trees = SimpleNamespace(get_manager=lambda index, create_if_none_exists, m=manager: m)
        monkeypatch.setitem(sys.modules, "torch._inductor.cudagraph_trees", trees)
        assert capture.is_capturing(on_gpu) is (manager is not None) and not capture.is_capturing(on_cpu)


def test_graph_reads_valid_codes_if_weights_stay(monkeypatch):
    m = layer()
    m(X)
    monkeypatch.setattr("octavo.fp8.weights.cache._is_capturing", lambda weight: True)
    cache = m[0]._site.codes
    for stay, edited, captured in ((False, False, True), (True, False, False), (True, True, True), (True, False, True)):
        before = casts(m)
        if edited:
            with torch.no_grad():
                m[0].weight.mul_(2)
        with capture.assume_constant_weights() if stay else nullcontext():
            assert_right(m)
        assert (casts(m) > before) == cache.captured == captured, (stay, edited)
    assert not capture.are_weights_constant()


@pytest.mark.parametrize("recipe", ["blockwise", "rowwise"])
def test_codes_count_once(recipe):
    """Two layers alike, on a device where every tensor has the address 0; dgrad's codes may be the forward's."""
    found = []
    for device in ("cpu", "meta"):
        model = nn.Sequential(nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False)).to(device)
        fp8.apply(model, fp8.plan(model, recipe))
        model(torch.ones(4, 32, device=device, requires_grad=True)).sum().backward()
        found.append(fp8.weight_cache_bytes(model))
    assert found[0] == found[1] >= 2 * 32 * 32 * (1 + (recipe == "rowwise"))
