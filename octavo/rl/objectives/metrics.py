"""Figures of a batch that was cut into micro-batches and spread over ranks.

Every function of this package that gives figures gives its part of the whole batch's: a mean is divided by the count of
the whole batch already, so that parts are added; what is called ``min`` or ``max`` is the smallest or largest of the
parts. A part with nothing to look at has +inf as its smallest and -inf as its largest, which change nothing; once all
parts are together, :func:`whole` says 0 for what nobody had.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

import torch
from torch import Tensor

Figures = dict[str, Tensor]

# Names in TensorBoard, for readers who compare with TRL: ours -> TRL's of the same figure. All other names are TRL's or
# ours alone, but for reward_std: ours is the mean of the groups' deviations, TRL's the deviation of all completions.
TRL_NAMES = {
    "length": "completions/mean_length",
    "logp_gap_mean": "sampling/sampling_logp_difference/mean",
    "logp_gap_max": "sampling/sampling_logp_difference/max",
    "reward_std": "reward_std_of_groups",
    "value_loss": "loss/value_avg",  # as TRL had it while it had PPO
    "value_clip_ratio": "val/clipfrac_avg",
}


class Ranks(Protocol):
    """What :class:`octavo.parallel.World` offers here: elementwise reductions over ranks."""

    def sum(self, tensor: Tensor) -> Tensor: ...
    def all_reduce_max(self, tensor: Tensor) -> Tensor: ...


def kind(name: str) -> str:
    """How parts of a figure are put together, by its last word: `min`, `max` or `sum`."""
    found = re.search(r"(?:^|[/_])(min|max)$", name)
    return found[1] if found else "sum"


def lowest(values: Tensor, where: Tensor) -> Tensor:
    """The smallest of the values that count; +inf of none. Nothing waits for a GPU."""
    return torch.where(where, values, math.inf).amin() if len(values) else values.new_tensor(math.inf)


def highest(values: Tensor, where: Tensor) -> Tensor:
    return -lowest(-values, where)


def add_up(parts: Iterable[Mapping[str, Tensor]]) -> Figures:
    """Figures of several parts as those of one; a name may be missing in some."""
    total: Figures = {}
    put: dict[str, Callable[..., Tensor]] = {"sum": torch.add, "min": torch.minimum, "max": torch.maximum}
    for part in parts:
        for name, value in part.items():
            total[name] = put[kind(name)](total[name], value) if name in total else value
    return total


def whole(figures: Mapping[str, Tensor], ranks: Ranks) -> dict[str, float]:
    """The batch's figures over all ranks, as numbers. Every rank must have the same names. Two collectives."""
    sums = {name: float(value) for name, value in figures.items() if kind(name) == "sum"}
    sign = {"min": -1.0, "max": 1.0}
    tops = {name: sign[kind(name)] * float(value) for name, value in figures.items() if kind(name) != "sum"}
    added = ranks.sum(torch.tensor([*sums.values()], dtype=torch.float64)).tolist()
    largest = ranks.all_reduce_max(torch.tensor([*tops.values()], dtype=torch.float64)).tolist()
    both = dict(zip(sums, added, strict=True))
    both |= {name: sign[kind(name)] * value for name, value in zip(tops, largest, strict=True)}
    return {name: 0.0 if math.isinf(both[name]) and name in tops else both[name] for name in figures}
