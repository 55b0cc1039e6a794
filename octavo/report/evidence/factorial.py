"""The effects of a 2^k design: what FP8 costs in each of several components, and in combination.

A cell is a set of components that run in FP8. For k components there are 2^k cells, and from the figures y of all
cells each set T of components has one effect, by Yates's contrast:

    effect(T) = sum over cells S of (-1)^|T - S| y(S) / 2^(k - 1)

For one component that is the mean of the cells with it less the mean of those without it: its main effect, in which
every cell counts. For two it is half the extra cost of one if the other is in FP8 too: their interaction, which
is 0 if costs add up. Each seed has its own cells, so that the seed's common influence cancels in every
effect; the effects of several seeds are independent, and :func:`octavo.report.evidence.claims.mean_gap` computes their
interval.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from octavo.report.evidence.claims import Interval, mean_gap

Cell = frozenset[str]
NONE: Cell = frozenset()


@dataclass(frozen=True)
class Effect:
    """The effect of ``of`` (one component: a main effect; more: an interaction), seed by seed, and over the seeds."""

    of: tuple[str, ...]
    by_seed: tuple[float, ...]

    @property
    def interval(self) -> Interval | None:
        """None with fewer than two seeds, or with a figure that is not finite."""
        return mean_gap(self.by_seed)

    @property
    def is_main(self) -> bool:
        return len(self.of) == 1

    @property
    def label(self) -> str:
        return " x ".join(self.of)


def subsets(factors: Sequence[str]) -> list[tuple[str, ...]]:
    """Every subset of the factors, from the empty one to all, in their order."""
    return [chosen for size in range(len(factors) + 1) for chosen in combinations(factors, size)]


def compute_contrast(figures: Mapping[Cell, float], of: Sequence[str]) -> float:
    """The effect of ``of``, from the figures of all cells of one seed."""
    k = math.log2(len(figures))
    return sum((-1) ** len(Cell(of) - cell) * figure for cell, figure in figures.items()) / 2 ** (k - 1)


def compute_effects(seeds: Sequence[Mapping[Cell, float]], factors: Sequence[str]) -> list[Effect]:
    """Every effect of a design, main effects first; ``seeds`` has the figures of all cells for each seed."""
    cells = {Cell(chosen) for chosen in subsets(factors)}
    for number, figures in enumerate(seeds):
        if figures.keys() != cells:
            raise ValueError(f"seed {number} has {len(figures)} of the {len(cells)} cells of {', '.join(factors)}")
    return [Effect(of, tuple(compute_contrast(figures, of) for figures in seeds)) for of in subsets(factors)[1:]]


def effect_spread(pair: float, factors: int) -> float:
    """Return the standard deviation of an effect over seeds, if ``pair`` is the standard deviation of the gap of a pair
    of runs (one in FP8, one not) and every run contributes equally: an effect takes 2^k runs, each with the weight
    1 / 2^(k - 1)."""
    return pair * math.sqrt(2.0 ** (1 - factors))
