"""The three GEMMs of every recipe in one kernel: out [M, N] = a contracted with b.

fwd contracts dimension 1 of both (x [M, K], w [N, K]), dgrad dimension 1 of dy [M, N] and 0 of w [N, K], wgrad
dimension 0 of both (dy [M, N], x [M, K]). ``cast.convert_to_k_major`` brings each operand into one layout, rows of
codes with the contraction contiguous, so that the kernel has a single case; its arithmetic is in ``contraction``.
:mod:`tiles` chooses the form of the kernel.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.fp8.arithmetic.cast import CastError, Quantized
from octavo.fp8.kernels import layout
from octavo.fp8.kernels.triton_kernels import cast, tiles
from octavo.fp8.kernels.triton_kernels.cast_plans import Job
from octavo.fp8.kernels.triton_kernels.contraction import contract, place, store
from octavo.fp8.kernels.triton_kernels.launch import launch
from octavo.fp8.kernels.triton_kernels.tiles import Gpu, Tile


@triton.jit(do_not_specialize=["M", "K"])
def gemm_kernel(
    a,  # [M, a_held] FP8 codes (uint8 in the interpreter): pointer, or TMA descriptor where FORM.tma
    b,  # [N, b_held] likewise; both have the contraction contiguous
    out,  # [M, N] contiguous, fp32, bf16 or fp16
    a_scale,  # [a's free blocks, blocks of K] fp32, or uint8 for e8m0
    b_scale,  # [b's free blocks, blocks of K] likewise
    bias,  # [N] any float, or None
    M,
    N,
    K,  # codes that are contracted; zeros follow up to the held ones
    a_held,  # codes per row in memory, a multiple of 16
    b_held,
    a_stride_f,  # strides of the scales, in elements: free dimension, contraction
    a_stride_k,
    b_stride_f,
    b_stride_k,
    FORM: tl.constexpr,
    TILE: tl.constexpr,
    BIAS: tl.constexpr,  # whether to add the bias
    GROUP_M: tl.constexpr,  # row tiles that go down together (contraction.place)
):
    """One tile [TILE.m, TILE.n] of out = a @ b.T times the scales, plus bias."""
    # M and K are not specialized: a new batch size or sequence length must not compile the kernel again.
    i, j = place(tl.program_id(0), tl.cdiv(M, TILE.m), tl.cdiv(N, TILE.n), GROUP_M)
    row = i * TILE.m
    col = j * TILE.n
    # Main loop over K; all scales are applied, in fp32.
    acc = contract(
        (a, row, M, a_held),
        (b, col, N, b_held),
        (a_scale, row, M, a_stride_f, a_stride_k),
        (b_scale, col, N, b_stride_f, b_stride_k),
        0,
        K,
        FORM,
        TILE,
    )
    # Epilogue: bias, one rounding, masked store.
    store(out, acc, row, col, M, N, bias, BIAS, TILE)


def gemm(
    a_q: Quantized,
    a_contract: int,
    b_q: Quantized,
    b_contract: int,
    out_dtype: torch.dtype,
    bias: Tensor | None = None,
    gpu: Gpu | None = None,
    tile: Tile | None = None,
    fixed: bool = False,
) -> Tensor:
    """Contract dimension ``a_contract`` of a with dimension ``b_contract`` of b.

    Args:
        a_q, b_q: matrices under any specs whose scales hold for 32, 128 or all of the contraction.
        a_contract, b_contract: the contracted dimensions, 0 or 1; both 1 is a forward GEMM, which may accumulate fast.
        out_dtype: fp32, bf16 or fp16; the result is rounded once, to this.
        bias: [free dimension of b], added in fp32 before the rounding.
        gpu, tile: used instead of the device's own, for tests and measurements.
        fixed: use the one tile that serves every number of rows (:func:`tiles.fixed`).

    Returns:
        [free dimension of a, free dimension of b], contiguous.

    Raises CastError for operands that do not agree, or scales that change at another interval along the contraction.
    """
    if a_q.data.dim() != 2 or b_q.data.dim() != 2 or a_q.data.shape[a_contract] != b_q.data.shape[b_contract]:
        raise CastError(
            f"gemm: the operands are {list(a_q.data.shape)} and {list(b_q.data.shape)}; it takes two matrices that "
            f"agree in dimension {a_contract} of the first and {b_contract} of the second. Flatten leading dimensions."
        )
    sizes = a_q.data.shape[1 - a_contract], b_q.data.shape[1 - b_contract], a_q.data.shape[a_contract]
    jobs, gpu = ((a_q.spec, a_contract), (b_q.spec, b_contract)), gpu or tiles.gpu_of(a_q.data.device)
    plan = _plan(jobs, sizes, gpu, tile, bias is not None, fixed)
    out = torch.empty(sizes[:2], dtype=out_dtype, device=a_q.data.device)
    if 0 in plan.grid:
        return out
    # Operands that were cast for another contraction are copied into the kernel's layout here.
    a, b, tile = cast.convert_to_k_major(a_q, a_contract), cast.convert_to_k_major(b_q, b_contract), plan.tile
    bias = None if bias is None else bias.contiguous()
    launch(
        gemm_kernel,
        plan.grid,
        tiles.source(a.codes, a.free, a.contracted, (tile.m, tile.k), plan.tma),
        tiles.source(b.codes, b.free, b.contracted, (tile.n, tile.k), plan.tma),
        out,
        *(layout.as_bytes(a.scale), layout.as_bytes(b.scale), bias),
        *(*sizes, a.codes.stride(0), b.codes.stride(0), *a.scale.stride(), *b.scale.stride()),
        **plan.constants,
    )
    return out


class Plan(NamedTuple):
    """The parts of a launch that follow from casts and sizes; ``tma``: the operands are TMA descriptors."""

    tile: Tile
    tma: bool
    grid: tuple[int]
    constants: dict[str, object]


@lru_cache(maxsize=4096)
def _plan(
    jobs: tuple[Job, Job], sizes: tuple[int, int, int], gpu: Gpu, tile: Tile | None, bias: bool, fixed: bool
) -> Plan:
    """Computed once for all GEMMs of these casts and sizes (rows, columns, contraction)."""
    rows, cols, contracted = sizes
    grains = tiles.scale_block(*jobs[0]), tiles.scale_block(*jobs[1])
    form = tiles.form(*grains, fast=jobs[0][1] == jobs[1][1] == 1, gpu=gpu)
    if not contracted:  # a TMA descriptor of an empty tensor is invalid, and the kernel reads nothing
        form = form._replace(tma=False)
    tile = tile or (tiles.invariant_tile(form, gpu) if fixed else tiles.choose(rows, cols, form, gpu))
    grid = (layout.ceil_div(rows, tile.m) * layout.ceil_div(cols, tile.n),)
    return Plan(tile, form.tma, grid, tiles.options(form, tile) | {"BIAS": bias})
