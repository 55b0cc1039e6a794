"""Computes the effects of a 2^k design: the cost of FP8 in each component, and in combinations of components.

A cell is a set of components that run in FP8. For k components there are 2^k cells, and from the figures y of all
cells each set T of components has one effect, by Yates's contrast:

    effect(T) = sum over cells S of (-1)^|T - S| y(S) / 2^(k - 1)

For one component that is its main effect: the mean of the cells with it minus the mean of the cells without it. For two
components it is their interaction: half of the additional cost of one when the other is in FP8 too, which is 0 if costs
add up. Each seed has all cells, so the influence of the seed cancels in every effect; effects of different seeds are
independent, and :func:`octavo.report.evidence.claims.mean_gap` computes their interval.
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
    """The effect of the components ``of`` (a main effect for one component, otherwise an interaction), for each seed
    and over all seeds."""

    of: tuple[str, ...]
    by_seed: tuple[float, ...]

    @property
    def interval(self) -> Interval | None:
        """The interval over seeds, or None with fewer than two seeds or a figure that is not finite."""
        return mean_gap(self.by_seed)

    @property
    def is_main(self) -> bool:
        return len(self.of) == 1

    @property
    def label(self) -> str:
        return " x ".join(self.of)


def subsets(factors: Sequence[str]) -> list[tuple[str, ...]]:
    """Return every subset of the factors, smaller subsets first."""
    return [chosen for size in range(len(factors) + 1) for chosen in combinations(factors, size)]


def compute_contrast(figures: Mapping[Cell, float], of: Sequence[str]) -> float:
    """Return the effect of the components ``of`` from the figures of all cells of one seed."""
    k = math.log2(len(figures))
    return sum((-1) ** len(Cell(of) - cell) * figure for cell, figure in figures.items()) / 2 ** (k - 1)


def compute_effects(seeds: Sequence[Mapping[Cell, float]], factors: Sequence[str]) -> list[Effect]:
    """Return every effect of a design, main effects first; ``seeds`` has the figures of all cells for each seed."""
    cells = {Cell(chosen) for chosen in subsets(factors)}
    for number, figures in enumerate(seeds):
        if figures.keys() != cells:
            raise ValueError(f"seed {number} has {len(figures)} of the {len(cells)} cells of {', '.join(factors)}")
    return [Effect(of, tuple(compute_contrast(figures, of) for figures in seeds)) for of in subsets(factors)[1:]]
