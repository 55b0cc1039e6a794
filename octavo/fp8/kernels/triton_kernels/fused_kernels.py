"""The kernels of the fused layers: RMSNorm and SwiGLU with quantized outputs. ``fused.py`` chooses among them.

Every tile is computed in fp32, rounded once to the dtype of the input, and quantized from that. Tiles reach over the
edge of the matrix [M, K] into the padding of the outputs, where values are 0, so that codes are 0 and scales 1: the
same stores write padding and results. Where the matrix consists of WHOLE tiles there are no masks: a quarter fewer
instructions, and no spills. Pointers that are None are outputs that are not wanted.

Arguments that several kernels share::

    codes, scales    of a row layout:    uint8 [M up to 16, K up to the block], scales fp32 [blocks of K, M up to 16]
                     of a column layout: uint8 [K up to 16, M up to the block], scales fp32 [blocks of M, K up to 16]
                     e8m0 scales: uint8, [M, blocks of K] or [K, blocks of M]
    top              int32 [1]: pattern of the amax of the whole result, raised by every program
    CAST, ROW, COL   (side of a block or 0 for the whole row, scales are powers of two, codes are E5M2)
    UNIT             power of two up to 16 that divides K and all row strides, which come divided by it: fused._unit
    BM, BK           rows and columns of a tile
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.fp8.kernels.triton_kernels.bits import (
    INTERPRETED,
    amax_bits,
    encode,
    round_to,
    scale_of,
    top_bits,
    widen,
)


@triton.jit
def _in_bounds(rows, cols, M, K, WHOLE: tl.constexpr):
    """Mask [rows, cols] of positions inside [M, K]; a constant for a WHOLE tile, so that the compiler drops it."""
    if WHOLE:
        return tl.full([rows.shape[0], cols.shape[0]], 1, tl.int1)
    return (rows[:, None] < M) & (cols[None, :] < K)


@triton.jit
def _store_row(
    y,  # fp32 [BM, BK], 0 outside [M, K]
    codes,
    scales,
    row,  # of the tile's first element in [M, K]
    col,  # likewise
    M,
    K,
    BM: tl.constexpr,
    BK: tl.constexpr,
    CAST: tl.constexpr,
    WHOLE: tl.constexpr = False,
):
    """Quantize y in blocks (1, G), G = CAST[0], and store codes and scales with their padding.

    G = 0: the row is one block, and y holds all of it.
    """
    G: tl.constexpr = CAST[0]
    SPAN: tl.constexpr = BK if G == 0 else G
    # Reduce and scale: one amax per row and SPAN columns.
    blocks = tl.reshape(y, [BM, BK // SPAN, SPAN])
    scale, bad = scale_of(top_bits(tl.abs(blocks), 2)[:, :, None], CAST[1], CAST[2])
    out = tl.reshape(encode(blocks, scale, bad, CAST[1], CAST[2], False), [BM, BK])
    rows = row + tl.arange(0, BM)
    cols = col + tl.arange(0, BK)
    if not WHOLE:  # noqa: SIM102 (a constant outside, the device's own inside)
        # A bad block at the edge has NaN codes in its padding too; there they must be 0.
        if (row + BM > M) | (col + BK > K):
            out = tl.where((rows[:, None] < M) & (cols[None, :] < K), out, tl.zeros_like(out))
    # Store the codes; rows are padded to 16 and columns to a whole block (or 16).
    PAD: tl.constexpr = 16 if G == 0 else G
    width = (K + PAD - 1) // PAD * PAD
    at = codes + rows[:, None].to(tl.int64) * width + cols[None, :]
    tl.store(at, out, mask=_in_bounds(rows, cols, (M + 15) // 16 * 16, width, WHOLE))
    # Store the scales: e8m0 row by row, fp32 with the rows contiguous, the layouts that GEMMs read.
    scale = tl.reshape(scale, [BM, BK // SPAN])
    block = col // SPAN + tl.arange(0, BK // SPAN)[None, :]
    count = (K + SPAN - 1) // SPAN
    if scales.dtype.element_ty == tl.uint8:
        byte = (scale.to(tl.int32, bitcast=True) >> 23).to(tl.uint8)
        tl.store(scales + rows[:, None].to(tl.int64) * count + block, byte, mask=(rows[:, None] < M) & (block < count))
    else:
        stored = M if G == 0 else (M + 15) // 16 * 16
        at = scales + block.to(tl.int64) * stored + rows[:, None]
        tl.store(at, scale, mask=(rows[:, None] < stored) & (block < count))


@triton.jit
def _store_col(
    y, codes, scales, row, col, M, K, BM: tl.constexpr, BK: tl.constexpr, CAST: tl.constexpr, WHOLE: tl.constexpr
):
    """:func:`_store_row` for blocks (G, 1): codes [K up to 16, M up to G], transposed, and their scales."""
    G: tl.constexpr = CAST[0]
    # Reduce and scale: one amax per column and G rows.
    blocks = tl.reshape(y, [BM // G, G, BK])
    scale, bad = scale_of(top_bits(tl.abs(blocks), 1)[:, None, :], CAST[1], CAST[2])
    out = tl.reshape(encode(blocks, scale, bad, CAST[1], CAST[2], False), [BM, BK])
    rows = row + tl.arange(0, BM)
    cols = col + tl.arange(0, BK)
    if not WHOLE:  # noqa: SIM102 (a constant outside, the device's own inside)
        # As in _store_row: padding codes are 0 even in a bad block.
        if (row + BM > M) | (col + BK > K):
            out = tl.where((rows[:, None] < M) & (cols[None, :] < K), out, tl.zeros_like(out))
    # Store the codes transposed (through shared memory), so that stores are contiguous along M.
    height = (M + G - 1) // G * G
    at = codes + cols[:, None].to(tl.int64) * height + rows[None, :]
    tl.store(at, tl.trans(out), mask=_in_bounds(cols, rows, (K + 15) // 16 * 16, height, WHOLE))
    # Store the scales: e8m0 column by column, fp32 with the columns contiguous.
    scale = tl.reshape(scale, [BM // G, BK])
    block = row // G + tl.arange(0, BM // G)[:, None]
    count = (M + G - 1) // G
    if scales.dtype.element_ty == tl.uint8:
        byte = (scale.to(tl.int32, bitcast=True) >> 23).to(tl.uint8)
        tl.store(scales + cols[None, :].to(tl.int64) * count + block, byte, mask=(cols[None, :] < K) & (block < count))
    else:
        stored = (K + 15) // 16 * 16
        at = scales + block.to(tl.int64) * stored + cols[None, :]
        tl.store(at, scale, mask=(cols[None, :] < stored) & (block < count))


@triton.jit
def _raise_amax(top, y):
    """Raise the amax pattern at ``top``, if it is wanted, to the amax of the tile y, fp32."""
    if top is not None:
        # Relaxed: only the value matters, and the next launch sees it.
        tl.atomic_max(top, tl.max(tl.max(amax_bits(y), axis=1), axis=0), sem="relaxed")


@triton.jit
def _rstd_of(total, K, eps):
    """1 / sqrt(total / K + eps), fp32 [rows], every operation rounded once.

    Divisors and dividends are tensors: a constant could become a product with a rounded reciprocal.
    """
    mean = tl.div_rn(total, tl.zeros_like(total) + K)
    return tl.div_rn(tl.zeros_like(mean) + 1.0, tl.sqrt_rn(mean + eps))


@triton.jit
def _round_to_low(out, LOW: tl.constexpr):
    """fp32 values that a cast reads: the result ``out``, or the LOW copy that autocast would make of it."""
    if LOW == out.dtype:  # noqa: SIM300 (a constexpr on the left, or == is not Triton's)
        return widen(out)
    return widen(round_to(widen(out), LOW))


@triton.jit
def rmsnorm_rows(
    x,  # [M, K] bf16, fp16 or fp32, rows x_stride * UNIT apart
    weight,  # [K] any float
    rstd,  # fp32 [M]
    y,  # [M, K] OUT, contiguous
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
    tl.store(y + rows[:, None].to(tl.int64) * K + cols[None, :], out, mask=inside)
    # Quantize from registers what a reader of y would quantize.
    _raise_amax(top, _round_to_low(out, LOW))
    if codes is not None:
        _store_row(_round_to_low(out, LOW), codes, scales, row, 0, M, K, BM, BK, CAST)


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
def rmsnorm_tile(
    x,  # [M, K] bf16, fp16 or fp32, rows x_stride * UNIT apart
    weight,  # [K] any float
    rstd,  # fp32 [M], from rstd_of_rows
    y,  # [M, K] OUT, contiguous
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
    rows = row + tl.arange(0, BM)
    cols = col + tl.arange(0, BK)
    # Load; outside of [M, K] everything is 0.
    inside = _in_bounds(rows, cols, M, K, WHOLE)
    v = widen(tl.load(x + rows[:, None].to(tl.int64) * (x_stride * UNIT) + cols[None, :], mask=inside, other=0.0))
    r = tl.load(rstd + rows, mask=rows < M, other=0.0)
    w = widen(tl.load(weight + cols, mask=cols < K, other=0.0))
    # Scale, round once to OUT, store y.
    out = round_to(tl.where(inside, v * r[:, None] * w[None, :], 0.0), OUT)
    tl.store(y + rows[:, None].to(tl.int64) * K + cols[None, :], out, mask=inside)
    # Quantize from registers, in each layout that is wanted.
    _raise_amax(top, _round_to_low(out, LOW))
    if row_codes is not None:
        _store_row(_round_to_low(out, LOW), row_codes, row_scales, row, col, M, K, BM, BK, ROW, WHOLE)
    if col_codes is not None:
        _store_col(_round_to_low(_hide(out), LOW), col_codes, col_scales, row, col, M, K, BM, BK, COL, WHOLE)


@triton.jit
def _hide(x):
    """x, hidden from the compiler: the second user of a 16-bit tile then widens it again, where the compiler would keep
    the fp32 tile alive in registers and spill."""
    if INTERPRETED or x.dtype == tl.float32:
        return x
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], x.dtype, is_pure=True, pack=2)


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
    row = tl.program_id(1) * BM
    col = tl.program_id(0) * BK
    rows = row + tl.arange(0, BM)
    cols = col + tl.arange(0, BK)
    # Load gate and up; outside of [M, K] both are 0, and so is h.
    inside = _in_bounds(rows, cols, M, K, WHOLE)
    wide = rows[:, None].to(tl.int64)
    g = widen(tl.load(gate + wide * (gate_stride * UNIT) + cols[None, :], mask=inside, other=0.0))
    u = widen(tl.load(up + wide * (up_stride * UNIT) + cols[None, :], mask=inside, other=0.0))
    # Compute in fp32, round once to the input's dtype: codes equal the cast of the plain layer's output.
    out = round_to(g * sigmoid(g) * u, gate.dtype.element_ty)
    if h is not None:
        tl.store(h + wide * K + cols[None, :], out, mask=inside)
    # Quantize from registers, in each layout that is wanted.
    _raise_amax(top, widen(out))
    if row_codes is not None:
        _store_row(widen(out), row_codes, row_scales, row, col, M, K, BM, BK, ROW, WHOLE)
    if col_codes is not None:
        _store_col(widen(_hide(out)), col_codes, col_scales, row, col, M, K, BM, BK, COL, WHOLE)


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
    """A tile of dgate, or of dup, and its codes in one or two layouts.

    One program computes one of the two, since both at once need more registers than a thread has. Programs 2i and
    2i + 1 compute the same tile of both at the same time, so that their common inputs come from memory once.
    """
    K = K * UNIT
    row = tl.program_id(1) * BM
    col = tl.program_id(0) // 2 * BK
    rows = row + tl.arange(0, BM)
    cols = col + tl.arange(0, BK)
    # Load what both need; values stay 16 bits wide until they are used, which saves registers.
    inside = _in_bounds(rows, cols, M, K, WHOLE)
    wide = rows[:, None].to(tl.int64)
    d = tl.load(dh + wide * (dh_stride * UNIT) + cols[None, :], mask=inside, other=0.0)
    g = tl.load(gate + wide * (gate_stride * UNIT) + cols[None, :], mask=inside, other=0.0)
    if tl.program_id(0) % 2 == 0:
        # dup = dh * silu(gate), in fp32, rounded once.
        d_up = round_to(widen(d) * (widen(g) * sigmoid(widen(g))), gate.dtype.element_ty)
        if dup is not None:
            tl.store(dup + wide * K + cols[None, :], d_up, mask=inside)
        # Quantize from registers, in each layout that is wanted.
        _raise_amax(up_top, widen(d_up))
        if up_row is not None:
            _store_row(widen(d_up), up_row, up_row_scales, row, col, M, K, BM, BK, ROW, WHOLE)
        if up_col is not None:
            _store_col(widen(_hide(d_up)), up_col, up_col_scales, row, col, M, K, BM, BK, COL, WHOLE)
    else:
        # dgate = dh * up * silu'(gate), with silu'(g) = s + g s (1 - s).
        u = tl.load(up + wide * (up_stride * UNIT) + cols[None, :], mask=inside, other=0.0)
        s = sigmoid(widen(g))
        slope = s + widen(g) * s * (1.0 - s)
        d_gate = round_to(widen(d) * widen(u) * slope, gate.dtype.element_ty)
        if dgate is not None:
            tl.store(dgate + wide * K + cols[None, :], d_gate, mask=inside)
        # Quantize from registers, in each layout that is wanted.
        _raise_amax(gate_top, widen(d_gate))
        if gate_row is not None:
            _store_row(widen(d_gate), gate_row, gate_row_scales, row, col, M, K, BM, BK, ROW, WHOLE)
        if gate_col is not None:
            _store_col(widen(_hide(d_gate)), gate_col, gate_col_scales, row, col, M, K, BM, BK, COL, WHOLE)
