"""Figures of a batch that is split into micro-batches and over ranks.

Every function of this package that returns figures returns its part of the whole batch's figures: a mean is already
divided by the count of the whole batch, so that parts are added; figures named ``min`` or ``max`` are the smallest or
largest of the parts. An empty part has +inf as its smallest and -inf as its largest value, which change nothing; once
all parts are combined, :func:`whole` returns 0 for a figure that no part had.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

import torch
from torch import Tensor

Figures = dict[str, Tensor]

# Names in TensorBoard, for users who compare with TRL: Octavo's name -> TRL's name of the same figure. All other names
# are the same in TRL or exist only here, except reward_std: here the mean of the groups' deviations, in TRL the
# deviation over all completions.
TRL_NAMES = {
    "length": "completions/mean_length",
    "logp_gap_mean": "sampling/sampling_logp_difference/mean",
    "logp_gap_max": "sampling/sampling_logp_difference/max",
    "reward_std": "reward_std_of_groups",
    "value_loss": "loss/value_avg",  # from the versions of TRL that had PPO
    "value_clip_ratio": "val/clipfrac_avg",
}


class Ranks(Protocol):
    """The part of :class:`octavo.parallel.World` that figures need: elementwise reductions over ranks."""

    def sum(self, tensor: Tensor) -> Tensor: ...
    def all_reduce_max(self, tensor: Tensor) -> Tensor: ...


def kind(name: str) -> str:
    """Return how parts of a figure are combined, by the last word of its name: `min`, `max` or `sum`."""
    match = re.search(r"(?:^|[/_])(min|max)$", name)
    return match[1] if match else "sum"


def lowest(values: Tensor, where: Tensor) -> Tensor:
    """Return the smallest of the values that count, or +inf if none does. Does not synchronize with the GPU."""
    return torch.where(where, values, math.inf).amin() if len(values) else values.new_tensor(math.inf)


def highest(values: Tensor, where: Tensor) -> Tensor:
    return -lowest(-values, where)


def combine_figures(parts: Iterable[Mapping[str, Tensor]]) -> Figures:
    """Combine the figures of several parts; a name may be missing in a part."""
    total: Figures = {}
    combine: dict[str, Callable[..., Tensor]] = {"sum": torch.add, "min": torch.minimum, "max": torch.maximum}
    for part in parts:
        for name, value in part.items():
            total[name] = combine[kind(name)](total[name], value) if name in total else value
    return total


def whole(figures: Mapping[str, Tensor], ranks: Ranks) -> dict[str, float]:
    """Reduce the batch's figures over all ranks, as numbers. All ranks must pass the same names. Two collectives."""
    sums = {name: float(value) for name, value in figures.items() if kind(name) == "sum"}
    sign = {"min": -1.0, "max": 1.0}
    tops = {name: sign[kind(name)] * float(value) for name, value in figures.items() if kind(name) != "sum"}
    added = ranks.sum(torch.tensor([*sums.values()], dtype=torch.float64)).tolist()
    largest = ranks.all_reduce_max(torch.tensor([*tops.values()], dtype=torch.float64)).tolist()
    combined = dict(zip(sums, added, strict=True))
    combined |= {name: sign[kind(name)] * value for name, value in zip(tops, largest, strict=True)}
    return {name: 0.0 if math.isinf(combined[name]) and name in tops else combined[name] for name in figures}
