"""Tensors moved by the orders of their axes, and back: bits are copied, nothing is computed.

`width`: of scales, how many places of the last axis an entry stands for (-1: all); blocks of so many stay together.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from octavo.sealing.axes import Axis, Layout, Orders, places
from octavo.sealing.draw import inverse
from octavo.sealing.errors import SealError


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
    found: np.ndarray = order[::width] // width
    if (order // width != found.repeat(width)[: len(order)]).any():
        raise SealError(f"an axis of {len(order)} has scales for {width} places each, which would be torn apart")
    return found
