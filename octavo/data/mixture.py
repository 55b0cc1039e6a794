"""Which row comes n-th, for every n, from the seed alone: a resume needs one number."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from octavo.data.errors import DataError


class Mixture:
    """An endless order over several data sets, with random access: `row(n) -> (source, row)`.

    A data set is drawn in proportion to weight x size (its size after `max_samples`): with all weights 1 every row
    of every data set comes equally often; weight 2 makes the rows of one come twice as often. The order is made of
    rounds of as many rows as there are in all; a round holds a fixed number of draws from each data set (the
    proportion, rounded by largest remainder, at least one) in shuffled places. Each data set runs through its own
    epochs, each a new shuffle, and every row comes once in an epoch. Same sources, weights and seed, same order, on
    any machine: the shuffles sort raw PCG64 words, whose stream NumPy keeps stable.
    """

    def __init__(self, sources: Sequence[Any], weights: Sequence[float] | None = None, seed: int = 0) -> None:
        self.sources = tuple(sources)
        weights = [1.0] * len(self.sources) if weights is None else list(weights)
        if not self.sources:
            raise DataError("there is no data set to draw from; name at least one in data.train")
        if len(weights) != len(self.sources) or not all(0 < weight < float("inf") for weight in weights):
            raise DataError(f"weights {weights} for {len(self.sources)} data set(s); give each a weight over 0")
        self.seed = seed
        self.sizes = tuple(len(source) for source in self.sources)
        self.draws = _share_out(sum(self.sizes), [w * n for w, n in zip(weights, self.sizes, strict=True)])
        self._round = int(sum(self.draws))
        self._places = lru_cache(maxsize=2)(self._make_places)
        self._order = lru_cache(maxsize=2 * len(self.sources))(self._make_order)

    def row(self, n: int) -> tuple[int, int]:
        """(index of the data set, row in it) of the n-th row, n from 0."""
        if n < 0:
            raise IndexError(f"row {n}; rows count from 0")
        turn, place = divmod(n, self._round)
        which, nth = self._places(turn)
        source = int(which[place])
        epoch, position = divmod(turn * self.draws[source] + int(nth[place]), self.sizes[source])
        return source, int(self._order(source, epoch)[position])

    def _make_places(self, turn: int) -> tuple[np.ndarray, np.ndarray]:
        """For each place of a round: the data set, and how many draws from it the round had before."""
        which = np.repeat(np.arange(len(self.draws), dtype=np.int32), self.draws)
        if len(self.draws) > 1:
            which = which[shuffled(self._round, self.seed, 1, turn)]
        nth = np.empty(self._round, dtype=np.int64)
        for source, draws in enumerate(self.draws):
            nth[which == source] = np.arange(draws)
        return which, nth

    def _make_order(self, source: int, epoch: int) -> np.ndarray:
        return shuffled(self.sizes[source], self.seed, 2, source, epoch)

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k not in ("_places", "_order")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._places = lru_cache(maxsize=2)(self._make_places)
        self._order = lru_cache(maxsize=2 * len(self.sources))(self._make_order)


def shuffled(size: int, *key: int) -> np.ndarray:
    """The numbers below `size` in an order that `key` alone decides, on any machine."""
    words = np.random.PCG64(np.random.SeedSequence([abs(k) for k in key])).random_raw(size)
    return np.argsort(words, kind="stable")


def _share_out(total: int, shares: Sequence[float]) -> list[int]:
    """Whole numbers in proportion to `shares` that sum to `total`, largest remainders first; none below one."""
    exact = np.asarray(shares, dtype=np.float64)
    exact = exact * (total / exact.sum())
    counts = np.floor(exact).astype(np.int64)
    for index in np.argsort(-(exact - counts), kind="stable")[: total - int(counts.sum())]:
        counts[index] += 1
    return [max(1, int(count)) for count in counts]
