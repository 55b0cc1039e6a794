"""Grouped GEMMs: the rows of all experts at once, each with its expert's weights, without waiting for the device.

Rows are ordered as ``groups`` says: each expert's begin at a multiple of 128, so that a tile of rows has one expert::

    fwd    y  [R, N]    = x [R, K]  . w [E, N, K]     the expert of a tile from ``groups.tiles``
    dgrad  dx [R, K]    = dy [R, N] . w [E, N, K]     the same, contracting N
    wgrad  dw [E, N, K] = dy [R, N] . x [R, K]        contracting an expert's rows: from ``groups.starts`` and ``sizes``

The kernels read the number of rows of an expert on the device. Tiles of no expert are set to zero; an expert without
rows has a contraction of no steps and gets zeros. As for ``gemm``, ``contraction`` has the arithmetic and ``tiles``
chooses the form.

Weights are rows of codes too, one expert's [free, contracted] matrix after the other (``layout.experts_k_major``), so
that the expert of a tile only changes the row at which its weights begin.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.fp8.arithmetic.cast import CastError, Quantized
from octavo.fp8.kernels import layout
from octavo.fp8.kernels.groups import TILE as OWNED_ROWS
from octavo.fp8.kernels.groups import Groups
from octavo.fp8.kernels.triton_kernels import cast, grouped_cast, tiles
from octavo.fp8.kernels.triton_kernels.contraction import contract, place, store
from octavo.fp8.kernels.triton_kernels.launch import launch
from octavo.fp8.kernels.triton_kernels.tiles import Gpu


@triton.jit(do_not_specialize=["rows", "K"])
def grouped_rows_kernel(
    a,  # [rows, a_held] FP8 codes of all experts' rows: pointer, or TMA descriptor where FORM.tma
    b,  # [E * b_rows, b_held] FP8 codes, likewise: each expert's [N, K], padded to b_rows rows
    out,  # [rows, N] contiguous, fp32, bf16 or fp16
    a_scale,  # [free blocks, blocks of K], or [E] where an expert's rows share one; fp32, or uint8 for e8m0
    b_scale,  # [E, free blocks, blocks of K] likewise
    bias,  # [E, N] any float, or None
    experts,  # [rows / OWNED] int32: the expert of each OWNED rows, -1 for none
    rows,  # R, a multiple of OWNED
    N,
    K,
    a_held,  # codes per row in memory, a multiple of 16
    b_held,
    b_rows,  # rows of b per expert
    b_all,  # rows of b in all
    a_stride_e,  # strides of the scales, in elements: expert, free block, block of the contraction; 0 where shared
    a_stride_f,
    a_stride_k,
    b_stride_e,
    b_stride_f,
    b_stride_k,
    FORM: tl.constexpr,
    TILE: tl.constexpr,
    BIAS: tl.constexpr,
    GROUP_M: tl.constexpr,
    OWNED: tl.constexpr,  # 128: rows that have one expert (groups.TILE)
):
    """fwd and dgrad: one tile [TILE.m, TILE.n] of rows [rows, K] times their expert's b [N, K]."""
    # OWNED is a multiple of TILE.m, so all rows of the tile have one expert.
    i, j = place(tl.program_id(0), rows // TILE.m, tl.cdiv(N, TILE.n), GROUP_M)
    row = i * TILE.m
    col = j * TILE.n
    expert = tl.load(experts + row // OWNED)
    if expert < 0:
        # Padding rows after the last expert: out is not cleared by the host, so zeros are stored here.
        BLOCK_M: tl.constexpr = TILE.m
        BLOCK_N: tl.constexpr = TILE.n
        nothing = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        store(out, nothing, row, col, rows, N, bias, False, TILE)
        return
    # Scales of this expert. a_stride_e is 0 unless all rows of an expert share a scale; weights can exceed 2^31.
    a_scale += expert * a_stride_e
    b_scale += expert.to(tl.int64) * b_stride_e
    acc = contract(
        (a, row, rows, a_held),
        (b, expert * b_rows + col, b_all, b_held),
        (a_scale, row, rows, a_stride_f, a_stride_k),
        (b_scale, col, N, b_stride_f, b_stride_k),
        0,
        K,
        FORM,
        TILE,
    )
    # Epilogue: the expert's bias, one rounding, masked store.
    store(out, acc, row, col, rows, N, bias + expert * N if BIAS else bias, BIAS, TILE)


@triton.jit(do_not_specialize=["M"])
def grouped_wgrad_kernel(
    a,  # [M, a_held] FP8 codes of dy, its rows contiguous: pointer, or TMA descriptor where FORM.tma
    b,  # [N, b_held] FP8 codes of x, likewise
    out,  # [E, M, N] contiguous, fp32, bf16 or fp16
    a_scale,  # [free blocks, blocks of rows], [E, M] or [E] where an expert's rows share one; fp32 or uint8 (e8m0)
    b_scale,  # likewise
    starts,  # [E + 1] int32: the first row of each expert, multiples of OWNED
    sizes,  # [E] int32: the real rows of each expert
    M,
    N,
    a_held,  # codes per row in memory, a multiple of 16
    b_held,
    a_stride_e,  # strides of the scales, in elements: expert, free block, block of the contraction; 0 where shared
    a_stride_f,
    a_stride_k,
    b_stride_e,
    b_stride_f,
    b_stride_k,
    FORM: tl.constexpr,
    TILE: tl.constexpr,
    GROUP_M: tl.constexpr,
    OWNED: tl.constexpr,  # 128: rows that have one expert (groups.TILE)
):
    """One tile of one expert's [M, N]: a [M, rows] contracted with b [N, rows] over the rows of that expert."""
    # Place: all tiles of one expert, then the next expert; within one, as for a plain GEMM.
    down = tl.cdiv(M, TILE.m)
    across = tl.cdiv(N, TILE.n)
    expert = tl.program_id(0) // (down * across)
    i, j = place(tl.program_id(0) % (down * across), down, across, GROUP_M)
    row = i * TILE.m
    col = j * TILE.n
    # The stretch of the contraction that is this expert's; the hint keeps loads of scales vectorized.
    first = tl.multiple_of(tl.load(starts + expert), OWNED)
    # Whole steps of 128: rows between the expert's last one and the next expert's first have zero codes. No rows, no
    # steps: the tile is zero.
    last = first + tl.cdiv(tl.load(sizes + expert), OWNED) * OWNED
    a_scale += expert.to(tl.int64) * a_stride_e
    b_scale += expert.to(tl.int64) * b_stride_e
    # Main loop over the expert's rows; all scales are applied, in fp32.
    acc = contract(
        (a, row, M, a_held),
        (b, col, N, b_held),
        (a_scale, row, M, a_stride_f, a_stride_k),
        (b_scale, col, N, b_stride_f, b_stride_k),
        first,
        last,
        FORM,
        TILE,
    )
    # Epilogue: one rounding, masked store into the expert's matrix; ``out`` takes the place of the unused bias.
    store(out + expert.to(tl.int64) * M * N, acc, row, col, M, N, out, False, TILE)


class _GroupedOperand(NamedTuple):
    """An operand: codes [rows in memory, codes per row]; scales with their strides by (expert, free block, contracted
    block); rows in memory per expert; the real sizes."""

    codes: Tensor
    scale: Tensor
    strides: tuple[int, ...]
    rows: int
    free: int
    contracted: int


def fwd(
    x_q: Quantized,
    w_q: Quantized,
    groups: Groups,
    out_dtype: torch.dtype,
    bias: Tensor | None = None,
    gpu: Gpu | None = None,
    fixed: bool = False,
) -> Tensor:
    """y [R, N] = x [R, K] times each expert's w [E, N, K] transposed, plus bias [E, N]; zeros in tiles of no expert.
    ``fixed``: use the one tile that serves every number of rows.
    Raises CastError for operands that do not agree with each other or with ``groups``."""
    return _rows("fwd", x_q, w_q, 1, groups, out_dtype, bias, gpu, fixed)


def dgrad(dy_q: Quantized, w_q: Quantized, groups: Groups, out_dtype: torch.dtype, gpu: Gpu | None = None) -> Tensor:
    """dx [R, K] = dy [R, N] times each expert's w [E, N, K]; zeros in tiles of no expert. Raises CastError for operands
    that do not agree with each other or with ``groups``."""
    return _rows("dgrad", dy_q, w_q, 0, groups, out_dtype, None, gpu)


def _rows(
    name: str,
    a_q: Quantized,
    w_q: Quantized,
    w_contract: int,
    groups: Groups,
    out_dtype: torch.dtype,
    bias: Tensor | None,
    gpu: Gpu | None,
    fixed: bool = False,
) -> Tensor:
    a_shape, w_shape = tuple(a_q.data.shape), tuple(w_q.data.shape)
    if (
        len(a_shape) != 2
        or len(w_shape) != 3
        or a_shape[1] != w_shape[1 + w_contract]
        or (a_shape[0], w_shape[0]) != (groups.rows, groups.experts)
    ):
        raise CastError(
            f"grouped_{name}: rows {list(a_shape)} and weights {list(w_shape)} do not match each other, or groups of "
            f"{groups.rows} rows and {groups.experts} experts. It takes [R, {'NK'[w_contract]}] and [E, N, K]."
        )
    gpu = gpu or tiles.gpu_of(a_q.data.device)
    form = tiles.form(
        tiles.scale_block(a_q.spec, 1), tiles.scale_block(w_q.spec, w_contract), fast=name == "fwd", gpu=gpu
    )
    a, b = _of_rows(a_q, 1), _of_experts(w_q, w_contract)
    out = torch.empty(groups.rows, b.free, dtype=out_dtype, device=a.codes.device)
    if out.numel() == 0 or not groups.experts:
        return out.zero_()
    if b.codes.numel() == 0:  # a TMA descriptor of an empty tensor is invalid, and the kernel reads nothing
        form = form._replace(tma=False)
    if fixed:
        tile = tiles.invariant_tile(form, gpu, OWNED_ROWS)
    else:
        tile = tiles.choose(groups.rows, b.free, form, gpu, tallest=OWNED_ROWS)
    bias = None if bias is None else bias.contiguous()
    launch(
        grouped_rows_kernel,
        (groups.rows // tile.m * layout.ceil_div(b.free, tile.n),),
        tiles.source(a.codes, groups.rows, a.contracted, (tile.m, tile.k), form.tma),
        tiles.source(b.codes, b.codes.shape[0], b.contracted, (tile.n, tile.k), form.tma),
        *(out, a.scale, b.scale, bias, groups.tiles),
        *(groups.rows, b.free, a.contracted, a.codes.stride(0), b.codes.stride(0), b.rows, b.codes.shape[0]),
        *(*a.strides, *b.strides),
        **tiles.options(form, tile),
        BIAS=bias is not None,
        OWNED=OWNED_ROWS,
    )
    return out


def wgrad(dy_q: Quantized, x_q: Quantized, groups: Groups, out_dtype: torch.dtype, gpu: Gpu | None = None) -> Tensor:
    """dw [E, N, K] = each expert's dy [R, N] transposed times its x [R, K]; zeros for an expert without rows. Raises
    CastError for operands that do not agree with each other or with ``groups``."""
    a_shape, b_shape = tuple(dy_q.data.shape), tuple(x_q.data.shape)
    if len(a_shape) != 2 or len(b_shape) != 2 or not a_shape[0] == b_shape[0] == groups.rows:
        raise CastError(
            f"grouped_wgrad: {list(a_shape)} and {list(b_shape)} do not agree in their rows, or with groups of "
            f"{groups.rows} rows. It takes dy [R, N] and x [R, K]."
        )
    gpu = gpu or tiles.gpu_of(dy_q.data.device)
    form = tiles.form(tiles.scale_block(dy_q.spec, 0), tiles.scale_block(x_q.spec, 0), fast=False, gpu=gpu)
    a, b = _of_rows(dy_q, 0), _of_rows(x_q, 0)
    out = torch.empty(groups.experts, a.free, b.free, dtype=out_dtype, device=a.codes.device)
    if out.numel() == 0:
        return out
    tile = tiles.choose(a.free, b.free, form, gpu, batch=groups.experts)
    launch(
        grouped_wgrad_kernel,
        (groups.experts * layout.ceil_div(a.free, tile.m) * layout.ceil_div(b.free, tile.n),),
        tiles.source(a.codes, a.free, groups.rows, (tile.m, tile.k), form.tma),
        tiles.source(b.codes, b.free, groups.rows, (tile.n, tile.k), form.tma),
        *(out, a.scale, b.scale, groups.starts, groups.sizes),
        *(a.free, b.free, a.codes.stride(0), b.codes.stride(0), *a.strides, *b.strides),
        **tiles.options(form, tile),
        OWNED=OWNED_ROWS,
    )
    return out


def _of_rows(q: Quantized, contract: int) -> _GroupedOperand:
    """Codes [R, columns] of all experts' rows, contracted along ``contract``; scales as ``Backend.quantize_rows``."""
    whole = q.spec.block[contract] == -1  # one scale a row, a column of an expert, or an expert
    held = cast.convert_to_k_major(q._replace(scale=q.scale[:1]) if whole else q, contract)
    scale = layout.as_bytes(q.scale if whole else held.scale)
    if not whole:
        strides = (0, *scale.stride())
    elif q.spec.block[1 - contract] == -1:
        strides = (scale.stride(0), 0, 0)
    else:
        strides = (0, scale.stride(0), 0) if contract == 1 else (scale.stride(0), scale.stride(1), 0)
    return _GroupedOperand(held.codes, scale, strides, held.codes.shape[0], held.free, held.contracted)


def _of_experts(q: Quantized, contract: int) -> _GroupedOperand:
    """Codes [E, N, K], contracted along ``contract`` of each [N, K], as rows of codes."""
    held = grouped_cast.convert_to_k_major(q, contract)
    experts, rows, width = held.codes.shape
    scale = layout.as_bytes(held.scale)
    if q.spec.block[1 - contract] == 1 and q.spec.block[contract] != -1 and q.spec.scale != "e8m0":
        # a scale for every row, as k_major has
        scale = torch.nn.functional.pad(scale, (0, 0, 0, rows - scale.shape[1]))
    codes = held.codes.view(experts * rows, width)
    return _GroupedOperand(codes, scale, scale.stride(), rows, held.free, held.contracted)
