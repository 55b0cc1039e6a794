"""Tensors moved by the orders of their axes, and back: bits are copied, nothing is computed."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from octavo.sealing.axes import Axis, Layout, Orders, places
from octavo.sealing.draw import inverse


def sealed(tensor: Tensor, layout: Layout, orders: Orders) -> Tensor:
    """A tensor of the plain model as the sealed one has it."""
    return _moved(tensor, layout, orders, back=False)


def plain(tensor: Tensor, layout: Layout, orders: Orders) -> Tensor:
    """A tensor of a sealed model as the plain one has it."""
    return _moved(tensor, layout, orders, back=True)


def _moved(tensor: Tensor, layout: Layout, orders: Orders, back: bool) -> Tensor:
    view = tensor if layout.shape is None else tensor.reshape(layout.shape)
    if not layout.each:
        return _by(view, layout.axes, orders, back).reshape(tensor.shape)
    (first,) = layout.axes
    order = places(first, orders)
    assert order is not None
    out = torch.empty_like(view)
    for at, of in enumerate(order.tolist()):  # expert `at` of the sealed model is `of` of the plain one
        source, target = (at, of) if back else (of, at)
        out[target] = _by(view[source], layout.each[at], orders, back)
    return out


def _by(tensor: Tensor, axes: tuple[Axis, ...], orders: Orders, back: bool) -> Tensor:
    for number, axis in enumerate(axes):
        if (order := places(axis, orders)) is not None:
            index: np.ndarray = inverse(order) if back else order
            tensor = tensor.index_select(number, torch.from_numpy(index))
    return tensor
