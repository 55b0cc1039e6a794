"""The torch backend (and DeepGEMM where it is installed) on a GPU, against float64 on the same codes."""

from __future__ import annotations

import pytest
import torch

from octavo.fp8.arithmetic import cast
from octavo.fp8.arithmetic.cast import Quantized
from octavo.fp8.arithmetic.recipe import RECIPES, recipe
from octavo.fp8.kernels import registry
from octavo.fp8.metrics import calc_diff
from tests.fp8.kernels.laid_out import laid_out

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

GEMMS = ("fwd", "dgrad", "wgrad")
CONTRACTED = {"fwd": (1, 1), "dgrad": (1, 0), "wgrad": (0, 0)}
SHAPES = (  # (M, N, K)
    (1, 80, 144),
    (33, 3420, 1280),
    (300, 1280, 3420),
    (257, 4304, 1152),
    (129, 1176, 1280),
    (16, 128, 128),
    (1024, 2048, 1024),
    (7, 12, 20),
)


def spread(rows: int, cols: int, seed: int) -> torch.Tensor:
    """Values whose magnitudes change by row and by column, so that a scale in the wrong place shows."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, cols, generator=generator)
    steps = [torch.randint(-4, 5, (size,), generator=generator).float() for size in (rows, cols)]
    return (x * torch.exp2(steps[0])[:, None] * torch.exp2(steps[1])).cuda()


def operands(name: str, op: str, m: int, n: int, k: int, format: str | None = None) -> tuple[Quantized, Quantized]:
    """Casts by the reference, plain in memory: laying them out is part of what is tested."""
    sides = {"fwd": ((m, k), (n, k)), "dgrad": ((m, n), (n, k)), "wgrad": ((m, n), (m, k))}[op]
    gemm = recipe(name, format).gemm(op)
    return cast.quantize(spread(*sides[0], seed=m), gemm.a), cast.quantize(spread(*sides[1], seed=n + 1), gemm.b)


def exact(op: str, a_q: Quantized, b_q: Quantized) -> torch.Tensor:
    a, b = (cast.dequantize(q._replace(scale=torch.ones_like(cast.scale_fp32(q)))).double() for q in (a_q, b_q))
    for values, q in ((a, a_q), (b, b_q)):
        scale = cast.scale_fp32(q).double()
        for dim, (side, size) in enumerate(zip(q.spec.block, values.shape, strict=True)):
            scale = scale.repeat_interleave(size if side == -1 else side, dim).narrow(dim, 0, size)
        values *= scale
    return {"fwd": lambda: a @ b.T, "dgrad": lambda: a @ b, "wgrad": lambda: a.T @ b}[op]()


def able(backend: str, op: str, name: str, format: str | None = None) -> registry.Backend:
    chosen = registry.get(backend)
    why_not = chosen.supports(op, recipe(name, format), torch.device("cuda"), None)
    if why_not is not None:
        pytest.skip(f"{backend} {name} {op}: {why_not}")
    return chosen


@pytest.mark.parametrize("backend", ("torch", "deepgemm"))
@pytest.mark.parametrize("op", GEMMS)
@pytest.mark.parametrize("name", RECIPES)
def test_gemms_against_float64(backend: str, name: str, op: str) -> None:
    chosen = able(backend, op, name)
    fast = op == "fwd" and name in ("tensorwise", "delayed", "rowwise")
    for m, n, k in SHAPES:
        a_q, b_q = operands(name, op, m, n, k)
        right = exact(op, a_q, b_q)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            if dtype is torch.float16 and right.abs().max() > 6e4:
                continue
            y = getattr(chosen, f"gemm_{op}")(a_q, b_q, dtype)
            assert y.shape == right.shape and y.dtype is dtype and y.is_contiguous()
            bound = 1e-4 if fast else 1e-5
            assert calc_diff(y, right) < bound, (m, n, k, dtype, calc_diff(y, right))


@pytest.mark.parametrize("backend", ("torch", "deepgemm"))
@pytest.mark.parametrize("name", RECIPES)
def test_hybrid_and_bias(backend: str, name: str) -> None:
    if name != "mxfp8":
        for op in ("dgrad", "wgrad"):
            chosen = registry.get(backend)
            if chosen.supports(op, recipe(name, "hybrid"), torch.device("cuda"), None) is None:
                a_q, b_q = operands(name, op, 257, 3420, 1280, "hybrid")
                y = getattr(chosen, f"gemm_{op}")(a_q, b_q, torch.bfloat16)
                assert calc_diff(y, exact(op, a_q, b_q)) < 1e-5
    chosen = able(backend, "fwd", name)
    for m, n, k in ((33, 3420, 1280), (300, 1280, 144)):
        x_q, w_q = operands(name, "fwd", m, n, k)
        for bias_dtype in (torch.float32, torch.bfloat16):
            bias = (torch.randn(n, generator=torch.Generator().manual_seed(n)) * 1000).to("cuda", bias_dtype)
            right = exact("fwd", x_q, w_q) + bias.double()
            for dtype in (torch.bfloat16, torch.float32):
                y = chosen.gemm_fwd(x_q, w_q, dtype, bias)
                assert y.dtype is dtype and calc_diff(y, right) < 1e-4


@pytest.mark.parametrize("m", (1, 3, 4, 15, 17, 100, 127, 129, 255))
def test_any_number_of_tokens(m: int) -> None:
    for name in RECIPES:
        for op in GEMMS:
            backend = registry.get("torch")
            if backend.supports(op, recipe(name), torch.device("cuda"), None) is None:
                a_q, b_q = operands(name, op, m, 80, 144)
                y = getattr(backend, f"gemm_{op}")(a_q, b_q, torch.float32)
                assert calc_diff(y, exact(op, a_q, b_q)) < 1e-4


def test_operands_in_layout_are_captured_without_synchronization() -> None:
    backend = registry.get("torch")
    for name in ("rowwise", "tensorwise", "blockwise"):
        gemm = recipe(name).fwd
        if backend.supports("fwd", recipe(name), torch.device("cuda"), None) is not None:
            continue
        x_q, w_q = (cast.quantize(spread(size, 384, size), spec) for size, spec in ((100, gemm.a), (272, gemm.b)))
        laid = [laid_out(q, 1) for q in (x_q, w_q)]
        torch.cuda.set_sync_debug_mode("error")
        try:
            eager = backend.gemm_fwd(*laid, torch.bfloat16)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = backend.gemm_fwd(*laid, torch.bfloat16)
        graph.replay()
        assert torch.equal(captured, eager)


def test_wrong_scale_is_detected() -> None:
    """Doubling one scale of 64 rows exceeds the tolerance."""
    backend = able("torch", "fwd", "rowwise")
    x_q, w_q = operands("rowwise", "fwd", 64, 80, 144)
    right = exact("fwd", x_q, w_q)
    scale = x_q.scale.clone()
    scale[int(right.square().sum(1).argmax())] *= 2
    assert calc_diff(backend.gemm_fwd(x_q._replace(scale=scale), w_q, torch.float32), right) > 1e-4
