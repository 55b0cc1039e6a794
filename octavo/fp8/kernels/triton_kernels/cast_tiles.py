"""The kernels of the casts: one that casts a tile into one or two layouts, and what it leans on.

A cast moves bytes: it reads 2 a value (bf16) and writes 1 for each layout. What follows from that:

* One load serves both layouts. The tile that the two blocks share, 128 x 128 for (1, 128) and (128, 1), is loaded once,
  cast twice in registers, and stored as rows and, through shared memory, as columns.
* Accesses are 16 bytes a thread and whole lines of 128 bytes a warp wherever strides allow. Codes always allow: their
  buffers are padded to 16, and the kernel writes the padding itself, so no fill comes before it. For the input the host
  passes UNIT (the last stride is 1) and EVEN, the largest power of two up to 16 that divides row stride and row length;
  ``n // EVEN * EVEN`` tells the compiler. 3420 columns still load 8 bytes at a time (``ld.global.v2.b32``), not 2.
* Blocks that a tile holds whole take their amax from it: finite blocks always, rows up to 32768 long by tiles as long
  as the row, small tensors. Other whole rows, columns and tensors cost a pass before, :func:`amax_kernel`, 2 bytes a
  value more; its maxima meet in ``atomic_max`` on int32 patterns, whose order does not matter, so it is deterministic.

* 128 x 128 values in two layouts are 64 for each thread of 8 warps, and a second program on the multiprocessor, to load
  while the first computes, needs them to fit 128 registers: hence no select a code for what is bad (NaN divides it) or
  padding (a branch that only ragged tiles take), and one reciprocal a block by integers.
* Instructions, not bytes, bound a cast that is written without care. Tiles within the matrix take ``cast_inside``,
  which masks nothing; those at its edges, rows that are no multiple of anything and whole rows take the way below, of
  one tile and masks. INSIDE says that there may be tiles of the first kind, EDGES that there are some of the second:
  the form without EDGES holds no mask at all.

What the compiler makes of it (capability 9.0, bf16, lengths that are multiples of 16): ``ld.global.v4.b32`` for every
load, ``st.global.v2.b32`` for codes in rows and ``v4`` for columns, one ``cvt.rn.satfinite`` for two codes, one
``st.shared.b32`` for four values of the transposition; nothing spilled. ``tests/fp8/kernels/test_cast_counts.py`` and
``test_triton_cast.py`` look again.

Everything has a batch dimension for the experts of a mixture (``tl.program_id(1)``; one otherwise), and GROUPED says
that rows are those of :mod:`octavo.fp8.kernels.groups`, where "all rows" means all of the tile's expert.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.fp8.kernels.triton_kernels.bits import amax_bits, decode_bits, encode_bits, round_to, scale_of, widen
from octavo.fp8.kernels.triton_kernels.cast_blocks import in_units, indices, scales_at, store_scales, tile_tops
from octavo.fp8.kernels.triton_kernels.cast_inside import cast_inside


@triton.jit
def _place(pid_r, M, sizes_ptr, starts_ptr, tiles_ptr, GROUPED: tl.constexpr, TR: tl.constexpr):
    """(group, end): what "all rows" of this tile is, 0 or its expert, and the row where its real rows end."""
    if GROUPED:
        # Tiles may lie beyond the last row, where scales are padded further than codes.
        expert = tl.load(tiles_ptr + pid_r * TR // 128, mask=pid_r * TR < M, other=-1)
        group = tl.maximum(expert, 0)
        return group, tl.where(expert >= 0, tl.load(starts_ptr + group) + tl.load(sizes_ptr + group), 0)
    return 0, M


@triton.jit
def _load(x_ptr, batch, stride_b, stride_r, stride_c, row, col, end, K, EVEN, UNIT, TR: tl.constexpr, TC: tl.constexpr):
    """(values fp32 [TR, TC], which of them are real) of the tile at (row, col); 0 where there is none."""
    r = tl.arange(0, TR)[:, None]
    c = tl.arange(0, TC)[None, :]
    real = (row + r < end) & (col + c < K)
    if UNIT:
        step = stride_r // EVEN * EVEN
        stride_b = stride_b // EVEN * EVEN
        x = tl.load(x_ptr + batch * stride_b + row.to(tl.int64) * step + col + (r * step + c), mask=real, other=0.0)
    else:
        at = (row + r).to(tl.int64) * stride_r + (col + c).to(tl.int64) * stride_c
        x = tl.load(x_ptr + batch * stride_b + at, mask=real, other=0.0)
    return widen(x), real


@triton.jit
def _emit(
    x, real, ragged, place, M, K, out, CAST: tl.constexpr, CONTRACT: tl.constexpr, TR: tl.constexpr, TC: tl.constexpr
):
    """Cast the tile x [TR, TC] and store codes and scales; codes [rows, columns] for CONTRACT 1, transposed for 0."""
    batch, pid_r, pid_c, _ = place
    i, j = indices(place, CAST, TR, TC)
    s = scales_at(tile_tops(tl.abs(x), CAST, TR, TC) if CAST.from_tile else 0, i, j, place, M, K, out, CAST)
    store_scales(s[0], i, j, place, M, K, out, CAST)
    codes = encode_bits(in_units(x, s, CAST), CAST.e5m2)
    if ragged:  # a bad block's padding too is zero
        codes = tl.where(real, codes, 0)

    r = tl.arange(0, TR)[:, None]
    c = tl.arange(0, TC)[None, :]
    row = pid_r * TR
    col = pid_c * TC
    pitch = out[1] // 16 * 16
    if CONTRACT == 1:
        free = tl.cdiv(M, 16) * 16
        start = out[0] + (batch * free + row) * pitch + col
        tl.store(start + (r * pitch + c), codes, mask=(row + r < free) & (col + c < pitch))
    else:
        free = tl.cdiv(K, 16) * 16
        start = out[0] + (batch * free + col) * pitch + row
        tl.store(start + (c * pitch + r), codes, mask=(col + c < free) & (row + r < pitch))


@triton.jit
def _masked(
    x_ptr, strides, ragged, place, end, M, K, out1, out0,
    CAST1: tl.constexpr, CAST0: tl.constexpr, EVEN: tl.constexpr, UNIT: tl.constexpr,
    TR: tl.constexpr, TC: tl.constexpr,
):  # fmt: skip
    """The tile at ``place``, which may reach over the edges of the matrix."""
    batch, pid_r, pid_c, _ = place
    x, real = _load(x_ptr, batch, *strides, pid_r * TR, pid_c * TC, end, K, EVEN, UNIT, TR, TC)
    if CAST1 is not None:
        _emit(x, real, ragged, place, M, K, out1, CAST1, 1, TR, TC)
    if CAST0 is not None:
        _emit(x, real, ragged, place, M, K, out0, CAST0, 0, TR, TC)


@triton.jit
def cast_kernel(
    x_ptr,
    stride_b,
    stride_r,
    stride_c,
    M,
    K,
    across,
    codes1_ptr,
    pitch1,
    scale1_ptr,
    scale1_b,
    scale1_r,
    scale1_c,
    amax1_ptr,
    given1_ptr,
    codes0_ptr,
    pitch0,
    scale0_ptr,
    scale0_b,
    scale0_r,
    scale0_c,
    amax0_ptr,
    given0_ptr,
    sizes_ptr,
    starts_ptr,
    tiles_ptr,
    CAST1: tl.constexpr,
    CAST0: tl.constexpr,
    GROUPED: tl.constexpr,
    EVEN: tl.constexpr,
    UNIT: tl.constexpr,
    BATCH: tl.constexpr,
    INSIDE: tl.constexpr,
    EDGES: tl.constexpr,
    TR: tl.constexpr,
    TC: tl.constexpr,
):
    """Cast the tile (program // across, program % across) of x [M, K] for a contraction of dimension 1 (CAST1), of
    dimension 0 (CAST0), or both; None leaves one out. INSIDE, EDGES: see the top of this file."""
    pid_r = tl.program_id(0) // across
    pid_c = tl.program_id(0) % across
    batch = (tl.program_id(1) if BATCH else pid_r * 0).to(tl.int64)  # a zero that is known saves 30 instructions
    K = K // EVEN * EVEN
    group, end = _place(pid_r, M, sizes_ptr, starts_ptr, tiles_ptr, GROUPED, TR)
    place = (batch, pid_r, pid_c, group)
    out1 = (codes1_ptr, pitch1, scale1_ptr, scale1_b, scale1_r, scale1_c, amax1_ptr, given1_ptr)
    out0 = (codes0_ptr, pitch0, scale0_ptr, scale0_b, scale0_r, scale0_c, amax0_ptr, given0_ptr)
    strides = (stride_b, stride_r, stride_c)
    ragged = (pid_r * TR + TR > end) | (pid_c * TC + TC > K)
    if not INSIDE:
        _masked(x_ptr, strides, ragged, place, end, M, K, out1, out0, CAST1, CAST0, EVEN, UNIT, TR, TC)
    elif not EDGES:
        cast_inside(x_ptr, stride_b, stride_r, place, M, K, out1, out0, CAST1, CAST0, EVEN, TR, TC)
    elif ragged:
        _masked(x_ptr, strides, ragged, place, end, M, K, out1, out0, CAST1, CAST0, EVEN, UNIT, TR, TC)
    else:
        cast_inside(x_ptr, stride_b, stride_r, place, M, K, out1, out0, CAST1, CAST0, EVEN, TR, TC)


@triton.jit
def amax_kernel(
    x_ptr,
    stride_b,
    stride_r,
    stride_c,
    M,
    K,
    across,
    rows_ptr,
    cols_ptr,
    all_ptr,
    sizes_ptr,
    starts_ptr,
    tiles_ptr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    ALL: tl.constexpr,
    GROUPED: tl.constexpr,
    EVEN: tl.constexpr,
    UNIT: tl.constexpr,
    TR: tl.constexpr,
    TC: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Raise amax patterns, zero before: rows [batch, M], cols [batch or group, K], all [batch or group].

    A program walks STEPS tiles along the rows if ROWS are wanted, else down the columns, and keeps the largest of each
    place in registers, so that it reduces, and meets the others in an atomic, once.
    """
    pid_r = tl.program_id(0) // across
    pid_c = tl.program_id(0) % across
    batch = tl.program_id(1).to(tl.int64)
    row = pid_r * TR if ROWS else pid_r * TR * STEPS
    col = pid_c * TC * STEPS if ROWS else pid_c * TC
    size = K
    K = K // EVEN * EVEN
    group, end = _place(row // TR, M, sizes_ptr, starts_ptr, tiles_ptr, GROUPED, TR)
    r = tl.arange(0, TR)
    c = tl.arange(0, TC)
    cols_ptr += (batch + group) * size
    top = tl.zeros([TR, TC], tl.int32)
    for step in tl.static_range(STEPS):
        at_r = row if ROWS else row + step * TR
        at_c = col + step * TC if ROWS else col
        x, _ = _load(x_ptr, batch, stride_b, stride_r, stride_c, at_r, at_c, end, K, EVEN, UNIT, TR, TC)
        bits = amax_bits(x)
        top = tl.maximum(top, bits)
        if ROWS and COLS:
            tl.atomic_max(cols_ptr + at_c + c, tl.max(bits, axis=0), mask=at_c + c < K, sem="relaxed")
    if ROWS:
        tl.atomic_max(rows_ptr + batch * M + row + r, tl.max(top, axis=1), mask=row + r < end, sem="relaxed")
    if COLS and not ROWS:
        tl.atomic_max(cols_ptr + col + c, tl.max(top, axis=0), mask=col + c < K, sem="relaxed")
    if ALL:
        tl.atomic_max(all_ptr + batch + group, tl.max(tl.max(top, axis=1), axis=0), sem="relaxed")


@triton.jit
def scales_kernel(
    amax_ptr, scale_ptr, n, POW2: tl.constexpr, E5M2: tl.constexpr, E8M0: tl.constexpr, BLOCK: tl.constexpr
):
    """The scale of each of n amax patterns."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    scale, _ = scale_of(tl.load(amax_ptr + at, mask=at < n, other=0), POW2, E5M2)
    if E8M0:
        tl.store(scale_ptr + at, (scale.to(tl.int32, bitcast=True) >> 23).to(tl.uint8), mask=at < n)
    else:
        tl.store(scale_ptr + at, scale, mask=at < n)


@triton.jit
def dequantize_kernel(
    codes_ptr,
    stride_r,
    stride_c,
    scale_ptr,
    scale_r,
    scale_c,
    out_ptr,
    M,
    K,
    across,
    BR: tl.constexpr,
    BC: tl.constexpr,
    E5M2: tl.constexpr,
    E8M0: tl.constexpr,
    EVEN: tl.constexpr,
    TR: tl.constexpr,
    TC: tl.constexpr,
):
    """out [M, K] contiguous = fp32(code) * scale, rounded once to out's dtype; codes and scales of any strides."""
    pid_r = tl.program_id(0) // across
    pid_c = tl.program_id(0) % across
    K = K // EVEN * EVEN
    rows = pid_r * TR + tl.arange(0, TR)[:, None]
    cols = pid_c * TC + tl.arange(0, TC)[None, :]
    real = (rows < M) & (cols < K)
    codes = tl.load(codes_ptr + rows.to(tl.int64) * stride_r + cols.to(tl.int64) * stride_c, mask=real, other=0)
    NR: tl.constexpr = 1 if BR == -1 else TR // BR
    NC: tl.constexpr = 1 if BC == -1 else TC // BC
    i = tl.arange(0, NR)[:, None]
    j = tl.arange(0, NC)[None, :]
    gr = i if BR == -1 else pid_r * NR + i
    gc = j if BC == -1 else pid_c * NC + j
    inside = (gr < (1 if BR == -1 else tl.cdiv(M, BR))) & (gc < (1 if BC == -1 else tl.cdiv(K, BC)))
    scale = tl.load(scale_ptr + gr.to(tl.int64) * scale_r + gc.to(tl.int64) * scale_c, mask=inside, other=0)
    if E8M0:
        byte = scale.to(tl.int32)
        pattern = tl.where(byte == 0, 0x00400000, byte << 23)  # 2^-127 is subnormal in fp32
        scale = tl.where(byte == 255, 0x7FC00000, pattern).to(tl.float32, bitcast=True)
    values = tl.reshape(decode_bits(codes, E5M2), [NR, TR // NR, NC, TC // NC]) * scale[:, None, :, None]
    out = round_to(tl.reshape(values, [TR, TC]), out_ptr.dtype.element_ty)
    tl.store(out_ptr + rows.to(tl.int64) * K + cols, out, mask=real)


@triton.jit
def relay_kernel(
    codes_ptr,
    stride_b,
    stride_f,
    stride_k,
    out_ptr,
    F,
    K,
    pitch,
    across,
    EVEN_F: tl.constexpr,
    EVEN_K: tl.constexpr,
    TF: tl.constexpr,
    TK: tl.constexpr,
):
    """Copy codes [batch, F, K] of any strides into [batch, F padded to 16, pitch], contiguous, the padding zero."""
    rows = tl.program_id(0) // across * TF + tl.arange(0, TF)[:, None]
    cols = tl.program_id(0) % across * TK + tl.arange(0, TK)[None, :]
    batch = tl.program_id(1).to(tl.int64)
    at = batch * stride_b + rows.to(tl.int64) * stride_f + cols.to(tl.int64) * stride_k
    codes = tl.load(codes_ptr + at, mask=(rows < F // EVEN_F * EVEN_F) & (cols < K // EVEN_K * EVEN_K), other=0)
    free = tl.cdiv(F, 16) * 16
    pitch = pitch // 16 * 16
    out = out_ptr + (batch * free + rows) * pitch + cols
    tl.store(out, codes, mask=(rows < free) & (cols < pitch))
