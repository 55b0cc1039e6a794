"""The FP8 linear layer: its three GEMMs, the tensors that it saves, and the wrappers that it supports."""

import copy
import gc
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from octavo import fp8
from octavo.base import recipe_specs
from octavo.fp8.observe import uncounted

RECIPES = recipe_specs.NAMES
FP8_TYPES = (torch.float8_e4m3fn, torch.float8_e5m2)


def convert(module, recipe="blockwise", **kwargs):
    return fp8.apply(module, fp8.plan(module, fp8.Policy(recipe=recipe, **kwargs)))


def layer(n=48, k=160, bias=True, dtype=torch.float32, recipe="blockwise", **kwargs):
    torch.manual_seed(0)
    return convert(nn.Sequential(nn.Linear(k, n, bias=bias, dtype=dtype)), recipe, **kwargs)


def relative(a, b):
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).norm() / b.norm())


def gemms_float64(x, w, dy, recipe):
    """Compute the three GEMMs from codes in float64."""
    r = fp8.recipe(recipe)

    def cast(t, spec):
        return fp8.dequantize(fp8.quantize(t, spec)).double()

    y = cast(x, r.fwd.a) @ cast(w, r.fwd.b).t()
    dx = cast(dy, r.dgrad.a) @ cast(w, r.dgrad.b)
    dw = cast(dy, r.wgrad.a).t() @ cast(x, r.wgrad.b)
    return y, dx, dw


def spread(rows, columns):
    """Return normal values times powers of two that differ by row and by column."""
    up, across = torch.randint(-6, 7, (rows, 1)), torch.randint(-6, 7, (1, columns))
    return torch.randn(rows, columns) * 2.0 ** (up + across)


def assert_elementwise(ours, exact, a, b):
    """Compare a @ b element by element, relative to the sum of magnitudes of its terms."""
    assert ours.shape == exact.shape
    size = (a.double().abs() @ b.double().abs()).clamp_min(torch.finfo(torch.float64).tiny)
    if ours.numel():
        assert float(((ours.detach().double() - exact).abs() / size).max()) < 1e-5


def assert_gemms_of_the_codes(recipe, m, n, k):
    x, w, dy = spread(m, k).requires_grad_(), spread(n, k).requires_grad_(), spread(m, n)
    y = fp8.linear(x, w, recipe=recipe)
    y.backward(dy)
    x0, w0 = x.detach(), w.detach()
    exact_y, exact_dx, exact_dw = gemms_float64(x0, w0, dy, recipe)
    assert_elementwise(y, exact_y, x0, w0.t())
    assert_elementwise(x.grad, exact_dx, dy, w0)
    assert_elementwise(w.grad, exact_dw, dy.t(), x0)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("m,n,k", [(7, 33, 130), (1, 16, 256), (130, 72, 40), (257, 140, 300)])
def test_gemms_match_codes(recipe, m, n, k):
    torch.manual_seed(1)
    assert_gemms_of_the_codes(recipe, m, n, k)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("tokens", [0, 1, 7])
@pytest.mark.parametrize("features", [1176, 3420, 4304])
def test_sizes_of_vision_towers_and_few_tokens(recipe, tokens, features):
    torch.manual_seed(2)
    for n, k in ((24, features), (features, 24)):
        assert_gemms_of_the_codes(recipe, tokens, n, k)


@pytest.mark.parametrize("shape", [(160,), (1, 160), (0, 160), (2, 0, 160), (2, 3, 5, 160)])
@pytest.mark.parametrize("bias", [True, False])
def test_leading_dimensions(shape, bias):
    m, stock = layer(bias=bias), nn.Linear(160, 48, bias=bias)
    x = torch.randn(shape, requires_grad=True)
    y = m(x)
    assert y.shape == stock(x).shape
    y.sum().backward()
    assert x.grad.shape == x.shape
    assert all(p.grad.shape == p.shape and p.grad.isfinite().all() for p in m.parameters())


def test_the_bias_is_added_before_the_one_rounding():
    x = torch.randn(64, 160).bfloat16()
    m = layer(dtype=torch.bfloat16)
    with torch.no_grad():
        m[0].bias.normal_(std=10)
    y32 = fp8.linear(x.float(), m[0].weight.detach(), None) + m[0].bias.float()
    assert torch.equal(m(x), y32.bfloat16())
    dy = torch.randn(64, 48).bfloat16()
    m(x).backward(dy)
    assert torch.equal(m[0].bias.grad, dy.float().sum(0).bfloat16())


@pytest.mark.parametrize("gemm", ["fwd", "dgrad", "wgrad"])
def test_a_gemm_in_bf16_is_exactly_high_precision(gemm):
    m, x = layer(recipe="blockwise", **{gemm: "bf16"}), torch.randn(20, 160, requires_grad=True)
    stock = nn.Linear(160, 48)
    stock.load_state_dict(m[0].state_dict())
    x2 = x.detach().clone().requires_grad_()
    dy = torch.randn(20, 48)
    with fp8.count_gemms() as counts:
        y = m(x)
        y.backward(dy)
    y2 = stock(x2)
    y2.backward(dy)
    pairs = {"fwd": (y, y2), "dgrad": (x.grad, x2.grad), "wgrad": (m[0].weight.grad, stock.weight.grad)}
    for name, (actual, expected) in pairs.items():
        assert (relative(actual, expected) < 1e-6) == (name == gemm)
        assert counts["0", name, fp8.HIGH if name == gemm else "reference"] == 1


def test_output_and_gradients_keep_their_dtypes():
    m = layer(dtype=torch.float32)
    x = torch.randn(4, 160, dtype=torch.bfloat16, requires_grad=True)
    y = m(x)
    y.sum().backward()
    assert (y.dtype, x.grad.dtype, m[0].weight.grad.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)


@pytest.mark.parametrize("backward_inside", [True, False])
def test_autocast_gives_its_dtype_and_does_not_reach_into_the_gemms(backward_inside):
    m, x = layer(), torch.randn(9, 160, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = m(x)
        assert y.dtype == torch.bfloat16
        if backward_inside:
            y.sum().backward()
    if not backward_inside:
        y.sum().backward()
    x2 = x.detach().bfloat16().requires_grad_()
    w = m[0].weight.detach().clone().requires_grad_()
    y2 = fp8.linear(x2, w, m[0].bias.detach())
    y2.sum().backward()
    assert torch.equal(y, y2) and torch.equal(x.grad, x2.grad.float()) and torch.equal(m[0].weight.grad, w.grad)


def saved(module, x):
    """Return the bytes of all tensors that a forward keeps alive, found by hooks and in memory."""
    recorded = {}

    def pack(t):
        recorded[t.untyped_storage().data_ptr()] = t
        return t

    original = {p.untyped_storage().data_ptr() for p in module.parameters()} | {x.untyped_storage().data_ptr()}
    gc.collect()
    before = {id(o) for o in gc.get_objects() if issubclass(type(o), torch.Tensor)}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = module(x)
    gc.collect()
    # What hangs on the node as a plain attribute, at any depth, is found by walking from it.
    for obj in _reachable(y.grad_fn):
        if isinstance(obj, torch.Tensor) and id(obj) not in before and obj is not y:
            recorded[obj.untyped_storage().data_ptr()] = obj
    return y, [
        t for pointer, t in recorded.items() if pointer not in original and pointer != y.untyped_storage().data_ptr()
    ]


def _reachable(root, depth=6):
    todo, results = [(root, depth)], {}
    while todo:
        obj, left = todo.pop()
        if id(obj) in results or left == 0 or isinstance(obj, type):
            continue
        results[id(obj)] = obj
        inner = list(gc.get_referents(obj))
        if hasattr(obj, "__dict__"):
            inner += list(vars(obj).values())
        todo += [(o, left - 1) for o in inner if not callable(o) or isinstance(o, torch.Tensor)]
    return list(results.values())


@pytest.mark.parametrize("recipe", RECIPES)
def test_only_fp8_is_saved_for_backward(recipe):
    module, x = layer(256, 512, dtype=torch.bfloat16, recipe=recipe), torch.randn(1024, 512).bfloat16()
    inner = (x * 1.0).requires_grad_()
    module[0](torch.randn(2, 512).bfloat16())  # the weight's codes are cached, not saved per forward
    _, live = saved(module[0], inner)
    wide = [t for t in live if t.element_size() > 1 and t.numel() > 4096]
    assert not wide, [(t.dtype, t.shape) for t in wide]
    codes = [t for t in live if t.dtype in FP8_TYPES and t.shape == (1024, 512)]
    assert len(codes) == 1
    size = sum(t.untyped_storage().nbytes() for t in live)
    assert size < 1024 * 512 * 1.1 + 256 * 512 * 2.2  # x once, the cached weight at most twice
    stock = nn.Linear(512, 256, dtype=torch.bfloat16)
    view = inner * 1.0  # what BF16 keeps: x itself
    with torch.autograd.graph.saved_tensors_hooks(lambda t: bf16.append(t.nbytes) or t, lambda t: t):
        bf16 = []
        stock(view)
    assert max(bf16) == 2 * codes[0].nbytes


def test_frozen_weight_saves_no_x_and_runs_no_wgrad():
    m = layer()
    m[0].weight.requires_grad_(False)
    x = torch.randn(64, 160, requires_grad=True)
    with fp8.count_gemms() as counts:
        y, live = saved(m[0], x)
        y.sum().backward()
    assert not [t for t in live if t.shape == x.shape]
    assert m[0].weight.grad is None and x.grad is not None and m[0].bias.grad is not None
    assert counts.total("wgrad") == 0 and counts.total("dgrad") == 1


def test_unneeded_dgrad_is_skipped():
    m, x = layer(), torch.randn(64, 160)
    with fp8.count_gemms() as counts:
        m(x).sum().backward()
    assert (counts.total("dgrad"), counts.total("wgrad")) == (0, 1)
    with torch.no_grad():
        assert m(x).grad_fn is None


def test_inference_mode_then_training():
    m, x = layer(), torch.randn(5, 160)
    with torch.inference_mode():
        y = m(x)
        assert y.is_inference()
    x.requires_grad_()
    z = m(x)
    z.sum().backward()
    assert torch.equal(y, z) and m[0].weight.grad is not None
    assert m[0]._site.codes.casts == 1
    with torch.inference_mode():
        inside = nn.Sequential(nn.Linear(160, 48))
        convert(inside)
        first = inside(x)
        inside[0].weight.mul_(2)
        inside[0].bias.mul_(2)
        assert torch.equal(inside(x), 2 * first)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("recipe", ["blockwise", "delayed"])
def test_activation_checkpointing_gives_the_same_gradients(reentrant, recipe):
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64))
    a = convert(block, recipe)
    b = copy.deepcopy(a)
    for step in range(3):
        x = (torch.randn(10, 64) * (step + 1)).requires_grad_()
        x2 = x.detach().clone().requires_grad_()
        a(x).square().sum().backward()
        with fp8.count_gemms() as counts:
            checkpoint(b, x2, use_reentrant=reentrant).square().sum().backward()
        assert torch.equal(x.grad, x2.grad)
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(a.parameters(), b.parameters(), strict=True))
        assert {g: counts.total(g, "2") for g in ("fwd", "recompute", "dgrad", "wgrad")} == dict.fromkeys(
            ("fwd", "recompute", "dgrad", "wgrad"), 1
        )
        assert counts.due("2", "wgrad") == counts.due("0", "dgrad") == 1
    for name, state in fp8.scaling_state(a).items():
        assert torch.equal(state, fp8.scaling_state(b)[name]), name


def test_uncounted_work_is_never_counted():
    for reentrant in (True, False):
        m = layer(64, 64, recipe="delayed")
        x = torch.randn(4, 64, requires_grad=True)
        with fp8.count_gemms() as counts, fp8.health() as h:
            with uncounted():
                dummy = m(m(x)) + checkpoint(m, x, use_reentrant=reentrant)
            real = m(x)
            (dummy.sum() * 0 + real.sum()).backward()
        assert {k[1]: n for k, n in counts.items() if n} == {"fwd": 1, "dgrad": 1, "wgrad": 1}
        state = fp8.scaling_state(m)
        assert int((state["0.fp8_amax_x"] > 0).sum()) == 1 and int((state["0.fp8_amax_dy"] > 0).sum()) == 1
        assert set(h.table()) == {"0"}


def test_deepcopy_and_pickle_copy_weights_and_no_codes():
    m, x = layer(), torch.randn(5, 160)
    y = m(x)
    twin = copy.deepcopy(m)
    assert len(m[0]._site.codes) == 1 and len(twin[0]._site.codes) == 0
    assert type(twin[0]) is fp8.Linear and twin[0].recipe == m[0].recipe and twin[0].name == "0"
    with torch.no_grad():
        twin[0].weight.mul_(2)
        twin[0].bias.mul_(2)
    assert torch.equal(twin(x), 2 * y) and torch.equal(m(x), y)
    assert torch.equal(pickle.loads(pickle.dumps(m))(x), y)


def test_state_dicts_are_those_of_the_stock_layer():
    m, stock = layer(recipe="delayed"), nn.Sequential(nn.Linear(160, 48))
    assert list(m.state_dict()) == list(stock.state_dict()) == ["0.weight", "0.bias"]
    assert all(type(v) is torch.Tensor for v in m.state_dict().values())
    stock.load_state_dict(m.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(m.parameters(), stock.parameters(), strict=True))


def test_apply_keeps_objects_parameters_and_hooks():
    m = nn.Sequential(nn.Linear(64, 64))
    inner, weight, calls = m[0], m[0].weight, []
    inner.register_forward_hook(lambda *a: calls.append(1))
    convert(m)
    m(torch.randn(2, 64))
    assert m[0] is inner and m[0].weight is weight and calls == [1]
    assert isinstance(inner, nn.Linear) and "fp8=blockwise e4m3, backend=reference" in repr(m)


def test_tied_weights_add_their_gradients():
    m = nn.ModuleDict({"a": nn.Linear(64, 64, bias=False), "b": nn.Linear(64, 64, bias=False)})
    m["b"].weight = m["a"].weight
    convert(m)
    x = torch.randn(8, 64)
    m["b"](m["a"](x)).sum().backward()
    tied = m["a"].weight.grad.clone()
    n = nn.ModuleDict({"a": nn.Linear(64, 64, bias=False), "b": nn.Linear(64, 64, bias=False)})
    n["a"].weight.data.copy_(m["a"].weight.data)
    n["b"].weight.data.copy_(m["a"].weight.data)
    convert(n)
    n["b"](n["a"](x)).sum().backward()
    assert torch.allclose(tied, n["a"].weight.grad + n["b"].weight.grad, rtol=1e-5)


def test_a_layer_used_twice_in_one_forward():
    m, x = layer(64, 64, bias=False), torch.randn(6, 64, requires_grad=True)
    with fp8.count_gemms() as counts:
        m(m(x)).sum().backward()
    assert counts["0", "fwd", "reference"] == counts["0", "wgrad", "reference"] == 2
    assert m[0]._site.codes.casts == 1


def test_transposed_and_strided_inputs():
    m, x = layer(bias=False), torch.randn(160, 12)
    assert torch.equal(m(x.t()), m(x.t().contiguous()))
    assert torch.equal(m(x.t()[::2]), m(x.t()[::2].contiguous()))


@pytest.mark.parametrize("shape", [(6, 64), (2, 3, 64)])
def test_output_may_be_modified_in_place(shape):
    m = layer(64, 64)
    x = torch.randn(shape, requires_grad=True)
    y = m(x)
    y += 1
    nn.functional.relu(y, inplace=True).sum().backward()
    actual, x.grad = x.grad, None
    torch.relu(m(x) + 1).sum().backward()
    assert torch.equal(actual, x.grad)


def test_nan_in_block_propagates():
    m, x = layer(), torch.randn(4, 160)
    x[2, 5] = float("inf")
    with fp8.health() as h:
        y = m(x.requires_grad_())
        y[0].sum().backward()
    assert y[2].isnan().all() and y[:2].isfinite().all()
    assert h.table()["0"]["nan_codes"] > 0


def test_error_messages():
    with pytest.raises(RuntimeError, match="inputs with 160 features.*got an input of shape"):
        layer()(torch.randn(3, 159))
    with pytest.raises(fp8.RecipeError, match="does not exist"):
        fp8.linear(torch.randn(2, 8), torch.randn(4, 8), recipe="blockwize")
    with pytest.raises(fp8.BackendError, match="no backend 'magic'"):
        fp8.linear(torch.randn(2, 8), torch.randn(4, 8), backend="magic")


def test_weight_change_before_backward_is_detected():
    m, x = layer(), torch.randn(3, 160, requires_grad=True)
    y = m(x)
    with torch.no_grad():
        m[0].weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_health_figures():
    m, x = layer(64, 256), torch.randn(50, 256, requires_grad=True)
    with fp8.health() as h:
        m(x).square().mean().backward()
        m(torch.zeros(0, 256, requires_grad=True)).sum().backward()
    row = h.table()["0"]
    assert {"x", "w", "dy", "x_wgrad", "dy_wgrad", "dw_cosine", "nan_codes"} == set(row)
    assert all(20 < row[r]["sqnr"] < 45 and row[r]["underflow"] < 0.01 for r in ("x", "w", "dy", "x_wgrad", "dy_wgrad"))
    assert row["dw_cosine"] > 0.99 and row["nan_codes"] == 0
    summary = h.summary()
    assert summary["x_sqnr_min"] == row["x"]["sqnr"] and all(v == v for v in summary.values())
    with fp8.health() as later:
        pass
    assert later.table() == {} and later.summary() == {"nan_codes": 0.0}


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_health_is_measured_once_under_recomputation(reentrant):
    m = layer(64, 64)
    g = torch.Generator().manual_seed(2)
    x = torch.randn(40, 64, generator=g, requires_grad=True)
    with fp8.health() as h:
        y = m(x) if reentrant is None else checkpoint(m, x, use_reentrant=reentrant)
        y.square().sum().backward()
    assert len(h._metrics["0"]["x"]) == len(h._metrics["0"]["x_wgrad"]) == len(h._cosines["0"]) == 1
    with fp8.health() as plain:
        m(x).square().sum().backward()
    assert h.table() == plain.table()


def test_functional_call_works():
    m, x = layer(), torch.randn(3, 160)
    double = {k: v * 2 for k, v in m.named_parameters()}
    y = m(x)
    assert torch.equal(torch.func.functional_call(m, double, (x,)), 2 * y)
    assert torch.equal(m(x), y)


def test_close_to_high_precision():
    x, w = torch.randn(64, 256), torch.randn(96, 256)
    for recipe in RECIPES:
        assert relative(fp8.linear(x, w, recipe=recipe), F.linear(x, w)) < 0.06


def test_functorch_transforms_are_rejected():
    m, x = layer(), torch.randn(9, 160)
    for run in (
        lambda: torch.func.grad(lambda x: m(x).sum())(x),
        lambda: torch.func.vmap(m)(x.unsqueeze(1)),
        lambda: torch.func.jvp(m, (x,), (x,)),
    ):
        with pytest.raises(RuntimeError, match="'0' was called inside a torch.func transform.*only torch.autograd"):
            run()
    with fp8.high_precision(m):
        assert torch.func.grad(lambda x: m(x).sum())(x).shape == x.shape


@pytest.mark.parametrize("keep", [{}, {"wgrad": "bf16"}, {"dgrad": "bf16"}])
def test_autocast_around_backward_is_ignored(keep, monkeypatch):
    """Autocast changes neither FP8 GEMMs nor those in high precision."""
    backend, lowered = fp8.kernels.registry.get("reference"), []
    for name in ("gemm_dgrad", "gemm_wgrad"):
        own = getattr(backend, name)
        monkeypatch.setattr(
            backend, name, lambda *a, own=own, **k: lowered.append(torch.is_autocast_enabled("cpu")) or own(*a, **k)
        )
    results = []
    for inside in (False, True):
        m, x = layer(**keep), torch.randn(9, 160, generator=torch.Generator().manual_seed(0)).requires_grad_()
        y = m(x).square().sum()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=inside):
            y.backward()
        results.append([x.grad, m[0].weight.grad, m[0].bias.grad])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert lowered == [False] * (4 - 2 * len(keep))
