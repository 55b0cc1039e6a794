"""MLPs that save FP8 codes of the input of their activation and recompute its output bit for bit."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.activations import ACT2FN
from transformers.models.internvl.modeling_internvl import InternVLVisionMLP
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionMLP
from transformers.models.siglip.modeling_siglip import SiglipMLP

from octavo import fp8
from octavo.fp8.arithmetic import cast
from octavo.fp8.blocks import gated_mlp
from octavo.fp8.blocks import mlp as saved_mlp
from octavo.fp8.dense import sources
from octavo.fp8.dense.swap import unswap
from octavo.fp8.memory.accounting import count_saved

ACTS = ("silu", "gelu", "gelu_pytorch_tanh", "gelu_new", "quick_gelu", "relu2", "mish", "linear")


class Gated(nn.Module):
    def __init__(self, k=96, i=160, act="silu", bias=False):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(k, i, bias), nn.Linear(k, i, bias)
        self.down_proj, self.act_fn = nn.Linear(i, k, bias), ACT2FN[act]

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Plain(nn.Module):
    def __init__(self, k=96, i=160, act="gelu_pytorch_tanh", bias=True):
        super().__init__()
        self.fc1, self.fc2, self.activation_fn = nn.Linear(k, i, bias), nn.Linear(i, k, bias), ACT2FN[act]

    def forward(self, x):
        return self.fc2(self.activation_fn(self.fc1(x)))


def pair(kind=Gated, recipe="blockwise", dtype=torch.float32, policy=None, together=False, **kwargs):
    """Return a stock MLP with FP8 layers, and a copy that saves codes; ``together`` fuses both."""
    torch.manual_seed(0)
    mlp = kind(**kwargs).to(dtype)
    if recipe != "off":
        fp8.apply(mlp, fp8.plan(mlp, fp8.Policy(recipe=recipe, fuse="off", **(policy or {}))))
    twin = copy.deepcopy(mlp)
    if together:
        assert gated_mlp.fuse(mlp) is None and gated_mlp.fuse(twin, saves=True) is None
    else:
        assert saved_mlp.save_as_codes(twin) is None
    return mlp, twin


def make_input(k=96, rows=(3, 40), dtype=torch.float32, outliers=False):
    x = torch.randn(*rows, k, generator=torch.Generator().manual_seed(1))
    if outliers:
        x[..., 5] *= 60
        x = x * 2.0 ** torch.arange(rows[-1]).remainder(5).unsqueeze(-1)
    return x.to(dtype)


def run(m, x, lowered=False, inner=None, grad=True):
    x = x.detach().clone().requires_grad_(grad)
    m.zero_grad(set_to_none=True)
    with fp8.count_gemms() as counts:
        with torch.autocast("cpu", torch.bfloat16, enabled=lowered):
            y = m(x) if inner is None else inner(m, x)
        (y.float() * torch.randn(y.shape, generator=torch.Generator().manual_seed(2))).sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in m.parameters())], (dict(counts.calls), dict(counts.expected))


def cosine(a, b):
    return torch.cosine_similarity(a.double().flatten(), b.double().flatten(), 0).item()


def all_equal(a, b):
    return all((x is None and y is None) or torch.equal(x, y) for x, y in zip(a, b, strict=True))


class Rounded(torch.autograd.Function):
    """Round x to FP8; gradients pass through."""

    @staticmethod
    def forward(ctx, x):
        return cast.dequantize(cast.quantize(x, sources.SPEC)).to(x.dtype)

    @staticmethod
    def backward(ctx, dy):
        return dy


def rounding(mlp):
    """The same MLP in plain PyTorch, where autograd saves everything."""
    names = saved_mlp.find_parts(mlp)
    saved = mlp._modules

    def forward(m, x):
        created = [Rounded.apply(saved[name](x)) for name in names.first]
        h = saved[names.act](created[0])
        return saved[names.last](h * created[1] if len(created) == 2 else h)

    return forward


RECIPES = [
    ("blockwise", {}), ("rowwise", {}), ("tensorwise", {}), ("mxfp8", {}), ("delayed", {}), ("off", {}),
    ("blockwise", {"wgrad": "bf16"}), ("blockwise", {"fwd": "bf16"}), ("blockwise", {"dgrad": "bf16"}),
]  # fmt: skip


def _dtypes():
    """Every kind of MLP under every recipe: BF16 and autocast by turns, fp32 and the other one long."""
    for i, (recipe, policy) in enumerate(RECIPES):
        for j, kind in enumerate((Gated, Plain)):
            for k, dtype in enumerate((torch.bfloat16, "autocast", torch.float32)):
                yield pytest.param(kind, recipe, policy, dtype, marks=() if k == (i + j) % 2 else pytest.mark.long)


@pytest.mark.parametrize(("kind", "recipe", "policy", "dtype"), _dtypes())
def test_equals_mlp_on_rounded_values_bitwise(torch_products, kind, recipe, policy, dtype):
    """Output, gradients and counts equal those of an MLP that rounds and saves everything."""
    lowered, saved = dtype == "autocast", torch.float32 if dtype == "autocast" else dtype
    mlp, twin = pair(kind, recipe, saved, policy)
    x = make_input(dtype=saved)
    for _ in range(2):  # a second step casts with the histories of the first
        (want, counts), (got, counts2) = run(mlp, x, lowered, rounding(mlp)), run(twin, x, lowered)
        if recipe == "off" and lowered:  # the stock layer rounds the gradient of its bias to BF16 on the way
            assert all(
                torch.equal(a, b) or torch.equal(a, b.bfloat16().float()) for a, b in zip(want, got, strict=True)
            )
        else:
            assert all_equal(want, got)
        assert counts == counts2
    assert (counts != ({}, {})) == (recipe != "off")


@pytest.mark.parametrize("kind", [Gated, Plain])
@pytest.mark.parametrize("act", ACTS)
def test_activations(act, kind):
    mlp, twin = pair(kind, act=act, dtype=torch.bfloat16)
    x = make_input(dtype=torch.bfloat16)
    assert all_equal(run(mlp, x, inner=rounding(mlp))[0], run(twin, x)[0])


@pytest.mark.parametrize("outliers", [False, True])
@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("kind", [Gated, Plain])
def test_close_to_mlp_that_saves_16_bits(kind, together, outliers):
    if together and kind is Plain:
        pytest.skip("only gated MLPs run as one function")
    mlp, twin = pair(kind, dtype=torch.bfloat16, together=together, k=256, i=512)
    x = make_input(256, dtype=torch.bfloat16, outliers=outliers)
    (want, _), (got, _) = run(mlp, x), run(twin, x)
    assert all(cosine(a, b) >= 0.99 for a, b in zip(want, got, strict=True))


@pytest.mark.parametrize("recipe", ["blockwise", "rowwise", "tensorwise", "mxfp8"])
@pytest.mark.parametrize("bias", [False, True])
def test_fused_function_saves_same_codes(recipe, bias):
    """One function: as separate layers but for where h is rounded; counts, bits of a recomputation, bytes."""
    mlp, twin = pair(Gated, recipe, torch.bfloat16, together=True, bias=bias)
    _, separate = pair(Gated, recipe, torch.bfloat16, bias=bias)
    x = make_input(dtype=torch.bfloat16)
    (want, counts), (got, counts2), (unfused, counts3) = (run(m, x) for m in (mlp, twin, separate))
    assert counts == counts2 == counts3
    assert all(cosine(a, b) >= 0.995 for a, b in zip(want, got, strict=True))
    assert all(cosine(a, b) >= 0.9995 for a, b in zip(unfused, got, strict=True))
    again = run(twin, x, inner=lambda m, x: checkpoint(m, x, use_reentrant=False))[0]
    assert all_equal(got, again)
    with fp8.health():  # layer by layer then, on the same values
        watched, _ = run(twin, x)
    assert all_equal(watched, unfused)
    assert storages(twin, x) == storages(separate, x) and torch.bfloat16 not in storages(twin, x)


def storages(m, x):
    """Bytes by dtype of what is saved beside weights. The accountant's hooks would make a fused MLP run by layers."""
    weights, saved = {p.data_ptr() for p in m.parameters()}, {}

    def pack(t):
        if t.data_ptr() not in weights:
            saved[t.untyped_storage().data_ptr()] = (t.dtype, t.untyped_storage().nbytes())
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = m(x.detach().clone().requires_grad_())
    assert y.requires_grad
    results = list(saved.values())
    return {dtype: sum(n for d, n in results if d == dtype) for dtype in {d for d, _ in results}}


def rows(m, x, lowered=False):
    model, x = nn.Sequential(m), x.detach().clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=lowered), count_saved(model) as accountant:
        y = model(x)
    results = [r for r in accountant.report().rows if r.kind == "activation"]
    del y
    return results


@pytest.mark.parametrize("lowered", [False, True])
@pytest.mark.parametrize("kind", [Gated, Plain])
def test_saved_tensors(kind, lowered):
    """The codes of x once, and those of the activation's inputs; only scales have 16 or 32 bits."""
    _, twin = pair(kind, dtype=torch.float32 if lowered else torch.bfloat16, k=256, i=512)
    x = make_input(256, (128,), torch.float32 if lowered else torch.bfloat16)
    run(twin, x, lowered)
    results, inner = rows(twin, x, lowered), 2 if kind is Gated else 1
    inputs = 128 * inner * 512 * (1 + 4 / 128)  # with scales of 1x128
    assert sum(r.bytes for r in results) == inputs + 128 * 256 + 4 * 2
    assert {r.dtype for r in results} == {torch.float8_e4m3fn, torch.float32}
    for p in twin.parameters():
        p.requires_grad_(False)  # dx alone
    assert sum(r.bytes for r in rows(twin, x, lowered)) == inputs
    if kind is Gated and not lowered:
        with torch.no_grad():
            assert not rows(twin, x, lowered)


def test_high_precision_layer_saves_no_input():
    """down_proj in BF16 also recomputes h; gate and up save their x once."""
    mlp, twin = pair(recipe="off", dtype=torch.bfloat16, k=256, i=512)
    x = make_input(256, (128,), torch.bfloat16)
    assert sum(r.bytes for r in rows(twin, x)) == 128 * 2 * 512 * (1 + 4 / 128)  # x is the caller's
    assert type(twin.down_proj) is not nn.Linear and isinstance(twin.down_proj, nn.Linear)
    unswap(twin.down_proj)
    assert type(twin.down_proj) is nn.Linear


def test_last_layer_saves_codes_without_source():
    """If gate and up need no gradient, one tensor of codes is smaller than two."""
    _, twin = pair(dtype=torch.bfloat16)
    for m in (twin.gate_proj, twin.up_proj):
        m.requires_grad_(False)
    with count_saved(nn.Sequential(twin)) as accountant:
        y = twin(make_input(rows=(128,), dtype=torch.bfloat16))
    assert y.requires_grad
    assert sum(r.bytes for r in accountant.report().rows if r.dtype == torch.float8_e4m3fn) == 128 * 160


@pytest.mark.parametrize("together", [False, True])
def test_recomputation_two_backwards_and_inference(together):
    _, twin = pair(together=together)
    x = make_input()
    want, counts = run(twin, x)
    for reentrant in (False, True):
        got, counts2 = run(twin, x, inner=lambda m, x, r=reentrant: checkpoint(m, x, use_reentrant=r))
        assert all_equal(want, got) and counts2 != counts
    with torch.no_grad():
        assert torch.equal(twin(x), want[0])
    with torch.inference_mode():
        assert torch.equal(twin(x), want[0])
    x = x.requires_grad_()
    loss = twin(x).square().sum()
    first = torch.autograd.grad(loss, x, retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(loss, x)[0])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("together", [False, True])
def test_nan_and_inf_propagate(together, bad):
    _, twin = pair(together=together)
    x = make_input()
    x[0, 3, 7] = bad
    y, dx, *dws = run(twin, x)[0]
    assert y[0, 3].isnan().any() and y[1].isfinite().all() and dx[0, 3].isnan().any()
    assert any(dw.isnan().any() for dw in dws)


@pytest.mark.parametrize("kind", [Gated, Plain])
def test_unsupported_calls_run_stock_forward(kind):
    mlp, twin = pair(kind)
    x = make_input()
    assert torch.equal(torch.compile(twin, backend="eager")(x), mlp(x))
    with fp8.high_precision(twin):
        stock = run(twin, x)[0]
    with fp8.high_precision(mlp):
        assert all_equal(stock, run(mlp, x)[0])
    assert not all_equal(run(twin, x)[0], run(mlp, x)[0])  # and back
    assert twin(torch.zeros(0, 96)).shape == (0, 96)
    act = twin._modules[saved_mlp.find_parts(twin).act]
    recorded = []
    handle = act.register_forward_hook(lambda *a: recorded.append(a[2]))
    assert all_equal(run(twin, x)[0], run(mlp, x)[0]) and len(recorded) == 1
    handle.remove()
    assert not all_equal(run(twin, x)[0], run(mlp, x)[0])


def test_hooks_on_layers_and_adapters():
    """gate, up and down are called as modules: hooks run, and the base layer of an adapter saves nothing of h."""

    class Adapter(nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base_layer, self.a, self.b = base, nn.Linear(160, 4, False), nn.Linear(4, 96, False)

        def forward(self, x):
            return self.base_layer(x) + self.b(self.a(x))

    mlp, twin = pair(dtype=torch.bfloat16)
    recorded = []
    for m in (twin.gate_proj, twin.up_proj, twin.down_proj):
        m.register_forward_hook(lambda m, *_: recorded.append(m.name))
    x = make_input(dtype=torch.bfloat16)
    run(twin, x)
    assert recorded == ["gate_proj", "up_proj", "down_proj"]
    twin.down_proj = Adapter(twin.down_proj).bfloat16()
    mlp.down_proj = copy.deepcopy(twin.down_proj)
    assert all_equal(run(mlp, x, inner=rounding(mlp))[0], run(twin, x)[0])
    # What the adapter's own first matrix is trained with is h itself; the FP8 layer adds nothing to it.
    assert [r.shape[-1] for r in rows(twin, x) if r.module.endswith("base_layer")] == []


def test_copies_and_pickles():
    mlp, twin = pair()
    x = make_input()
    want = run(twin, x)[0]
    for other in (copy.deepcopy(twin), pickle.loads(pickle.dumps(twin))):
        assert type(other) is type(twin) and all_equal(run(other, x)[0], want)
    unswap(twin)
    assert type(twin) is Gated and all_equal(run(twin, x)[0], run(mlp, x)[0])


class Config:
    hidden_size, intermediate_size, hidden_act, mlp_bias = 64, 128, "gelu_pytorch_tanh", True


@pytest.mark.parametrize("kind", [Qwen3VLVisionMLP, SiglipMLP, InternVLVisionMLP])
def test_vision_families(kind):
    mlp, twin = pair(kind, config=Config)
    x = make_input(64)
    assert all_equal(run(mlp, x, inner=rounding(mlp))[0], run(twin, x)[0])


class Dropping(Plain):
    def __init__(self, p=0.1):
        super().__init__()
        self.drop = nn.Dropout(p)

    def forward(self, x):
        return self.drop(super().forward(x))


class Extra(Plain):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(96)


class Scaled(Plain):
    def forward(self, x):
        return 2 * super().forward(x)


class Two(Plain):
    def forward(self, x, residual):
        return super().forward(x) + residual


class Functional(Plain):
    def forward(self, x):
        return self.fc2(nn.functional.dropout(self.activation_fn(self.fc1(x)), 0.5, self.training))


def test_unsupported_mlps_give_reason():
    prelu, inplace, hooked = Plain(), Plain(), Plain()
    prelu.activation_fn, inplace.activation_fn = nn.PReLU(), nn.ReLU(inplace=True)
    hooked.activation_fn.register_forward_hook(lambda *a: None)
    cases = [
        (Dropping(), "has drop"), (Extra(), "has norm"), (Scaled(), "not fc2(activation_fn(fc1(x)))"),
        (Two(), "forward fails"), (Functional(), "is not fc2"), (prelu, "has parameters"), (inplace, "in place"),
        (hooked, "has hooks"), (Plain().double(), "float64"),
    ]  # fmt: skip
    for module, word in cases:
        reason = saved_mlp.save_as_codes(module)
        assert reason is not None and word in reason, (word, reason)
        assert "Fp8" not in type(module).__name__
    assert saved_mlp.save_as_codes(Dropping(0.0)) is None
    assert (
        saved_mlp.find_parts(nn.Sequential(nn.Linear(2, 2))) is None
        and saved_mlp.find_parts(Gated()).first[1] == "up_proj"
    )


def test_later_dropout_change_is_respected():
    torch.manual_seed(0)
    mlp = Dropping(0.0)
    assert saved_mlp.save_as_codes(mlp) is None
    x = make_input()
    mlp.drop.p = 0.5
    assert (mlp(x) == 0).float().mean() > 0.3
