"""One output tile: codes times codes along the contraction, with their scales. What all GEMM kernels share.

The contraction is contiguous in both operands (``layout.k_major``); a tile takes BLOCK_M rows of a and BLOCK_N rows
of b and walks along the contraction in steps of BLOCK_K::

    scales that hold for the whole contraction       acc += a . b                           * scales once, at the end
    scales that change every 32 or 128 (side)        acc += (a . b of one step) * scale_a * scale_b     at every step
    both 1x32 in e8m0, on SM100 and later            acc += a . b with the scales inside the tensor core

Two numbers for each operand (``tiles.ScaleBlock``) say which codes share a scale: ``free``, along its rows (0: one
scale for all rows; 1: one for each row; 128: one for 128 rows), and ``side``, along the contraction (0: one scale for
all of it; 32; 128). A kernel is compiled for a ``FORM`` (``tiles.Form``) and a ``TILE`` (``tiles.Tile``). Each operand
is two tuples::

    codes     (descriptor or pointer, first row of the tile, rows that may be read, held: codes per row in memory)
    scales    (pointer, first row of the tile, number of real rows, stride between rows, stride between steps)

Accumulation. The FP8 tensor cores of Ada and Hopper keep about 14 bits of a running sum. So the product of each step
starts from zero and is added in fp32 (``PROMOTE``): at most 128 products are summed coarsely. Per-tensor and per-row
forward GEMMs skip that and accumulate in the tensor core. A plain ``acc += tl.dot(a, b)`` does not promote: the
compiler folds the addition into the product unless ``max_num_imprecise_acc`` says that these sums are imprecise.

Range. A sum times scale_a may overflow fp32 where the result does not (x near 1e34, w near 1e-30). Where one of the two
scales is a scalar for the tile, both are multiplied first (:func:`_clamped_product`), a vector times a scalar, and the
sum is multiplied once by their product. Powers of two lose nothing by it: values that vanish are below 2^-124, and sums
below 1 are too small only where the product of the scales exceeds 2^127; all other sums are infinite there. Scales that
hold for the whole contraction may be any fp32 numbers and are applied one after the other, as in the reference; where
scale_a is extreme, a power of two moves to the other side (:func:`_split_scale`), which rounds nothing. Where both
scales are vectors and change along the contraction (wgrad of blockwise_1d; mxfp8 before SM100) a sum is infinite as
soon as its product with the scale of dy is, which takes a dy beyond 5e33. Small scales are safe there: products of two
codes are multiples of 2^-32 and scales at least 2^-115, so that the results are exact down to the last subnormal.

Loads use TMA descriptors (SM90 and later), which give zeros beyond the edges, or pointers: rows beyond the edge read
the last row again and are never stored, and the contraction is read up to its zero padding.
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
    """(row tile, column tile) of program ``pid`` in a grid of ``rows`` x ``cols`` tiles.

    GROUP row tiles of one column come before the next column, so that the programs of one wave share their operands in
    the L2 cache.
    """
    first = pid // (GROUP * cols) * GROUP
    # The last group may have fewer than GROUP row tiles.
    height = tl.minimum(rows - first, GROUP)
    inside = pid % (GROUP * cols)
    return first + inside % height, inside // height


@triton.jit
def _scale(scales, step, GRAIN: tl.constexpr, BLOCK: tl.constexpr):
    """Return the fp32 scales of the tile's BLOCK rows at one step: [BLOCK], or a scalar if the rows share one."""
    ptr, free, limit, stride_f, stride_k = scales
    if GRAIN.free == 1:
        row = free + tl.arange(0, BLOCK)
        # The buffer holds scales up to a multiple of 16 rows (layout.py). A limit that divides by 16 lets the compiler
        # load several at a time.
        if GRAIN.side > 0 and not GRAIN.e8m0:
            limit = tl.cdiv(limit, 16) * 16
        raw = tl.load(ptr + row.to(tl.int64) * stride_f + step * stride_k, mask=row < limit, other=0)
    elif GRAIN.free == 128:
        # The tile has at most 128 rows here (tiles.candidates), so one scale serves all of it.
        raw = tl.load(ptr + (free // 128) * stride_f + step * stride_k)
    else:
        raw = tl.load(ptr + step * stride_k)
    if GRAIN.e8m0:
        # e8m0: the byte is the exponent field of an fp32; 0 is 2^-127 (subnormal in fp32), 255 is NaN.
        byte = raw.to(tl.int32)
        bits = tl.where(byte == 255, 0x7FC00000, tl.where(byte == 0, 0x00400000, byte << 23))
        return bits.to(tl.float32, bitcast=True)
    else:
        return raw


@triton.jit
def apply_scale(acc, scale, FREE: tl.constexpr, ROWS: tl.constexpr):
    """acc times the scales of its rows (ROWS) or columns, or times the one scale of the whole tile."""
    if FREE != 1:
        return acc * scale
    elif ROWS:
        return acc * scale[:, None]
    else:
        return acc * scale[None, :]


@triton.jit
def _clamped_product(sa, sb):
    """sa * sb, at most 2^127, so that a sum of zero stays zero; NaN stays."""
    product = sa * sb
    # Not tl.minimum: NaN compares false here and is kept.
    return tl.where(product > LARGEST, LARGEST, product)


@triton.jit
def _split_scale(scale):
    """(scale divided by a power of two, that power): 2^40 from 2^80 on, 2^-40 below 2^-80, else 1.

    The power is applied after the other operand's scale, so that no intermediate product overflows or vanishes.
    """
    large = scale >= HUGE
    small = scale < TINY
    inverse = tl.where(large, DOWN, tl.where(small, UP, 1.0))
    return scale * inverse, tl.where(large, UP, tl.where(small, DOWN, 1.0))


@triton.jit
def _load_pointers(codes, TMA: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr):
    """Return the descriptor, or pointers [BLOCK, BLOCK_K] to a tile at step 0."""
    source, row, rows, held = codes
    if TMA:
        return source
    else:
        # Rows beyond the edge read the last row again: no mask in the loop. Their results are never stored.
        at = tl.minimum(row + tl.arange(0, BLOCK), rows - 1)
        # ``held`` is padded to 16 (layout.py): the hint lets the compiler load 16 bytes at a time.
        return source + at.to(tl.int64)[:, None] * tl.multiple_of(held, 16) + tl.arange(0, BLOCK_K)[None, :]


@triton.jit
def _load(source, codes, k, TMA: tl.constexpr, BLOCK_K: tl.constexpr, E5M2: tl.constexpr):
    """Codes [BLOCK, BLOCK_K] from k on."""
    _, row, _, held = codes
    if TMA:
        codes_tile = source.load([row, k])  # zeros beyond the edges
    else:
        # Only the last step can reach beyond ``held``: columns up to there are real codes or zero padding.
        codes_tile = tl.load(source + k, mask=(k + tl.arange(0, BLOCK_K) < held)[None, :], other=0.0)
    if INTERPRETED:  # the interpreter decodes FP8 incorrectly
        return decode_bits(codes_tile, E5M2)
    else:
        return codes_tile


@triton.jit
def _e8m0(scales, step, steps, BLOCK: tl.constexpr, COUNT: tl.constexpr):
    """e8m0 bytes [BLOCK, COUNT] of 1x32 scales, from scale ``step`` on; 1 (byte 127) beyond the edges."""
    ptr, free, limit, stride_f, stride_k = scales
    row = free + tl.arange(0, BLOCK)
    col = step + tl.arange(0, COUNT)
    where = ptr + row.to(tl.int64)[:, None] * stride_f + col[None, :] * stride_k
    return tl.load(where, mask=(row < limit)[:, None] & (col < steps)[None, :], other=127)


@triton.jit
def contract(a, b, a_scales, b_scales, first, last, FORM: tl.constexpr, TILE: tl.constexpr):
    """Return the tile in fp32 with all scales applied; see :func:`contract_scaled` and :func:`apply_whole_scales`."""
    return apply_whole_scales(
        contract_scaled(a, b, a_scales, b_scales, first, last, FORM, TILE), a_scales, b_scales, FORM, TILE
    )


@triton.jit
def contract_scaled(a, b, a_scales, b_scales, first, last, FORM: tl.constexpr, TILE: tl.constexpr):
    """Return the tile, fp32 [m, n], summed over ``first`` to ``last`` of the contraction, with scales that change along
    it.

    ``a``, ``b``, ``a_scales`` and ``b_scales`` are the tuples above. ``first`` and ``last`` are multiples of 128 or the
    end of the contraction, from which on codes are zero.
    """
    A: tl.constexpr = FORM.a
    B: tl.constexpr = FORM.b
    BLOCK_M: tl.constexpr = TILE.m
    BLOCK_N: tl.constexpr = TILE.n
    BLOCK_K: tl.constexpr = TILE.k
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    # Addresses of step 0 are computed once; each step only adds k.
    a_source = _load_pointers(a, FORM.tma, BLOCK_M, BLOCK_K)
    b_source = _load_pointers(b, FORM.tma, BLOCK_N, BLOCK_K)
    for k in range(first, last, BLOCK_K):
        # Load: one step of codes of a and b. The compiler runs TILE.stages steps ahead.
        k = tl.multiple_of(k, BLOCK_K)
        a_codes = _load(a_source, a, k, FORM.tma, BLOCK_K, A.e5m2)
        b_codes = _load(b_source, b, k, FORM.tma, BLOCK_K, B.e5m2)
        if FORM.scaled:
            # Tensor cores of SM100 apply both 1x32 scales themselves and sum in fp32.
            steps = tl.cdiv(last, 32)
            sa = _e8m0(a_scales, k // 32, steps, BLOCK_M, BLOCK_K // 32)
            sb = _e8m0(b_scales, k // 32, steps, BLOCK_N, BLOCK_K // 32)
            A_KIND: tl.constexpr = "e5m2" if A.e5m2 else "e4m3"
            B_KIND: tl.constexpr = "e5m2" if B.e5m2 else "e4m3"
            acc = tl.dot_scaled(a_codes, sa, A_KIND, b_codes.T, sb, B_KIND, acc)
        elif A.side > 0 or B.side > 0:
            # Scales are loaded before the product, so that their loads overlap with it.
            if A.side > 0:
                sa = _scale(a_scales, k // A.side, A, BLOCK_M)
            if B.side > 0:
                sb = _scale(b_scales, k // B.side, B, BLOCK_N)
            # Product of one step, from zero: scales change from step to step, so acc cannot be its addend.
            part = tl.dot(a_codes, b_codes.T, max_num_imprecise_acc=BLOCK_K)
            # At most one of the two is a vector: one multiplication per element, and no overflow in between.
            if A.side > 0 and B.side > 0 and (A.free != 1 or B.free != 1):
                ROWS: tl.constexpr = A.free == 1
                FREE: tl.constexpr = A.free if ROWS else B.free
                part = apply_scale(part, _clamped_product(sa, sb), FREE, ROWS)
            else:
                if A.side > 0:
                    part = apply_scale(part, sa, A.free, True)
                if B.side > 0:
                    part = apply_scale(part, sb, B.free, False)
            # Promotion: the scaled product joins the sum in fp32, in the order of the contraction.
            acc += part
        elif FORM.promote:
            # Promotion without scales: the step's product starts from zero and is added in fp32.
            acc += tl.dot(a_codes, b_codes.T, max_num_imprecise_acc=BLOCK_K)
        else:
            # Fast: the tensor core accumulates, in the precision of its sums.
            acc = tl.dot(a_codes, b_codes.T, acc)
    return acc


@triton.jit
def apply_whole_scales(acc, a_scales, b_scales, FORM: tl.constexpr, TILE: tl.constexpr):
    """acc times the scales that hold for the whole contraction."""
    A: tl.constexpr = FORM.a
    B: tl.constexpr = FORM.b
    if A.side == 0:
        # The order a, b, rest of a is the reference's; see Range above for the split of a's scale.
        sa, later = _split_scale(_scale(a_scales, 0, A, TILE.m))
        acc = apply_scale(acc, sa, A.free, True)
    if B.side == 0:
        acc = apply_scale(acc, _scale(b_scales, 0, B, TILE.n), B.free, False)
    if A.side == 0:
        acc = apply_scale(acc, later, A.free, True)
    return acc


@triton.jit
def store(out, acc, row, col, rows, cols, bias, BIAS: tl.constexpr, TILE: tl.constexpr):
    """Epilogue: add bias [cols] in fp32, round once to out's dtype, store the part of the tile inside [rows, cols]."""
    r = row + tl.arange(0, TILE.m)
    c = col + tl.arange(0, TILE.n)
    if BIAS:
        # The barrier makes the compiler free the registers of the scales before it loads the bias: fewer spills on
        # SM100.
        tl.debug_barrier()
        acc += widen(tl.load(bias + c, mask=c < cols, other=0))[None, :]
    # int64 rows: rows * cols may exceed 2^31. Elements outside [rows, cols] are masked.
    where = out + r.to(tl.int64)[:, None] * cols + c[None, :]
    tl.store(where, round_to(acc, out.dtype.element_ty), mask=(r < rows)[:, None] & (c < cols)[None, :])
