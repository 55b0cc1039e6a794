"""The kernels of the casts: one that casts a tile into one or two layouts, and its helpers.

A cast moves bytes: it reads 2 per value (bf16) and writes 1 for each layout. Consequences:

* One load serves both layouts. The tile that the two blocks share, 128 x 128 for (1, 128) and (128, 1), is loaded once,
  cast twice in registers, and stored as rows and, through shared memory, as columns.
* Accesses are 16 bytes per thread and whole lines of 128 bytes per warp wherever strides allow it. Those of codes
  always do: their buffers are padded to 16, and the kernel writes the padding itself, so no fill precedes it. For the
  input the host passes UNIT (the last stride is 1) and EVEN, the largest power of two up to 16 that divides row stride
  and row length; ``n // EVEN * EVEN`` proves it to the compiler. 3420 columns still load 8 bytes at a time
  (``ld.global.v2.b32``), not 2.
* Blocks that fit in a tile take their amax from it: finite blocks always, rows of up to 32768 with tiles as long as the
  row, small tensors. Other whole rows, columns and tensors need a pass before, :func:`amax_kernel`, 2 more bytes per
  value; it combines maxima with ``atomic_max`` on int32 patterns, whose order does not matter, so it is deterministic.

* 128 x 128 values in two layouts are 64 for each thread of 8 warps. They must fit in 128 registers, so that a second
  program on the multiprocessor loads while the first computes. Therefore no code needs a select for bad blocks (the
  scale is NaN) or for padding (a branch that only ragged tiles take), and reciprocals are integer work, one per block.
* Instructions, not bytes, bound a careless cast. ``cast_words`` moves codes to the other layout four at a time, and has
  no masks for tiles inside the matrix. INSIDE says that such tiles may exist, EDGES that tiles at the edges do: the
  form without EDGES has no masks at all. Only tiles of one or two whole rows take ``cast_rows``.

The compiled code (capability 9.0, bf16, lengths that are multiples of 16): ``ld.global.v4.b32`` for every load,
``st.global.v2.b32`` for codes in rows and ``v4`` for columns, one ``cvt.rn.satfinite`` for two codes, one
``st.shared.b32`` for four values of the transposition; no spills. ``tests/fp8/kernels/test_cast_counts.py`` and
``test_triton_cast.py`` check this.

Every kernel has a batch dimension for the experts of a mixture (``tl.program_id(1)``; 1 otherwise). GROUPED: the rows
are ordered as in :mod:`octavo.fp8.kernels.groups`, and "all rows" means all rows of the tile's expert.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.fp8.kernels.triton_kernels.bits import amax_bits, decode_bits, round_to, scale_of
from octavo.fp8.kernels.triton_kernels.cast_rows import cast_rows, load_tile
from octavo.fp8.kernels.triton_kernels.cast_words import cast_words


@triton.jit
def _place(pid_r, M, sizes_ptr, starts_ptr, tiles_ptr, GROUPED: tl.constexpr, TR: tl.constexpr):
    """(group, end) of a row tile: the meaning of "all rows", 0 or its expert, and the end of its real rows."""
    if GROUPED:
        # Tiles may be beyond the last row, where scales are padded further than codes.
        expert = tl.load(tiles_ptr + pid_r * TR // 128, mask=pid_r * TR < M, other=-1)
        group = tl.maximum(expert, 0)
        # Tiles of no expert (-1) end at row 0: all of their values are read as 0, and x is ignored.
        return group, tl.where(expert >= 0, tl.load(starts_ptr + group) + tl.load(sizes_ptr + group), 0)
    return 0, M


@triton.jit
def cast_kernel(
    x_ptr,  # [batch, M, K] bf16, fp16 or fp32
    stride_b,  # strides of x, in elements
    stride_r,
    stride_c,
    M,
    K,
    across,  # tiles per row of tiles
    codes1_ptr,  # uint8 [batch, M up to 16, pitch1]: codes for a contraction of dimension 1
    pitch1,  # codes per row in memory, a multiple of 16
    scale1_ptr,  # fp32, or uint8 for e8m0: a scale per block, padded (layout.py)
    scale1_b,  # strides of the scales: batch, block row, block column
    scale1_r,
    scale1_c,
    amax1_ptr,  # int32 [blocks]: amax patterns, unless CAST1.from_tile
    given1_ptr,  # fp32 [blocks]: scales, if CAST1.scale_given
    codes0_ptr,  # uint8 [batch, K up to 16, pitch0]: the same for a contraction of dimension 0
    pitch0,  # likewise
    scale0_ptr,
    scale0_b,
    scale0_r,
    scale0_c,
    amax0_ptr,
    given0_ptr,
    sizes_ptr,  # GROUPED: sizes, starts and tiles of groups.Groups, int32; else unused
    starts_ptr,
    tiles_ptr,
    CAST1: tl.constexpr,  # cast_blocks.Facts, or None: no such layout
    CAST0: tl.constexpr,
    GROUPED: tl.constexpr,  # rows belong to experts
    EVEN: tl.constexpr,  # power of two up to 16 that divides strides and K; 1 if not UNIT
    UNIT: tl.constexpr,  # the last stride of x is 1
    BATCH: tl.constexpr,  # x has a batch of more than 1
    INSIDE: tl.constexpr,  # tiles may be inside the matrix and have contiguous rows: they need no masks
    EDGES: tl.constexpr,  # some tiles are ragged
    TR: tl.constexpr,  # rows and columns of a tile
    TC: tl.constexpr,
):
    """Cast the tile (program // across, program % across) of x for one contraction, or for both from one load."""
    pid_r = tl.program_id(0) // across
    pid_c = tl.program_id(0) % across
    # A batch index that the compiler knows to be 0 saves 30 instructions.
    batch = (tl.program_id(1) if BATCH else pid_r * 0).to(tl.int64)
    # Proves to the compiler that EVEN divides K, so that masks of a vector agree.
    K = K // EVEN * EVEN
    group, end = _place(pid_r, M, sizes_ptr, starts_ptr, tiles_ptr, GROUPED, TR)
    place = (batch, pid_r, pid_c, group)
    out1 = (codes1_ptr, pitch1, scale1_ptr, scale1_b, scale1_r, scale1_c, amax1_ptr, given1_ptr)
    out0 = (codes0_ptr, pitch0, scale0_ptr, scale0_b, scale0_r, scale0_c, amax0_ptr, given0_ptr)
    strides = (stride_b, stride_r, stride_c)
    # Tiles that reach beyond the real rows or columns: they mask loads and clear the codes of padding.
    ragged = (pid_r * TR + TR > end) | (pid_c * TC + TC > K)
    # All conditions but ``ragged`` are constants: each compiled form holds only the paths that its shapes need.
    if TR % 4 != 0:
        x, real = load_tile(x_ptr, batch, *strides, pid_r * TR, pid_c * TC, end, K, EVEN, UNIT, TR, TC)
        cast_rows(x, real, ragged, place, M, K, out1, CAST1, TR, TC)
    elif not INSIDE:
        cast_words(x_ptr, strides, place, end, M, K, out1, out0, CAST1, CAST0, EVEN, UNIT, True, TR, TC)
    elif not EDGES:
        cast_words(x_ptr, strides, place, end, M, K, out1, out0, CAST1, CAST0, EVEN, UNIT, False, TR, TC)
    elif ragged:
        cast_words(x_ptr, strides, place, end, M, K, out1, out0, CAST1, CAST0, EVEN, UNIT, True, TR, TC)
    else:
        cast_words(x_ptr, strides, place, end, M, K, out1, out0, CAST1, CAST0, EVEN, UNIT, False, TR, TC)


@triton.jit
def amax_kernel(
    x_ptr,  # [batch, M, K] bf16, fp16 or fp32
    stride_b,  # strides of x, in elements
    stride_r,
    stride_c,
    M,
    K,
    across,  # tiles per row of tiles
    rows_ptr,  # int32 [batch, M]: pattern of each row's amax, if ROWS
    cols_ptr,  # int32 [batch or experts, K]: of each column, if COLS
    all_ptr,  # int32 [batch or experts]: of everything, if ALL
    sizes_ptr,  # GROUPED: sizes, starts and tiles of groups.Groups, int32; else unused
    starts_ptr,
    tiles_ptr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    ALL: tl.constexpr,
    GROUPED: tl.constexpr,  # rows belong to experts
    EVEN: tl.constexpr,  # power of two up to 16 that divides strides and K; 1 if not UNIT
    UNIT: tl.constexpr,  # the last stride of x is 1
    TR: tl.constexpr,  # rows and columns of a tile
    TC: tl.constexpr,
    STEPS: tl.constexpr,  # tiles per program
):
    """Raise amax patterns, which the caller has set to zero, to the maxima of x.

    A program walks STEPS tiles along the rows if ROWS is set, else down the columns, and keeps the largest value of
    each position in registers, so that it reduces, and issues an atomic, only once.
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
    # Load and maximum, element by element. Patterns of magnitudes: NaN is larger than every number.
    top = tl.zeros([TR, TC], tl.int32)
    for step in tl.static_range(STEPS):
        at_r = row if ROWS else row + step * TR
        at_c = col + step * TC if ROWS else col
        x, _ = load_tile(x_ptr, batch, stride_b, stride_r, stride_c, at_r, at_c, end, K, EVEN, UNIT, TR, TC)
        bits = amax_bits(x)
        top = tl.maximum(top, bits)
        if ROWS and COLS:
            # Columns change from step to step here, so their maxima cannot wait for the end.
            tl.atomic_max(cols_ptr + at_c + c, tl.max(bits, axis=0), mask=at_c + c < K, sem="relaxed")
    # Reduce the tile and combine with other programs. Maxima of integers give the same bits in any order.
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
    """Scales [n] (fp32, or uint8 for e8m0) of amax patterns [n] (int32)."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    scale, _ = scale_of(tl.load(amax_ptr + at, mask=at < n, other=0), POW2, E5M2)
    if E8M0:
        # The byte of e8m0 is the exponent field of the fp32 scale.
        tl.store(scale_ptr + at, (scale.to(tl.int32, bitcast=True) >> 23).to(tl.uint8), mask=at < n)
    else:
        tl.store(scale_ptr + at, scale, mask=at < n)


@triton.jit
def dequantize_kernel(
    codes_ptr,  # uint8 [M, K] codes
    stride_r,  # strides of the codes, in elements
    stride_c,
    scale_ptr,  # [blocks down, blocks across] fp32, or uint8 for e8m0
    scale_r,  # strides of the scales, in elements
    scale_c,
    out_ptr,  # [M, K] contiguous, fp32, bf16 or fp16
    M,
    K,
    across,  # tiles per row of tiles
    BR: tl.constexpr,  # rows and columns of a block, -1: all
    BC: tl.constexpr,
    E5M2: tl.constexpr,
    E8M0: tl.constexpr,
    EVEN: tl.constexpr,  # power of two up to 16 that divides K
    TR: tl.constexpr,  # rows and columns of a tile, multiples of BR and BC
    TC: tl.constexpr,
):
    """out = fp32(code) * scale, rounded once to out's dtype."""
    pid_r = tl.program_id(0) // across
    pid_c = tl.program_id(0) % across
    K = K // EVEN * EVEN
    rows = pid_r * TR + tl.arange(0, TR)[:, None]
    cols = pid_c * TC + tl.arange(0, TC)[None, :]
    real = (rows < M) & (cols < K)
    # Load codes by their strides: either dimension may be the contiguous one.
    codes = tl.load(codes_ptr + rows.to(tl.int64) * stride_r + cols.to(tl.int64) * stride_c, mask=real, other=0)
    # Load the scales of the tile's blocks, [NR, NC].
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
        # The byte is the exponent field of an fp32, except 0 (2^-127) and 255 (NaN).
        pattern = tl.where(byte == 0, 0x00400000, byte << 23)  # 2^-127 is subnormal in fp32
        scale = tl.where(byte == 255, 0x7FC00000, pattern).to(tl.float32, bitcast=True)
    # Scale, round once, store.
    values = tl.reshape(decode_bits(codes, E5M2), [NR, TR // NR, NC, TC // NC]) * scale[:, None, :, None]
    out = round_to(tl.reshape(values, [TR, TC]), out_ptr.dtype.element_ty)
    tl.store(out_ptr + rows.to(tl.int64) * K + cols, out, mask=real)


@triton.jit
def relay_kernel(
    codes_ptr,  # uint8 [batch, F, K] codes
    stride_b,  # strides of the codes, in elements
    stride_f,
    stride_k,
    out_ptr,  # uint8 [batch, F up to 16, pitch], contiguous
    F,  # free dimension
    K,  # contracted dimension
    pitch,  # a multiple of 16
    across,  # tiles per row of tiles
    EVEN_F: tl.constexpr,  # powers of two up to 16 that divide F and K
    EVEN_K: tl.constexpr,
    TF: tl.constexpr,  # rows and columns of a tile
    TK: tl.constexpr,
):
    """Copy codes of any strides into the layout of a GEMM's operand, contraction contiguous, the padding zero."""
    rows = tl.program_id(0) // across * TF + tl.arange(0, TF)[:, None]
    cols = tl.program_id(0) % across * TK + tl.arange(0, TK)[None, :]
    batch = tl.program_id(1).to(tl.int64)
    # Load along whichever dimension is contiguous; zeros outside become the padding.
    at = batch * stride_b + rows.to(tl.int64) * stride_f + cols.to(tl.int64) * stride_k
    codes = tl.load(codes_ptr + at, mask=(rows < F // EVEN_F * EVEN_F) & (cols < K // EVEN_K * EVEN_K), other=0)
    free = tl.cdiv(F, 16) * 16
    pitch = pitch // 16 * 16
    # Store along the contraction; the compiler transposes the tile through shared memory in between.
    out = out_ptr + (batch * free + rows) * pitch + cols
    tl.store(out, codes, mask=(rows < free) & (cols < pitch))
