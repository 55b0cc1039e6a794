"""Row orders with random access, of one data set (`FullShuffle`, `WindowShuffle`) and of a mixture of several.

An order is computed from the seed only, so a resume needs one number: the position. The rows of a data set come epoch
by epoch, either all shuffled together or in two levels. Two levels are for data sets of many files (shards), of which
only a few can be available at a time:

    an epoch = its shards in a new order, concatenated and cut into windows of `window` rows
    a window = its rows in a new order

So a window needs only the few shards that it covers, and memory holds the order of the shards and of two windows,
for any number of rows. Both classes compute `row(epoch, position)` for any position without the previous ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Sized
from functools import lru_cache
from typing import Any

import numpy as np

from octavo.data.errors import DataError

FULL_SHUFFLE_ROWS = 1 << 24  # up to this many rows, a data set is shuffled as a whole by default: 8 bytes per row
WINDOW = 1 << 14  # default number of rows in a window
BLOCK = 1 << 16  # approximate rows per block; a round of more than FULL_SHUFFLE_ROWS rows is divided into blocks
PIECE = 1 << 10  # rows per piece; pieces take the place of shards in a data set without shards


def permutation(size: int, *key: int) -> np.ndarray:
    """Return a permutation of range(size) that depends only on `key`, on any machine."""
    words = np.random.PCG64(np.random.SeedSequence([abs(k) for k in key])).random_raw(size)
    return np.argsort(words, kind="stable")


class FullShuffle:
    """Shuffles all rows together; takes 8 bytes per row."""

    def __init__(self, size: int, seed: int, source: int) -> None:
        self.size, self.seed, self.source = size, seed, source
        self._order = lru_cache(maxsize=2)(self._make)

    def row(self, epoch: int, position: int) -> int:
        """Return the row at a position (from 0) of an epoch."""
        return int(self._order(epoch)[position])

    def _make(self, epoch: int) -> np.ndarray:
        return permutation(self.size, self.seed, 2, self.source, epoch)

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        return type(self), (self.size, self.seed, self.source)


class WindowShuffle:
    """Shuffles shards of `sizes` rows in each epoch, and rows within windows of `window` rows. Takes 8 bytes per row of
    a window and 24 per shard."""

    def __init__(self, sizes: Sequence[int] | np.ndarray, window: int, seed: int, source: int) -> None:
        self.sizes, self.window, self.seed, self.source = np.asarray(sizes, np.int64), window, seed, source
        self.first = np.cumsum(self.sizes) - self.sizes  # row of each shard
        self.size = int(self.sizes.sum())
        self._shards = lru_cache(maxsize=2)(self._make_shards)
        self._rows = lru_cache(maxsize=2)(self._make_rows)

    def row(self, epoch: int, position: int) -> int:
        """Return the row at a position (from 0) of an epoch."""
        window, nth = divmod(position, self.window)
        place = window * self.window + int(self._rows(epoch, window)[nth])
        order, starts = self._shards(epoch)
        index = int(np.searchsorted(starts, place, "right")) - 1
        return int(self.first[order[index]]) + place - int(starts[index])

    def shards(self, epoch: int, position: int) -> Iterator[int]:
        """Yield the shards of the window at a position, then the shards of the next window."""
        for _ in range(2):
            if position >= self.size:
                epoch, position = epoch + 1, 0
            begin = position // self.window * self.window
            stop = min(begin + self.window, self.size)
            order, starts = self._shards(epoch)
            first, last = np.searchsorted(starts, (begin, stop - 1), "right") - 1
            yield from (int(order[index]) for index in range(first, last + 1) if self.sizes[order[index]])
            position = stop

    def _make_shards(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the shards in the order of the epoch, and the position at which each begins."""
        order = permutation(len(self.sizes), self.seed, 2, self.source, epoch)
        sizes = self.sizes[order]
        return order, np.cumsum(sizes) - sizes

    def _make_rows(self, epoch: int, window: int) -> np.ndarray:
        size = min(self.window, self.size - window * self.window)
        return permutation(size, self.seed, 4, self.source, epoch, window)

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        return type(self), (self.sizes, self.window, self.seed, self.source)


def make_order(source: Sized, seed: int, number: int) -> FullShuffle | WindowShuffle:
    """Return the order of a data set, which is the `number`-th of its mixture.

    `source.window` is the number of rows shuffled together, or None for the default: all rows up to
    :data:`FULL_SHUFFLE_ROWS`, windows for larger data sets. `source.shards` is the number of rows in each file, or None
    for pieces of :data:`PIECE` rows.
    """
    size = len(source)
    window = getattr(source, "window", None)
    if window is None and size > FULL_SHUFFLE_ROWS:
        window = WINDOW
    if window is None or window >= size:
        return FullShuffle(size, seed, number)
    sizes = getattr(source, "shards", None)
    if sizes is None or len(sizes) < 2:
        sizes = np.full(-(-size // PIECE), PIECE)
        sizes[-1] = size - PIECE * (len(sizes) - 1)
    return WindowShuffle(sizes, window, seed, number)


class Mixture:
    """An endless order over several data sets, with random access: `row(n) -> (source, row)`.

    A data set is drawn in proportion to weight x size (its size after `max_samples`): with all weights 1 every row
    of every data set comes equally often; with weight 2 the rows of a set come twice as often. The order consists of
    rounds with as many rows as there are in total; a round has a fixed number of draws from each data set (the
    proportion, rounded by largest remainder, at least one) in shuffled places. A round of more than `FULL_SHUFFLE_ROWS`
    rows is divided into blocks, each with a proportional share of every data set. Each data set has separate epochs,
    each in a new order (`make_order`), and every row comes once in an epoch. The same sources, weights and seed give
    the same order on any machine: the shuffles sort raw PCG64 words, whose stream NumPy keeps stable. `round`: the rows
    of a round, which is an epoch of `train.epochs`.
    """

    def __init__(self, sources: Iterable[Any], weights: Sequence[float] | None = None, seed: int = 0) -> None:
        self.sources = tuple(sources)
        weights = [1.0] * len(self.sources) if weights is None else list(weights)
        if not self.sources:
            raise DataError("the mixture has no data set; name at least one in data.train")
        if len(weights) != len(self.sources) or not all(0 < weight < float("inf") for weight in weights):
            raise DataError(f"weights {weights} for {len(self.sources)} data set(s); give each a weight over 0")
        self.seed = seed
        self.sizes = tuple(len(source) for source in self.sources)
        self.draws = _apportion(sum(self.sizes), [w * n for w, n in zip(weights, self.sizes, strict=True)])
        self.orders = tuple(make_order(source, seed, number) for number, source in enumerate(self.sources))
        self.round = int(sum(self.draws))
        self._blocks = 1 if self.round <= FULL_SHUFFLE_ROWS else -(-self.round // BLOCK)
        self._places = lru_cache(maxsize=2)(self._make_places)

    def row(self, n: int) -> tuple[int, int]:
        """Return (index of the data set, row in it) for the n-th row, n from 0."""
        if n < 0:
            raise IndexError(f"row {n}; rows count from 0")
        round_index, place = divmod(n, self.round)
        if len(self.sources) == 1:
            return 0, self.orders[0].row(round_index, place)
        block = self._find_block(round_index, place)
        source_at, nth = self._places(round_index, block)
        place -= self._block_start(round_index, block)
        source = int(source_at[place])
        epoch, position = divmod(round_index * self.draws[source] + int(nth[place]), self.sizes[source])
        return source, self.orders[source].row(epoch, position)

    def shards(self, n: int, sources: Iterable[int]) -> Iterator[tuple[int, int]]:
        """Yield (data set, shard) for the files of these data sets that rows from the n-th on need: the files in the
        current and the next window, or all files of a data set that is shuffled as a whole."""
        round_index, place = divmod(n, self.round)
        for source in sources:
            order = self.orders[source]
            if isinstance(order, WindowShuffle):
                before = place if len(self.sources) == 1 else self._count_draws(round_index, source, place)
                epoch, position = divmod(round_index * self.draws[source] + before, self.sizes[source])
                yield from ((source, shard) for shard in order.shards(epoch, position))
            else:
                sizes = getattr(self.sources[source], "shards", None)
                yield from ((source, shard) for shard, rows in enumerate([] if sizes is None else sizes) if rows)

    def _count_draws(self, round_index: int, source: int, place: int) -> int:
        """Return the number of draws from a data set in a round before a place."""
        block = self._find_block(round_index, place)
        source_at, _ = self._places(round_index, block)
        in_block = int(np.count_nonzero(source_at[: place - self._block_start(round_index, block)] == source))
        return self._draws_before(round_index, source, block) + in_block

    def _draws_before(self, round_index: int, source: int, block: int) -> int:
        """Return the number of draws from a data set in a round before a block. Each data set has a different offset,
        so that data sets with few draws do not all fall into the same blocks."""
        return (block * self.draws[source] + (7919 * round_index + 104729 * source) % self._blocks) // self._blocks

    def _block_start(self, round_index: int, block: int) -> int:
        return sum(self._draws_before(round_index, source, block) for source in range(len(self.draws)))

    def _find_block(self, round_index: int, place: int) -> int:
        """Return the last block that begins at or before a place of a round."""
        low, high = 0, self._blocks
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._block_start(round_index, middle) <= place else (low, middle)
        return low

    def _make_places(self, round_index: int, block: int) -> tuple[np.ndarray, np.ndarray]:
        """Return two arrays over the places of a block: the data set, and the number of earlier draws from it in the
        round."""
        begins, ends = (
            [self._draws_before(round_index, s, b) for s in range(len(self.draws))] for b in (block, block + 1)
        )
        counts = np.subtract(ends, begins)
        source_at = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
        key = (round_index,) if self._blocks == 1 else (round_index, block)
        source_at = source_at[permutation(len(source_at), self.seed, 1, *key)]
        nth = np.empty(len(source_at), dtype=np.int64)
        for source, (begin, end) in enumerate(zip(begins, ends, strict=True)):
            nth[source_at == source] = np.arange(begin, end)
        return source_at, nth

    def __getstate__(self) -> dict[str, object]:
        return {k: v for k, v in self.__dict__.items() if k != "_places"}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._places = lru_cache(maxsize=2)(self._make_places)


def _apportion(total: int, shares: Sequence[float]) -> list[int]:
    """Return integers in proportion to `shares` that sum to `total`, by largest remainders; each is at least 1."""
    exact = np.asarray(shares, dtype=np.float64)
    exact = exact * (total / exact.sum())
    counts = np.floor(exact).astype(np.int64)
    for index in np.argsort(-(exact - counts), kind="stable")[: total - int(counts.sum())]:
        counts[index] += 1
    return [max(1, int(count)) for count in counts]
