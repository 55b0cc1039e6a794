"""The kernels of the fused layers: RMSNorm and SwiGLU with quantized outputs. ``fused.py`` chooses among them.

Every tile is computed in fp32, rounded once to the dtype of the input, and quantized from that, as four quarters
(``fused_tiles.py``). Tiles reach over the edge of the matrix [M, K] into the padding of the outputs. Where the matrix
consists of WHOLE tiles there are no masks: a quarter fewer instructions. Pointers that are None are outputs that the
caller does not want.

Arguments that several kernels share::

    codes, scales    of a row layout:    uint8 [M up to 16, K up to the block], scales fp32 [blocks of K, M up to 16]
                     of a column layout: uint8 [K up to 16, M up to the block], scales fp32 [blocks of M, K up to 16]
                     e8m0 scales: uint8, [M, blocks of K] or [K, blocks of M]
                     scales of 128 x 128, columns only: fp32 [blocks of K, blocks of M up to 4]
    top              int32 [1]: pattern of the amax of the whole result, raised by every program
    CAST, ROW, COL   (side of a block or 0 for the whole row, scales are powers of two, codes are E5M2, a block is a
                     tile of 128 x 128)
    UNIT             power of two up to 16 that divides K and all row strides, which come divided by it: fused._unit
    BM, BK           rows and columns of a tile
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.fp8.kernels.triton_kernels.bits import INTERPRETED, round_to, widen
from octavo.fp8.kernels.triton_kernels.fused_tiles import (
    load_quarter,
    quarter,
    raise_amax,
    raise_amax_of_quarters,
    store_columns,
    store_quarter,
    store_row,
)


@triton.jit
def _rstd_of(total, K, eps):
    """1 / sqrt(total / K + eps), fp32 [rows], every operation rounded once.

    Divisors and dividends are tensors: a constant could become a product with a rounded reciprocal.
    """
    mean = tl.div_rn(total, tl.zeros_like(total) + K)
    return tl.div_rn(tl.zeros_like(mean) + 1.0, tl.sqrt_rn(mean + eps))


@triton.jit
def _convert_to_low(out, LOW: tl.constexpr):
    """What a cast reads: the result ``out``, or the LOW copy that autocast would make of it."""
    if LOW == out.dtype:  # noqa: SIM300 (a constexpr on the left, or == is not Triton's)
        return out
    return round_to(widen(out), LOW)


@triton.jit
def rmsnorm_rows(
    x,  # [M, K] bf16, fp16 or fp32, rows x_stride * UNIT apart
    weight,  # [K] any float
    rstd,  # fp32 [M]
    y,  # [M, K] OUT, contiguous, or None
    codes,  # row layout, or None
    scales,
    top,  # or None
    M,
    x_stride,
    K,
    eps,  # fp32
    UNIT: tl.constexpr,
    BM: tl.constexpr,  # whole rows per program
    BK: tl.constexpr,  # K up to a power of two
    CAST: tl.constexpr,
    OUT: tl.constexpr,  # dtype of y
    LOW: tl.constexpr,  # dtype that is quantized
):
    """RMSNorm of BM whole rows: rstd, y, and row codes if they are wanted, from one read of x."""
    K = K * UNIT
    # Load: whole rows; the ragged tail of columns and rows reads as 0.
    row = tl.program_id(0) * BM
    rows = row + tl.arange(0, BM)
    cols = tl.arange(0, BK)
    inside = (rows[:, None] < M) & (cols[None, :] < K)
    v = widen(tl.load(x + rows[:, None].to(tl.int64) * (x_stride * UNIT) + cols[None, :], mask=inside, other=0.0))
    w = widen(tl.load(weight + cols, mask=cols < K, other=0.0))
    # Reduce: the statistics of a row, in fp32.
    r = _rstd_of(tl.sum(v * v, axis=1), K, eps)
    tl.store(rstd + rows, r, mask=rows < M)
    # Scale and round once to OUT. In the padding, 0 * rstd is NaN where rstd is NaN or infinite.
    out = round_to(tl.where(inside, v * r[:, None] * w[None, :], 0.0), OUT)
    if y is not None:
        tl.store(y + rows[:, None].to(tl.int64) * K + cols[None, :], out, mask=inside)
    # Quantize from registers what a reader of y would quantize.
    out = _convert_to_low(out, LOW)
    raise_amax(top, out)
    store_row(out, codes, scales, (row, row * 0, M, K), tl.arange(0, BM), BK, CAST)


@triton.jit
def rstd_of_rows(x, rstd, M, x_stride, K, eps, UNIT: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr):
    """rstd, fp32 [M], of BM rows per program of x [M, K], of any length, in steps of BK columns."""
    K = K * UNIT
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    at = x + rows[:, None].to(tl.int64) * (x_stride * UNIT)
    # Sum element by element over the steps and reduce once: the order does not depend on the grid.
    squares = tl.zeros([BM, BK], tl.float32)
    for col in range(0, K, BK):
        cols = col + tl.arange(0, BK)[None, :]
        v = widen(tl.load(at + cols, mask=(rows[:, None] < M) & (cols < K), other=0.0))
        squares += v * v
    tl.store(rstd + rows, _rstd_of(tl.sum(squares, axis=1), K, eps), mask=rows < M)


@triton.jit
def _norm_quarter(
    x,  # as in rmsnorm_tile
    w,  # fp32 [BK]
    rstd,
    y,
    codes,  # row layout, or None
    scales,
    place,  # see fused_tiles
    x_step,  # between rows
    J: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
    WHOLE: tl.constexpr,
    ROW: tl.constexpr,
    OUT: tl.constexpr,
    LOW: tl.constexpr,
):
    """Quarter J of a tile of y, as a cast reads it. Stores y and its row codes, if they are wanted."""
    row, col, M, K = place
    rows = row + quarter(J, BM)
    v = widen(load_quarter(x, place, x_step, J, BM, BK, WHOLE))
    v *= (tl.load(rstd + rows) if WHOLE else tl.load(rstd + rows, mask=rows < M, other=0.0))[:, None]
    v *= w[None, :]
    if not WHOLE:
        # In the padding, 0 * rstd is NaN where rstd is NaN or infinite.
        v = tl.where((rows < M)[:, None] & (col + tl.arange(0, BK) < K)[None, :], v, 0.0)
    out = round_to(v, OUT)
    store_quarter(y, out, place, J, BM, BK, WHOLE)
    out = _convert_to_low(out, LOW)
    store_row(out, codes, scales, place, quarter(J, BM), BK, ROW, WHOLE)
    return out


@triton.jit
def rmsnorm_tile(
    x,  # [M, K] bf16, fp16 or fp32, rows x_stride * UNIT apart
    weight,  # [K] any float
    rstd,  # fp32 [M], from rstd_of_rows
    y,  # [M, K] OUT, contiguous, or None
    row_codes,  # row layout, or None
    row_scales,
    col_codes,  # column layout, or None
    col_scales,
    top,  # or None
    M,
    x_stride,
    K,
    UNIT: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
    ROW: tl.constexpr,  # cast of each layout
    COL: tl.constexpr,
    WHOLE: tl.constexpr,  # no tile is ragged
    OUT: tl.constexpr,  # dtype of y
    LOW: tl.constexpr,  # dtype that is quantized
):
    """A tile of y, and its codes in one or two layouts, from x and rstd."""
    K = K * UNIT
    # The last rows come first: rstd_of_rows has just read them, so that they are in the L2 cache.
    row = (tl.num_programs(1) - 1 - tl.program_id(1)) * BM
    col = tl.program_id(0) * BK
    place = (row, col, M, K)
    cols = col + tl.arange(0, BK)
    w = widen(tl.load(weight + cols) if WHOLE else tl.load(weight + cols, mask=cols < K, other=0.0))
    step = x_stride * UNIT
    q = (
        _norm_quarter(x, w, rstd, y, row_codes, row_scales, place, step, 0, BM, BK, WHOLE, ROW, OUT, LOW),
        _norm_quarter(x, w, rstd, y, row_codes, row_scales, place, step, 1, BM, BK, WHOLE, ROW, OUT, LOW),
        _norm_quarter(x, w, rstd, y, row_codes, row_scales, place, step, 2, BM, BK, WHOLE, ROW, OUT, LOW),
        _norm_quarter(x, w, rstd, y, row_codes, row_scales, place, step, 3, BM, BK, WHOLE, ROW, OUT, LOW),
    )
    # Quantize down the columns, from registers.
    raise_amax_of_quarters(top, q)
    store_columns(q, col_codes, col_scales, place, BM, BK, COL, WHOLE)


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)) in six instructions, exact to 2^-21 for |x| < 16; 0 for x < -87, where it is below 2^-126.

    The compiler's own exp and division take twenty, most of them for subnormal numbers, and would take longer than the
    memory accesses.
    """
    if INTERPRETED:
        return 1.0 / (1.0 + tl.exp(-x))
    # exp(-x) as 2^(-x * log2(e)); ftz: flush subnormal numbers to zero.
    e = tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=r,r", [x * -1.4426950408889634], tl.float32, True, 1)
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=r,r", [1.0 + e], tl.float32, True, 1)


@triton.jit
def rmsnorm_backward(
    dy,  # [M, K] any float, rows dy_stride * UNIT apart
    x,  # likewise
    weight,  # [K] any float
    rstd,  # fp32 [M]
    dx,  # [M, K] OUT, contiguous, or None
    sums,  # fp32 [programs, K], or None
    M,
    dy_stride,
    x_stride,
    K,
    UNIT: tl.constexpr,
    ROWS: tl.constexpr,  # of a program
    BK: tl.constexpr,  # K up to a power of two
    OUT: tl.constexpr,  # dtype of dx
):
    """dx of ROWS rows, and the sum of dy * n over them, from one read: n = x * rstd, g = dy * weight,
    dx = rstd * (g - n * mean(g * n))."""
    K = K * UNIT
    cols = tl.arange(0, BK)
    w = widen(tl.load(weight + cols, mask=cols < K, other=0.0))
    total = tl.zeros([BK], tl.float32)
    first = tl.program_id(0) * ROWS
    for row in range(first, min(first + ROWS, M)):
        at = tl.cast(row, tl.int64)
        d = widen(tl.load(dy + at * (dy_stride * UNIT) + cols, mask=cols < K, other=0.0))
        r = tl.load(rstd + at)
        n = widen(tl.load(x + at * (x_stride * UNIT) + cols, mask=cols < K, other=0.0)) * r
        # In the padding, 0 * rstd is NaN where rstd is NaN or infinite: it must not reach the mean.
        n = tl.where(cols < K, n, 0.0)
        if sums is not None:
            total += d * n
        if dx is not None:
            g = d * w
            mean = tl.div_rn(tl.sum(g * n, axis=0), K.to(tl.float32))
            tl.store(dx + at * K + cols, round_to((g - n * mean) * r, OUT), mask=cols < K)
    if sums is not None:
        tl.store(sums + tl.program_id(0).to(tl.int64) * K + cols, total, mask=cols < K)


@triton.jit
def _swiglu_quarter(
    gate,  # [M, K], as in swiglu
    up,
    h,
    codes,  # row layout, or None
    scales,
    place,  # see fused_tiles
    gate_step,  # between rows
    up_step,
    J: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
    WHOLE: tl.constexpr,
    ROW: tl.constexpr,
):
    """Quarter J of a tile of h = silu(gate) * up. Stores h and its row codes, if they are wanted."""
    g = widen(load_quarter(gate, place, gate_step, J, BM, BK, WHOLE))
    u = widen(load_quarter(up, place, up_step, J, BM, BK, WHOLE))
    # Compute in fp32, round once to the input's dtype: codes equal the cast of the plain layer's output.
    out = round_to(g * sigmoid(g) * u, gate.dtype.element_ty)
    store_quarter(h, out, place, J, BM, BK, WHOLE)
    store_row(out, codes, scales, place, quarter(J, BM), BK, ROW, WHOLE)
    return out


@triton.jit
def swiglu(
    gate,  # [M, K] bf16, fp16 or fp32, rows gate_stride * UNIT apart
    up,  # [M, K] likewise
    h,  # [M, K] in gate's dtype, contiguous, or None
    row_codes,  # row layout, or None
    row_scales,
    col_codes,  # column layout, or None
    col_scales,
    top,  # or None
    M,
    gate_stride,
    up_stride,
    K,
    UNIT: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
    ROW: tl.constexpr,  # cast of each layout
    COL: tl.constexpr,
    WHOLE: tl.constexpr,  # no tile is ragged
):
    """A tile of h = silu(gate) * up, and its codes in one or two layouts."""
    K = K * UNIT
    place = (tl.program_id(1) * BM, tl.program_id(0) * BK, M, K)
    g_step = gate_stride * UNIT
    u_step = up_stride * UNIT
    q = (
        _swiglu_quarter(gate, up, h, row_codes, row_scales, place, g_step, u_step, 0, BM, BK, WHOLE, ROW),
        _swiglu_quarter(gate, up, h, row_codes, row_scales, place, g_step, u_step, 1, BM, BK, WHOLE, ROW),
        _swiglu_quarter(gate, up, h, row_codes, row_scales, place, g_step, u_step, 2, BM, BK, WHOLE, ROW),
        _swiglu_quarter(gate, up, h, row_codes, row_scales, place, g_step, u_step, 3, BM, BK, WHOLE, ROW),
    )
    # Quantize down the columns, from registers.
    raise_amax_of_quarters(top, q)
    store_columns(q, col_codes, col_scales, place, BM, BK, COL, WHOLE)


@triton.jit
def _hide(x):
    """x, hidden from the compiler, which would keep the fp32 tile alive in registers and spill. The next user of a
    16-bit tile then widens it again."""
    if INTERPRETED or x.dtype == tl.float32:
        return x
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], x.dtype, is_pure=False, pack=2)


@triton.jit
def _gradient_quarters(
    inputs,  # dh, gate, up [M, K]
    steps,  # between their rows
    dgate,  # and the other outputs: as in swiglu_backward
    dup,
    gate_row,
    gate_row_scales,
    up_row,
    up_row_scales,
    place,  # see fused_tiles
    J: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
    WHOLE: tl.constexpr,
    ROW: tl.constexpr,
):
    """Quarter J of a tile of dgate and of dup. Stores them and their row codes, if they are wanted."""
    d = widen(load_quarter(inputs[0], place, steps[0], J, BM, BK, WHOLE))
    g = widen(load_quarter(inputs[1], place, steps[1], J, BM, BK, WHOLE))
    u = widen(load_quarter(inputs[2], place, steps[2], J, BM, BK, WHOLE))
    # dgate = dh * up * silu'(gate), with silu'(g) = s + g s (1 - s), and dup = dh * silu(gate); each is rounded once.
    s = sigmoid(g)
    slope = s + g * s * (1.0 - s)
    d_gate = round_to(d * u * slope, inputs[1].dtype.element_ty)
    d_up = round_to(d * (g * s), inputs[1].dtype.element_ty)
    store_quarter(dgate, d_gate, place, J, BM, BK, WHOLE)
    store_quarter(dup, d_up, place, J, BM, BK, WHOLE)
    store_row(d_gate, gate_row, gate_row_scales, place, quarter(J, BM), BK, ROW, WHOLE)
    store_row(d_up, up_row, up_row_scales, place, quarter(J, BM), BK, ROW, WHOLE)
    return _hide(d_gate), _hide(d_up)


@triton.jit
def swiglu_backward(
    dh,  # [M, K] bf16, fp16 or fp32, rows dh_stride * UNIT apart
    gate,  # [M, K] likewise
    up,  # [M, K] likewise
    dgate,  # [M, K] in gate's dtype, contiguous, or None
    dup,  # likewise
    gate_row,  # layouts of dgate, or None
    gate_row_scales,
    gate_col,
    gate_col_scales,
    up_row,  # layouts of dup, or None
    up_row_scales,
    up_col,
    up_col_scales,
    gate_top,  # of dgate and dup, or None
    up_top,
    M,
    dh_stride,
    gate_stride,
    up_stride,
    K,
    UNIT: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
    ROW: tl.constexpr,  # cast of each layout
    COL: tl.constexpr,
    WHOLE: tl.constexpr,  # no tile is ragged
):
    """A tile of dgate and of dup, and their codes in one or two layouts.

    Row codes are stored quarter by quarter. Until all quarters are there for the column codes, values wait in 16 bits:
    128 fp32 values a thread would not fit in its registers.
    """
    K = K * UNIT
    place = (tl.program_id(1) * BM, tl.program_id(0) * BK, M, K)
    inputs = (dh, gate, up)
    steps = (dh_stride * UNIT, gate_stride * UNIT, up_stride * UNIT)
    # Load, compute, store rows: a quarter after the other.
    g0, u0 = _gradient_quarters(
        inputs, steps, dgate, dup, gate_row, gate_row_scales, up_row, up_row_scales, place, 0, BM, BK, WHOLE, ROW
    )
    g1, u1 = _gradient_quarters(
        inputs, steps, dgate, dup, gate_row, gate_row_scales, up_row, up_row_scales, place, 1, BM, BK, WHOLE, ROW
    )
    g2, u2 = _gradient_quarters(
        inputs, steps, dgate, dup, gate_row, gate_row_scales, up_row, up_row_scales, place, 2, BM, BK, WHOLE, ROW
    )
    g3, u3 = _gradient_quarters(
        inputs, steps, dgate, dup, gate_row, gate_row_scales, up_row, up_row_scales, place, 3, BM, BK, WHOLE, ROW
    )
    # Quantize down the columns, one result after the other.
    raise_amax_of_quarters(gate_top, (g0, g1, g2, g3))
    store_columns((g0, g1, g2, g3), gate_col, gate_col_scales, place, BM, BK, COL, WHOLE)
    raise_amax_of_quarters(up_top, (u0, u1, u2, u3))
    store_columns((u0, u1, u2, u3), up_col, up_col_scales, place, BM, BK, COL, WHOLE)
