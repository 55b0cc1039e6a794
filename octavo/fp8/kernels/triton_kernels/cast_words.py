"""The cast of a tile whose codes move four bytes at a time.

Codes for a contraction along the rows are the tile transposed. Transposing single bytes is slow: each is stored to
shared memory by itself and packed again with its neighbours. Besides, compilers may write wrong bytes there (issue
11111 of Triton). So a tile is loaded as four: rows 0, 4, 8 ..., rows 1, 5, 9 ... and so on. A thread then holds four
adjacent rows of a column, whose codes make one word, and words are transposed::

    x0, x1, x2, x3 [TR / 4, TC]  ->  row codes: four stores, of every fourth row each
                                 ->  words: int32 [TR / 4, TC], transposed, stored as [TC, TR / 4]

MASKED tiles may reach beyond the matrix: they mask loads and stores, and clear the codes of padding. Tiles inside the
matrix have no masks. ``docs/lab/kernels.md`` has the instructions per value, before and after; a test holds them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.fp8.kernels.triton_kernels.bits import (
    encode_bits,
    encode_words,
    quotient,
    short_division,
    widen,
)
from octavo.fp8.kernels.triton_kernels.cast_blocks import (
    block_tops,
    in_units,
    indices,
    larger_magnitude,
    scales_at,
    store_scales,
    tile_tops,
)


@triton.jit
def cast_words(
    x_ptr,  # [batch, M, K] bf16, fp16 or fp32
    strides,  # of x in elements: batch, row, column
    place,  # (batch, tile row, tile column, group)
    end,  # of the tile's real rows, if MASKED
    M,
    K,
    out1,  # results for CAST1: see cast_blocks
    out0,  # likewise, for CAST0
    CAST1: tl.constexpr,  # Facts of the cast for a contraction of dimension 1, or None
    CAST0: tl.constexpr,  # likewise for dimension 0
    EVEN: tl.constexpr,  # power of two up to 16 that divides strides and K; 1 if not UNIT
    UNIT: tl.constexpr,  # the last stride of x is 1
    MASKED: tl.constexpr,  # values may be outside the matrix
    TR: tl.constexpr,  # rows of the tile, a multiple of 4
    TC: tl.constexpr,
):
    """Cast the tile at ``place`` under one cast or under both, from one load of x."""
    # Load: four tiles of every fourth row.
    x = (
        _load(x_ptr, strides, place, 0, end, K, EVEN, UNIT, MASKED, TR, TC),
        _load(x_ptr, strides, place, 1, end, K, EVEN, UNIT, MASKED, TR, TC),
        _load(x_ptr, strides, place, 2, end, K, EVEN, UNIT, MASKED, TR, TC),
        _load(x_ptr, strides, place, 3, end, K, EVEN, UNIT, MASKED, TR, TC),
    )
    x = (widen(x[0]), widen(x[1]), widen(x[2]), widen(x[3]))
    if CAST1 is not None and CAST0 is not None and not _one_cast(CAST1, CAST0):
        # Two casts with different codes, one after the other: fewer registers than both at once.
        s = _scales(x, place, M, K, out1, out1, CAST1, None, TR, TC)
        v = _in_units(x, s, place, end, K, CAST1, MASKED, TR, TC)
        _store_rows(v, place, M, out1, CAST1, MASKED, TR, TC)
        s = _scales(x, place, M, K, out0, out0, CAST0, None, TR, TC)
        v = _in_units(x, s, place, end, K, CAST0, MASKED, TR, TC)
        _store_columns(v, place, K, out0, CAST0, MASKED, TR, TC)
    else:
        # Codes that are the same in both layouts are computed once and stored twice, as are scales.
        CAST: tl.constexpr = CAST0 if CAST1 is None else CAST1
        SECOND: tl.constexpr = None if CAST1 is None else CAST0
        s = _scales(x, place, M, K, out0 if CAST1 is None else out1, out0, CAST, SECOND, TR, TC)
        # Scale, encode, store. Powers of two multiply; fp32 inputs, scales per block and edges divide.
        if MASKED or CAST.pow2 or CAST.rows != -1 or CAST.cols != -1 or x_ptr.dtype.element_ty == tl.float32:
            v = _in_units(x, s, place, end, K, CAST, MASKED, TR, TC)
            _store(v, place, M, K, out1, out0, CAST1, CAST0, MASKED, TR, TC)
        else:
            # One fp32 scale for the tile, 16-bit values: three operations replace the IEEE division
            # if the bounds of short_division hold, which the amax decides.
            scale, _, top = s[0]
            short, inverse = short_division(scale, top)
            if short:
                q0 = quotient(x[0], scale, inverse)
                q1 = quotient(x[1], scale, inverse)
                q2 = quotient(x[2], scale, inverse)
                q3 = quotient(x[3], scale, inverse)
                _store((q0, q1, q2, q3), place, M, K, out1, out0, CAST1, CAST0, MASKED, TR, TC)
            else:
                v = _in_units(x, s, place, end, K, CAST, MASKED, TR, TC)
                _store(v, place, M, K, out1, out0, CAST1, CAST0, MASKED, TR, TC)


@triton.jit
def _load(
    x_ptr,
    strides,
    place,
    J: tl.constexpr,
    end,
    K,
    EVEN: tl.constexpr,
    UNIT: tl.constexpr,
    MASKED: tl.constexpr,
    TR: tl.constexpr,
    TC: tl.constexpr,
):
    """Load rows J, J + 4, J + 8 ... of the tile [TR / 4, TC]; 0 outside of the matrix."""
    batch, pid_r, pid_c, _ = place
    stride_b, stride_r, stride_c = strides
    r = tl.arange(0, TR // 4)[:, None]
    c = tl.arange(0, TC)[None, :]
    if UNIT:
        # Contiguous rows: the start of the tile in int64, offsets inside it in int32. ``n // EVEN * EVEN`` proves
        # the alignment of vector loads.
        step = stride_r // EVEN * EVEN
        x_ptr += batch * (stride_b // EVEN * EVEN) + (pid_r * TR).to(tl.int64) * step + pid_c * TC
        at = x_ptr + (r * 4 * step + c) + J * step
    else:
        # Any strides: every offset in int64.
        row = (pid_r * TR + 4 * r + J).to(tl.int64)
        at = x_ptr + batch * stride_b + row * stride_r + (pid_c * TC + c).to(tl.int64) * stride_c
    if MASKED:
        return tl.load(at, mask=_real(place, J, end, K, TR, TC), other=0.0)
    else:
        return tl.load(at)


@triton.jit
def _real(place, J: tl.constexpr, end, K, TR: tl.constexpr, TC: tl.constexpr):
    """Mask [TR / 4, TC] of the values inside the matrix, for rows J, J + 4 ... of the tile."""
    r = tl.arange(0, TR // 4)[:, None] * 4 + J
    c = tl.arange(0, TC)[None, :]
    return (place[1] * TR + r < end) & (place[2] * TC + c < K)


@triton.constexpr_function
def _one_cast(a, b):
    """True if two casts give the same codes; the layout of scales does not matter."""
    return (a.rows, a.cols, a.pow2, a.e5m2) == (b.rows, b.cols, b.pow2, b.e5m2)


@triton.jit
def _scales(x, place, M, K, out, second, CAST: tl.constexpr, SECOND: tl.constexpr, TR: tl.constexpr, TC: tl.constexpr):
    """Store the scales of the tile's blocks and return them for each of the four tiles x, fp32 [TR / 4, TC].

    ``place`` and ``out``: see cast_blocks. ``second``, SECOND: the same for a layout that has the same scales in
    another order, or None. Returns four times (scales fp32, bad int1, amax patterns int32), [blocks down, blocks
    across] or scalars.
    """
    rows, cols = indices(place, CAST, TR, TC)
    if CAST.rows == 1:
        # Blocks of one row: each of the four tiles has separate blocks.
        NQ: tl.constexpr = TR // 4
        NC: tl.constexpr = 1 if CAST.cols == -1 else TC // CAST.cols
        t = (0, 0, 0, 0)
        top = 0
        if CAST.from_tile:
            # Reduce: the amax of each block, in the registers of its tile.
            t = (
                block_tops(tl.abs(x[0]), NQ, NC, CAST.integers),
                block_tops(tl.abs(x[1]), NQ, NC, CAST.integers),
                block_tops(tl.abs(x[2]), NQ, NC, CAST.integers),
                block_tops(tl.abs(x[3]), NQ, NC, CAST.integers),
            )
            # Interleave the four in the order of the rows, so that scales are stored as in the matrix.
            joined = tl.join(tl.join(t[0], t[2]), tl.join(t[1], t[3]))  # [NQ, NC, 2, 2]
            top = tl.reshape(tl.permute(joined, (0, 2, 3, 1)), [TR, NC])
        scale, _, _ = scales_at(top, rows, cols, place, M, K, out, CAST)
        store_scales(scale, rows, cols, place, M, K, out, CAST)
        if SECOND is not None:
            store_scales(scale, rows, cols, place, M, K, second, SECOND)
        # Scale again from the four parts: they have the layout of their tiles, and no shuffle is needed.
        rows = place[1] * TR + 4 * tl.arange(0, NQ)[:, None]
        return (
            scales_at(t[0], rows, cols, place, M, K, out, CAST),
            scales_at(t[1], rows + 1, cols, place, M, K, out, CAST),
            scales_at(t[2], rows + 2, cols, place, M, K, out, CAST),
            scales_at(t[3], rows + 3, cols, place, M, K, out, CAST),
        )
    else:
        top = 0
        if CAST.from_tile:
            # Reduce: blocks have rows of all four tiles, so their magnitudes meet element by element first.
            low = larger_magnitude(tl.abs(x[0]), tl.abs(x[1]), CAST.integers)
            high = larger_magnitude(tl.abs(x[2]), tl.abs(x[3]), CAST.integers)
            top = tile_tops(larger_magnitude(low, high, CAST.integers), CAST, TR, TC)
        s = scales_at(top, rows, cols, place, M, K, out, CAST)
        store_scales(s[0], rows, cols, place, M, K, out, CAST)
        if SECOND is not None:
            store_scales(s[0], rows, cols, place, M, K, second, SECOND)
        return (s, s, s, s)


@triton.jit
def _in_units(x, s, place, end, K, CAST: tl.constexpr, MASKED: tl.constexpr, TR: tl.constexpr, TC: tl.constexpr):
    """Return the four tiles, each divided by its scales."""
    v = (
        in_units(x[0], s[0], CAST),
        in_units(x[1], s[1], CAST),
        in_units(x[2], s[2], CAST),
        in_units(x[3], s[3], CAST),
    )
    if MASKED:
        # Padding is 0 even in a bad block, where NaN divided it.
        v = (
            tl.where(_real(place, 0, end, K, TR, TC), v[0], 0.0),
            tl.where(_real(place, 1, end, K, TR, TC), v[1], 0.0),
            tl.where(_real(place, 2, end, K, TR, TC), v[2], 0.0),
            tl.where(_real(place, 3, end, K, TR, TC), v[3], 0.0),
        )
    return v


@triton.jit
def _store(
    v,
    place,
    M,
    K,
    out1,
    out0,
    CAST1: tl.constexpr,
    CAST0: tl.constexpr,
    MASKED: tl.constexpr,
    TR: tl.constexpr,
    TC: tl.constexpr,
):
    """Store the codes of the four tiles v in each layout that is wanted."""
    if CAST1 is not None:
        _store_rows(v, place, M, out1, CAST1, MASKED, TR, TC)
    if CAST0 is not None:
        _store_columns(v, place, K, out0, CAST0, MASKED, TR, TC)


@triton.jit
def _store_rows(v, place, M, out, CAST: tl.constexpr, MASKED: tl.constexpr, TR: tl.constexpr, TC: tl.constexpr):
    """Encode the four tiles v and store every fourth row of codes [M, K] from each.

    Stores end at the padded sizes of the buffer, whose padding MASKED tiles write as zeros.
    """
    batch, pid_r, pid_c, _ = place
    pitch = out[1] // 16 * 16
    free = tl.cdiv(M, 16) * 16
    # 8 bytes per thread, since a load of 16 bytes has 8 values: wider stores would move codes between threads.
    c = tl.max_contiguous(tl.arange(0, TC), 8)[None, :]
    at = out[0] + (batch * free + pid_r * TR) * pitch + pid_c * TC + (tl.arange(0, TR // 4)[:, None] * 4 * pitch + c)
    if MASKED:
        r = pid_r * TR + 4 * tl.arange(0, TR // 4)[:, None]
        # All four rows of a word are inside the buffer or none is: its rows are a multiple of 16.
        inside = (r < free) & (pid_c * TC + c < pitch)
        tl.store(at, encode_bits(v[0], CAST.e5m2), mask=inside)
        tl.store(at + pitch, encode_bits(v[1], CAST.e5m2), mask=inside)
        tl.store(at + 2 * pitch, encode_bits(v[2], CAST.e5m2), mask=inside)
        tl.store(at + 3 * pitch, encode_bits(v[3], CAST.e5m2), mask=inside)
    else:
        tl.store(at, encode_bits(v[0], CAST.e5m2))
        tl.store(at + pitch, encode_bits(v[1], CAST.e5m2))
        tl.store(at + 2 * pitch, encode_bits(v[2], CAST.e5m2))
        tl.store(at + 3 * pitch, encode_bits(v[3], CAST.e5m2))


@triton.jit
def _store_columns(v, place, K, out, CAST: tl.constexpr, MASKED: tl.constexpr, TR: tl.constexpr, TC: tl.constexpr):
    """Encode the four tiles v into words of four adjacent rows and store them transposed, codes [K, M]."""
    batch, pid_r, pid_c, _ = place
    pitch = out[1] // 16 * 4  # in words
    free = tl.cdiv(K, 16) * 16
    c = tl.arange(0, TC)[:, None]
    r = tl.arange(0, TR // 4)[None, :]
    at = c * pitch + r
    at += (batch * free + pid_c * TC) * pitch + pid_r * (TR // 4)
    # The transposition goes through shared memory, four codes at a time.
    words = tl.trans(encode_words(v[0], v[1], v[2], v[3], CAST.e5m2))
    start = out[0].to(tl.pointer_type(tl.int32))
    if MASKED:
        tl.store(start + at, words, mask=(pid_c * TC + c < free) & (pid_r * (TR // 4) + r < pitch))
    else:
        tl.store(start + at, words)
