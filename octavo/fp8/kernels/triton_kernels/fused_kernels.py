"""The kernels of the fused layers: RMSNorm and SwiGLU with quantized outputs. ``fused.py`` says which runs when.

Every tile is computed in fp32, rounded once to the dtype of the input, and quantized from there. Tiles reach over the
edge of the matrix [M, K] into the padding of the outputs, where values are 0, and so codes are 0 and scales 1: padding
is written by the same stores as everything else. Where the matrix is made of WHOLE tiles nothing is masked: a quarter
fewer instructions, and no register spilled. Pointers that are None are outputs that nobody wants.

Column counts and row strides come divided by ``UNIT``, which divides them all: see ``fused._unit``.
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
def _within(rows, cols, M, K, WHOLE: tl.constexpr):
    """Which places [rows, cols] lie within [M, K]: all of a WHOLE tile, which the compiler then sees."""
    if WHOLE:
        return tl.full([rows.shape[0], cols.shape[0]], 1, tl.int1)
    return (rows[:, None] < M) & (cols[None, :] < K)


@triton.jit
def _store_row(
    y, codes, scales, row, col, M, K,
    BM: tl.constexpr, BK: tl.constexpr, CAST: tl.constexpr, WHOLE: tl.constexpr = False,
):  # fmt: skip
    """Quantize y [BM, BK] fp32 (0 outside [M, K]) at (row, col) in blocks (1, G) and store it, padding included; G = 0:
    the row is one block, and y holds all of it. CAST is (G, whether scales are powers of two, whether codes are E5M2).

    Codes lie [M up to 16, K up to G], scales one block of columns after the other (e8m0: one row after the other).
    """
    G: tl.constexpr = CAST[0]
    SPAN: tl.constexpr = BK if G == 0 else G
    blocks = tl.reshape(y, [BM, BK // SPAN, SPAN])
    scale, bad = scale_of(top_bits(tl.abs(blocks), 2)[:, :, None], CAST[1], CAST[2])
    out = tl.reshape(encode(blocks, scale, bad, CAST[1], CAST[2], False), [BM, BK])
    rows = row + tl.arange(0, BM)
    cols = col + tl.arange(0, BK)
    if not WHOLE:  # noqa: SIM102 (a constant outside, the device's own inside)
        if (row + BM > M) | (col + BK > K):  # the NaN of a bad block at the edge goes no further than the edge
            out = tl.where((rows[:, None] < M) & (cols[None, :] < K), out, tl.zeros_like(out))
    PAD: tl.constexpr = 16 if G == 0 else G
    width = (K + PAD - 1) // PAD * PAD
    at = codes + rows[:, None].to(tl.int64) * width + cols[None, :]
    tl.store(at, out, mask=_within(rows, cols, (M + 15) // 16 * 16, width, WHOLE))
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
    """As :func:`_store_row` for blocks (G, 1): codes lie [K up to 16, M up to G], scales one block of rows after the
    other (e8m0: one column after the other)."""
    G: tl.constexpr = CAST[0]
    blocks = tl.reshape(y, [BM // G, G, BK])
    scale, bad = scale_of(top_bits(tl.abs(blocks), 1)[:, None, :], CAST[1], CAST[2])
    out = tl.reshape(encode(blocks, scale, bad, CAST[1], CAST[2], False), [BM, BK])
    rows = row + tl.arange(0, BM)
    cols = col + tl.arange(0, BK)
    if not WHOLE:  # noqa: SIM102 (a constant outside, the device's own inside)
        if (row + BM > M) | (col + BK > K):
            out = tl.where((rows[:, None] < M) & (cols[None, :] < K), out, tl.zeros_like(out))
    height = (M + G - 1) // G * G
    at = codes + cols[:, None].to(tl.int64) * height + rows[None, :]
    tl.store(at, tl.trans(out), mask=_within(cols, rows, (K + 15) // 16 * 16, height, WHOLE))
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
def _raise(top, y):
    """Raise the amax pattern at ``top``, if anybody asks for it, to that of a tile."""
    if top is not None:
        tl.atomic_max(top, tl.max(tl.max(amax_bits(y), axis=1), axis=0), sem="relaxed")


@triton.jit
def _rstd_of(total, K, eps):
    """1 / sqrt(total / K + eps), every step rounded once."""
    mean = tl.div_rn(total, tl.zeros_like(total) + K)
    return tl.div_rn(tl.zeros_like(mean) + 1.0, tl.sqrt_rn(mean + eps))


@triton.jit
def _lowered(out, LOW: tl.constexpr):
    """fp32 of what a cast reads: the result, or the copy that autocast would make of it."""
    if LOW == out.dtype:  # noqa: SIM300 (a constexpr on the left, or == is not Triton's)
        return widen(out)
    return widen(round_to(widen(out), LOW))


@triton.jit
def rmsnorm_rows(
    x,
    weight,
    rstd,
    y,
    codes,
    scales,
    top,
    M,
    x_stride,
    K,
    eps,
    UNIT: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
    CAST: tl.constexpr,
    OUT: tl.constexpr,
    LOW: tl.constexpr,
):
    """BM whole rows: x -> rstd, y, and row codes if there are any; one read."""
    K = K * UNIT
    row = tl.program_id(0) * BM
    rows = row + tl.arange(0, BM)
    cols = tl.arange(0, BK)
    inside = (rows[:, None] < M) & (cols[None, :] < K)
    v = widen(tl.load(x + rows[:, None].to(tl.int64) * (x_stride * UNIT) + cols[None, :], mask=inside, other=0.0))
    w = widen(tl.load(weight + cols, mask=cols < K, other=0.0))
    r = _rstd_of(tl.sum(v * v, axis=1), K, eps)
    tl.store(rstd + rows, r, mask=rows < M)
    # Where rstd is NaN or infinite, so would be 0 * rstd in the padding.
    out = round_to(tl.where(inside, v * r[:, None] * w[None, :], 0.0), OUT)
    tl.store(y + rows[:, None].to(tl.int64) * K + cols[None, :], out, mask=inside)
    _raise(top, _lowered(out, LOW))
    if codes is not None:
        _store_row(_lowered(out, LOW), codes, scales, row, 0, M, K, BM, BK, CAST)


@triton.jit
def rstd_of_rows(x, rstd, M, x_stride, K, eps, UNIT: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr):
    """rstd of BM rows of any length."""
    K = K * UNIT
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    at = x + rows[:, None].to(tl.int64) * (x_stride * UNIT)
    squares = tl.zeros([BM, BK], tl.float32)
    for col in range(0, K, BK):
        cols = col + tl.arange(0, BK)[None, :]
        v = widen(tl.load(at + cols, mask=(rows[:, None] < M) & (cols < K), other=0.0))
        squares += v * v
    tl.store(rstd + rows, _rstd_of(tl.sum(squares, axis=1), K, eps), mask=rows < M)


@triton.jit
def rmsnorm_tile(
    x,
    weight,
    rstd,
    y,
    row_codes,
    row_scales,
    col_codes,
    col_scales,
    top,
    M,
    x_stride,
    K,
    UNIT: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
    ROW: tl.constexpr,
    COL: tl.constexpr,
    WHOLE: tl.constexpr,
    OUT: tl.constexpr,
    LOW: tl.constexpr,
):
    """A tile of y in OUT, and in one or two layouts the codes of y in LOW, from x and rstd; the last rows come
    first."""
    K = K * UNIT
    row = (tl.num_programs(1) - 1 - tl.program_id(1)) * BM
    col = tl.program_id(0) * BK
    rows = row + tl.arange(0, BM)
    cols = col + tl.arange(0, BK)
    inside = _within(rows, cols, M, K, WHOLE)
    v = widen(tl.load(x + rows[:, None].to(tl.int64) * (x_stride * UNIT) + cols[None, :], mask=inside, other=0.0))
    r = tl.load(rstd + rows, mask=rows < M, other=0.0)
    w = widen(tl.load(weight + cols, mask=cols < K, other=0.0))
    out = round_to(tl.where(inside, v * r[:, None] * w[None, :], 0.0), OUT)
    tl.store(y + rows[:, None].to(tl.int64) * K + cols[None, :], out, mask=inside)
    _raise(top, _lowered(out, LOW))
    if row_codes is not None:
        _store_row(_lowered(out, LOW), row_codes, row_scales, row, col, M, K, BM, BK, ROW, WHOLE)
    if col_codes is not None:
        _store_col(_lowered(_again(out), LOW), col_codes, col_scales, row, col, M, K, BM, BK, COL, WHOLE)


@triton.jit
def _again(x):
    """x, where the compiler does not see that it is x: the second user of a 16-bit tile then widens it once more,
    instead of keeping the wide one in registers that are not there."""
    if INTERPRETED or x.dtype == tl.float32:
        return x
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], x.dtype, is_pure=True, pack=2)


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)) in six instructions, exact to 2^-21 for |x| < 16; 0 for x < -87, where it is below 2^-126.

    The compiler's own exp and division take twenty, most of them for subnormal numbers, and would cost more time than
    the memory does.
    """
    if INTERPRETED:
        return 1.0 / (1.0 + tl.exp(-x))
    e = tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=r,r", [x * -1.4426950408889634], tl.float32, True, 1)
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=r,r", [1.0 + e], tl.float32, True, 1)


@triton.jit
def swiglu(
    gate,
    up,
    h,
    row_codes,
    row_scales,
    col_codes,
    col_scales,
    top,
    M,
    gate_stride,
    up_stride,
    K,
    UNIT: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
    ROW: tl.constexpr,
    COL: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """A tile of h = silu(gate) * up and its codes in one or two layouts."""
    K = K * UNIT
    row = tl.program_id(1) * BM
    col = tl.program_id(0) * BK
    rows = row + tl.arange(0, BM)
    cols = col + tl.arange(0, BK)
    inside = _within(rows, cols, M, K, WHOLE)
    wide = rows[:, None].to(tl.int64)
    g = widen(tl.load(gate + wide * (gate_stride * UNIT) + cols[None, :], mask=inside, other=0.0))
    u = widen(tl.load(up + wide * (up_stride * UNIT) + cols[None, :], mask=inside, other=0.0))
    out = round_to(g * sigmoid(g) * u, gate.dtype.element_ty)
    if h is not None:
        tl.store(h + wide * K + cols[None, :], out, mask=inside)
    _raise(top, widen(out))
    if row_codes is not None:
        _store_row(widen(out), row_codes, row_scales, row, col, M, K, BM, BK, ROW, WHOLE)
    if col_codes is not None:
        _store_col(widen(_again(out)), col_codes, col_scales, row, col, M, K, BM, BK, COL, WHOLE)


@triton.jit
def swiglu_backward(
    dh,
    gate,
    up,
    dgate,
    dup,
    gate_row,
    gate_row_scales,
    gate_col,
    gate_col_scales,
    up_row,
    up_row_scales,
    up_col,
    up_col_scales,
    gate_top,
    up_top,
    M,
    dh_stride,
    gate_stride,
    up_stride,
    K,
    UNIT: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
    ROW: tl.constexpr,
    COL: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """A tile of dgate, or of dup, and its codes in one or two layouts; dgate and dup themselves only where asked.

    One program makes one of the two, since both at once need more registers than there are. Programs 2i and 2i + 1 make
    those of the same tile at the same time, so that what both read comes from memory once.
    """
    K = K * UNIT
    row = tl.program_id(1) * BM
    col = tl.program_id(0) // 2 * BK
    rows = row + tl.arange(0, BM)
    cols = col + tl.arange(0, BK)
    inside = _within(rows, cols, M, K, WHOLE)
    wide = rows[:, None].to(tl.int64)
    d = tl.load(dh + wide * (dh_stride * UNIT) + cols[None, :], mask=inside, other=0.0)
    g = tl.load(gate + wide * (gate_stride * UNIT) + cols[None, :], mask=inside, other=0.0)
    if tl.program_id(0) % 2 == 0:
        d_up = round_to(widen(d) * (widen(g) * sigmoid(widen(g))), gate.dtype.element_ty)
        if dup is not None:
            tl.store(dup + wide * K + cols[None, :], d_up, mask=inside)
        _raise(up_top, widen(d_up))
        if up_row is not None:
            _store_row(widen(d_up), up_row, up_row_scales, row, col, M, K, BM, BK, ROW, WHOLE)
        if up_col is not None:
            _store_col(widen(_again(d_up)), up_col, up_col_scales, row, col, M, K, BM, BK, COL, WHOLE)
    else:
        u = tl.load(up + wide * (up_stride * UNIT) + cols[None, :], mask=inside, other=0.0)
        s = sigmoid(widen(g))
        slope = s + widen(g) * s * (1.0 - s)
        d_gate = round_to(widen(d) * widen(u) * slope, gate.dtype.element_ty)
        if dgate is not None:
            tl.store(dgate + wide * K + cols[None, :], d_gate, mask=inside)
        _raise(gate_top, widen(d_gate))
        if gate_row is not None:
            _store_row(widen(d_gate), gate_row, gate_row_scales, row, col, M, K, BM, BK, ROW, WHOLE)
        if gate_col is not None:
            _store_col(widen(_again(d_gate)), gate_col, gate_col_scales, row, col, M, K, BM, BK, COL, WHOLE)
