"""In which order the rows of one data set come, an epoch after the other: all shuffled together, or in two levels.

Two levels are for sets of many files (shards), of which few can be at hand at a time:

    an epoch = its shards in a new order, one behind the other, cut into windows of `window` rows
    a window = its rows in a new order

So a window needs the few shards that it lies in, and what is kept is the order of the shards and of two windows,
however many rows there are. Both orders answer `row(epoch, position)` for any position without what came before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

WHOLE = 1 << 24  # rows of a set up to which all are shuffled together, where nothing else is said: 8 bytes each
WINDOW = 1 << 14  # rows of a window, where nobody says
PIECE = 1 << 10  # rows that stand together in a set without shards


def shuffled(size: int, *key: int) -> np.ndarray:
    """The numbers below `size` in an order that `key` alone decides, on any machine."""
    words = np.random.PCG64(np.random.SeedSequence([abs(k) for k in key])).random_raw(size)
    return np.argsort(words, kind="stable")


class Whole:
    """All rows shuffled together: 8 bytes each."""

    def __init__(self, size: int, seed: int, source: int) -> None:
        self.size, self.seed, self.source = size, seed, source
        self._order = lru_cache(maxsize=2)(self._make)

    def row(self, epoch: int, position: int) -> int:
        """The row that comes at a position (from 0) of an epoch."""
        return int(self._order(epoch)[position])

    def _make(self, epoch: int) -> np.ndarray:
        return shuffled(self.size, self.seed, 2, self.source, epoch)

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        return type(self), (self.size, self.seed, self.source)


class Windows:
    """Shards of `sizes` rows in an order of the epoch's, the rows shuffled within windows of `window`: 8 bytes a row of
    a window, 24 a shard."""

    def __init__(self, sizes: Sequence[int], window: int, seed: int, source: int) -> None:
        self.sizes, self.window, self.seed, self.source = np.asarray(sizes, np.int64), window, seed, source
        self.first = np.cumsum(self.sizes) - self.sizes  # row of each shard
        self.size = int(self.sizes.sum())
        self._shards = lru_cache(maxsize=2)(self._make_shards)
        self._rows = lru_cache(maxsize=2)(self._make_rows)

    def row(self, epoch: int, position: int) -> int:
        """The row that comes at a position (from 0) of an epoch."""
        window, nth = divmod(position, self.window)
        place = window * self.window + int(self._rows(epoch, window)[nth])
        order, starts = self._shards(epoch)
        at = int(np.searchsorted(starts, place, "right")) - 1
        return int(self.first[order[at]]) + place - int(starts[at])

    def shards(self, epoch: int, position: int) -> Iterator[int]:
        """The shards that the window at a position needs, and then those of the window behind it."""
        for _ in range(2):
            if position >= self.size:
                epoch, position = epoch + 1, 0
            begin = position // self.window * self.window
            stop = min(begin + self.window, self.size)
            order, starts = self._shards(epoch)
            first, last = np.searchsorted(starts, (begin, stop - 1), "right") - 1
            yield from (int(order[at]) for at in range(first, last + 1) if self.sizes[order[at]])
            position = stop

    def _make_shards(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """(shards in the epoch's order, the position at which each begins)."""
        order = shuffled(len(self.sizes), self.seed, 2, self.source, epoch)
        sizes = self.sizes[order]
        return order, np.cumsum(sizes) - sizes

    def _make_rows(self, epoch: int, window: int) -> np.ndarray:
        size = min(self.window, self.size - window * self.window)
        return shuffled(size, self.seed, 4, self.source, epoch, window)

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        return type(self), (self.sizes, self.window, self.seed, self.source)


def order_of(source: Any, seed: int, number: int) -> Whole | Windows:
    """The order of a data set, the `number`-th of its mixture.

    `source.window`: rows that are shuffled together, None for all; a source that does not say it has all up to
    :data:`WHOLE` rows, and windows beyond. `source.shards`: how many rows each of its files has; without, pieces of
    :data:`PIECE` rows stand for files."""
    size = len(source)
    window = getattr(source, "window", None)
    if window is None and size > WHOLE:
        window = WINDOW
    if window is None or window >= size:
        return Whole(size, seed, number)
    sizes = getattr(source, "shards", None)
    if sizes is None or len(sizes) < 2:
        sizes = np.full(-(-size // PIECE), PIECE)
        sizes[-1] = size - PIECE * (len(sizes) - 1)
    return Windows(sizes, window, seed, number)
