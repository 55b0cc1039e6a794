"""The blocks of a tile that is cast: their indices in the matrix, and their scales.

Kernels take three descriptions. Pointers that are not used may have any value::

    CAST     constant, :class:`Facts`: the block, the kind of scale, the format
    place    (batch, tile row, tile column, group); group: what "all rows" of the tile means, 0 or its expert
    out      (0 codes, 1 their pitch, 2 scales, 3 to 5 strides of the scales: batch, block row, block column,
              6 amax patterns int32, 7 given scales fp32)
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from octavo.fp8.kernels.triton_kernels.bits import (
    INF_BITS,
    amax_bits,
    larger,
    scale_of,
    scaled,
    top_bits,
)


class Facts(NamedTuple):
    """The constant that describes a cast to the kernel."""

    rows: int  # of a block; -1: all
    cols: int
    pow2: bool  # scales are powers of two
    e5m2: bool  # format of the codes; else e4m3
    e8m0: bool  # scales are stored as bytes; else fp32
    write_scale: bool  # this kernel stores the scales
    from_tile: bool  # the tile holds whole blocks and takes their amax; else amax patterns are read
    scale_given: bool  # scales are read (delayed scaling)
    pad_rows: int  # block rows and columns are padded to multiples of these
    pad_cols: int
    integers: bool  # maxima are of integer patterns: see :func:`tops`


@triton.jit
def tops(magnitude, AXIS: tl.constexpr, INTEGERS: tl.constexpr):
    """fp32 |x| -> int32 patterns of the largest along an axis.

    INTEGERS: without the instruction ``max.NaN``. Kernels that move single bytes through shared memory need this,
    because compilers may write wrong bytes there after that instruction (issue 11111 of Triton).
    """
    if INTEGERS:
        return tl.max(amax_bits(magnitude), axis=AXIS)
    else:
        return top_bits(magnitude, AXIS)


@triton.jit
def larger_magnitude(a, b, INTEGERS: tl.constexpr):
    """The larger of two fp32 |x|, or NaN if either is NaN; INTEGERS: see :func:`tops`."""
    if INTEGERS:
        return tl.maximum(amax_bits(a), amax_bits(b)).to(tl.float32, bitcast=True)
    else:
        return larger(a, b)


@triton.jit
def block_tops(magnitude, NR: tl.constexpr, NC: tl.constexpr, INTEGERS: tl.constexpr):
    """amax patterns of the NR x NC blocks of a tile, fp32 |x| [rows, columns] -> int32 [NR, NC]."""
    HR: tl.constexpr = magnitude.shape[0] // NR
    HC: tl.constexpr = magnitude.shape[1] // NC
    if HC == 1:
        return tops(tl.reshape(magnitude, [NR, HR, NC]), 1, INTEGERS)
    elif HR == 1:
        return tops(tl.reshape(magnitude, [NR, NC, HC]), 2, INTEGERS)
    else:
        # First within each row of a block, then over its rows; patterns order as magnitudes do.
        return tl.max(tops(tl.reshape(magnitude, [NR, HR, NC, HC]), 3, INTEGERS), axis=1)


@triton.jit
def tile_tops(magnitude, CAST: tl.constexpr, TR: tl.constexpr, TC: tl.constexpr):
    """:func:`block_tops` of a TR x TC tile under a cast; a scalar where one block is the whole matrix."""
    NR: tl.constexpr = 1 if CAST.rows == -1 else TR // CAST.rows
    NC: tl.constexpr = 1 if CAST.cols == -1 else TC // CAST.cols
    top = block_tops(magnitude, NR, NC, CAST.integers)
    if CAST.rows == -1 and CAST.cols == -1:
        top = tl.max(top)
    return top


@triton.jit
def indices(place, CAST: tl.constexpr, TR: tl.constexpr, TC: tl.constexpr):
    """(rows [n, 1], columns [1, m]) of the tile's blocks in the grid of the matrix; scalars where one block is all."""
    _, pid_r, pid_c, group = place
    if CAST.rows == -1 and CAST.cols == -1:
        # A zero with the type of a program id, so that callers can add it to other indices.
        return group, pid_c * 0
    else:
        NR: tl.constexpr = 1 if CAST.rows == -1 else TR // CAST.rows
        NC: tl.constexpr = 1 if CAST.cols == -1 else TC // CAST.cols
        i = tl.arange(0, NR)[:, None]
        j = tl.arange(0, NC)[None, :]
        # A whole dimension has one block: of its group along the rows, the first along the columns.
        return group + i if CAST.rows == -1 else pid_r * NR + i, j if CAST.cols == -1 else pid_c * NC + j


@triton.jit
def in_units(x, s, CAST: tl.constexpr):
    """The tile x, fp32, divided by the scales of its blocks, NaN in bad blocks; s: :func:`scales_at`."""
    scale, bad, _ = s
    if CAST.rows == -1 and CAST.cols == -1:
        return scaled(x, scale, bad, CAST.pow2, CAST.scale_given)
    else:
        NR: tl.constexpr = scale.shape[0]
        NC: tl.constexpr = scale.shape[1]
        # [NR, rows of a block, NC, columns of a block]: scales broadcast along a block's own dimensions.
        blocks = tl.reshape(x, [NR, x.shape[0] // NR, NC, x.shape[1] // NC])
        v = scaled(blocks, scale[:, None, :, None], bad[:, None, :, None], CAST.pow2, CAST.scale_given)
        return tl.reshape(v, x.shape)


@triton.jit
def _grid(group, M, K, CAST: tl.constexpr):
    """Block rows and block columns of the matrix, up to and including this group."""
    return group + 1 if CAST.rows == -1 else tl.cdiv(M, CAST.rows), 1 if CAST.cols == -1 else tl.cdiv(K, CAST.cols)


@triton.jit
def scales_at(top, rows, cols, place, M, K, out, CAST: tl.constexpr):
    """(scales fp32, bad int1, amax patterns int32) of the blocks (rows, cols).

    ``top``: their patterns, where CAST takes them from the tile.
    """
    batch, _, _, group = place
    grid_r, grid_c = _grid(group, M, K, CAST)
    # Blocks of the padding have the amax 0 and so the scale 1.
    inside = (rows < grid_r) & (cols < grid_c)
    at = batch * grid_r * grid_c + rows * grid_c + cols
    if not CAST.from_tile:
        # Load: patterns of a pass before this one, or of the caller's fp32 amax, whose sign is cleared.
        top = tl.load(out[6] + at, mask=inside, other=0) & 0x7FFFFFFF
    if CAST.scale_given:
        # A given scale (of the last steps) does not show NaN or infinity; the amax of this tensor does.
        bad = top >= INF_BITS
        return tl.where(bad, float("nan"), tl.load(out[7] + at, mask=inside, other=1.0)), bad, top
    else:
        # Scale: from the amax.
        scale, bad = scale_of(top, CAST.pow2, CAST.e5m2)
        return scale, bad, top


@triton.jit
def store_scales(scale, rows, cols, place, M, K, out, CAST: tl.constexpr):
    """Store the scales of the blocks (rows, cols), including the padding, whose blocks have no elements and scale 1."""
    if CAST.write_scale:
        batch, pid_r, pid_c, group = place
        grid_r, grid_c = _grid(group, M, K, CAST)
        writes = rows < tl.cdiv(grid_r, CAST.pad_rows) * CAST.pad_rows
        writes &= cols < tl.cdiv(grid_c, CAST.pad_cols) * CAST.pad_cols
        # Several tiles may share a scale; the first of them stores it, so that no two programs write one address.
        if CAST.rows == -1:
            writes = writes & (pid_r == 0)
        if CAST.cols == -1:
            writes = writes & (pid_c == 0)
        where = out[2] + batch * out[3] + rows * out[4] + cols * out[5]
        if CAST.e8m0:
            # e8m0 is the exponent field of the fp32 scale; NaN becomes 255.
            tl.store(where, (scale.to(tl.int32, bitcast=True) >> 23).to(tl.uint8), mask=writes)
        else:
            tl.store(where, scale, mask=writes)
