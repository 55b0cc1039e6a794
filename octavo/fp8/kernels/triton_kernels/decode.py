"""Products of few rows: y [M, N] = x [M, K] @ w [N, K].T for M up to 64, as in decoding. Forward only.

Reading the weights bounds such a product: M rows do 2 M operations per byte of w, where a GPU could do hundreds. Tiles
of :mod:`gemm` leave multiprocessors idle (64 columns each: 16 programs for the 1,024 outputs of k and v), so these
kernels also split the contraction::

    part[p] = the product over stretch p of the contraction, and the scales that change along it      a program each
    y       = (part[0] + part[1] + ...) * the scales that hold for all of it + bias, rounded once     in this order

One tile holds all rows, so that w is read once; missing rows are read as zeros (TMA) or as the last row, and not
stored. The tile, the stretches and the order of the sum depend on N, K and the device, and on neither M nor the
position of a row. A second kernel adds the parts, which are stored in fp32 (4 M N bytes each); where one stretch is
enough there is no second kernel, and the sum is the sum of :mod:`gemm`, step by step. No atomics: their order varies.

Codes of x come from the preceding cast. A cast inside the kernel would be repeated by each program that multiplies them
(N / 64 times), and three times for q, k and v.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.fp8.arithmetic.cast import Quantized
from octavo.fp8.kernels import layout
from octavo.fp8.kernels.triton_kernels import cast, gemm, tiles
from octavo.fp8.kernels.triton_kernels.cast_plans import Job
from octavo.fp8.kernels.triton_kernels.contraction import apply_whole_scales, contract_scaled, store
from octavo.fp8.kernels.triton_kernels.launch import launch
from octavo.fp8.kernels.triton_kernels.tiles import Gpu, Tile

_JOIN = Tile(4, 128, 0, 4, 1)  # 4 values a thread; 128 columns share a scale at most


@triton.jit(do_not_specialize=["M", "K"])
def decode_kernel(
    x,  # [M, x_held] FP8 codes (uint8 in the interpreter): pointer, or TMA descriptor where FORM.tma
    w,  # [N, w_held] likewise; both have the contraction contiguous
    out,  # ALL: y [M, N] in its dtype; else parts fp32 [number of stretches, M, N]
    x_scale,  # [M or 1, blocks of K] fp32, or uint8 for e8m0
    w_scale,  # [free blocks of w, blocks of K] likewise
    bias,  # [N] any float, or None
    M,
    N,
    K,  # codes that are contracted; zeros follow up to the held ones
    stretch,  # codes of the contraction per program, a multiple of 128
    x_held,  # codes per row in memory, a multiple of 16
    w_held,
    x_stride_f,  # strides of the scales, in elements: free dimension, contraction
    x_stride_k,
    w_stride_f,
    w_stride_k,
    FORM: tl.constexpr,
    TILE: tl.constexpr,
    BIAS: tl.constexpr,  # whether to add the bias
    ALL: tl.constexpr,  # one stretch is the whole contraction
):
    """TILE.n columns of y, or of one part of it: all rows times one stretch of the contraction."""
    # Row 0 is the first row of every tile: TILE.m holds all M rows, so each byte of w is read by one program.
    col = tl.program_id(0) * TILE.n
    part = tl.program_id(1)
    x_scales = (x_scale, 0, M, x_stride_f, x_stride_k)
    w_scales = (w_scale, col, N, w_stride_f, w_stride_k)
    # Main loop over this stretch only; scales that change along it are applied in the loop.
    first = part * stretch
    last = tl.minimum(first + stretch, K)
    acc = contract_scaled((x, 0, M, x_held), (w, col, N, w_held), x_scales, w_scales, first, last, FORM, TILE)
    if ALL:
        # Epilogue in the same kernel: remaining scales, bias, one rounding.
        store(out, apply_whole_scales(acc, x_scales, w_scales, FORM, TILE), 0, col, M, N, bias, BIAS, TILE)
    else:
        # The part is stored unrounded (out is fp32) and without bias; join_kernel finishes it.
        store(out + part.to(tl.int64) * M * N, acc, 0, col, M, N, bias, False, TILE)


@triton.jit(do_not_specialize=["M"])
def join_kernel(
    parts,  # fp32 [PARTS, M, N], contiguous
    out,  # y [M, N] contiguous, fp32, bf16 or fp16
    x_scale,  # [M or 1, blocks of K] fp32, or uint8 for e8m0
    w_scale,  # [free blocks of w, blocks of K] likewise
    bias,  # [N] any float, or None
    M,
    N,
    x_stride_f,  # strides of the scales, in elements: free dimension, contraction
    x_stride_k,
    w_stride_f,
    w_stride_k,
    FORM: tl.constexpr,
    TILE: tl.constexpr,
    BIAS: tl.constexpr,  # whether to add the bias
    PARTS: tl.constexpr,
):
    """One tile of y: the sum of the parts in order, then the scales of the whole contraction, bias, one rounding."""
    row = tl.program_id(1) * TILE.m
    col = tl.program_id(0) * TILE.n
    r = row + tl.arange(0, TILE.m)
    c = col + tl.arange(0, TILE.n)
    inside = (r < M)[:, None] & (c < N)[None, :]
    where = parts + r.to(tl.int64)[:, None] * N + c[None, :]
    # Reduce in the order of the contraction, for every M: the bits of a row must not depend on the batch.
    acc = tl.load(where, mask=inside, other=0.0)
    for part in tl.static_range(1, PARTS):
        acc += tl.load(where + part * M * N, mask=inside, other=0.0)
    # Epilogue, as in a plain GEMM.
    x_scales = (x_scale, row, M, x_stride_f, x_stride_k)
    w_scales = (w_scale, col, N, w_stride_f, w_stride_k)
    store(out, apply_whole_scales(acc, x_scales, w_scales, FORM, TILE), row, col, M, N, bias, BIAS, TILE)


def decode(
    x_q: Quantized, w_q: Quantized, out_dtype: torch.dtype, bias: Tensor | None = None, gpu: Gpu | None = None
) -> Tensor:
    """y [M, N] = x [M, K] @ w [N, K].T + bias [N]; arguments, result and errors as in :func:`gemm.gemm`, which
    multiplies more rows than :data:`tiles.FEW`."""
    layout.check_fit("decode", x_q, 1, w_q, 1)
    rows, (cols, contracted) = x_q.data.shape[0], w_q.data.shape
    if rows > tiles.FEW:
        return gemm.gemm(x_q, 1, w_q, 1, out_dtype, bias, gpu)
    gpu = gpu or tiles.gpu_of(x_q.data.device)
    plan = _plan((x_q.spec, 1), (w_q.spec, 1), cols, contracted, gpu)
    out = torch.empty(rows, cols, dtype=out_dtype, device=x_q.data.device)
    if not rows or not cols:
        return out
    x, w, tile, parts = cast.convert_to_k_major(x_q, 1), cast.convert_to_k_major(w_q, 1), plan.tile, plan.parts
    bias = None if bias is None else bias.contiguous()
    sums, first_bias = out, bias
    if parts > 1:  # the bias is added once, by the second kernel
        sums, first_bias = torch.empty(parts, rows, cols, dtype=torch.float32, device=out.device), None
    scales, strides = (layout.as_bytes(x.scale), layout.as_bytes(w.scale)), (*x.scale.stride(), *w.scale.stride())
    launch(
        decode_kernel,
        (layout.ceil_div(cols, tile.n), parts),
        tiles.source(x.codes, rows, contracted, (tile.m, tile.k), plan.form.tma),
        tiles.source(w.codes, cols, contracted, (tile.n, tile.k), plan.form.tma),
        sums,
        *(*scales, first_bias),
        *(rows, cols, contracted, plan.stretch, x.codes.stride(0), w.codes.stride(0), *strides),
        **plan.constants,
        BIAS=first_bias is not None,
        ALL=parts == 1,
    )
    if parts > 1:
        launch(
            join_kernel,
            (layout.ceil_div(cols, _JOIN.n), layout.ceil_div(rows, _JOIN.m)),
            *(sums, out, *scales, bias, rows, cols, *strides),
            FORM=plan.form, TILE=_JOIN, BIAS=bias is not None, PARTS=parts, num_warps=_JOIN.warps,
        )  # fmt: skip
    return out


class Plan(NamedTuple):
    """What follows from casts, N and K; ``stretch``: codes of the contraction in each of the ``parts``."""

    form: tiles.Form
    tile: Tile
    stretch: int
    parts: int
    constants: dict[str, object]


@lru_cache(maxsize=4096)
def _plan(x: Job, w: Job, cols: int, contracted: int, gpu: Gpu) -> Plan:
    form = tiles.form(tiles.scale_block(*x), tiles.scale_block(*w), fast=True, gpu=gpu)
    if not contracted:  # a TMA descriptor of an empty tensor is invalid, and the kernel reads nothing
        form = form._replace(tma=False)
    tile = tiles.decode(form, gpu)
    stretch = tiles.contraction_per_program(cols, contracted, tile, gpu) if cols and contracted else tiles.STEP
    parts = max(1, layout.ceil_div(contracted, stretch))
    constants = {"FORM": form, "TILE": tile, "num_warps": tile.warps, "num_stages": tile.stages}
    return Plan(form, tile, stretch, parts, constants)
