"""What a cast writes into: buffers for codes and scales, padded as :mod:`octavo.fp8.kernels.layout` has it.

Codes and scales of one layout are two allocations and at most two views more; both layouts in one would keep the codes
of the forward in memory for as long as the backward's are.
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


class Laid(NamedTuple):
    """What a kernel fills: ``codes`` uint8 and ``scales`` fp32 or uint8, the buffers with their padding; ``data`` and
    ``scale``, the views of the real ones, [*batch, rows, columns] and [*batch, row blocks, column blocks]."""

    codes: Tensor
    scales: Tensor
    data: Tensor
    scale: Tensor


class Room(NamedTuple):
    """What a cast of one geometry is written into, in the order of the matrix whatever is contiguous in memory.

    Sizes of the buffer of codes, of the real ones in it, and the strides of both; the same of scales; ``padding``: the
    kernel writes row and column blocks up to multiples of these. ``dtype``: of codes; ``e8m0``: that of scales.
    """

    codes: tuple[int, ...]
    data: tuple[int, ...]
    strides: tuple[int, ...]
    scales: tuple[int, ...]
    scale: tuple[int, ...]
    steps: tuple[int, ...]
    padding: tuple[int, int]
    dtype: torch.dtype
    e8m0: bool


def allocate(x: Tensor, spec: CastSpec, contract: int, groups: Groups | None = None) -> Laid:
    """Room for the cast of x [*batch, rows, columns], for each of a batch. Nothing is written yet."""
    return make(room(x.shape, spec, contract, None if groups is None else groups.experts), x.device)


def make(place: Room, device: torch.device) -> Laid:
    e8m0 = place.e8m0
    codes = torch.empty_strided(place.codes, place.strides, dtype=torch.uint8, device=device)
    scales = torch.empty_strided(place.scales, place.steps, dtype=torch.uint8 if e8m0 else torch.float32, device=device)
    data, scale = codes.view(place.dtype), scales.view(E8M0) if e8m0 else scales
    if place.data != place.codes:
        data = data.as_strided(place.data, place.strides)
    if place.scale != place.scales:
        scale = scale.as_strided(place.scale, place.steps)
    return Laid(codes, scales, data, scale)


@lru_cache(maxsize=4096)
def room(shape: torch.Size, spec: CastSpec, contract: int, experts: int | None) -> Room:
    """Worked out once for each shape. ``experts``: how many share the rows, where "all rows" is all of an expert."""
    *batch, rows, cols = shape
    free, contracted = layout.padded_sizes(rows, cols, spec, contract)
    codes, pitch = ((free, contracted), (contracted, 1)) if contract == 1 else ((contracted, free), (1, contracted))
    grid, pads, by_row = layout.grid_of(rows, cols, spec), (1, 1), contract == 1
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
    return Room(*sizes, pads, spec.fmt.dtype, spec.scale == "e8m0")
