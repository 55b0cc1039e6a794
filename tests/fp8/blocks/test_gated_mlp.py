"""Fused gated MLPs: casts and GEMMs of three layers, values within rounding, saved tensors, and the stock forward."""

import copy
import pickle
import re
from collections import Counter
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from octavo import fp8
from octavo.fp8.arithmetic.cast import quantize
from octavo.fp8.blocks import gated_mlp
from octavo.fp8.dense.swap import unswap
from octavo.fp8.kernels import registry
from octavo.fp8.kernels.reference import swiglu_backward
from octavo.fp8.metrics import calc_diff
from octavo.fp8.observe import uncounted
from octavo.fp8.weights import cache as weights
from tests.fp8.remembered import held_bytes

CHILDREN = gated_mlp.CHILDREN


class Mlp(nn.Module):
    """The module of Hugging Face."""

    def __init__(self, k=72, n=136, bias=False, act=None, **kwargs):
        super().__init__()
        self.gate_proj = nn.Linear(k, n, bias=bias, **kwargs)
        self.up_proj = nn.Linear(k, n, bias=bias, **kwargs)
        self.down_proj = nn.Linear(n, k, bias=bias, **kwargs)
        self.act_fn = act or nn.SiLU()

    def forward(self, hidden_state):
        return self.down_proj(self.act_fn(self.gate_proj(hidden_state)) * self.up_proj(hidden_state))


def pair(recipe="blockwise", seed=0, module=None, policy=None, **kwargs):
    """Return a stock MLP with FP8 layers, and its fused copy."""
    torch.manual_seed(seed)
    module = module or Mlp(**kwargs)
    policy = {"recipe": recipe, **(policy or {})}
    plain = fp8.apply(module, fp8.plan(module, fp8.Policy(**policy)))
    twin = copy.deepcopy(plain)
    assert [reason for _, reason in gated_mlp.convert(twin)] == [None]
    return plain, twin


def run(module, x, inner=lambda m, x: m(x), needs_x=True):
    """Return (output, gradient of x, gradients of the parameters, counts)."""
    x = x.detach().clone().requires_grad_(needs_x)
    module.zero_grad(set_to_none=True)
    with fp8.count_gemms() as counts:
        y = inner(module, x)
        if y.requires_grad:
            (y.float() * torch.linspace(-1, 2, y.numel()).view(y.shape)).sum().backward()
    return y.detach(), x.grad, {n: p.grad for n, p in module.named_parameters()}, counts


def report(counts):
    return {n: dict(getattr(counts, n)) for n in ("calls", "flops", "expected", "ran", "no_grad")}


def assert_near_max(found, exact, dtype):
    """Compare each element with a tolerance for different rounding of h, and so of a few codes."""
    tolerance = {torch.float32: 2**-12, torch.bfloat16: 2**-3}[dtype]
    gap = (found.float() - exact.float()).abs().max()
    assert gap <= tolerance * exact.float().abs().max(), (float(gap), float(exact.float().abs().max()))
    assert calc_diff(found, exact) < (1e-6 if dtype == torch.float32 else 5e-3)


def assert_near(plain, twin, x, inner=lambda m, x: m(x), needs_x=True, dtype=None):
    y, dx, grads, counts = run(plain, x, inner, needs_x)
    y2, dx2, grads2, counts2 = run(twin, x, inner, needs_x)
    assert report(counts) == report(counts2)
    pairs = [(y2, y), (dx2, dx), *((grads2[n], g) for n, g in grads.items())]
    for results, exact in pairs:
        assert (results is None) == (exact is None)
        if exact is not None:
            assert results.dtype == exact.dtype and results.shape == exact.shape
            assert_near_max(results, exact, dtype or x.dtype)


def calls(monkeypatch):
    """The calls of the fused function."""
    ran, original = Counter(), gated_mlp._Mlp.apply
    monkeypatch.setattr(gated_mlp._Mlp, "apply", lambda *a: ran.update(["fused"]) or original(*a))
    return ran


def casts(monkeypatch):
    """(rows, columns) of separate casts, except of weights, and fused operations."""
    backend, recorded = registry.get("reference"), Counter()
    for name in ("quantize", "quantize_both", "swiglu_quantize", "swiglu_backward_quantize"):
        own = getattr(backend, name)

        def spy(x, *args, own=own, name=name, **kwargs):
            recorded[name, tuple(x.shape)] += 1
            return own(x, *args, **kwargs)

        monkeypatch.setattr(backend, name, spy)
    return recorded


@pytest.mark.parametrize("recipe", ["blockwise", "blockwise_1d", "rowwise", "tensorwise", "mxfp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_matches_three_separate_layers(recipe, dtype, monkeypatch):
    plain, twin = pair(recipe, dtype=dtype, policy={"format": "e4m3"})
    ran = calls(monkeypatch)
    for shape in ((150, 72), (2, 3, 72), (72,)):
        assert_near(plain, twin, torch.randn(shape).to(dtype))
    assert ran["fused"] == 3


@pytest.mark.parametrize("recipe", ["blockwise", "rowwise", "tensorwise", "mxfp8"])
def test_casts_and_gemms_match_manual_computation(recipe):
    """The equations of the module docstring, bit for bit."""
    plain, twin = pair(recipe, dtype=torch.bfloat16)
    x, r, ref = torch.randn(140, 72).bfloat16(), plain.gate_proj.recipe, registry.get("reference")
    y, dx, grads, _ = run(twin, x)
    w_g, w_u, w_d = (quantize(getattr(plain, c).weight, r.fwd.b) for c in CHILDREN)
    x_row, x_col = quantize(x, r.fwd.a), quantize(x, r.wgrad.b)
    gate, up = (ref.gemm_fwd(x_row, w, torch.bfloat16) for w in (w_g, w_u))
    h = (gate.float() * torch.sigmoid(gate.float()) * up.float()).bfloat16()
    assert torch.equal(y, ref.gemm_fwd(quantize(h, r.fwd.a), w_d, torch.bfloat16))
    dy = torch.linspace(-1, 2, y.numel()).view(y.shape).bfloat16()
    w_g, w_u, w_d = (quantize(getattr(plain, c).weight, r.dgrad.b) for c in CHILDREN)
    dh = ref.gemm_dgrad(quantize(dy, r.dgrad.a), w_d, torch.bfloat16)
    dgate, dup = swiglu_backward(dh, gate, up)
    exact = [t.float().requires_grad_() for t in (gate, up)]
    (nn.functional.silu(exact[0]) * exact[1]).backward(dh.float())
    for d, e in zip((dgate, dup), exact, strict=True):
        assert ((d.float() - e.grad).abs() <= 2**-7 * e.grad.abs() + 1e-30).all()
    parts = [ref.gemm_dgrad(quantize(d, r.dgrad.a), w, torch.bfloat16) for d, w in ((dgate, w_g), (dup, w_u))]
    assert torch.equal(dx, parts[0] + parts[1])
    for name, d, operand in (("gate", dgate, x_col), ("up", dup, x_col), ("down", dy, quantize(h, r.wgrad.b))):
        dw = ref.gemm_wgrad(quantize(d, r.wgrad.a), operand, torch.bfloat16)
        assert torch.equal(grads[f"{name}_proj.weight"], dw), name


def test_x_is_cast_once_and_h_is_never_written(monkeypatch):
    _, twin = pair()
    run(twin, torch.randn(9, 72))  # weights
    recorded = casts(monkeypatch)
    run(twin, torch.randn(9, 72))
    both = {k: n for k, n in recorded.items() if k[0] != "quantize"}
    assert both == {
        ("quantize_both", (9, 72)): 2,  # x and dy
        ("swiglu_quantize", (9, 136)): 1,
        ("swiglu_backward_quantize", (9, 136)): 1,
    }
    assert ("quantize", (9, 136)) not in recorded


def saved(module, x):
    """Return the bytes that a forward saves, by (shape, dtype), without parameters."""
    weights = {p.data_ptr() for p in module.parameters()}
    results = {}

    def pack(t):
        if t.data_ptr() not in weights:
            results[t.untyped_storage().data_ptr()] = (tuple(t.shape), t.dtype)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        module(x)
    return Counter(results.values())


def test_saved_tensors():
    plain, twin = pair(dtype=torch.bfloat16)
    x = torch.randn(256, 72).bfloat16().requires_grad_()
    codes = torch.float8_e4m3fn
    assert saved(twin, x) == {
        ((256, 72), codes): 1,
        ((2, 1), torch.float32): 1,
        ((256, 136), codes): 1,
        ((2, 2), torch.float32): 1,
        ((256, 136), torch.bfloat16): 2,
    }
    assert saved(plain, x)[(256, 136), torch.bfloat16] > 2
    for layer in (twin.gate_proj, twin.up_proj, twin.down_proj):
        layer.weight.requires_grad_(False)
    assert saved(twin, x) == {((256, 136), torch.bfloat16): 2}
    assert saved(twin, x.detach()) == {}


def test_frozen_weights_inputs_without_gradient_and_no_grad(monkeypatch):
    ran = calls(monkeypatch)
    for frozen in ((), ("gate_proj",), ("down_proj",), ("gate_proj", "up_proj"), CHILDREN):
        for needs_x in (True, False):
            plain, twin = pair(bias=True)
            for m in (plain, twin):
                for name in frozen:
                    getattr(m, name).requires_grad_(False)
            assert_near(plain, twin, torch.randn(20, 72), needs_x=needs_x)
    with torch.no_grad():
        assert_near(plain, twin, torch.randn(20, 72))
    with torch.inference_mode():
        assert_near_max(twin(torch.ones(3, 72)), plain(torch.ones(3, 72)), torch.float32)
    assert ran["fused"] == 12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bias_gradients_are_exact_sums(dtype):
    plain, twin = pair(bias=True, dtype=dtype)
    assert_near(plain, twin, torch.randn(150, 72).to(dtype))
    for m in (plain, twin):
        m.gate_proj.bias.requires_grad_(False)
        m.up_proj.bias.requires_grad_(False)
    assert_near(plain, twin, torch.randn(150, 72).to(dtype))


def test_autocast():
    plain, twin = pair()

    def lowered(m, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return m(x)

    assert_near(plain, twin, torch.randn(40, 72), lowered, dtype=torch.bfloat16)
    assert twin.gate_proj.weight.grad.dtype == torch.float32


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant, monkeypatch):
    plain, twin = pair()
    ran = calls(monkeypatch)
    assert_near(plain, twin, torch.randn(9, 72), lambda m, x: checkpoint(m, x, use_reentrant=reentrant))
    inside = lambda m, x: checkpoint(lambda x: m(x) * 1, x * 1, use_reentrant=reentrant)  # noqa: E731
    assert_near(plain, twin, torch.randn(9, 72), inside)
    with uncounted():
        assert_near(plain, twin, torch.randn(9, 72))
    assert ran["fused"] == 5


def test_selective_checkpointing():
    plain, twin = pair()
    save = [torch.ops.aten.mm.default, torch.ops.aten.mul.Tensor]
    contexts = partial(create_selective_checkpoint_contexts, save)
    for _ in range(2):
        inner = lambda m, x: checkpoint(m, x, use_reentrant=False, context_fn=contexts)  # noqa: E731
        assert_near(plain, twin, torch.randn(9, 72), inner)


def test_weight_codes_are_cast_once_per_step():
    plain, twin = pair()
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01, fused=True) for m in (plain, twin)]
    for _ in range(2):
        for seed in range(2):
            x = torch.randn(5, 72, generator=torch.Generator().manual_seed(seed))
            assert_near(plain, twin, x)
        for optimizer in optimizers:
            optimizer.step()
        twin.load_state_dict(plain.state_dict())
    assert all(getattr(twin, c)._site.codes.casts == 2 for c in CHILDREN)
    twin(x), plain(x)
    assert fp8.weight_cache_bytes(twin) == fp8.weight_cache_bytes(plain) > 0


def wrap_in_adapter(m):
    class Adapter(nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base_layer = base

        def forward(self, x):
            return 2 * self.base_layer(x)

    m.up_proj = Adapter(m.up_proj)


LOOKS = {
    "forward hook": lambda m: m.gate_proj.register_forward_hook(lambda mod, args, y: y * 2),
    "pre-hook": lambda m: m.down_proj.register_forward_pre_hook(lambda mod, args: (args[0] + 1,)),
    "backward hook": lambda m: m.up_proj.register_full_backward_hook(lambda mod, gx, gy: (gx[0] * 2,)),
    "hook on the activation": lambda m: m.act_fn.register_forward_hook(lambda mod, args, y: y + 1),
    "forward on the instance": lambda m: m.up_proj.__dict__.update(forward=lambda x, own=m.up_proj.forward: own(x) * 3),
    "adapter": wrap_in_adapter,
    "another child": lambda m: m.add_module("drop", nn.Identity()),
}


@pytest.mark.parametrize("look", LOOKS)
def test_hooks_on_children_run_separate_layers(look, monkeypatch):
    plain, twin = pair()
    for m in (plain, twin):
        LOOKS[look](m)
    ran = calls(monkeypatch)
    x = torch.randn(6, 72)
    results = [run(m, x) for m in (plain, twin)]
    assert ran["fused"] == 0
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])


def test_global_hooks_health_and_high_precision(monkeypatch):
    plain, twin = pair()
    ran, x, recorded = calls(monkeypatch), torch.randn(40, 72), Counter()
    handle = nn.modules.module.register_module_forward_hook(lambda m, a, y: recorded.update([type(m).__name__]))
    twin(x)
    handle.remove()
    assert recorded["Linear"] == 3
    tables = []
    for m in (plain, twin):
        with fp8.health() as h:
            run(m, x)
        tables.append(h.table())
    assert tables[0] == tables[1] and len(tables[0]) == 3
    stock = Mlp()
    stock.load_state_dict(twin.state_dict())
    with fp8.high_precision(twin):
        assert torch.equal(twin(x), stock(x))
    assert ran["fused"] == 0
    hooks = []
    twin.register_forward_hook(lambda m, a, y: hooks.append(y.shape))  # a hook on the MLP itself sees what it should
    twin(hidden_state=x)
    assert hooks == [x.shape] and ran["fused"] == 1


def test_unsupported_calls_run_separate_layers():
    _, twin = pair()
    with pytest.raises(RuntimeError, match="expects inputs with 72 features"):
        twin(torch.randn(3, 71))
    assert twin(torch.randn(0, 72)).shape == (0, 72)
    with pytest.raises(fp8.CastError, match="float64"):
        twin(torch.randn(2, 72, dtype=torch.float64))


def test_copy_pickle_and_unfuse(monkeypatch):
    plain, twin = pair()
    ran = calls(monkeypatch)
    assert isinstance(twin, Mlp) and list(twin.state_dict()) == list(plain.state_dict())
    for created in (copy.deepcopy(twin), pickle.loads(pickle.dumps(twin))):
        assert_near(plain, created, torch.randn(5, 72))
        assert type(created) is type(twin) and created.gate_proj is not twin.gate_proj
    assert ran["fused"] == 2
    unswap(twin)
    assert type(twin) is Mlp and torch.equal(twin(torch.ones(1, 72)), plain(torch.ones(1, 72)))
    assert ran["fused"] == 2


def test_compiled_code_runs_separate_layers(monkeypatch):
    plain, twin = pair()
    x = torch.randn(4, 72)
    ran = calls(monkeypatch)
    ys = [torch.compile(m, backend="eager", fullgraph=True)(x) for m in (plain, twin)]
    assert ran["fused"] == 0 and torch.equal(*ys)


@pytest.mark.parametrize("reshard", [True, False])
def test_fsdp(mesh_of_one, reshard, monkeypatch):
    plain, twin = pair()
    ran = calls(monkeypatch)
    fully_shard(twin, mesh=mesh_of_one, reshard_after_forward=reshard)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01, fused=True) for m in (plain, twin)]
    losses: list[list[float]] = [[], []]
    for seed in range(3):
        for m, optimizer, out in zip((plain, twin), optimizers, losses, strict=True):
            loss = m(torch.randn(4, 72, generator=torch.Generator().manual_seed(seed))).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            out.append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert ran["fused"] == 3
    if reshard:
        assert fp8.weight_cache_bytes(twin) == 0


def test_graph_capture_saves_weight_codes(monkeypatch):
    plain, twin = pair(dtype=torch.bfloat16)
    x = torch.randn(4, 72).bfloat16()
    run(twin, x)
    created = [getattr(twin, c)._site.codes.casts for c in CHILDREN]
    monkeypatch.setattr(weights, "_is_capturing", lambda _: True)
    with torch.no_grad():  # unseen, as a replay's weights would be
        for m in (plain, twin):
            m.down_proj.weight.data.mul_(2)
    assert_near(plain, twin, x)
    assert [getattr(twin, c)._site.codes.casts for c in CHILDREN] == [n + 1 for n in created]


class Gelu(Mlp):
    def forward(self, x):
        return self.down_proj(nn.functional.gelu(self.gate_proj(x)) * self.up_proj(x))


class Swapped(Mlp):
    def forward(self, x):
        return self.down_proj(self.act_fn(self.up_proj(x)) * self.gate_proj(x))


class Fails(Mlp):
    def forward(self, x):
        return self.nothing(x)


class Scaled(Mlp):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(72))


@pytest.mark.parametrize(
    ("make", "policy", "reason"),
    [
        (Gelu, {}, r"not down\(silu"),
        (Swapped, {}, r"not down\(silu"),
        (Fails, {}, "fails on three small layers"),
        (Scaled, {}, "has scale in addition to"),
        (Mlp, {"recipe": "delayed"}, "amax history"),
        (Mlp, {"wgrad": "bf16"}, "wgrad stays in high precision"),
        (Mlp, {"rules": [fp8.Rule("up_proj", recipe="off")]}, "not all of its layers are whole"),
        (Mlp, {"rules": [fp8.Rule("up_proj", recipe="rowwise")]}, "different recipes"),
        (lambda: Mlp(act=nn.GELU()), {}, r"not down\(silu"),
    ],
)
def test_unsupported_modules_give_reason(make, policy, reason):
    module = make()
    fp8.apply(module, fp8.plan(module, fp8.Policy(**{"recipe": "blockwise", **policy})))
    before = torch.random.get_rng_state()
    ((name, why),) = gated_mlp.convert(module)
    assert name == "" and re.search(reason, why), why
    assert not isinstance(module, gated_mlp.GatedMlp) and torch.equal(before, torch.random.get_rng_state())


def test_other_modules_are_not_candidates():
    model = nn.ModuleDict({"a": Mlp(), "b": nn.ModuleDict({"gate_proj": nn.Linear(72, 72), "act_fn": nn.SiLU()})})
    assert gated_mlp.convert(model) == ()  # nothing in FP8
    fp8.apply(model, fp8.plan(model, "blockwise"))
    assert gated_mlp.convert(model) == (("a", None),) and gated_mlp.convert(model) == (("a", "it is already fused"),)


def test_triton_in_the_interpreter(monkeypatch):
    pytest.importorskip("triton")
    _, twin = pair(k=32, n=48, dtype=torch.bfloat16, policy={"backend": "triton"})
    _, reference = pair(k=32, n=48, dtype=torch.bfloat16)
    from octavo.fp8.kernels.triton_kernels.launch import launches

    x = torch.randn(20, 32).bfloat16()
    with launches() as recorded:
        y, dx, grads, _ = run(twin, x)
    assert recorded["swiglu"] == 1 and recorded["swiglu_backward"] == 1
    y2, dx2, grads2, _ = run(reference, x)
    for results, exact in ((y, y2), (dx, dx2), *((grads[n], g) for n, g in grads2.items())):
        assert_near_max(results, exact, torch.bfloat16)


def test_backends_run_without_autocast(monkeypatch):
    _, twin = pair(bias=True)
    backend, lowered = registry.get("reference"), []
    for name in ("quantize_both", "gemm_fwd", "gemm_dgrad", "gemm_wgrad", "swiglu_codes"):
        own = getattr(backend, name)

        def spy(*args, own=own, **kwargs):
            lowered.append(torch.is_autocast_enabled("cpu"))
            return own(*args, **kwargs)

        monkeypatch.setattr(backend, name, spy)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        twin(torch.randn(40, 72, requires_grad=True)).float().square().sum().backward()
    assert len(lowered) >= 12 and not any(lowered)


def test_bias_gradients_are_summed_in_fp32_under_autocast(monkeypatch):
    """dgate and dup are bf16, biases are fp32: their gradient is an fp32 sum."""
    _, twin = pair(bias=True)
    recorded, original = [], gated_mlp.swiglu_backward
    monkeypatch.setattr(gated_mlp, "swiglu_backward", lambda *a: recorded.append(original(*a)) or recorded[-1])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = twin(torch.randn(150, 72))
    dy = torch.randn(y.shape).to(y.dtype)
    y.backward(dy)
    ((dgate, dup),) = recorded
    assert dgate.dtype == torch.bfloat16
    for layer, d in ((twin.gate_proj, dgate), (twin.up_proj, dup), (twin.down_proj, dy)):
        gap = (layer.bias.grad.double() - d.double().sum(0)).abs()
        assert layer.bias.grad.dtype == torch.float32 and bool((gap <= 1e-6 * d.double().abs().sum(0)).all())


def test_functorch_transforms_run_separate_layers():
    _, twin = pair()
    with pytest.raises(RuntimeError, match="gate_proj' was called inside a torch.func transform"):
        torch.func.grad(lambda x: twin(x).sum())(torch.randn(5, 72))


def test_backward_drops_cached_input_codes():
    """An input that is refilled undetected between two steps is cast again."""
    _, twin = pair()
    x = torch.randn(40, 72)
    y = twin(x)
    assert held_bytes() > 0
    y.sum().backward()
    assert held_bytes() == 0
