"""The cast of whole rows, and the largest magnitude of each column, from one read of x.

A cast by row and by column needs the scales of the columns before it can write their codes, and the scale of a column
needs all rows. So the columns need a second read. The first read does everything else: a program keeps whole rows in
registers, takes their scales, stores their codes, and keeps the largest magnitude of each column until it has seen all
of its rows::

    rows_kernel    reads 2, writes 1 byte a value: row codes, row scales, maxima of the columns
    cast_kernel    reads 2, writes 1: column codes and scales

A pass that only takes maxima of rows and columns in tiles reduces each tile twice and issues an atomic a column and
tile: about three times the time that its bytes need. Here there is an atomic a column and program.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.fp8.kernels.triton_kernels.bits import amax_bits, encode_bits, widen
from octavo.fp8.kernels.triton_kernels.cast_blocks import (
    in_units,
    indices,
    larger_magnitude,
    scales_at,
    store_scales,
    tile_tops,
)


@triton.jit
def load_tile(
    x_ptr, batch, stride_b, stride_r, stride_c, row, col, end, K, EVEN, UNIT, TR: tl.constexpr, TC: tl.constexpr
):
    """(values fp32 [TR, TC], mask of the real ones) of the tile at (row, col); 0 outside of the matrix."""
    r = tl.arange(0, TR)[:, None]
    c = tl.arange(0, TC)[None, :]
    real = (row + r < end) & (col + c < K)
    if UNIT:
        # Contiguous rows: the start of the tile in int64, offsets inside it in int32, alignment proved by EVEN.
        step = stride_r // EVEN * EVEN
        stride_b = stride_b // EVEN * EVEN
        x = tl.load(x_ptr + batch * stride_b + row.to(tl.int64) * step + col + (r * step + c), mask=real, other=0.0)
    else:
        # Any strides: every offset in int64.
        at = (row + r).to(tl.int64) * stride_r + (col + c).to(tl.int64) * stride_c
        x = tl.load(x_ptr + batch * stride_b + at, mask=real, other=0.0)
    return widen(x), real


@triton.jit
def cast_rows(x, real, ragged, place, M, K, out, CAST: tl.constexpr, TR: tl.constexpr, TC: tl.constexpr):
    """Cast the tile x, fp32 [TR, TC], for a contraction of dimension 1; store codes [M, K] and scales.

    ``real``: mask of the values inside the matrix; ``ragged``: whether any is outside; ``place``, ``out``: cast_blocks.
    """
    batch, pid_r, pid_c, _ = place
    row = pid_r * TR
    col = pid_c * TC
    i, j = indices(place, CAST, TR, TC)
    # Reduce and scale: the amax of each block, from the tile or from memory; padding is 0 and changes none.
    s = scales_at(tile_tops(tl.abs(x), CAST, TR, TC) if CAST.from_tile else 0, i, j, place, M, K, out, CAST)
    store_scales(s[0], i, j, place, M, K, out, CAST)
    # Cast. NaN scales of bad blocks make NaN codes.
    codes = encode_bits(in_units(x, s, CAST), CAST.e5m2)
    # Padding codes are 0 even in a bad block, where NaN divided them. Only ragged tiles pay for the select.
    if ragged:
        codes = tl.where(real, codes, 0)
    # Store up to the padded sizes of the buffer, whose padding this writes as zeros.
    r = tl.arange(0, TR)[:, None]
    c = tl.arange(0, TC)[None, :]
    pitch = out[1] // 16 * 16
    free = tl.cdiv(M, 16) * 16
    start = out[0] + (batch * free + row) * pitch + col
    tl.store(start + (r * pitch + c), codes, mask=(row + r < free) & (col + c < pitch))


@triton.jit
def rows_kernel(
    x_ptr,  # [M, K] bf16, fp16 or fp32
    stride_r,  # strides of x, in elements
    stride_c,
    M,
    K,
    tiles,  # of TR rows, including rows of padding
    codes_ptr,  # uint8 [M up to 16, pitch]
    pitch,  # codes per row in memory, a multiple of 16
    scale_ptr,  # fp32 [M], or uint8 for e8m0
    scale_r,  # stride of the scales
    tops_ptr,  # int32 [K]: amax patterns of the columns, which the caller has set to zero
    CAST: tl.constexpr,  # cast_blocks.Facts of the rows: blocks (1, -1), from_tile
    EVEN: tl.constexpr,  # power of two up to 16 that divides stride_r and K; 1 if not UNIT
    UNIT: tl.constexpr,  # the last stride of x is 1
    PADDED: tl.constexpr,  # K is no multiple of 16: rows of codes have padding
    TR: tl.constexpr,  # rows and columns of a tile, which holds whole rows
    TC: tl.constexpr,
    STAGES: tl.constexpr,  # tiles that are loaded ahead
):
    """Cast rows, and raise ``tops`` to the maxima of the columns. Programs share the tiles evenly."""
    K = K // EVEN * EVEN
    out = (codes_ptr, pitch, scale_ptr, 0, scale_r, 0, x_ptr, x_ptr)
    best = tl.zeros([TR, TC], tl.float32)
    for step in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):
        tile = tl.cast(step, tl.int32)
        place = ((tile * 0).to(tl.int64), tile, tile * 0, tile * 0)
        x, real = load_tile(x_ptr, 0, 0, stride_r, stride_c, tile * TR, 0, M, K, EVEN, UNIT, TR, TC)
        best = larger_magnitude(best, tl.abs(x), CAST.integers)
        cast_rows(x, real, PADDED, place, M, K, out, CAST, TR, TC)
    # Maxima of integers give the same bits in any order, so programs may finish in any order.
    c = tl.arange(0, TC)
    tl.atomic_max(tops_ptr + c, tl.max(amax_bits(best), axis=0), mask=c < K, sem="relaxed")
