"""Scales of checkpoints, which are no powers of two: every GEMM multiplies by them as they are."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from octavo import fp8
from octavo.fp8.arithmetic import cast
from octavo.fp8.kernels import deepgemm_backend, names, registry, torch_backend
from octavo.fp8.kernels.layout import ALIGN, k_major
from octavo.fp8.planning.frozen import recipe_for_codes
from octavo.fp8.weights import codes_of_frozen, frozen_from_codes

RECIPES = {"row": "rowwise", "block": "blockwise", "tensor": "tensorwise"}
BLOCKS = {"row": (1, -1), "block": (128, 128), "tensor": (-1, -1)}
SHAPES = ((300, 200), (256, 384), (16, 128))  # ragged in both dimensions; whole blocks; one


def weight(kind: str, n: int, k: int) -> nn.Parameter:
    """As a checkpoint holds it: amax / 448 a block, every code in use."""
    g = torch.Generator().manual_seed(n + k)
    values = torch.randn(n, k, generator=g) * torch.exp2(torch.randint(-4, 5, (n, 1), generator=g).float())
    q = cast.quantize(values, fp8.CastSpec("e4m3", BLOCKS[kind], "fp32"))
    assert not torch.equal(q.scale, torch.exp2(q.scale.log2().round()))
    return frozen_from_codes(q.data, q.scale, q.spec, torch.float32)


@pytest.fixture(params=[name for name in ("reference", "triton") if name in names()])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "triton":
        pytest.importorskip("triton")
    yield request.param


@pytest.mark.parametrize(
    ("kind", "n", "k"), [(kind, *SHAPES[(i + j) % 3]) for i, kind in enumerate(RECIPES) for j in (0, 1)]
)
def test_both_gemms_match_dequantized_values(kind: str, n: int, k: int, backend: str) -> None:
    own, chosen = weight(kind, n, k), fp8.recipe(RECIPES[kind], format="e4m3")
    layer = nn.Sequential(nn.Linear(k, n, bias=False))
    layer[0].weight = own
    before = fp8.fingerprint(layer)
    plan = fp8.plan(layer, fp8.Policy(recipe=RECIPES[kind], format="e4m3", backend=backend))
    assert str(plan.rows[0].recipe.fwd.b.scale) == "fp32"
    fp8.apply(layer, plan)
    x = torch.randn(9, k, generator=torch.Generator().manual_seed(1)).requires_grad_()
    dy = torch.randn(9, n, generator=torch.Generator().manual_seed(2))
    y = layer(x)
    y.backward(dy)
    values, dw = own.dequantize().double(), chosen.dgrad
    x_q = cast.dequantize(cast.quantize(x, chosen.fwd.a), torch.float32).double()
    dy_q = cast.dequantize(cast.quantize(dy, dw.a), torch.float32).double()
    again = values
    if kind == "row":  # dgrad's blocks are columns: cast from the values
        again = cast.dequantize(cast.quantize(own.dequantize(), dw.b), torch.float32).double()
    for found, a, b in ((y, x_q, values.t()), (x.grad, dy_q, again)):
        assert ((found.double() - a @ b).abs() <= 2**-20 * (a.abs() @ b.abs()) + 1e-30).all()
    assert fp8.fingerprint(layer) == before
    scales = 4 * codes_of_frozen(own).scale.numel()  # kept in dgrad's order where that is another; no code is
    assert fp8.weight_cache_bytes(layer) in (0, scales)


@pytest.mark.parametrize("kind", RECIPES)
@pytest.mark.parametrize("n,k", SHAPES)
def test_codes_are_laid_out_for_any_tensor_core(kind: str, n: int, k: int) -> None:
    """Where FSDP2 or a checkpoint left them: the values of each operand are the same, its padding holds zeros."""
    q = codes_of_frozen(weight(kind, n, k))
    for contract in (1, 0) if kind != "row" else (1,):
        operand = k_major(q, contract)
        codes = operand.codes.float()
        assert operand.codes.stride(1) == 1 and operand.codes.shape[1] % ALIGN == 0
        free, contracted = (n, k) if contract == 1 else (k, n)
        assert codes[free:].abs().sum() == 0 and codes[:, contracted:].abs().sum() == 0
        plain = q.data.float() if contract == 1 else q.data.float().t()
        assert torch.equal(codes[:free, :contracted], plain)
        scale = q.scale if contract == 1 else q.scale.t()
        assert torch.equal(operand.scale.reshape(-1), scale.reshape(-1))


def test_deepgemm_accepts_any_scale_only_on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    own = recipe_for_codes(fp8.recipe("blockwise"), fp8.CastSpec("e4m3", (128, 128), "fp32"))
    assert own is not None and own.fwd.b.scale == own.dgrad.b.scale == "fp32" and own.wgrad.b.scale == "pow2"
    monkeypatch.setattr(deepgemm_backend, "_why_not", lambda *_: None)
    made, cuda = registry.get("deepgemm"), torch.device("cuda")
    for hopper in (True, False):
        monkeypatch.setattr(deepgemm_backend, "_supports_fp32_scales", lambda *_, hopper=hopper: hopper)
        for op in ("fwd", "dgrad", "grouped_fwd"):
            why_not = made.supports(op, own, cuda, None)
            assert (why_not is None) is hopper and (hopper or "DeepGEMM uses only the exponents of scales" in why_not)
        assert made.supports("fwd", fp8.recipe("blockwise"), cuda, None) is None


@pytest.mark.parametrize("kind", RECIPES)
def test_torch_backend_runs_supported_gemms(kind: str) -> None:
    """What scaled_mm is handed of such a weight passes its own checks, asked of fake tensors on a GPU."""
    chosen = fp8.recipe(RECIPES[kind], format="e4m3")
    q, x_q = codes_of_frozen(weight(kind, 256, 384)), cast.quantize(torch.randn(32, 384), chosen.fwd.a)
    product = torch_backend.make_product("fwd", x_q, q)
    with FakeTensorMode(), torch.no_grad():
        fake = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cuda") for t in product[1:]]
        asked = product._replace(**dict(zip(product._fields[1:], fake, strict=True)))
        assert torch_backend.multiply(asked, torch.bfloat16).shape == (32, 256)
