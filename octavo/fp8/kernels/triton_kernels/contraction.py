"""One output tile: codes times codes along the contraction, with their scales. What all GEMM kernels share.

Both operands lie with the contraction contiguous (``layout.k_major``); a tile takes BLOCK_M rows of a and BLOCK_N rows
of b and walks along the contraction in steps of BLOCK_K::

    scales that hold for the whole contraction       acc += a . b                           * scales once, at the end
    scales that change every 32 or 128 (side)        acc += (a . b of one step) * scale_a * scale_b     at every step
    both 1x32 in e8m0, on SM100 and later            acc += a . b with the scales inside the tensor core

How a scale belongs to codes is told by two numbers an operand (``tiles.Grain``): ``free``, along its rows (0: one for
all; 1: one each; 128: one for 128 of them), and ``side``, along the contraction (0: one for all of it; 32; 128). A
kernel is compiled for a ``FORM`` (``tiles.Form``) and a ``TILE`` (``tiles.Tile``). Each operand comes as two tuples::

    codes     (descriptor or pointer, first row of the tile, rows that may be read, held: codes a row in memory)
    scales    (pointer, first row of the tile, rows that there are, distance between rows, between steps)

Accumulation. The FP8 tensor cores of Ada and Hopper keep about 14 bits of a running sum. So each step's product starts
from zero and is added in fp32 (``PROMOTE``): never more than 128 products are summed coarsely. Per-tensor and per-row
forward GEMMs skip that and accumulate in the tensor core. A plain ``acc += tl.dot(a, b)`` would not do: where the
compiler is not told that sums are imprecise, it folds the addition into the product.

Range. A sum times scale_a alone may leave fp32 where the result does not (x near 1e34, w near 1e-30). Where one scale
of the two is the tile's own, both are multiplied first (:func:`_together`), a vector times a scalar, and a sum once by
their product. Powers of two lose nothing by it: what vanishes lies below 2^-124, and only where the product of the
scales is beyond 2^127 are sums below 1 too small; all others are infinite then. Scales that hold for the whole
contraction may be any fp32 numbers and come one after the other, as in the reference; a power of two changes sides
where scale_a is far out (:func:`_far`), which rounds nothing. Where both scales are vectors and change along the
contraction (blockwise wgrad; mxfp8 before SM100) a sum is infinite as soon as it is under the scale of dy alone, which
takes a dy beyond 5e33. Small scales are safe there: products of two codes are multiples of 2^-32 and scales at least
2^-115, so that what follows is exact down to the last subnormal.

Loads are TMA descriptors (SM90 and later), which give zeros beyond the edges, or pointers: rows beyond the edge read
the last row again, never stored, and the contraction is read up to its zero padding.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.fp8.kernels.triton_kernels.bits import INTERPRETED, decode_bits, round_to, widen

HUGE, TINY = tl.constexpr(2.0**80), tl.constexpr(2.0**-80)  # scales beyond which a power of two changes sides
UP, DOWN = tl.constexpr(2.0**40), tl.constexpr(2.0**-40)
LARGEST = tl.constexpr(2.0**127)


@triton.jit
def place(pid, rows, cols, GROUP: tl.constexpr):
    """(row tile, column tile) of program ``pid``: GROUP row tiles go down together before the next column begins, so
    that the programs of one wave share their operands in L2."""
    first = pid // (GROUP * cols) * GROUP
    height = tl.minimum(rows - first, GROUP)
    inside = pid % (GROUP * cols)
    return first + inside % height, inside // height


@triton.jit
def _scale(scales, step, GRAIN: tl.constexpr, BLOCK: tl.constexpr):
    """The fp32 scales of the tile's BLOCK rows at one step: a vector, or a scalar if they share one."""
    ptr, free, limit, stride_f, stride_k = scales
    if GRAIN.free == 1:
        row = free + tl.arange(0, BLOCK)
        if GRAIN.side > 0 and not GRAIN.e8m0:  # scales up to a multiple of 16 (layout.py): loads of several at a time
            limit = tl.cdiv(limit, 16) * 16
        raw = tl.load(ptr + row.to(tl.int64) * stride_f + step * stride_k, mask=row < limit, other=0)
    elif GRAIN.free == 128:
        raw = tl.load(ptr + (free // 128) * stride_f + step * stride_k)
    else:
        raw = tl.load(ptr + step * stride_k)
    if GRAIN.e8m0:
        byte = raw.to(tl.int32)
        bits = tl.where(byte == 255, 0x7FC00000, tl.where(byte == 0, 0x00400000, byte << 23))
        return bits.to(tl.float32, bitcast=True)
    else:
        return raw


@triton.jit
def times(acc, scale, FREE: tl.constexpr, ROWS: tl.constexpr):
    """acc by the scales of its rows (ROWS) or columns, or by the one of the whole tile."""
    if FREE != 1:
        return acc * scale
    elif ROWS:
        return acc * scale[:, None]
    else:
        return acc * scale[None, :]


@triton.jit
def _together(sa, sb):
    """sa * sb, at most 2^127, so that a sum of zero stays zero; NaN stays."""
    product = sa * sb
    return tl.where(product > LARGEST, LARGEST, product)


@triton.jit
def _far(scale):
    """(scale nearer to 1 by a power of two, that power): 2^40 beyond 2^80, 2^-40 below 2^-80, else 1."""
    large = scale >= HUGE
    small = scale < TINY
    inverse = tl.where(large, DOWN, tl.where(small, UP, 1.0))
    return scale * inverse, tl.where(large, UP, tl.where(small, DOWN, 1.0))


@triton.jit
def _source(codes, TMA: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr):
    """The descriptor, or pointers to a tile at step 0; rows beyond those that may be read become the last one."""
    source, row, rows, held = codes
    if TMA:
        return source
    else:
        at = tl.minimum(row + tl.arange(0, BLOCK), rows - 1)
        return source + at.to(tl.int64)[:, None] * tl.multiple_of(held, 16) + tl.arange(0, BLOCK_K)[None, :]


@triton.jit
def _load(source, codes, k, TMA: tl.constexpr, BLOCK_K: tl.constexpr, E5M2: tl.constexpr):
    """Codes [BLOCK, BLOCK_K] from k on."""
    _, row, _, held = codes
    if TMA:
        found = source.load([row, k])
    else:
        found = tl.load(source + k, mask=(k + tl.arange(0, BLOCK_K) < held)[None, :], other=0.0)
    if INTERPRETED:  # its own decoding of FP8 is wrong
        return decode_bits(found, E5M2)
    else:
        return found


@triton.jit
def _e8m0(scales, step, steps, BLOCK: tl.constexpr, COUNT: tl.constexpr):
    """Bytes [BLOCK, COUNT] of 1x32 scales from ``step`` on; 1 beyond the edges."""
    ptr, free, limit, stride_f, stride_k = scales
    row = free + tl.arange(0, BLOCK)
    col = step + tl.arange(0, COUNT)
    where = ptr + row.to(tl.int64)[:, None] * stride_f + col[None, :] * stride_k
    return tl.load(where, mask=(row < limit)[:, None] & (col < steps)[None, :], other=127)


@triton.jit
def contract(a, b, a_scales, b_scales, first, last, FORM: tl.constexpr, TILE: tl.constexpr):
    """The tile in fp32, all scales applied; see :func:`summed` and :func:`whole`."""
    return whole(summed(a, b, a_scales, b_scales, first, last, FORM, TILE), a_scales, b_scales, FORM, TILE)


@triton.jit
def summed(a, b, a_scales, b_scales, first, last, FORM: tl.constexpr, TILE: tl.constexpr):
    """The tile in fp32 under those scales that change along the contraction. ``first`` and ``last``, the stretch of it,
    are multiples of 128, but for its end; codes are zero from there on."""
    A: tl.constexpr = FORM.a
    B: tl.constexpr = FORM.b
    BLOCK_M: tl.constexpr = TILE.m
    BLOCK_N: tl.constexpr = TILE.n
    BLOCK_K: tl.constexpr = TILE.k
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    a_source = _source(a, FORM.tma, BLOCK_M, BLOCK_K)
    b_source = _source(b, FORM.tma, BLOCK_N, BLOCK_K)
    for k in range(first, last, BLOCK_K):
        k = tl.multiple_of(k, BLOCK_K)
        a_codes = _load(a_source, a, k, FORM.tma, BLOCK_K, A.e5m2)
        b_codes = _load(b_source, b, k, FORM.tma, BLOCK_K, B.e5m2)
        if FORM.scaled:
            steps = tl.cdiv(last, 32)
            sa = _e8m0(a_scales, k // 32, steps, BLOCK_M, BLOCK_K // 32)
            sb = _e8m0(b_scales, k // 32, steps, BLOCK_N, BLOCK_K // 32)
            A_KIND: tl.constexpr = "e5m2" if A.e5m2 else "e4m3"
            B_KIND: tl.constexpr = "e5m2" if B.e5m2 else "e4m3"
            acc = tl.dot_scaled(a_codes, sa, A_KIND, b_codes.T, sb, B_KIND, acc)
        elif A.side > 0 or B.side > 0:
            if A.side > 0:  # before the product, so that the loads are under way beside it
                sa = _scale(a_scales, k // A.side, A, BLOCK_M)
            if B.side > 0:
                sb = _scale(b_scales, k // B.side, B, BLOCK_N)
            part = tl.dot(a_codes, b_codes.T, max_num_imprecise_acc=BLOCK_K)
            if A.side > 0 and B.side > 0 and (A.free != 1 or B.free != 1):  # one of them at most is a vector
                ROWS: tl.constexpr = A.free == 1
                FREE: tl.constexpr = A.free if ROWS else B.free
                part = times(part, _together(sa, sb), FREE, ROWS)
            else:
                if A.side > 0:
                    part = times(part, sa, A.free, True)
                if B.side > 0:
                    part = times(part, sb, B.free, False)
            acc += part
        elif FORM.promote:
            acc += tl.dot(a_codes, b_codes.T, max_num_imprecise_acc=BLOCK_K)
        else:
            acc = tl.dot(a_codes, b_codes.T, acc)
    return acc


@triton.jit
def whole(acc, a_scales, b_scales, FORM: tl.constexpr, TILE: tl.constexpr):
    """acc by the scales that hold for the whole contraction."""
    A: tl.constexpr = FORM.a
    B: tl.constexpr = FORM.b
    if A.side == 0:
        sa, later = _far(_scale(a_scales, 0, A, TILE.m))
        acc = times(acc, sa, A.free, True)
    if B.side == 0:
        acc = times(acc, _scale(b_scales, 0, B, TILE.n), B.free, False)
    if A.side == 0:
        acc = times(acc, later, A.free, True)
    return acc


@triton.jit
def store(out, acc, row, col, rows, cols, bias, BIAS: tl.constexpr, TILE: tl.constexpr):
    """Add bias [cols] in fp32, round once, write the part of the tile that lies within [rows, cols]."""
    r = row + tl.arange(0, TILE.m)
    c = col + tl.arange(0, TILE.n)
    if BIAS:
        tl.debug_barrier()  # the scales' registers are free before the bias takes its own: fewer spill on SM100
        acc += widen(tl.load(bias + c, mask=c < cols, other=0))[None, :]
    where = out + r.to(tl.int64)[:, None] * cols + c[None, :]
    tl.store(where, round_to(acc, out.dtype.element_ty), mask=(r < rows)[:, None] & (c < cols)[None, :])
