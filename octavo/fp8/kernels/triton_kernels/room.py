"""The buffers that a cast fills: codes and scales, padded as in :mod:`octavo.fp8.kernels.layout`.

Codes and scales of one layout are two allocations and at most two more views; one allocation for both layouts would
keep the codes of the forward in memory as long as the codes of the backward.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.fp8.arithmetic.cast import CastSpec
from octavo.fp8.arithmetic.formats import E8M0
from octavo.fp8.kernels import layout
from octavo.fp8.kernels.groups import Groups
from octavo.fp8.kernels.layout import round_up


class CastBuffers(NamedTuple):
    """The padded buffers that a cast kernel fills, ``codes`` uint8 and ``scales`` fp32 or uint8.

    ``data`` [*batch, rows, columns] and ``scale`` [*batch, row blocks, column blocks] are views of the real elements.
    """

    codes: Tensor
    scales: Tensor
    data: Tensor
    scale: Tensor


class BufferShapes(NamedTuple):
    """Sizes and strides of the buffers for a cast of one geometry, in the order of the matrix dimensions."""

    codes: tuple[int, ...]  # sizes of the buffer of codes, with padding
    data: tuple[int, ...]  # sizes of its real part
    strides: tuple[int, ...]  # of both
    scales: tuple[int, ...]  # sizes of the buffer of scales, with padding
    scale: tuple[int, ...]  # sizes of its real part
    steps: tuple[int, ...]  # strides of both
    padding: tuple[int, int]  # the kernel writes row and column blocks up to multiples of these
    dtype: torch.dtype  # of the codes
    e8m0: bool  # scales are bytes instead of fp32


def allocate(x: Tensor, spec: CastSpec, contract: int, groups: Groups | None = None) -> CastBuffers:
    """Allocate uninitialized buffers for the cast of x [*batch, rows, columns]."""
    return allocate_shapes(buffer_shapes(x.shape, spec, contract, None if groups is None else groups.experts), x.device)


def allocate_shapes(shapes: BufferShapes, device: torch.device) -> CastBuffers:
    """Allocate the buffers of ``shapes``, with views of their real elements."""
    e8m0 = shapes.e8m0
    codes = torch.empty_strided(shapes.codes, shapes.strides, dtype=torch.uint8, device=device)
    scales = torch.empty_strided(
        shapes.scales, shapes.steps, dtype=torch.uint8 if e8m0 else torch.float32, device=device
    )
    data, scale = codes.view(shapes.dtype), scales.view(E8M0) if e8m0 else scales
    if shapes.data != shapes.codes:
        data = data.as_strided(shapes.data, shapes.strides)
    if shapes.scale != shapes.scales:
        scale = scale.as_strided(shapes.scale, shapes.steps)
    return CastBuffers(codes, scales, data, scale)


@lru_cache(maxsize=4096)
def buffer_shapes(shape: torch.Size, spec: CastSpec, contract: int, experts: int | None) -> BufferShapes:
    """Compute the shapes of buffers, once for each input shape.

    If rows belong to experts, ``experts`` is their number, and "all rows" of a block are all rows of an expert.
    """
    *batch, rows, cols = shape
    free, contracted = layout.padded_sizes(rows, cols, spec, contract)
    codes, pitch = ((free, contracted), (contracted, 1)) if contract == 1 else ((contracted, free), (1, contracted))
    grid, pads, by_row = layout.grid_shape(rows, cols, spec), (1, 1), contract == 1
    # Scales: one per expert; or along the contraction, in the order that GEMMs read, padded; or in plain order.
    if experts is not None and spec.block[0] == -1:
        grid, by_row = (experts, grid[1]), True
    elif spec.block[contract] != -1 and spec.scale != "e8m0":
        by_free = layout.scales_by_contraction(spec, contract)
        by_row = by_free != by_row
        pad = (layout.ALIGN, 1) if by_free else (1, layout.SCALE_ALIGN)  # of free and contracted blocks
        pads = pad if contract == 1 else (pad[1], pad[0])
    scales = round_up(grid[0], pads[0]), round_up(grid[1], pads[1])
    step = (scales[1], 1) if by_row else (1, scales[0])
    strides = (codes[0] * codes[1], *pitch) if batch else pitch
    steps = (scales[0] * scales[1], *step) if batch else step
    sizes = (*batch, *codes), tuple(shape), strides, (*batch, *scales), (*batch, *grid), steps
    return BufferShapes(*sizes, pads, spec.fmt.dtype, spec.scale == "e8m0")
