"""RMSNorm and SwiGLU with FP8 outputs: the reference against float64, the Triton kernels against the reference.

Codes and scales must equal a cast of the values that the kernel computed, bit for bit; values are compared with the
reference's in units in the last place. Memory is filled with invalid values first, so that elements that no program
writes, padding included, are detected.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from octavo.fp8.arithmetic import cast
from octavo.fp8.arithmetic.cast import CastError, CastSpec, Quantized
from octavo.fp8.arithmetic.recipe import recipe
from octavo.fp8.kernels import layout, reference, registry
from octavo.fp8.kernels.triton_kernels import fused
from octavo.fp8.kernels.triton_kernels.launch import launches

ROW, COL = CastSpec(block=(1, 128)), CastSpec(block=(128, 1))
PAIRS = {
    "blockwise": (ROW, COL),
    "row": (ROW, None),
    "column": (None, COL),
    "neither": (None, None),
    "mxfp8": (CastSpec(block=(1, 32), scale="e8m0"), CastSpec(block=(32, 1), scale="e8m0")),
    "hybrid": (CastSpec("e5m2", (1, 128), "fp32"), CastSpec("e5m2", (128, 1), "fp32")),
    "rowwise": (CastSpec(block=(1, -1)), None),
    "rows and columns": (CastSpec(block=(1, -1)), CastSpec(block=(-1, 1))),
    "tensorwise": (CastSpec(block=(-1, -1), scale="fp32"), CastSpec(block=(-1, -1), scale="fp32")),
    "half in the tile": (CastSpec(block=(1, -1)), COL),
    "tiles": (ROW, CastSpec(block=(128, 128))),
}


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """New memory is full of 0xA5 (no NaN, no zero in any format); the dtypes that were asked for."""
    empty, requested = torch.empty, []

    def make(*size, **options):
        out = empty(*size, **options)
        requested.append(out.dtype)
        out.view(torch.uint8).fill_(0xA5) if out.numel() else None
        return out

    monkeypatch.setattr(torch, "empty", make)
    return requested


def ulps(a: torch.Tensor, b: torch.Tensor) -> int:
    """The largest distance between two tensors in representable values; NaN is equal to NaN."""
    assert a.dtype == b.dtype and a.shape == b.shape
    kind = torch.int32 if a.dtype is torch.float32 else torch.int16
    places = []
    for t in (a, b):
        bits = t.contiguous().view(kind).long()
        places.append(torch.where(bits < 0, torch.iinfo(kind).min - bits, bits))
    gap = (places[0] - places[1]).abs()
    assert torch.equal(a.isnan(), b.isnan())
    return int(gap.masked_fill(a.isnan(), 0).max()) if gap.numel() else 0


def assert_cast(q: Quantized | None, y: torch.Tensor, spec: CastSpec | None, contract: int) -> None:
    """q is the cast of y, bit for bit, and lies in memory as a GEMM wants it, padding included."""
    if spec is None:
        assert q is None
        return
    assert q is not None and q.spec == spec
    expected = cast.quantize(y, spec)
    assert torch.equal(q.data.contiguous().view(torch.uint8), expected.data.view(torch.uint8))
    assert q.scale.dtype == expected.scale.dtype and q.scale.shape == expected.scale.shape
    assert torch.equal(q.scale.float().nan_to_num(7e37), expected.scale.float().nan_to_num(7e37))
    results, requested = layout.k_major(q, contract), layout.k_major(expected, contract)
    assert torch.equal(results.codes.view(torch.uint8), requested.codes.view(torch.uint8)), "padding"
    assert results.codes.untyped_storage().data_ptr() == q.data.untyped_storage().data_ptr(), "codes were copied"
    assert results.scale.untyped_storage().data_ptr() == q.scale.untyped_storage().data_ptr(), "scales were copied"
    saved = (
        [o.scale.untyped_storage().tolist() for o in (results, requested)] if contract in spec_sides(spec) else [0, 0]
    )
    assert saved[0] == saved[1], "scales in padding"


def spec_sides(spec: CastSpec) -> list[int]:
    """The dimensions along which a scale's order has padding."""
    return [c for c in (0, 1) if spec.scale != "e8m0" and spec.block[c] > 1 and spec.block[1 - c] == 1]


def numbers(rows: int, cols: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Normal values whose magnitude changes from row to row and column to column by powers of two; none so negative
    that its exp(-x) overflows."""
    make = torch.Generator().manual_seed(seed + 1000 * rows + cols)
    spread = torch.randint(-4, 5, (rows, 1), generator=make) + torch.randint(-3, 4, (1, cols), generator=make)
    return (torch.randn(rows, cols, generator=make) * torch.exp2(spread.float())).clamp(-80, 80).to(dtype)


def record_plain(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Have the backward write its gradients beside their codes, as it does where a cast must read them."""
    original, values = fused._plain, []

    def plain(like, emit, *outs, **options):
        values.append(original(like, True, *outs, **options))
        return values[-1]

    monkeypatch.setattr(fused, "_plain", plain)
    return values


# --- the reference --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_reference_is_layer_rounded_once(dtype: torch.dtype) -> None:
    x, w = numbers(20, 300, dtype), numbers(1, 300, dtype)[0]
    y, rstd, row, col = reference.rmsnorm_quantize(x, w, 1e-6, ROW, COL)
    exact = F.rms_norm(x.double(), (300,), w.double(), 1e-6)
    assert ulps(y, exact.to(dtype)) <= 1 and (y != exact.to(dtype)).float().mean() < 0.01
    assert ulps(rstd, (x.double().pow(2).mean(1) + 1e-6).rsqrt().float()) <= 2
    assert_same(row, cast.quantize(y, ROW))
    assert_same(col, cast.quantize(y, COL))

    gate, up, dh = (numbers(20, 300, dtype, s).double().requires_grad_() for s in range(3))
    (F.silu(gate) * up).backward(dh.detach())
    h, row, col = reference.swiglu_quantize(gate.to(dtype), up.to(dtype), ROW, None)
    assert ulps(h, (F.silu(gate) * up).detach().to(dtype)) <= 1 and col is None
    assert_same(row, cast.quantize(h, ROW))
    results = reference.swiglu_backward_quantize(dh.to(dtype), gate.to(dtype), up.to(dtype), ROW, COL)
    for pair, grad in ((results[:2], gate.grad), (results[2:], up.grad)):
        for q, spec in zip(pair, (ROW, COL), strict=True):
            expected = cast.quantize(grad.to(dtype), spec)
            wrong = q.data.view(torch.uint8) != expected.data.view(torch.uint8)
            assert wrong.float().mean() < 0.002, "more than a rare gradient that rounds the other way"


def assert_same(a: Quantized, b: Quantized) -> None:
    assert torch.equal(a.data.view(torch.uint8), b.data.view(torch.uint8)) and torch.equal(a.scale, b.scale)


@pytest.mark.parametrize("name", ["reference", "triton"])
def test_invalid_inputs_are_rejected(name: str) -> None:
    backend = registry.get(name)
    with pytest.raises(CastError, match=r"x has shape \[2, 3, 4\] and weight \[4\]; it takes x \[M, K\].*Flatten"):
        backend.rmsnorm_quantize(torch.ones(2, 3, 4), torch.ones(4), 1e-6, ROW, None)
    with pytest.raises(CastError, match=r"weight \[5\]"):
        backend.rmsnorm_quantize(torch.ones(3, 4), torch.ones(5), 1e-6, ROW, None)
    with pytest.raises(CastError, match=r"shapes \[3, 4\], \[4, 3\]; they must be matrices"):
        backend.swiglu_quantize(torch.ones(3, 4), torch.ones(4, 3), ROW, None)
    with pytest.raises(CastError, match=r"swiglu_backward_quantize: found inputs of torch.float64"):
        backend.swiglu_backward_quantize(torch.ones(3, 4), torch.ones(3, 4).double(), torch.ones(3, 4), ROW, COL)


@pytest.mark.parametrize("name", ["reference", "triton"])
def test_backends_report_support(name: str) -> None:
    for op in ("rmsnorm", "swiglu", "swiglu_backward"):
        assert registry.get(name).supports(op, recipe("blockwise"), torch.device("cpu"), None) is None


# --- the kernels ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pair", PAIRS)
def test_rmsnorm_casts(pair: str, poisoned: list[torch.dtype]) -> None:
    row, col = PAIRS[pair]
    x, w = numbers(130, 300, torch.bfloat16), numbers(1, 300, torch.bfloat16)[0]
    y, rstd, row_q, col_q = fused.rmsnorm_quantize(x, w, 1e-6, row, col)
    exact = reference.rmsnorm_quantize(x, w, 1e-6, None, None)
    assert ulps(y, exact[0]) <= 1 and ulps(rstd, exact[1]) <= 2
    assert_cast(row_q, y, row, 1)
    assert_cast(col_q, y, col, 0)


@pytest.mark.parametrize("pair", ["neither", "mxfp8", "hybrid", "rows and columns", "tensorwise", "tiles"])
def test_swiglu_casts(pair: str, poisoned: list[torch.dtype]) -> None:
    row, col = PAIRS[pair]
    gate, up = numbers(130, 300, torch.bfloat16), numbers(130, 300, torch.bfloat16, 1)
    h, row_q, col_q = fused.swiglu_quantize(gate, up, row, col)
    assert ulps(h, reference.swiglu_quantize(gate, up, None, None)[0]) <= 1
    assert_cast(row_q, h, row, 1)
    assert_cast(col_q, h, col, 0)


@pytest.mark.parametrize("pair", ["blockwise", "mxfp8", "hybrid", "half in the tile", "tensorwise"])
def test_swiglu_backward_casts(pair: str, poisoned: list[torch.dtype], monkeypatch: pytest.MonkeyPatch) -> None:
    row, col = PAIRS[pair]
    dh, gate, up = (numbers(130, 300, torch.bfloat16, s) for s in range(3))
    plain = record_plain(monkeypatch)
    results = fused.swiglu_backward_quantize(dh, gate, up, row, col)
    g, u = gate.double().requires_grad_(), up.double().requires_grad_()
    (F.silu(g) * u).backward(dh.double())
    for values, exact, pair_q in zip(plain, (g.grad, u.grad), (results[:2], results[2:]), strict=True):
        assert ulps(values, exact.bfloat16()) <= 1
        assert_cast(pair_q[0], values, row, 1)
        assert_cast(pair_q[1], values, col, 0)


@pytest.mark.parametrize(
    ("size", "dtype"),
    [
        ((1, 48), torch.float16),
        ((1, 48), torch.float32),
        ((130, 300), torch.float16),
        ((3, 1176), torch.float32),
    ],
    ids=str,
)
def test_sizes_and_dtypes(size: tuple[int, int], dtype: torch.dtype, poisoned: list[torch.dtype]) -> None:
    near = 1 if dtype is torch.float16 else 8  # an fp32 result shows the rounding of every step, not of the last alone
    x, w = numbers(*size, dtype), numbers(1, size[1], torch.float32)[0]
    y, rstd, row, col = fused.rmsnorm_quantize(x, w, 1e-6, ROW, COL)
    exact = reference.rmsnorm_quantize(x, w, 1e-6, None, None)
    assert ulps(y, exact[0]) <= near and ulps(rstd, exact[1]) <= 2
    assert_cast(row, y, ROW, 1)
    assert_cast(col, y, COL, 0)
    up = numbers(*size, dtype, 1)
    h, row, col = fused.swiglu_quantize(x, up, ROW, COL)
    assert ulps(h, reference.swiglu_quantize(x, up, None, None)[0]) <= near
    assert_cast(row, h, ROW, 1)
    assert_cast(col, h, COL, 0)


MORE = [(m, n) for i, m in enumerate((2, 16, 127, 128, 129, 256, 300)) for n in ((1176,) if i % 2 == 0 else (48, 3420))]


@pytest.mark.parametrize(
    ("rows", "cols"), [(128, 256), *(pytest.param(*size, marks=pytest.mark.long) for size in MORE)]
)
def test_more_sizes(rows: int, cols: int, poisoned: list[torch.dtype], monkeypatch: pytest.MonkeyPatch) -> None:
    dh, gate, up = (numbers(rows, cols, torch.bfloat16, s) for s in range(3))
    y, _, row, col = fused.rmsnorm_quantize(gate, up[0], 1e-6, ROW, COL)
    assert ulps(y, reference.rmsnorm_quantize(gate, up[0], 1e-6, None, None)[0]) <= 1
    assert_cast(row, y, ROW, 1)
    assert_cast(col, y, COL, 0)
    y, _, row, _ = fused.rmsnorm_quantize(gate, up[0], 1e-6, PAIRS["rowwise"][0], None)
    assert_cast(row, y, PAIRS["rowwise"][0], 1)
    h, row, col = fused.swiglu_quantize(gate, up, ROW, COL)
    assert_cast(row, h, ROW, 1)
    assert_cast(col, h, COL, 0)
    plain = record_plain(monkeypatch)
    results = fused.swiglu_backward_quantize(dh, gate, up, ROW, COL)
    for values, pair in zip(plain, (results[:2], results[2:]), strict=True):
        assert_cast(pair[0], values, ROW, 1)
        assert_cast(pair[1], values, COL, 0)


def hard(seed: int) -> torch.Tensor:
    """[140, 160] with a zero row, tiny rows, a row below the floor, and NaN and infinity in a corner of their own."""
    x = numbers(140, 160, torch.bfloat16, seed)
    x[3] = 0.0
    x[4] *= 1e-7
    x[5] *= 2.0**-110
    x[6, ::2] = -0.0
    x[7, 40] = float("nan")
    x[8, 150] = float("inf")
    x[9, 2] = -float("inf")
    x[10] *= 2.0**70
    return x


@pytest.mark.parametrize("eps", [1e-6, 0.0])
def test_bad_tiny_and_zero_rows_of_rmsnorm(eps: float, poisoned: list[torch.dtype]) -> None:
    x, w = hard(0), numbers(1, 160, torch.bfloat16)[0]
    exact = reference.rmsnorm_quantize(x, w, eps, None, None)
    for row, col in (PAIRS["blockwise"], PAIRS["mxfp8"], PAIRS["rowwise"]):
        y, rstd, row_q, col_q = fused.rmsnorm_quantize(x, w, eps, row, col)
        assert ulps(y, exact[0]) <= 1 and ulps(rstd, exact[1]) <= 2
        assert y[7].isnan().all() and y[8, 150].isnan() and y[8, 0] == 0
        assert_cast(row_q, y, row, 1)
        assert_cast(col_q, y, col, 0)


def test_bad_tiny_and_zero_rows_of_swiglu(poisoned: list[torch.dtype], monkeypatch: pytest.MonkeyPatch) -> None:
    dh, gate, up = hard(0), hard(1).roll(1, 0), hard(2).roll(2, 0)
    gate[20, :8] = torch.tensor([-200.0, -88.0, -87.0, -1.2785, 0.0, 87.0, 200.0, 1e30])
    for row, col in (PAIRS["blockwise"], PAIRS["hybrid"], PAIRS["tiles"]):
        h, row_q, col_q = fused.swiglu_quantize(gate, up, row, col)
        assert ulps(h, reference.swiglu_quantize(gate, up, None, None)[0]) <= 1
        assert_cast(row_q, h, row, 1)
        assert_cast(col_q, h, col, 0)
    plain = record_plain(monkeypatch)
    results = fused.swiglu_backward_quantize(dh, gate, up, ROW, COL)
    monkeypatch.undo()
    for values, pair in zip(plain, (results[:2], results[2:]), strict=True):
        assert_cast(pair[0], values, ROW, 1)
        assert_cast(pair[1], values, COL, 0)
    for q, exact in zip(results, reference.swiglu_backward_quantize(dh, gate, up, ROW, COL), strict=True):
        assert (q.data.contiguous().view(torch.uint8) != exact.data.view(torch.uint8)).float().mean() < 0.002
        assert torch.equal(q.scale.isnan(), exact.scale.isnan())


def test_inputs_may_be_halves_or_transposed(poisoned: list[torch.dtype]) -> None:
    both = numbers(40, 2 * 152, torch.bfloat16)
    gate, up = both.chunk(2, dim=1)
    h, row, _ = fused.swiglu_quantize(gate, up, ROW, None)
    assert torch.equal(h, reference.swiglu_quantize(gate.contiguous(), up.contiguous(), None, None)[0])
    assert_cast(row, h, ROW, 1)
    unusual = numbers(160, 41, torch.bfloat16).t()
    y, *_ = fused.rmsnorm_quantize(unusual, both[0, :160], 1e-6, None, None)
    assert ulps(y, reference.rmsnorm_quantize(unusual, both[0, :160], 1e-6, None, None)[0]) <= 1


@pytest.mark.parametrize("rows", [0, 5])
def test_empty_input_and_codes_only(rows: int, poisoned: list[torch.dtype]) -> None:
    gate, up = numbers(rows, 144, torch.bfloat16), numbers(rows, 144, torch.bfloat16, 1)
    weight = up.new_ones(144)
    del poisoned[:]
    pair = fused.swiglu_codes(gate, up, ROW, COL)
    fused.swiglu_backward_quantize(up, gate, up, ROW, COL)
    rstd, *codes = fused.rmsnorm_codes(gate, weight, 1e-6, ROW, COL)
    only_row = fused.rmsnorm_codes(gate, weight, 1e-6, ROW, None)[1]
    assert not {torch.bfloat16, torch.float16} & set(poisoned), "something was written in 16 bits"
    h = fused.swiglu_quantize(gate, up, None, None)[0]
    y, rstd_with_y, *_ = fused.rmsnorm_quantize(gate, weight, 1e-6, ROW, COL)
    assert torch.equal(rstd, rstd_with_y)
    assert_cast(only_row, y, ROW, 1)
    for values, results in ((y, codes), (h, pair)):
        assert_cast(results[0], values, ROW, 1)
        assert_cast(results[1], values, COL, 0)


@pytest.mark.parametrize("pair", ["mxfp8", "hybrid", "rowwise", "half in the tile", "tensorwise", "tiles"])
def test_rmsnorm_codes_need_no_y(pair: str, poisoned: list[torch.dtype]) -> None:
    """Casts that need the amax of more than a tile read y, which is written for them; no caller sees it."""
    row, col = PAIRS[pair]
    x, w = numbers(130, 140, torch.float32), numbers(1, 140, torch.float32)[0]
    _, row_q, col_q = fused.rmsnorm_codes(x, w, 1e-6, row, col, torch.float32, torch.bfloat16)
    y = fused.rmsnorm_quantize(x, w, 1e-6, row, col, torch.float32, torch.bfloat16)[0].bfloat16()
    assert_cast(row_q, y, row, 1)
    assert_cast(col_q, y, col, 0)


@pytest.mark.parametrize("pair", ["mxfp8", "rowwise", "tiles"])
def test_rmsnorm_takes_statistics_that_the_caller_has(pair: str) -> None:
    """A compiled graph computes them with the residual sum; others than x's show that they are used."""
    row, col = PAIRS[pair]
    x, w = numbers(130, 140, torch.bfloat16), numbers(1, 140, torch.bfloat16)[0]
    rstd = 2 * reference.reciprocal_rms(x, 1e-6)
    returned, row_q, col_q = fused.rmsnorm_codes(x, w, 1e-6, row, col, rstd=rstd)
    y = reference.rmsnorm_quantize(x, w, 1e-6, None, None, rstd=rstd)[0]
    assert returned.data_ptr() == rstd.data_ptr()
    assert_cast(row_q, y, row, 1)
    assert_cast(col_q, y, col, 0)


@pytest.mark.parametrize(
    ("rows", "cols", "dtype"), [(37, 140, torch.bfloat16), (16, 3, torch.float32), (5, 1024, torch.float16)]
)
@pytest.mark.parametrize("needs", [(True, True), (True, False), (False, True)])
def test_rmsnorm_backward(rows: int, cols: int, dtype: torch.dtype, needs: tuple[bool, bool]) -> None:
    """dx and dw from one kernel, each to the rounding of sums in another order; a bad row spoils only itself in dx."""
    x, w, dy = numbers(rows, cols, dtype), numbers(1, cols, dtype, 1)[0], numbers(cols, rows, dtype, 2).t()
    rstd = reference.reciprocal_rms(x, 1e-6)
    rstd[3] = float("inf")
    with launches() as recorded:
        results = fused.rmsnorm_backward(dy, x, w, rstd, *needs)
    assert recorded["rmsnorm_backward"] == 1
    for ours, exact in zip(results, reference.rmsnorm_backward(dy, x, w, rstd, *needs), strict=True):
        assert (ours is None) == (exact is None)
        if ours is None or exact is None:
            continue
        good = exact.isfinite()
        assert ours.dtype == exact.dtype and torch.equal(ours.isfinite(), good)
        error = (ours.double() - exact.double())[good].abs()
        bound = torch.finfo(dtype).eps * exact.double()[good].abs() + 2.0**-18
        assert (error <= bound).all()


def test_rmsnorm_backward_of_other_sizes() -> None:
    """No rows, and rows that fit in no program."""
    w = torch.ones(16400)
    dx, dw = fused.rmsnorm_backward(w.new_ones(0, 40), w.new_ones(0, 40), w[:40], w[:0], True, True)
    assert dx is not None and dx.shape == (0, 40) and dw is not None and not dw.any()
    x, dy = numbers(2, 16400, torch.float32), numbers(2, 16400, torch.float32, 1)
    rstd = reference.reciprocal_rms(x, 1e-6)
    pairs = (of.rmsnorm_backward(dy, x, w, rstd, True, True) for of in (fused, reference))
    assert all(torch.equal(a, b) for a, b in zip(*pairs, strict=True))


def test_single_launch() -> None:
    x = numbers(5, 144, torch.bfloat16)
    with launches() as recorded:
        fused.rmsnorm_quantize(x, x[0], 1e-6, ROW, None)
        fused.swiglu_quantize(x, x, ROW, COL)
        fused.swiglu_backward_quantize(x, x, x, ROW, COL)
    assert recorded == {"rmsnorm_rows": 1, "swiglu": 1, "swiglu_backward": 1}
    with launches() as recorded:
        fused.rmsnorm_quantize(x, x[0], 1e-6, ROW, COL)
    assert recorded == {"rstd_of_rows": 1, "rmsnorm_tile": 1}


@pytest.mark.parametrize("bad", [False, True])
def test_tensor_amax_is_computed_in_kernel(bad: bool) -> None:
    """One cast follows, no pass for its amax; the largest value lies in another program than the first."""
    spec, half = CastSpec("e5m2", (-1, -1), "fp32"), CastSpec("e4m3", (-1, -1), "pow2")
    x, dh = numbers(70, 300, torch.bfloat16), numbers(70, 300, torch.bfloat16, 1)
    x[66, 290] = float("nan") if bad else 700.0
    with launches() as recorded:
        y, _, *of_y = fused.rmsnorm_quantize(x.float(), x[0].abs() + 1, 1e-6, spec, spec, low=torch.bfloat16)
        h, *of_h = fused.swiglu_quantize(dh, x, half, spec)
        gate_row, gate_col, up_row, up_col = fused.swiglu_backward_quantize(dh, x, dh, spec, None)
    assert recorded == {"rmsnorm_rows": 1, "swiglu": 1, "swiglu_backward": 1, "cast_kernel": 4}
    assert gate_col is None and up_col is None
    for results, values in zip((gate_row, up_row), reference.swiglu_backward(dh, x, dh), strict=True):
        want = cast.quantize(values, spec).scale  # of values that may differ in their last bit
        assert torch.allclose(results.scale, want, rtol=2**-7, equal_nan=True) and bool(want.isnan()) == bad
    for contract, results in ((1, of_y[0]), (0, of_y[1])):
        assert_cast(results, y.bfloat16(), spec, contract)
    assert_cast(of_h[0], h, half, 1)
    assert_cast(of_h[1], h, spec, 0)


def test_rows_too_long_for_one_program(monkeypatch: pytest.MonkeyPatch, poisoned: list[torch.dtype]) -> None:
    monkeypatch.setattr(fused, "WIDEST", 256)
    x = numbers(6, 1100, torch.bfloat16)
    y, rstd, row, _ = fused.rmsnorm_quantize(x, x[0], 1e-6, ROW, None)
    exact = reference.rmsnorm_quantize(x, x[0], 1e-6, None, None)
    assert ulps(y, exact[0]) <= 1 and ulps(rstd, exact[1]) <= 2
    assert_cast(row, y, ROW, 1)
