"""Describes the axes of tensors and permutes tensors: bits are copied, nothing is computed.

segment   (name of a permutation, unit): its items in sequence, each with `unit` positions
axis      a sequence of segments; an axis without any is not permuted
layout    the axes of a tensor, in its shape or another view; for expert tensors a list of axes per expert

`width`: for scales, the number of positions of the last axis that an entry covers (-1: all); such blocks stay together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from octavo.sealing.draw import invert
from octavo.sealing.errors import SealError


class Segment(NamedTuple):
    """The items of a permutation in sequence, each with `unit` positions."""

    name: str
    unit: int = 1


Axis = tuple[Segment, ...]
FIXED: Axis = ()


@dataclass(frozen=True)
class Layout:
    """The axes of one tensor.

    axes   of the view `shape`
    shape  of the view to which the axes refer; None for the tensor's shape
    each   for stacked experts: the axes after the first, expert by expert in sealed order
    """

    axes: tuple[Axis, ...]
    shape: tuple[int, ...] | None = None
    each: tuple[tuple[Axis, ...], ...] = ()


Orders = Mapping[str, np.ndarray]


def source_positions(axis: Axis, orders: Orders) -> np.ndarray | None:
    """Return the plain position of each position of the sealed axis, or None if the axis is not permuted."""
    if not axis:
        return None
    segments, start = [], 0
    for name, unit in axis:
        order = orders[name]
        segments.append((start + order[:, None] * unit + np.arange(unit)).reshape(-1))
        start += len(order) * unit
    return np.concatenate(segments)


def axis_size(axis: Axis, sizes: Mapping[str, int]) -> int:
    """Return the number of positions of an axis."""
    return sum(sizes[name] * unit for name, unit in axis)


def seal_tensor(tensor: Tensor, layout: Layout, orders: Orders, width: int = 1) -> Tensor:
    """Permute a tensor of the plain model to the sealed model's order."""
    return _permute_tensor(tensor, layout, orders, False, width)


def unseal_tensor(tensor: Tensor, layout: Layout, orders: Orders, width: int = 1) -> Tensor:
    """Permute a tensor of a sealed model back to the plain order."""
    return _permute_tensor(tensor, layout, orders, True, width)


def _permute_tensor(tensor: Tensor, layout: Layout, orders: Orders, back: bool, width: int) -> Tensor:
    view = tensor if layout.shape is None else tensor.reshape(layout.shape)
    if not layout.each:
        return _permute_axes(view, layout.axes, orders, back, width).reshape(tensor.shape)
    (first,) = layout.axes
    order = source_positions(first, orders)
    assert order is not None
    out = torch.empty_like(view)
    for sealed, plain in enumerate(order.tolist()):  # expert `sealed` of the sealed model is `plain` of the plain one
        source, target = (sealed, plain) if back else (plain, sealed)
        out[target] = _permute_axes(view[source], layout.each[sealed], orders, back, width)
    return out


def _permute_axes(tensor: Tensor, axes: tuple[Axis, ...], orders: Orders, back: bool, width: int) -> Tensor:
    for number, axis in enumerate(axes):
        if (order := source_positions(axis, orders)) is not None:
            if width != 1 and number == len(axes) - 1:
                order = _block_order(order, len(order) if width == -1 else width)
            index: np.ndarray = invert(order) if back else order
            tensor = tensor.index_select(number, torch.from_numpy(index))
    return tensor


def _block_order(order: np.ndarray, width: int) -> np.ndarray:
    """Return the order of blocks of `width` positions. Raises SealError if a block does not stay together."""
    blocks: np.ndarray = order[::width] // width
    if (order // width != blocks.repeat(width)[: len(order)]).any():
        raise SealError(f"an axis of {len(order)} has scales for blocks of {width}, which the permutation would split")
    return blocks
