"""Casts in Triton, with the bits of ``octavo/fp8/arithmetic/cast.py`` and the layout of
:mod:`octavo.fp8.kernels.layout`.

x is viewed as a matrix [rows, columns] with any two strides; a matrix with contiguous columns is cast as its transpose,
with the block transposed too, so that the kernels (``cast_tiles``) have one case. Shapes, strides and specs decide
which launches run::

    every block fits in a tile, or amax is given        one launch
    rows and columns, up to 16384 long                  zeros; rows, with the maxima of columns; columns (``cast_rows``)
    rows, columns or tensors longer than a tile         a pass for their amax (2 launches: zeros, maxima), then one

``cast_plans`` chooses tiles.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from octavo.fp8.arithmetic import cast
from octavo.fp8.arithmetic.cast import CastSpec, Quantized
from octavo.fp8.arithmetic.formats import E8M0
from octavo.fp8.kernels import layout
from octavo.fp8.kernels.capture import is_capturing
from octavo.fp8.kernels.groups import Groups
from octavo.fp8.kernels.layout import Operand, as_bytes, ceil_div
from octavo.fp8.kernels.triton_kernels import cast_rows, cast_tiles
from octavo.fp8.kernels.triton_kernels.cast_plans import (
    LONGEST_WITH_MAXIMA,
    TILES_OF_TWO,
    WHOLE,
    Block,
    Jobs,
    Tile,
    plan_cast,
    plan_maxima,
    plan_relay,
    plan_rows,
    transpose,
)
from octavo.fp8.kernels.triton_kernels.launch import launch
from octavo.fp8.kernels.triton_kernels.room import CastBuffers, allocate_shapes
from octavo.fp8.kernels.triton_kernels.tiles import gpu_of

_OUT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def quantize(x: Tensor, spec: CastSpec, contract: int = 1) -> Quantized:
    """See ``Backend.quantize``."""
    return _cast(x, ((spec, contract),))[0]


def quantize_both(x: Tensor, row: CastSpec, col: CastSpec, warps: int | None = None) -> tuple[Quantized, Quantized]:
    """See ``Backend.quantize_both``: one pass over x, or two where whole rows, columns or the tensor share a scale.

    ``warps``: 8 or 16 for blocks of 128, another tile than the default, to measure it.
    """
    first, second = _cast(x, ((row, 1), (col, 0)), tile=None if warps is None else TILES_OF_TWO[warps])
    return first, second


def quantize_jobs(x: Tensor, jobs: Jobs, top: Tensor | None = None) -> list[Quantized]:
    """x under one cast, or under two for contractions of 1 and 0; ``top`` [1]: the int32 pattern of its amax, if it is
    known and all blocks are the whole of x."""
    return _cast(x, jobs, amax=None if top is None else top.view(torch.float32))


def quantize_with_scale(
    x: Tensor, scale: Tensor, spec: CastSpec, amax: Tensor | None = None, contracts: Sequence[int] = (1,)
) -> list[Quantized]:
    """See ``Backend.quantize_with_scale``, for each of ``contracts``, 1 before 0; one launch if ``amax`` is given."""
    x_MK = cast.as_matrix(x)
    lay = cast.layout(x_MK.shape[0], x_MK.shape[1], spec.block)
    scale = cast.expand_to_grid("scale", scale, x_MK, lay, spec)
    amax = None if amax is None else cast.expand_to_grid("amax", amax, x_MK, lay, spec)
    return _cast(x, tuple((spec, contract) for contract in contracts), scale, amax)


def _cast(
    x: Tensor, jobs: Jobs, scale: Tensor | None = None, amax: Tensor | None = None, tile: Tile | None = None
) -> list[Quantized]:
    outs = run(cast.as_matrix(x), jobs, scale, amax, tile=tile)
    # A view may change the strides of dimensions of size 1, which layout.is_k_major reads: a matrix keeps its own.
    if x.dim() != 2:
        outs = [out._replace(data=out.data.view(x.shape)) for out in outs]
    return [Quantized(out.data, out.scale, spec) for out, (spec, _) in zip(outs, jobs, strict=True)]


def run(
    x: Tensor,
    jobs: Jobs,
    scale: Tensor | None = None,
    amax: Tensor | None = None,
    groups: Groups | None = None,
    tile: Tile | None = None,
) -> list[CastBuffers]:
    """Cast x [rows, columns], or a batch of such, for one contraction, or for 1 and 0 in that order.

    ``scale``, ``amax`` [row blocks, column blocks], fp32, contiguous: given by the caller, for one spec.
    ``groups``: rows belong to experts, and "all rows" of a block means all rows of an expert; the scale of such a block
    is [experts, column blocks]. ``tile``: another than the default. Raises CastError for a block that no tile can hold.
    """
    # Contiguous columns: cast the transpose, whose rows are contiguous.
    if groups is None and x.stride(-1) != 1 and x.stride(-2) == 1:
        flip = [None if t is None else t.mT.contiguous() for t in (scale, amax)]
        jobs_of_transpose = tuple((transpose(spec), 1 - contract) for spec, contract in reversed(jobs))
        outs = run(x.mT, jobs_of_transpose, flip[0], flip[1], tile=tile)
        return [o._replace(data=o.data.mT, scale=o.scale.mT) for o in reversed(outs)]
    if groups is None and scale is None and amax is None and tile is None and _by_row_and_column(x, jobs):
        return _cast_rows_then_columns(x, jobs)
    experts = None if groups is None else groups.experts
    plan = plan_cast(x.shape, x.stride(), jobs, scale is not None, amax is not None, experts, tile)
    laid = [allocate_shapes(place, x.device) for place in plan.rooms]
    if not x.numel():
        for out, (spec, _) in zip(laid, jobs, strict=True):
            out.scales.fill_(127 if spec.scale == "e8m0" else 1)
        if scale is not None:
            stored = scale if jobs[0][0].scale != "e8m0" else (scale.view(torch.int32) >> 23).to(torch.uint8)
            for out in laid:
                as_bytes(out.scale).copy_(stored)
        return laid

    # Maxima that the cast cannot take from its own tiles need a separate pass before it.
    tops = {} if amax is None else {spec.block: amax.view(torch.int32) for spec, _ in jobs}
    if plan.longer:
        tops = _maxima(x, plan.longer, groups)
    # x is passed for pointers that the constants make unused.
    args: list[tuple[object, ...]] = [(x, 0, x, 0, 0, 0, x, x), (x, 0, x, 0, 0, 0, x, x)]
    for out, numbers, (spec, contract) in zip(laid, plan.numbers, jobs, strict=True):
        top = tops.get(spec.block)
        if groups is not None and spec.block[0] == -1:
            _write_scales(tops[spec.block], out.scales, spec)
        pointers = (x if top is None else top, x if scale is None else scale)
        args[contract] = (out.codes, numbers[0], out.scales, *numbers[1:], *pointers)
    launch(
        cast_tiles.cast_kernel, plan.grid, x, *plan.sizes, *args[1], *args[0], *_pointers(x, groups), **plan.constants
    )
    return laid


def _by_row_and_column(x: Tensor, jobs: Jobs) -> bool:
    """True for a matrix with whole rows and whole columns as blocks, whose rows one program can hold."""
    blocks = [spec.block for spec, _ in jobs]
    return x.dim() == 2 and blocks == [(1, -1), (-1, 1)] and x.numel() > 0 and x.shape[1] <= LONGEST_WITH_MAXIMA


def _cast_rows_then_columns(x: Tensor, jobs: Jobs) -> list[CastBuffers]:
    (row, _), column = jobs
    plan = plan_rows(x.shape, x.stride(), row, gpu_of(x.device).processors)
    out, top = allocate_shapes(plan.place, x.device), zeros(x.shape[1], x.device)
    buffers = (out.codes, plan.pitch, out.scales, plan.scale_step, top)
    launch(cast_rows.rows_kernel, plan.grid, x, *plan.sizes, *buffers, **plan.constants)
    return [out, *run(x, (column,), amax=top.view(torch.float32))]


def _pointers(x: Tensor, groups: Groups | None) -> tuple[Tensor, Tensor, Tensor]:
    return (x, x, x) if groups is None else (groups.sizes, groups.starts, groups.tiles)


def _maxima(x: Tensor, blocks: tuple[Block, ...], groups: Groups | None) -> dict[Block, Tensor]:
    """amax patterns (int32) of whole rows, columns or tensors of x [*batch, rows, columns], by block, in one pass.

    Columns and tensors have one for each matrix of a batch, or for each expert in ``groups``.
    """
    plan = plan_maxima(x.shape, x.stride(), blocks, None if groups is None else groups.experts)
    buffer = zeros(sum(plan.counts), x.device)
    tops = dict(zip(blocks, buffer.split(plan.counts) if len(blocks) > 1 else (buffer,), strict=True))
    pointers = (tops.get(b, buffer) for b in WHOLE)
    launch(cast_tiles.amax_kernel, plan.grid, x, *plan.sizes, *pointers, *_pointers(x, groups), **plan.constants)
    return tops


_slabs: dict[tuple[int, torch.device, int], Tensor] = {}  # the rest of a slab, by thread, device and stream
_SLAB = 4096


def zeros(count: int, device: torch.device) -> Tensor:
    """int32 zeros [count] to take maxima in.

    A few zeros are cut from a slab that is filled once for thousands of casts: otherwise each cast would need a launch
    for them. While a CUDA graph is captured, the zeros are its own, so that every replay clears them.
    """
    if count > _SLAB // 64 or is_capturing(device):
        return torch.zeros(count, dtype=torch.int32, device=device)
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    key = threading.get_ident(), device, stream
    left = _slabs.get(key)
    if left is None or left.shape[0] < count:
        # The slab outlives the modes that are active now: an accountant of memory would charge it to one layer.
        with torch.inference_mode(False), _disable_current_modes():
            left = torch.zeros(_SLAB, dtype=torch.int32, device=device)
    cut = -(-count // 4) * 4  # pieces begin at multiples of 16 bytes
    _slabs[key] = left[cut:]
    return left[:count]


def _write_scales(top: Tensor, scales: Tensor, spec: CastSpec) -> None:
    """Store the scale of each amax pattern, in the same order."""
    n, e8m0 = top.numel(), spec.scale == "e8m0"
    constants = {"POW2": spec.scale != "fp32", "E5M2": spec.format == "e5m2", "E8M0": e8m0, "BLOCK": 1024}
    launch(cast_tiles.scales_kernel, (ceil_div(n, 1024),), top, scales, n, **constants)


def dequantize(q: Quantized, dtype: torch.dtype = torch.float32) -> Tensor:
    """See ``octavo.fp8.arithmetic.cast.dequantize``; codes and scales may have any strides."""
    if dtype not in _OUT_DTYPES:
        return dequantize(q).to(dtype)
    cast.check_scales(q)
    codes = q.data.view(torch.uint8).reshape(q.data.shape[:-1].numel(), q.data.shape[-1])
    rows, cols = codes.shape
    out = torch.empty(q.data.shape, dtype=dtype, device=codes.device)
    scale = as_bytes(q.scale)
    high = max(128 if codes.stride(1) != 1 else 32, q.spec.block[0])
    across = ceil_div(cols, 128)
    launch(
        cast_tiles.dequantize_kernel,
        (ceil_div(rows, high) * across,),
        *(codes, *codes.stride(), scale, *scale.stride(), out, rows, cols, across),
        BR=q.spec.block[0],
        BC=q.spec.block[1],
        E5M2=q.spec.format == "e5m2",
        E8M0=q.scale.dtype is E8M0,
        EVEN=math.gcd(16, cols),
        TR=high,
        TC=128,
        num_warps=high // 8,
    )
    return out


def convert_to_k_major(q: Quantized, contract: int) -> Operand:
    """Convert as ``layout.k_major``, with a kernel for the copy of codes if one is needed."""
    return layout.k_major(q, contract, copy_to_layout)


def copy_to_layout(q: Quantized, contract: int) -> Quantized:
    """See ``Backend.copy_to_layout``. Tiles of 128 x 128 bytes read whole lines along one dimension and write them
    along the other."""
    data = q.data
    place, grid, numbers, sizes, constants = plan_relay(data.shape, data.stride(), q.spec, contract)
    codes = torch.empty_strided(place.codes, place.strides, dtype=torch.uint8, device=data.device)
    launch(cast_tiles.relay_kernel, grid, data.view(torch.uint8), *numbers, codes, *sizes, **constants)
    laid = codes.view(data.dtype)
    return q._replace(data=laid if place.data == place.codes else laid.as_strided(place.data, place.strides))
