"""One cast of an input for all layers that multiply by it: number of casts, invalidation, saved tensors."""

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
def clear_cache():
    inputs.drop_entries()


@pytest.fixture
def casts(monkeypatch):
    """The casts of activations by the reference: (method, rows, features)."""
    backend, created, state = get("reference"), [], threading.local()

    def watch(name):
        original = getattr(backend, name)

        def wrapped(x, *args, **kwargs):
            depth = getattr(state, "depth", 0)
            if not depth:  # quantize_both may quantize twice
                created.append((name, *x.shape))
            state.depth = depth + 1
            try:
                return original(x, *args, **kwargs)
            finally:
                state.depth = depth

        monkeypatch.setattr(backend, name, wrapped)

    for name in ("quantize", "quantize_both"):
        watch(name)
    return created


def input_casts(casts, features=64):
    return [name for name, _, columns in casts if columns == features]


def warm(m, x):
    m(x.clone()).sum().backward()
    m.zero_grad()
    inputs.drop_entries()


def run_separately(m, x):
    """Return the output and gradients of each layer alone."""
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
    assert input_casts(casts) == ["quantize_both"]
    casts.clear()
    with torch.no_grad():
        m(x.clone())
    assert input_casts(casts) == ["quantize"]


@pytest.mark.parametrize("recipe", (*RECIPES, "delayed"))
def test_sharing_does_not_change_values(recipe):
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
        b, z = run_separately(m, x)
        z.square().sum().backward()
        assert torch.equal(y, z) and torch.equal(a.grad, b.grad)
        assert all(torch.equal(g, p.grad) for g, p in zip(grads, m.parameters(), strict=True))


def saved_codes(m, x):
    results = []

    def pack(t):
        results.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = m(x)
    return y, [t for t in results if t.dtype in FP8_TYPES and t.shape[-1] == x.shape[-1]]


@pytest.mark.parametrize("recipe", RECIPES)
def test_shared_codes_are_saved_once(recipe):
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


def test_high_precision_gemms_share_autocast_copy():
    m, x = three(wgrad="bf16"), torch.randn(40, 64)
    results = []
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: results.append(t) or t, lambda t: t):
            m(x)
    copies = {t.untyped_storage().data_ptr() for t in results if t.dtype == torch.bfloat16 and t.shape == (40, 64)}
    assert len(copies) == 1


def test_autocast_converts_once(casts):
    m, x = three(), torch.randn(5, 64, requires_grad=True)
    warm(m, x.detach())
    casts.clear()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = m(x)
    assert input_casts(casts) == ["quantize_both"] and y.dtype == torch.bfloat16
    y.float().square().sum().backward()
    parts = []
    for layer in (m.q, m.k, m.v):
        original = x.detach().bfloat16().requires_grad_()
        at = sum(p.shape[-1] for p in parts)
        z = fp8.linear(original, layer.weight.detach(), layer.bias.detach())
        z.backward(2 * y.detach()[:, at : at + z.shape[1]])
        parts.append(z)
        parts[-1].dx = original.grad.float()
    assert torch.allclose(x.grad, sum(p.dx for p in parts), rtol=1e-6) and x.grad.dtype == torch.float32
    for first, second in ((True, False), (False, True)):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=first):
            m.q(x)
        casts.clear()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=second):
            m.k(x)
        assert input_casts(casts) == ["quantize_both"]  # in another dtype: another cast


def test_edit_between_layers_is_detected():
    m, x = three(), torch.randn(5, 64)
    with torch.no_grad():
        q = m.q(x)
        x.mul_(2)
        k = m.k(x)
        assert torch.equal(k, fp8.linear(x, m.k.weight, m.k.bias)) and not torch.equal(q, m.q(x))


def test_layer_casts_again_after_undetected_write():
    """A CUDA graph or a collective may write without a new version; a layer's second call casts again."""
    m, x = three(), torch.randn(5, 64)
    for _ in range(3):
        x.data.mul_(2)
        assert torch.equal(m(x), torch.cat([fp8.linear(x, p.weight, p.bias) for p in (m.q, m.k, m.v)], -1))


def test_views_slices_and_reused_addresses():
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


def test_at_most_one_input_is_cached():
    m, saved = three(), []
    for rows in (3, 5, 7):
        saved.append(torch.randn(rows, 64))
        with torch.no_grad():
            m(saved[-1])
        codes, scales = rows * 64, rows * 4
        assert codes + scales <= held_bytes() <= codes + 4 * scales
    saved.clear()
    assert held_bytes() == 0


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_casts_again_with_same_result(casts, reentrant):
    m = three()
    x = torch.randn(5, 64)
    warm(m, x)
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    m(a).square().sum().backward()
    want = [p.grad.clone() for p in m.parameters()]
    m.zero_grad()
    casts.clear()
    y = checkpoint(m, b, use_reentrant=reentrant)
    assert len(input_casts(casts)) == 1
    y.square().sum().backward()
    assert len(input_casts(casts)) == 2
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
        actual = x.grad.clone()
        x.grad = None
        (other.q(x).sum() + m(x).square().sum()).backward()
        assert torch.equal(actual, x.grad)


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


def test_inference_and_training_do_not_share():
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
    assert held_bytes() == 5 * 64 * 2 + 4 * (5 + 1)  # the training input's, both ways, with scales of 1x128 and 128x128
    z.sum().backward()


def test_threads_have_separate_caches(casts):
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
    assert len(input_casts(casts)) == 3 and torch.equal(results[0], results[1])


def test_capture_does_not_share_codes(casts, monkeypatch):
    m, x = three(), torch.randn(5, 64, requires_grad=True)
    warm(m, x.detach())
    m.q(x)
    before = m.q._site.codes.casts
    casts.clear()
    monkeypatch.setattr(inputs, "_is_capturing", lambda _: True)
    monkeypatch.setattr(cache, "_is_capturing", lambda _: True)
    k = m.k(x)
    assert input_casts(casts) == ["quantize_both"] + ["quantize"]  # the input's, and the weight's
    v = m.v(x)
    with torch.no_grad():
        m.k.weight.data.mul_(2)  # what a replay finds, unseen
    assert torch.equal(m.k(x), fp8.linear(x, m.k.weight, m.k.bias))
    casts.clear()
    (k.sum() + v.sum()).backward()  # by the codes of their forward, which the graph holds
    assert input_casts(casts) == []
    assert m.q._site.codes.casts == before
    monkeypatch.undo()
    assert held_bytes() > 0
    with torch.no_grad():
        casts2 = m.q._site.codes.casts
        m.q(x)
        assert m.q._site.codes.casts == casts2


def test_fsdp(mesh_of_one, casts):
    m = three()
    plain = three()
    fully_shard(m, mesh=mesh_of_one)
    x = torch.randn(5, 64)
    for _ in range(2):
        casts.clear()
        y = m(x)
        assert input_casts(casts).count("quantize_both") == 1
        assert torch.equal(y, plain(x))
        y.sum().backward()


def test_functional_linear_does_not_share(casts):
    x, w = torch.randn(5, 64), torch.randn(16, 64)
    for _ in range(2):
        x.data.mul_(2)
        casts.clear()
        fp8.linear(x, w)
        assert len(input_casts(casts)) == 2  # x and w
    assert held_bytes() == 0


def unchecked(m, x):
    return [torch.equal(p(x), fp8.linear(x, p.weight, p.bias)) for p in (m.k, m.v)]


def test_numpy_memory_is_never_cached():
    """Writes of NumPy do not change the version: one array is refilled in every step, and layers alternate."""
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
def test_codes_are_dropped_by_backward_step_and_invalidate(end):
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


def test_backward_keeps_codes_of_other_inputs(casts):
    m, x, other = three(), torch.randn(5, 64), torch.randn(5, 64)
    warm(m, x)
    y = m.q(other)
    m.q(x)
    casts.clear()
    y.sum().backward()
    casts.clear()
    m.k(x)
    assert input_casts(casts) == []


def test_shape_and_strides_distinguish_inputs():
    m, x = three(), torch.randn(64, 64)
    with torch.no_grad():
        for other in (x.t(), x.view(32, 2, 64), x.as_strided((64, 64), (64, 1)), x[:32], x.view(1, 64, 64).mT):
            m.q(x)
            y = m.k(other)
            assert y.shape == (*other.shape[:-1], 16)
            assert torch.equal(y, fp8.linear(other, m.k.weight, m.k.bias))


def test_backends_share_one_pass():
    """A GemmOnlyBackend passes both casts to one backend, even if the other GEMM has a different backend."""
    from octavo.fp8.kernels.registry import GemmOnlyBackend

    created = []

    class Lent(GemmOnlyBackend):
        name = "lent"

        def quantize_both(self, x, row, col):
            created.append("both")
            return super().quantize_both(x, row, col)

        def quantize(self, x, spec, contract=1):
            created.append("one")
            return super().quantize(x, spec, contract)

    r, x = fp8.recipe("blockwise"), torch.randn(40, 64)
    row, col = CastRequest(Lent(), r.fwd.a), CastRequest(get("reference"), r.wgrad.b)
    got = cast_matrix(x, row, col)
    assert created == ["both"]
    for q, spec in zip(got, (r.fwd.a, r.wgrad.b), strict=True):
        want = fp8.quantize(x, spec)
        assert torch.equal(q.data.view(torch.uint8), want.data.view(torch.uint8)) and torch.equal(q.scale, want.scale)
