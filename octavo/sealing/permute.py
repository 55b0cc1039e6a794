"""The axes of tensors as data, and tensors moved by the orders of their axes: bits are copied, nothing is computed.

stretch   (name of a permutation, unit): its items one after the other, each `unit` places long
axis      stretches one after the other; of none: its places stay
layout    axes of a tensor, of its shape or of another view of it; in tensors of experts one list of axes each

`width`: of scales, how many places of the last axis an entry stands for (-1: all); blocks of so many stay together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from octavo.sealing.draw import inverse
from octavo.sealing.errors import SealError


class Stretch(NamedTuple):
    """The items of a permutation one behind the other, each of `unit` places."""

    name: str
    unit: int = 1


Axis = tuple[Stretch, ...]
FIXED: Axis = ()


@dataclass(frozen=True)
class Layout:
    """The axes of one tensor.

    axes   of the view `shape`
    shape  None: the tensor's own; else the view that the axes are of
    each   of stacked experts: the axes behind the first, expert by expert in sealed order
    """

    axes: tuple[Axis, ...]
    shape: tuple[int, ...] | None = None
    each: tuple[tuple[Axis, ...], ...] = ()


Orders = Mapping[str, np.ndarray]


def places(axis: Axis, orders: Orders) -> np.ndarray | None:
    """The place in the plain axis that each place of the sealed one is taken from; None where all stay."""
    if not axis:
        return None
    stretches, start = [], 0
    for name, unit in axis:
        order = orders[name]
        stretches.append((start + order[:, None] * unit + np.arange(unit)).reshape(-1))
        start += len(order) * unit
    return np.concatenate(stretches)


def size(axis: Axis, sizes: Mapping[str, int]) -> int:
    """Places of an axis."""
    return sum(sizes[name] * unit for name, unit in axis)


def sealed(tensor: Tensor, layout: Layout, orders: Orders, width: int = 1) -> Tensor:
    """A tensor of the plain model as the sealed one has it."""
    return _moved(tensor, layout, orders, False, width)


def plain(tensor: Tensor, layout: Layout, orders: Orders, width: int = 1) -> Tensor:
    """A tensor of a sealed model as the plain one has it."""
    return _moved(tensor, layout, orders, True, width)


def _moved(tensor: Tensor, layout: Layout, orders: Orders, back: bool, width: int) -> Tensor:
    view = tensor if layout.shape is None else tensor.reshape(layout.shape)
    if not layout.each:
        return _by(view, layout.axes, orders, back, width).reshape(tensor.shape)
    (first,) = layout.axes
    order = places(first, orders)
    assert order is not None
    out = torch.empty_like(view)
    for at, of in enumerate(order.tolist()):  # expert `at` of the sealed model is `of` of the plain one
        source, target = (at, of) if back else (of, at)
        out[target] = _by(view[source], layout.each[at], orders, back, width)
    return out


def _by(tensor: Tensor, axes: tuple[Axis, ...], orders: Orders, back: bool, width: int) -> Tensor:
    for number, axis in enumerate(axes):
        if (order := places(axis, orders)) is not None:
            if width != 1 and number == len(axes) - 1:
                order = _of_blocks(order, len(order) if width == -1 else width)
            index: np.ndarray = inverse(order) if back else order
            tensor = tensor.index_select(number, torch.from_numpy(index))
    return tensor


def _of_blocks(order: np.ndarray, width: int) -> np.ndarray:
    """The order of blocks of `width` places. Raises SealError where one does not stay together."""
    blocks: np.ndarray = order[::width] // width
    if (order // width != blocks.repeat(width)[: len(order)]).any():
        raise SealError(f"an axis of {len(order)} has scales for {width} places each, which would be torn apart")
    return blocks
