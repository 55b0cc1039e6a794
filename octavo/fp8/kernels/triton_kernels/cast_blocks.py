"""The blocks of a tile that is cast: where they lie among those of the matrix, and their scales.

A cast is described to a kernel by :class:`Facts`, its constant; a tile by ``place``: (batch, tile row, tile column,
group), where group is what "all rows" of it means, 0 or its expert; a result by ``out``: (codes, their pitch, scales,
the three strides of these, amax patterns, scales that are given), pointers that are not used being anything.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from octavo.fp8.kernels.triton_kernels.bits import INF_BITS, scale_of, scaled, top_bits


class Facts(NamedTuple):
    """A cast, as a constant of the kernel. ``rows`` and ``cols`` of a block (-1: all); scales that are powers of two,
    bytes (e8m0), written by this kernel, padded to ``pad_rows`` and ``pad_cols``; amax taken from the tile, else given;
    scale given (delayed scaling)."""

    rows: int
    cols: int
    pow2: bool
    e5m2: bool
    e8m0: bool
    write_scale: bool
    from_tile: bool
    scale_given: bool
    pad_rows: int
    pad_cols: int


@triton.jit
def block_tops(magnitude, NR: tl.constexpr, NC: tl.constexpr):
    """amax patterns of the NR x NC blocks of a tile, fp32 |x| [rows, columns] -> int32 [NR, NC]."""
    HR: tl.constexpr = magnitude.shape[0] // NR
    HC: tl.constexpr = magnitude.shape[1] // NC
    if HC == 1:
        return top_bits(tl.reshape(magnitude, [NR, HR, NC]), 1)
    elif HR == 1:
        return top_bits(tl.reshape(magnitude, [NR, NC, HC]), 2)
    else:
        return tl.max(top_bits(tl.reshape(magnitude, [NR, HR, NC, HC]), 3), axis=1)


@triton.jit
def tile_tops(magnitude, CAST: tl.constexpr, TR: tl.constexpr, TC: tl.constexpr):
    """:func:`block_tops` of a cast, whose tile has TR x TC values; a scalar where one block is all."""
    NR: tl.constexpr = 1 if CAST.rows == -1 else TR // CAST.rows
    NC: tl.constexpr = 1 if CAST.cols == -1 else TC // CAST.cols
    top = block_tops(magnitude, NR, NC)
    if CAST.rows == -1 and CAST.cols == -1:
        top = tl.max(top)
    return top


@triton.jit
def indices(place, CAST: tl.constexpr, TR: tl.constexpr, TC: tl.constexpr):
    """(rows [n, 1], columns [1, m]) of the tile's blocks among those of the matrix; scalars where one block is all."""
    _, pid_r, pid_c, group = place
    if CAST.rows == -1 and CAST.cols == -1:
        return group, pid_c * 0
    else:
        NR: tl.constexpr = 1 if CAST.rows == -1 else TR // CAST.rows
        NC: tl.constexpr = 1 if CAST.cols == -1 else TC // CAST.cols
        i = tl.arange(0, NR)[:, None]
        j = tl.arange(0, NC)[None, :]
        return group + i if CAST.rows == -1 else pid_r * NR + i, j if CAST.cols == -1 else pid_c * NC + j


@triton.jit
def in_units(x, s, CAST: tl.constexpr):
    """A tile in units of the scales of its blocks, NaN in bad ones."""
    scale, bad, _ = s
    if CAST.rows == -1 and CAST.cols == -1:
        return scaled(x, scale, bad, CAST.pow2, CAST.scale_given)
    else:
        NR: tl.constexpr = scale.shape[0]
        NC: tl.constexpr = scale.shape[1]
        blocks = tl.reshape(x, [NR, x.shape[0] // NR, NC, x.shape[1] // NC])
        v = scaled(blocks, scale[:, None, :, None], bad[:, None, :, None], CAST.pow2, CAST.scale_given)
        return tl.reshape(v, x.shape)


@triton.jit
def _grid(group, M, K, CAST: tl.constexpr):
    """Rows and columns of blocks in the matrix, up to this group."""
    return group + 1 if CAST.rows == -1 else tl.cdiv(M, CAST.rows), 1 if CAST.cols == -1 else tl.cdiv(K, CAST.cols)


@triton.jit
def scales_at(top, rows, cols, place, M, K, out, CAST: tl.constexpr):
    """(scales, which are bad, amax patterns) of the blocks (rows, cols), whose patterns are ``top`` if CAST takes them
    from the tile."""
    batch, _, _, group = place
    grid_r, grid_c = _grid(group, M, K, CAST)
    inside = (rows < grid_r) & (cols < grid_c)
    at = batch * grid_r * grid_c + rows * grid_c + cols
    if not CAST.from_tile:
        top = tl.load(out[6] + at, mask=inside, other=0) & 0x7FFFFFFF
    if CAST.scale_given:
        bad = top >= INF_BITS
        return tl.where(bad, float("nan"), tl.load(out[7] + at, mask=inside, other=1.0)), bad, top
    else:
        scale, bad = scale_of(top, CAST.pow2, CAST.e5m2)
        return scale, bad, top


@triton.jit
def store_scales(scale, rows, cols, place, M, K, out, CAST: tl.constexpr):
    """Store the scales of the blocks (rows, cols), padding included: it has no real elements and so the scale 1."""
    if CAST.write_scale:
        batch, pid_r, pid_c, group = place
        grid_r, grid_c = _grid(group, M, K, CAST)
        writes = rows < tl.cdiv(grid_r, CAST.pad_rows) * CAST.pad_rows
        writes &= cols < tl.cdiv(grid_c, CAST.pad_cols) * CAST.pad_cols
        if CAST.rows == -1:  # of the tiles that share a scale, the first writes
            writes = writes & (pid_r == 0)
        if CAST.cols == -1:
            writes = writes & (pid_c == 0)
        where = out[2] + batch * out[3] + rows * out[4] + cols * out[5]
        if CAST.e8m0:
            tl.store(where, (scale.to(tl.int32, bitcast=True) >> 23).to(tl.uint8), mask=writes)
        else:
            tl.store(where, scale, mask=writes)
