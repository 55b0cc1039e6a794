"""What the axes of a tensor are made of, as data: stretches of items that one permutation moves.

stretch   (name of a permutation, unit): its items one behind the other, each `unit` places long
axis      stretches one behind the other; of none: its places stay
layout    axes of a tensor, of its shape or of another view of it; in tensors of experts one list of axes each
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


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
    found, start = [], 0
    for name, unit in axis:
        order = orders[name]
        found.append((start + order[:, None] * unit + np.arange(unit)).reshape(-1))
        start += len(order) * unit
    return np.concatenate(found)


def size(axis: Axis, sizes: Mapping[str, int]) -> int:
    """Places of an axis."""
    return sum(sizes[name] * unit for name, unit in axis)
