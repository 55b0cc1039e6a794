"""The GEMMs of the reference against float64 on the same codes, with magnitudes that expose misplaced blocks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from octavo.fp8.arithmetic import cast
from octavo.fp8.arithmetic.cast import CastError, CastSpec, Quantized
from octavo.fp8.arithmetic.recipe import RECIPES, recipe
from octavo.fp8.kernels.registry import get
from octavo.fp8.metrics import calc_diff
from tests.fp8 import oracle

REFERENCE = get("reference")
GEMMS = ("fwd", "dgrad", "wgrad")
CONTRACTED = {"fwd": (1, 1), "dgrad": (1, 0), "wgrad": (0, 0)}  # the contracted dimension of each operand
SHAPES = [  # (M tokens, N, K): sizes of published towers, and few tokens
    (7, 48, 3420),
    (7, 3420, 48),
    (1, 40, 4304),
    (5, 4304, 24),
    (0, 24, 1176),
    (7, 1176, 1152),
    (1, 1, 1),
    (7, 1, 129),
    (257, 130, 72),
    (1176, 9, 80),
]


def operands(gemm: str, shape: tuple[int, int, int], seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    m, n, k = shape
    generator = torch.Generator().manual_seed(seed)
    sides = {"fwd": ((m, k), (n, k)), "dgrad": ((m, n), (n, k)), "wgrad": ((m, n), (m, k))}[gemm]
    return torch.randn(sides[0], generator=generator), torch.randn(sides[1], generator=generator)


def run(gemm: str, a_q: Quantized, b_q: Quantized, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return getattr(REFERENCE, f"gemm_{gemm}")(a_q, b_q, dtype)


def exact(gemm: str, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Compute the product in float64."""
    return {"fwd": lambda: a @ b.T, "dgrad": lambda: a @ b, "wgrad": lambda: a.T @ b}[gemm]()


def in_float64(q: Quantized) -> np.ndarray:
    return oracle.dequantize(
        q.data.view(torch.uint8).numpy(), q.scale.float().double().numpy(), q.spec.format, q.spec.block
    )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("gemm", GEMMS)
@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_on_every_shape(name: str, gemm: str, shape: tuple[int, int, int]) -> None:
    casts = recipe(name).gemm(gemm)
    assert casts is not None
    a, b = operands(gemm, shape)
    a_q, b_q = cast.quantize(a, casts.a), cast.quantize(b, casts.b)
    out = run(gemm, a_q, b_q)
    expected = torch.from_numpy(exact(gemm, in_float64(a_q), in_float64(b_q)))
    assert out.dtype == torch.float32 and out.shape == expected.shape
    assert calc_diff(out, expected) < 1e-10
    if 0 in shape:
        assert bool((out == 0).all())


def spread(spec: CastSpec, dim: int, size: int, seed: int) -> np.ndarray:
    """Exponents along one dimension, constant within each of the spec's blocks."""
    side = size if spec.block[dim] == -1 else spec.block[dim]
    return np.repeat(np.random.default_rng(seed).integers(-9, 10, -(-size // side)), side)[:size]


@pytest.mark.parametrize("shape", [(260, 300, 390), (33, 129, 1176)], ids=str)
@pytest.mark.parametrize("gemm", GEMMS)
@pytest.mark.parametrize("name", RECIPES)
def test_magnitudes_by_row_and_column(name: str, gemm: str, shape: tuple[int, int, int]) -> None:
    """Every block of both operands gets its own power of two. Divided out again, not one bit may have changed.

    Along the contraction the second operand takes the inverse of the first's, so that each product stays what it was. A
    kernel that used another block shape, or a neighbour's scale, would be off by powers of two.
    """
    casts = recipe(name).gemm(gemm)
    assert casts is not None
    a, b = operands(gemm, shape, seed=1)
    plain = run(gemm, cast.quantize(a, casts.a), cast.quantize(b, casts.b))
    a_dim, b_dim = CONTRACTED[gemm]
    along = spread(casts.a, a_dim, a.shape[a_dim], 2)
    rows, cols = spread(casts.a, 1 - a_dim, a.shape[1 - a_dim], 3), spread(casts.b, 1 - b_dim, b.shape[1 - b_dim], 4)

    def scaled(x: torch.Tensor, contracted: int, inner: np.ndarray, free: np.ndarray) -> torch.Tensor:
        exponents = inner[None, :] + free[:, None] if contracted == 1 else inner[:, None] + free[None, :]
        return x * torch.from_numpy(2.0**exponents).float()

    a_q = cast.quantize(scaled(a, a_dim, along, rows), casts.a)
    b_q = cast.quantize(scaled(b, b_dim, -along, cols), casts.b)
    out = run(gemm, a_q, b_q) / torch.from_numpy(2.0 ** (rows[:, None] + cols[None, :])).float()
    assert torch.equal(out, plain)
    error = calc_diff(out, torch.from_numpy(exact(gemm, a.double().numpy(), b.double().numpy())))
    assert error < (2.5e-3 if "e5m2" in (casts.a.format, casts.b.format) else 1e-3)


@pytest.mark.parametrize("name", ["blockwise", "rowwise", "mxfp8"])
def test_coarser_block_is_detected(name: str) -> None:
    """With one scale per tensor, the same inputs lose most of their values."""
    casts = recipe(name).fwd
    assert casts is not None
    a, b = operands("fwd", (64, 64, 512), seed=5)
    rows = torch.from_numpy(2.0 ** np.linspace(-25, 25, 64)).float()[:, None]
    expected = (a * rows).double() @ b.double().t()
    weight = 1 / rows.double()
    fine = run("fwd", cast.quantize(a * rows, casts.a), cast.quantize(b, casts.b))
    coarse_spec = CastSpec("e4m3", (-1, -1), "pow2")
    coarse = run("fwd", cast.quantize(a * rows, coarse_spec), cast.quantize(b, casts.b))
    assert calc_diff(fine * weight, expected * weight) < 1e-3
    assert calc_diff(coarse * weight, expected * weight) > 0.1


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("gemm", GEMMS)
def test_16_bit_outputs_are_rounded_once(name: str, gemm: str) -> None:
    casts = recipe(name).gemm(gemm)
    assert casts is not None
    a, b = operands(gemm, (33, 40, 136))
    a_q, b_q = cast.quantize(a, casts.a), cast.quantize(b, casts.b)
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(run(gemm, a_q, b_q, dtype), run(gemm, a_q, b_q).to(dtype))


def test_custom_scales() -> None:
    """fp32 scales that change along the contraction, and wide blocks across it."""
    a, b = operands("fwd", (70, 90, 300))
    for a_block, b_block in (((1, 64), (48, -1)), ((16, -1), (-1, 7)), ((-1, -1), (13, 64))):
        a_q, b_q = (cast.quantize(t, CastSpec("e4m3", s, "fp32")) for t, s in ((a, a_block), (b, b_block)))
        expected = torch.from_numpy(exact("fwd", in_float64(a_q), in_float64(b_q)))
        assert calc_diff(run("fwd", a_q, b_q), expected) < 1e-10


@pytest.mark.parametrize("name", RECIPES)
def test_bad_value_propagates(name: str) -> None:
    casts = recipe(name).fwd
    assert casts is not None
    a, b = operands("fwd", (5, 6, 200))
    a[2, 150] = float("inf")
    out = run("fwd", cast.quantize(a, casts.a), cast.quantize(b, casts.b))
    assert bool(out[2].isnan().all())
    assert bool(out.isnan().all()) == (name in ("tensorwise", "delayed"))


@pytest.mark.parametrize(("block", "kind"), [((1, -1), "pow2"), ((1, -1), "fp32"), ((-1, -1), "fp32")], ids=str)
def test_extreme_scales_do_not_overflow(block: tuple[int, int], kind: str) -> None:
    """Sums of 64 products of codes times 2^117 are beyond fp32; what the other scale makes of them is not."""
    spec = CastSpec("e4m3", block, kind)
    a, b = (t.abs() for t in operands("fwd", (4, 5, 64)))
    big, small = cast.quantize(a * 2.0**124, spec), cast.quantize(b * 2.0**-96, spec)
    plain = run("fwd", cast.quantize(a, spec), cast.quantize(b, spec))
    assert torch.equal(run("fwd", big, small), plain * 2.0**28)


@pytest.mark.parametrize("name", RECIPES)
def test_autocast_and_matmul_precision_are_ignored(name: str) -> None:
    casts = recipe(name).fwd
    assert casts is not None
    a, b = operands("fwd", (64, 96, 256))
    a_q, b_q = cast.quantize(a, casts.a), cast.quantize(b, casts.b)
    expected = run("fwd", a_q, b_q)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = run("fwd", a_q, b_q)
    assert inside.dtype == torch.float32 and torch.equal(inside, expected)
    before = torch.get_float32_matmul_precision()
    try:
        for precision in ("high", "medium"):
            torch.set_float32_matmul_precision(precision)
            assert calc_diff(run("fwd", a_q, b_q), expected) < 1e-12
            # Values with all 24 bits, so that BF16 products would show on any machine that has them.
            spec = CastSpec("e4m3", (1, 64), "fp32")
            a_f, b_f = cast.quantize(a, spec), cast.quantize(b, spec)
            exact_out = torch.from_numpy(exact("fwd", in_float64(a_f), in_float64(b_f)))
            assert calc_diff(run("fwd", a_f, b_f), exact_out) < 1e-10
    finally:
        torch.set_float32_matmul_precision(before)


def test_mismatched_operands_are_rejected() -> None:
    spec = CastSpec()
    q = {shape: cast.quantize(torch.zeros(shape), spec) for shape in ((4, 128), (4, 130), (2, 4, 128))}
    with pytest.raises(CastError, match=r"gemm_fwd: the operands are \[4, 128\] and \[4, 130\].*agree in dimension 1"):
        run("fwd", q[4, 128], q[4, 130])
    with pytest.raises(CastError, match="gemm_dgrad: .*dimension 1 of the first and 0 of the second"):
        run("dgrad", q[4, 128], q[4, 128])
    with pytest.raises(CastError, match=r"gemm_wgrad: .*\[2, 4, 128\].*Flatten leading dimensions first"):
        run("wgrad", q[2, 4, 128], q[4, 128])
