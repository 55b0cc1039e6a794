"""What each of several components costs, and what they cost together: the effects of a 2^k design.

A cell is the set of components that are in FP8 in it. Of k components there are 2^k cells, and of the figures y of all
of them each set T of components has one effect, by Yates's contrast:

    effect(T) = sum over cells S of (-1)^|T - S| y(S) / 2^(k - 1)

For one component that is the mean of the cells with it less the mean of those without it: its main effect, in which
every cell counts. For two it is half of what the one costs more where the other is in FP8 too: their interaction, which
is 0 where costs add up. Each seed has cells of its own, so that what the seed does to all of them goes out of every
effect; the effects of several seeds are independent, and :func:`octavo.report.evidence.claims.mean_gap` makes their
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
    def found(self) -> Interval | None:
        """None with fewer than two seeds, or with a figure that is not finite."""
        return mean_gap(self.by_seed)

    @property
    def main(self) -> bool:
        return len(self.of) == 1

    @property
    def label(self) -> str:
        return " x ".join(self.of)


def subsets(factors: Sequence[str]) -> list[tuple[str, ...]]:
    """Every set of the factors, none first and all last, each in their order."""
    return [chosen for size in range(len(factors) + 1) for chosen in combinations(factors, size)]


def contrast(figures: Mapping[Cell, float], of: Sequence[str]) -> float:
    """The effect of ``of`` in the figures of all cells of a design, of one seed."""
    k = math.log2(len(figures))
    return sum((-1) ** len(Cell(of) - cell) * figure for cell, figure in figures.items()) / 2 ** (k - 1)


def effects(seeds: Sequence[Mapping[Cell, float]], factors: Sequence[str]) -> list[Effect]:
    """Every effect of a design, main effects first; ``seeds`` has the figures of all cells for each seed."""
    cells = {Cell(chosen) for chosen in subsets(factors)}
    for number, figures in enumerate(seeds):
        if figures.keys() != cells:
            raise ValueError(f"seed {number} has {len(figures)} of the {len(cells)} cells of {', '.join(factors)}")
    return [Effect(of, tuple(contrast(figures, of) for figures in seeds)) for of in subsets(factors)[1:]]


def spread_of_effect(pair: float, factors: int) -> float:
    """How far an effect scatters over seeds, where the gap of a pair of runs (one in FP8, one not) scatters by ``pair``
    and each run adds as much of it as any other: an effect takes 2^k runs, each with the weight 1 / 2^(k - 1)."""
    return pair * math.sqrt(2.0 ** (1 - factors))
