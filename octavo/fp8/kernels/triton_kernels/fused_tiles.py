"""A tile of a fused layer's result as four quarters, and how they are quantized and stored.

Codes for a contraction along the rows are the tile transposed, and single bytes are slow to transpose (see
``cast_words.py``). So a tile is computed as four quarters: rows 0, 4, 8 ..., rows 1, 5, 9 ... and so on. A thread then
holds four adjacent rows of a column, whose codes make one word, and words are transposed. Rows are stored from each
quarter. Tiles reach over the edge of the matrix into the padding of the outputs, where values are 0, so that codes are
0 and scales 1: the same stores write padding and results. Where the matrix consists of WHOLE tiles there are no masks.

Arguments that several functions share::

    place        (row, column of the tile's first element, M, K)
    q            the four quarters [BM / 4, BK], as a cast reads them; 0 outside [M, K]
    codes, scales, CAST: see fused_kernels; nothing is stored where codes is None
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.fp8.kernels.triton_kernels.bits import (
    ONE_BITS,
    amax_bits,
    encode,
    encode_words,
    scale_of,
    scaled,
    widen,
)
from octavo.fp8.kernels.triton_kernels.cast_blocks import larger_magnitude, tops


@triton.jit
def quarter(J: tl.constexpr, BM: tl.constexpr):
    """The rows of quarter J, counted from the first of the tile: J, J + 4, J + 8 ..."""
    return 4 * tl.arange(0, BM // 4) + J


@triton.jit
def inside(row, col, r, M, K, BK: tl.constexpr, WHOLE: tl.constexpr):
    """Mask of the positions (row + r, col + 0 ... BK - 1) inside [M, K]; a constant for a WHOLE tile, so that the
    compiler drops it."""
    if WHOLE:
        return tl.full([r.shape[0], BK], 1, tl.int1)
    return (row + r < M)[:, None] & (col + tl.arange(0, BK) < K)[None, :]


@triton.jit
def pointers(x, row, col, r, stride, BK: tl.constexpr):
    """Pointers to (row + r, col + 0 ... BK - 1): the start of the tile in int64, offsets inside it in int32."""
    return x + (row.to(tl.int64) * stride + col) + (r[:, None] * stride + tl.arange(0, BK)[None, :])


@triton.jit
def load_quarter(x, place, stride, J: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, WHOLE: tl.constexpr):
    """Quarter J of x [M, K], whose rows are ``stride`` apart, in x's dtype; 0 outside."""
    row, col, M, K = place
    r = quarter(J, BM)
    return tl.load(pointers(x, row, col, r, stride, BK), mask=inside(row, col, r, M, K, BK, WHOLE), other=0.0)


@triton.jit
def store_quarter(y, out, place, J: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, WHOLE: tl.constexpr):
    """Store ``out`` as quarter J of y [M, K], contiguous, if y is wanted."""
    if y is not None:
        row, col, M, K = place
        r = quarter(J, BM)
        tl.store(pointers(y, row, col, r, K, BK), out, mask=inside(row, col, r, M, K, BK, WHOLE))


@triton.jit
def store_row(
    y,  # [rows, BK]
    codes,
    scales,
    place,  # of the tile, see above
    r,  # int32 [rows]: y's rows, counted from the first of the tile
    BK: tl.constexpr,
    CAST: tl.constexpr,
    WHOLE: tl.constexpr = False,
):
    """Quantize y in blocks (1, G), G = CAST[0], and store codes and scales with their padding.

    y: as a cast reads it, 0 outside [M, K]. G = 0: the row is one block, and y holds all of it.
    """
    if codes is not None:
        row, col, M, K = place
        G: tl.constexpr = CAST[0]
        SPAN: tl.constexpr = BK if G == 0 else G
        N: tl.constexpr = r.shape[0]
        # Reduce and scale: one amax per row and SPAN columns. Scales of e8m0 need integers: see cast_blocks.tops.
        blocks = tl.reshape(widen(y), [N, BK // SPAN, SPAN])
        E8M0: tl.constexpr = scales.dtype.element_ty == tl.uint8
        scale, bad = scale_of(tops(tl.abs(blocks), 2, E8M0)[:, :, None], CAST[1], CAST[2])
        out = tl.reshape(encode(blocks, scale, bad, CAST[1], CAST[2], False), [N, BK])
        if not WHOLE:
            # A bad block at the edge has NaN codes in its padding too; there they must be 0.
            out = tl.where(inside(row, col, r, M, K, BK, False), out, tl.zeros_like(out))
        # Store the codes; rows are padded to 16 and columns to a whole block (or 16). A thread stores the 8 columns
        # that it has loaded: wider stores would move codes between threads.
        PAD: tl.constexpr = 16 if G == 0 else G
        width = (K + PAD - 1) // PAD * PAD
        at = codes + (row.to(tl.int64) * width + col)
        at += r[:, None] * width + tl.max_contiguous(tl.arange(0, BK), 8)[None, :]
        tl.store(at, out, mask=inside(row, col, r, (M + 15) // 16 * 16, width, BK, WHOLE))
        # Store the scales: e8m0 row by row, fp32 with the rows contiguous, the layouts that GEMMs read.
        scale = tl.reshape(scale, [N, BK // SPAN])
        block = col // SPAN
        count = (K + SPAN - 1) // SPAN
        if scales.dtype.element_ty == tl.uint8:
            byte = (scale.to(tl.int32, bitcast=True) >> 23).to(tl.uint8)
            mask = inside(row, block, r, M, count, BK // SPAN, WHOLE)
            tl.store(pointers(scales, row, block, r, count, BK // SPAN), byte, mask=mask)
        else:
            stored = M if G == 0 else (M + 15) // 16 * 16
            at = (
                scales + (block.to(tl.int64) * stored + row) + (tl.arange(0, BK // SPAN)[None, :] * stored + r[:, None])
            )
            tl.store(at, scale, mask=inside(row, block, r, stored, count, BK // SPAN, WHOLE))


@triton.jit
def store_columns(
    q,  # four quarters [BM / 4, BK]
    codes,
    scales,
    place,  # of the tile, see above
    BM: tl.constexpr,
    BK: tl.constexpr,
    CAST: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Quantize the tile in blocks (G, 1), G = CAST[0], or as one block, and store codes [K up to 16, M up to G],
    transposed, and their scales. Codes of four adjacent rows move as one word."""
    if codes is not None:
        q = (widen(q[0]), widen(q[1]), widen(q[2]), widen(q[3]))
        row, col, M, K = place
        G: tl.constexpr = CAST[0]
        # Reduce and scale: blocks have rows of all quarters, so their magnitudes meet element by element first.
        E8M0: tl.constexpr = scales.dtype.element_ty == tl.uint8
        top = tops(tl.reshape(_largest(q, E8M0), [BM // G, G // 4, BK]), 1, E8M0)
        if CAST[3]:
            top = tl.broadcast_to(tl.max(top, axis=1)[:, None], [BM // G, BK])
        scale, bad = scale_of(top[:, None, :], CAST[1], CAST[2])
        words = encode_words(
            _in_units(q[0], scale, bad, BM, BK, CAST),
            _in_units(q[1], scale, bad, BM, BK, CAST),
            _in_units(q[2], scale, bad, BM, BK, CAST),
            _in_units(q[3], scale, bad, BM, BK, CAST),
            CAST[2],
        )
        if not WHOLE:
            # As in store_row: padding codes are 0 even in a bad block. ``real`` rows of a word are inside.
            real = tl.minimum(tl.maximum(M - row - quarter(0, BM), 0), 4)
            keep = tl.where(real == 4, -1, (1 << (8 * tl.minimum(real, 3))) - 1)
            words = tl.where((col + tl.arange(0, BK) < K)[None, :], words & keep[:, None], 0)
        # Store the words transposed (through shared memory), so that stores are contiguous along M.
        count = (M + G - 1) // G
        pitch = count * (G // 4)  # in words
        at = codes.to(tl.pointer_type(tl.int32)) + (col.to(tl.int64) * pitch + row // 4)
        at += tl.arange(0, BK)[:, None] * pitch + tl.arange(0, BM // 4)[None, :]
        mask = inside(row // 4, col, tl.arange(0, BM // 4), pitch, (K + 15) // 16 * 16, BK, WHOLE)
        tl.store(at, tl.trans(words), mask=tl.trans(mask))
        # Store the scales: of a tile, and 1 after the last; e8m0 column by column, fp32 with the columns contiguous.
        scale = tl.reshape(scale, [BM // G, BK])
        block = tl.arange(0, BM // G)
        if CAST[3]:
            i = row // G + tl.arange(0, 4)
            of_tile = i == row // G
            here = of_tile | ((row // G == count - 1) & (i < (count + 3) // 4 * 4))
            at = scales + ((col // BK).to(tl.int64) * ((count + 3) // 4 * 4) + i)
            bits = tl.max(scale.to(tl.int32, bitcast=True))  # equal everywhere; NaN keeps its pattern
            tl.store(at, tl.where(of_tile, bits, ONE_BITS).to(tl.float32, bitcast=True), mask=here & (col < K))
        elif scales.dtype.element_ty == tl.uint8:
            byte = (scale.to(tl.int32, bitcast=True) >> 23).to(tl.uint8)
            at = scales + (col.to(tl.int64) * count + row // G) + (tl.arange(0, BK)[None, :] * count + block[:, None])
            tl.store(at, byte, mask=inside(row // G, col, block, count, K, BK, WHOLE))
        else:
            stored = (K + 15) // 16 * 16
            at = pointers(scales, row // G, col, block, stored, BK)
            tl.store(at, scale, mask=inside(row // G, col, block, count, stored, BK, WHOLE))


@triton.jit
def _largest(q, INTEGERS: tl.constexpr = False):
    """The largest magnitude of the four quarters, fp32, at each position; NaN wins. INTEGERS: see cast_blocks.tops."""
    low = larger_magnitude(tl.abs(q[0]), tl.abs(q[1]), INTEGERS)
    return larger_magnitude(low, larger_magnitude(tl.abs(q[2]), tl.abs(q[3]), INTEGERS), INTEGERS)


@triton.jit
def _in_units(y, scale, bad, BM: tl.constexpr, BK: tl.constexpr, CAST: tl.constexpr):
    """A quarter divided by the scales of its columns' blocks, [blocks, 1, BK]."""
    blocks = tl.reshape(y, [BM // CAST[0], CAST[0] // 4, BK])
    return tl.reshape(scaled(blocks, scale, bad, CAST[1], False), [BM // 4, BK])


@triton.jit
def raise_amax(top, y):
    """Raise the amax pattern at ``top``, if it is wanted, to the amax of y [rows, columns]."""
    if top is not None:
        # Relaxed: only the value matters, and the next launch sees it.
        tl.atomic_max(top, tl.max(tl.max(amax_bits(widen(y)), axis=1), axis=0), sem="relaxed")


@triton.jit
def raise_amax_of_quarters(top, q):
    """:func:`raise_amax` of a whole tile."""
    if top is not None:
        raise_amax(top, _largest((widen(q[0]), widen(q[1]), widen(q[2]), widen(q[3]))))
