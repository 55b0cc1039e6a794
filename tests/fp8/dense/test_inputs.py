"""One cast of an input for all layers that multiply it: how often it is cast, when it must be again, what is saved."""

import gc
import threading
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from octavo import fp8
from octavo.fp8.dense import inputs
from octavo.fp8.dense.inputs import CastRequest, cast_matrix
from octavo.fp8.kernels.registry import get
from octavo.fp8.weights import cache
from tests.fp8.remembered import held_bytes

RECIPES = ("tensorwise", "rowwise", "blockwise", "mxfp8")
FP8_TYPES = (torch.float8_e4m3fn, torch.float8_e5m2)


class Three(nn.Module):
    def __init__(self, k=64, bias=True):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(k, n, bias=bias) for n in (48, 16, 32))

    def forward(self, x):
        return torch.cat([self.q(x), self.k(x), self.v(x)], -1)


def three(recipe="blockwise", **kwargs):
    torch.manual_seed(0)
    m = Three(kwargs.pop("features", 64))
    return fp8.apply(m, fp8.plan(m, fp8.Policy(recipe=recipe, **kwargs)))


@pytest.fixture(autouse=True)
def nothing_remembered():
    inputs.drop_entries()


@pytest.fixture
def casts(monkeypatch):
    """The casts that the reference makes of activations: (method, rows, features) each."""
    backend, made, state = get("reference"), [], threading.local()

    def watch(name):
        own = getattr(backend, name)

        def wrapped(x, *args, **kwargs):
            depth = getattr(state, "depth", 0)
            if not depth:  # quantize_both may quantize twice
                made.append((name, *x.shape))
            state.depth = depth + 1
            try:
                return own(x, *args, **kwargs)
            finally:
                state.depth = depth

        monkeypatch.setattr(backend, name, wrapped)

    for name in ("quantize", "quantize_both"):
        watch(name)
    return made


def of_x(casts, features=64):
    return [name for name, _, columns in casts if columns == features]


def warm(m, x):
    m(x.clone()).sum().backward()
    m.zero_grad()
    inputs.drop_entries()


def each_by_itself(m, x):
    """What every layer gives by itself: output, gradients."""
    x = x.detach().clone().requires_grad_()
    ys = []
    for layer in (m.q, m.k, m.v):
        inputs.drop_entries()
        ys.append(layer(x))
    return x, torch.cat(ys, -1)


@pytest.mark.parametrize("recipe", RECIPES)
def test_three_layers_cast_their_input_once(casts, recipe):
    m, x = three(recipe), torch.randn(5, 64)
    warm(m, x)
    casts.clear()
    m(x)
    assert of_x(casts) == ["quantize_both"]
    casts.clear()
    with torch.no_grad():
        m(x.clone())
    assert of_x(casts) == ["quantize"]


@pytest.mark.parametrize("recipe", (*RECIPES, "delayed"))
def test_values_are_those_of_layers_that_share_nothing(recipe):
    m = three(recipe)
    for seed in range(2):
        x = torch.randn(2, 3, 64, generator=torch.Generator().manual_seed(seed))
        a = x.clone().requires_grad_()
        m.zero_grad()
        state = {k: v.clone() for k, v in fp8.scaling_state(m).items()}
        y = m(a)
        y.square().sum().backward()
        grads = [p.grad.clone() for p in m.parameters()]
        m.zero_grad()
        fp8.load_scaling_state(m, state)
        b, z = each_by_itself(m, x)
        z.square().sum().backward()
        assert torch.equal(y, z) and torch.equal(a.grad, b.grad)
        assert all(torch.equal(g, p.grad) for g, p in zip(grads, m.parameters(), strict=True))


def saved_codes(m, x):
    found = []

    def pack(t):
        found.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = m(x)
    return y, [t for t in found if t.dtype in FP8_TYPES and t.shape[-1] == x.shape[-1]]


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_codes_that_they_keep_are_saved_once(recipe):
    m, x = three(recipe), torch.randn(40, 64)
    y, codes = saved_codes(m, x)
    assert len(codes) == 3 and len({t.untyped_storage().data_ptr() for t in codes}) == 1
    live = {
        t.untyped_storage().data_ptr()
        for t in gc.get_objects()
        if issubclass(type(t), torch.Tensor) and t.dtype in FP8_TYPES and t.numel() == 40 * 64
    }
    assert len(live) == (1 if recipe == "tensorwise" else 2)  # what wgrad needs, and what the next layer may ask for
    del x
    gc.collect()
    assert held_bytes() == 0 and y.grad_fn is not None


def test_high_precision_gemms_share_autocasts_copy():
    m, x = three(wgrad="bf16"), torch.randn(40, 64)
    found = []
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: found.append(t) or t, lambda t: t):
            m(x)
    copies = {t.untyped_storage().data_ptr() for t in found if t.dtype == torch.bfloat16 and t.shape == (40, 64)}
    assert len(copies) == 1


def test_autocast_lowers_once_and_adds_gradients_in_full(casts):
    m, x = three(), torch.randn(5, 64, requires_grad=True)
    warm(m, x.detach())
    casts.clear()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = m(x)
    assert of_x(casts) == ["quantize_both"] and y.dtype == torch.bfloat16
    y.float().square().sum().backward()
    parts = []
    for layer in (m.q, m.k, m.v):
        own = x.detach().bfloat16().requires_grad_()
        at = sum(p.shape[-1] for p in parts)
        z = fp8.linear(own, layer.weight.detach(), layer.bias.detach())
        z.backward(2 * y.detach()[:, at : at + z.shape[1]])
        parts.append(z)
        parts[-1].dx = own.grad.float()
    assert torch.allclose(x.grad, sum(p.dx for p in parts), rtol=1e-6) and x.grad.dtype == torch.float32
    for first, second in ((True, False), (False, True)):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=first):
            m.q(x)
        casts.clear()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=second):
            m.k(x)
        assert of_x(casts) == ["quantize_both"]  # in another dtype: another cast


def test_an_edit_between_two_layers_is_seen():
    m, x = three(), torch.randn(5, 64)
    with torch.no_grad():
        q = m.q(x)
        x.mul_(2)
        k = m.k(x)
        assert torch.equal(k, fp8.linear(x, m.k.weight, m.k.bias)) and not torch.equal(q, m.q(x))


def test_a_write_that_nobody_sees_is_met_by_asking_again():
    """A replayed CUDA graph or a collective may write without a new version: a layer that asks again gets a cast."""
    m, x = three(), torch.randn(5, 64)
    for _ in range(3):
        x.data.mul_(2)
        assert torch.equal(m(x), torch.cat([fp8.linear(x, p.weight, p.bias) for p in (m.q, m.k, m.v)], -1))


def test_views_slices_and_addresses_used_again():
    m = three()
    base = torch.randn(6, 64)
    for x in (base, base[:3], base[3:], base.view(2, 3, 64), base.t().contiguous().t(), base[:, :]):
        assert torch.equal(m.q(x), fp8.linear(x, m.q.weight, m.q.bias))
        assert torch.equal(m.k(x), fp8.linear(x, m.k.weight, m.k.bias))
    array = np.ones((6, 64), dtype=np.float32)  # two storages at one address
    x = torch.from_numpy(array)
    m_q = m.q(x)
    array[0] *= 3
    y = torch.from_numpy(array)
    assert torch.equal(m.k(y), fp8.linear(y, m.k.weight, m.k.bias)) and not torch.equal(m.q(y), m_q)
    for _ in range(20):
        x = torch.randn(6, 64)
        assert torch.equal(m.q(x), fp8.linear(x, m.q.weight, m.q.bias))
        del x
        assert held_bytes() == 0


def test_at_most_one_input_is_held_and_bytes_are_counted():
    m, kept = three(), []
    for rows in (3, 5, 7):
        kept.append(torch.randn(rows, 64))
        with torch.no_grad():
            m(kept[-1])
        codes, scales = rows * 64, rows * 4
        assert codes + scales <= held_bytes() <= codes + 4 * scales
    kept.clear()
    assert held_bytes() == 0


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recomputation_casts_once_more_and_gives_the_same(casts, reentrant):
    m = three()
    x = torch.randn(5, 64)
    warm(m, x)
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    m(a).square().sum().backward()
    want = [p.grad.clone() for p in m.parameters()]
    m.zero_grad()
    casts.clear()
    y = checkpoint(m, b, use_reentrant=reentrant)
    assert len(of_x(casts)) == 1
    y.square().sum().backward()
    assert len(of_x(casts)) == 2
    assert torch.equal(a.grad, b.grad)
    assert all(torch.equal(g, p.grad) for g, p in zip(want, m.parameters(), strict=True))


def test_selective_checkpointing_may_save_every_operation_of_a_cast():
    """It replays what it saved by counting operations: a region must make as many casts the second time."""
    m, x = three(), torch.randn(5, 64, requires_grad=True)
    other = three()
    for layers in (m, other):
        warm(layers, x.detach())  # weights are cast once, whatever is recomputed

    def save_all(ctx, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if op in saved else CheckpointPolicy.PREFER_RECOMPUTE

    aten = torch.ops.aten
    saved = (aten.amax.default, aten.mm.default, aten._to_copy.default)
    contexts = partial(create_selective_checkpoint_contexts, save_all)
    for _ in range(2):
        x.grad = None
        y = other.q(x).sum() + checkpoint(m, x, use_reentrant=False, context_fn=contexts).square().sum()
        y.backward()
        ours = x.grad.clone()
        x.grad = None
        (other.q(x).sum() + m(x).square().sum()).backward()
        assert torch.equal(ours, x.grad)


def test_micro_batches_and_optimizer_steps(casts):
    m = three()
    optimizer = torch.optim.AdamW(m.parameters(), lr=0.1, fused=True)
    static = torch.empty(5, 64)  # one buffer for all micro-batches
    for step in range(2):
        for micro in range(2):
            casts.clear()
            static.copy_(torch.randn(5, 64, generator=torch.Generator().manual_seed(micro + 2 * step)))
            y = m(static)
            fresh = torch.cat([fp8.linear(static, p.weight, p.bias) for p in (m.q, m.k, m.v)], -1)
            assert torch.equal(y, fresh)
            y.sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_inference_and_training_do_not_mix():
    m, x = three(), torch.randn(5, 64)
    with torch.inference_mode():
        y = m(x)
    z = m(x)
    assert torch.equal(y, z)
    with torch.inference_mode():
        inner = torch.randn(5, 64)
        a = m(inner)
        inner.mul_(2)
        assert not torch.equal(a, m(inner))
    assert held_bytes() == 5 * 64 * 2 + sum(
        4 * t for t in (5, 64)
    )  # the training input's, both ways, with their scales
    z.sum().backward()


def test_each_thread_remembers_its_own(casts):
    m, x = three(), torch.randn(5, 64)
    warm(m, x)
    casts.clear()
    results = {}

    def work(i):
        with torch.no_grad():
            results[i] = m(x)

    m(x)
    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(of_x(casts)) == 3 and torch.equal(results[0], results[1])


def test_a_capture_shares_nothing_with_what_is_outside(casts, monkeypatch):
    m, x = three(), torch.randn(5, 64, requires_grad=True)
    warm(m, x.detach())
    m.q(x)
    before = m.q._site.codes.casts
    casts.clear()
    monkeypatch.setattr(inputs, "_is_capturing", lambda _: True)
    monkeypatch.setattr(cache, "_is_capturing", lambda _: True)
    k = m.k(x)
    assert of_x(casts) == ["quantize_both"] + ["quantize"]  # the input's, and the weight's
    v = m.v(x)
    with torch.no_grad():
        m.k.weight.data.mul_(2)  # what a replay finds, unseen
    assert torch.equal(m.k(x), fp8.linear(x, m.k.weight, m.k.bias))
    casts.clear()
    (k.sum() + v.sum()).backward()  # by the codes of their forward, which the graph holds
    assert of_x(casts) == []
    assert m.q._site.codes.casts == before
    monkeypatch.undo()
    assert held_bytes() > 0
    with torch.no_grad():
        casts2 = m.q._site.codes.casts
        m.q(x)
        assert m.q._site.codes.casts == casts2


def test_under_fsdp(mesh_of_one, casts):
    m = three()
    plain = three()
    fully_shard(m, mesh=mesh_of_one)
    x = torch.randn(5, 64)
    for _ in range(2):
        casts.clear()
        y = m(x)
        assert of_x(casts).count("quantize_both") == 1
        assert torch.equal(y, plain(x))
        y.sum().backward()


def test_the_function_shares_nothing(casts):
    x, w = torch.randn(5, 64), torch.randn(16, 64)
    for _ in range(2):
        x.data.mul_(2)
        casts.clear()
        fp8.linear(x, w)
        assert len(of_x(casts)) == 2  # x and w
    assert held_bytes() == 0


def unchecked(m, x):
    return [torch.equal(p(x), fp8.linear(x, p.weight, p.bias)) for p in (m.k, m.v)]


def test_memory_that_numpy_may_write_is_never_remembered():
    """It moves no version: one array refilled in every step, and layers that take turns."""
    m, array = three(), np.ones((5, 64), dtype=np.float32)
    owned, shown = torch.from_numpy(array), torch.randn(5, 64)
    view = shown.numpy()
    for x, write in ((owned, array), (shown, view)):
        with torch.no_grad():
            for step in range(4):
                write[:] = step + 1
                layer = (m.q, m.k)[step % 2]
                assert torch.equal(layer(x), fp8.linear(x, layer.weight, layer.bias)), step
    assert held_bytes() == 0
    x = torch.randn(5, 64)
    with torch.no_grad():
        m.q(x)
        x.numpy()[:] *= 2  # shown only between two layers
        assert all(unchecked(m, x))


@pytest.mark.parametrize("end", ["backward", "optimizer", "invalidate"])
def test_codes_end_with_a_backward_an_optimizer_step_and_invalidate(end):
    m, x = three(), torch.randn(5, 64)
    optimizer = torch.optim.SGD(m.parameters(), lr=0.0)
    y = m.q(x)
    assert held_bytes() > 0
    x.data.mul_(2)  # unseen
    if end == "backward":
        y.sum().backward()
    elif end == "optimizer":
        optimizer.step()
    else:
        fp8.invalidate(nn.Linear(1, 1))
    assert held_bytes() == 0
    assert all(unchecked(m, x))


def test_a_backward_leaves_the_codes_of_another_input_alone(casts):
    m, x, other = three(), torch.randn(5, 64), torch.randn(5, 64)
    warm(m, x)
    y = m.q(other)
    m.q(x)
    casts.clear()
    y.sum().backward()
    casts.clear()
    m.k(x)
    assert of_x(casts) == []


def test_shape_and_strides_tell_inputs_of_one_memory_apart():
    m, x = three(), torch.randn(64, 64)
    with torch.no_grad():
        for other in (x.t(), x.view(32, 2, 64), x.as_strided((64, 64), (64, 1)), x[:32], x.view(1, 64, 64).mT):
            m.q(x)
            y = m.k(other)
            assert y.shape == (*other.shape[:-1], 16)
            assert torch.equal(y, fp8.linear(other, m.k.weight, m.k.bias))


def test_one_pass_where_a_backend_has_the_casts_of_another():
    """A GemmOnlyBackend hands both casts to one caster, though the other GEMM's backend is another."""
    from octavo.fp8.kernels.registry import GemmOnlyBackend

    made = []

    class Lent(GemmOnlyBackend):
        name = "lent"

        def quantize_both(self, x, row, col):
            made.append("both")
            return super().quantize_both(x, row, col)

        def quantize(self, x, spec, contract=1):
            made.append("one")
            return super().quantize(x, spec, contract)

    r, x = fp8.recipe("blockwise"), torch.randn(40, 64)
    row, col = CastRequest(Lent(), r.fwd.a), CastRequest(get("reference"), r.wgrad.b)
    got = cast_matrix(x, row, col)
    assert made == ["both"]
    for q, spec in zip(got, (r.fwd.a, r.wgrad.b), strict=True):
        want = fp8.quantize(x, spec)
        assert torch.equal(q.data.view(torch.uint8), want.data.view(torch.uint8)) and torch.equal(q.scale, want.scale)
