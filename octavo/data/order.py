"""The order of rows with random access, computed from the seed only, so that a resume needs one number: of one data set
(`FullShuffle`, `WindowShuffle`) and of a mixture of several.

The rows of a data set come epoch by epoch, all shuffled together or in two levels. Two levels are for sets of many
files (shards), of which only a few can be available at a time:

    an epoch = its shards in a new order, concatenated and cut into windows of `window` rows
    a window = its rows in a new order

So a window needs only the few shards that it covers, and memory holds the order of the shards and of two windows,
however many rows there are. Both orders compute `row(epoch, position)` for any position without the previous ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Sized
from functools import lru_cache
from typing import Any

import numpy as np

from octavo.data.errors import DataError

FULL_SHUFFLE_ROWS = 1 << 24  # up to this many rows a set is by default shuffled as a whole: 8 bytes a row
WINDOW = 1 << 14  # default rows of a window
BLOCK = 1 << 16  # approximate rows of a block, into which a round of more than WHOLE rows is divided
PIECE = 1 << 10  # rows of a piece, which takes the place of a shard in a set without shards


def permutation(size: int, *key: int) -> np.ndarray:
    """The numbers below `size` in an order that depends only on `key`, on any machine."""
    words = np.random.PCG64(np.random.SeedSequence([abs(k) for k in key])).random_raw(size)
    return np.argsort(words, kind="stable")


class FullShuffle:
    """All rows shuffled together: 8 bytes each."""

    def __init__(self, size: int, seed: int, source: int) -> None:
        self.size, self.seed, self.source = size, seed, source
        self._order = lru_cache(maxsize=2)(self._make)

    def row(self, epoch: int, position: int) -> int:
        """The row at a position (from 0) of an epoch."""
        return int(self._order(epoch)[position])

    def _make(self, epoch: int) -> np.ndarray:
        return permutation(self.size, self.seed, 2, self.source, epoch)

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        return type(self), (self.size, self.seed, self.source)


class WindowShuffle:
    """Shards of `sizes` rows in a new order each epoch, with rows shuffled within windows of `window` rows: 8 bytes a
    row of a window, 24 a shard."""

    def __init__(self, sizes: Sequence[int] | np.ndarray, window: int, seed: int, source: int) -> None:
        self.sizes, self.window, self.seed, self.source = np.asarray(sizes, np.int64), window, seed, source
        self.first = np.cumsum(self.sizes) - self.sizes  # row of each shard
        self.size = int(self.sizes.sum())
        self._shards = lru_cache(maxsize=2)(self._make_shards)
        self._rows = lru_cache(maxsize=2)(self._make_rows)

    def row(self, epoch: int, position: int) -> int:
        """The row at a position (from 0) of an epoch."""
        window, nth = divmod(position, self.window)
        place = window * self.window + int(self._rows(epoch, window)[nth])
        order, starts = self._shards(epoch)
        at = int(np.searchsorted(starts, place, "right")) - 1
        return int(self.first[order[at]]) + place - int(starts[at])

    def shards(self, epoch: int, position: int) -> Iterator[int]:
        """The shards of the window at a position, and then of the next window."""
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
        """(shards in the order of the epoch, the position at which each begins)."""
        order = permutation(len(self.sizes), self.seed, 2, self.source, epoch)
        sizes = self.sizes[order]
        return order, np.cumsum(sizes) - sizes

    def _make_rows(self, epoch: int, window: int) -> np.ndarray:
        size = min(self.window, self.size - window * self.window)
        return permutation(size, self.seed, 4, self.source, epoch, window)

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        return type(self), (self.sizes, self.window, self.seed, self.source)


def make_order(source: Sized, seed: int, number: int) -> FullShuffle | WindowShuffle:
    """The order of a data set, the `number`-th of its mixture.

    `source.window`: rows that are shuffled together; None: all up to :data:`FULL_SHUFFLE_ROWS` rows, windows for larger
    sets.
    `source.shards`: the number of rows in each of its files; without it, pieces of :data:`PIECE` rows are used."""
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
            raise DataError("there is no data set to draw from; name at least one in data.train")
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
        """(index of the data set, row in it) of the n-th row, n from 0."""
        if n < 0:
            raise IndexError(f"row {n}; rows count from 0")
        turn, place = divmod(n, self.round)
        if len(self.sources) == 1:
            return 0, self.orders[0].row(turn, place)
        block = self._find_block(turn, place)
        which, nth = self._places(turn, block)
        place -= self._block_start(turn, block)
        source = int(which[place])
        epoch, position = divmod(turn * self.draws[source] + int(nth[place]), self.sizes[source])
        return source, self.orders[source].row(epoch, position)

    def shards(self, n: int, sources: Iterable[int]) -> Iterator[tuple[int, int]]:
        """(data set, shard) of the files that the rows from the n-th on need of these data sets: of the current and the
        next window of each; all files of a set that is shuffled as a whole."""
        turn, place = divmod(n, self.round)
        for source in sources:
            order = self.orders[source]
            if isinstance(order, WindowShuffle):
                before = place if len(self.sources) == 1 else self._count_draws(turn, source, place)
                epoch, position = divmod(turn * self.draws[source] + before, self.sizes[source])
                yield from ((source, shard) for shard in order.shards(epoch, position))
            else:
                sizes = getattr(self.sources[source], "shards", None)
                yield from ((source, shard) for shard, rows in enumerate([] if sizes is None else sizes) if rows)

    def _count_draws(self, turn: int, source: int, place: int) -> int:
        """The number of draws from a data set in a round before a place."""
        block = self._find_block(turn, place)
        which, _ = self._places(turn, block)
        in_block = int(np.count_nonzero(which[: place - self._block_start(turn, block)] == source))
        return self._draws_before(turn, source, block) + in_block

    def _draws_before(self, turn: int, source: int, block: int) -> int:
        """The number of draws from a data set in a round before a block. Each set has another offset, so that the draws
        of several sets with few draws do not fall into the same blocks."""
        return (block * self.draws[source] + (7919 * turn + 104729 * source) % self._blocks) // self._blocks

    def _block_start(self, turn: int, block: int) -> int:
        return sum(self._draws_before(turn, source, block) for source in range(len(self.draws)))

    def _find_block(self, turn: int, place: int) -> int:
        """The last block that begins at or before a place of a round."""
        low, high = 0, self._blocks
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._block_start(turn, middle) <= place else (low, middle)
        return low

    def _make_places(self, turn: int, block: int) -> tuple[np.ndarray, np.ndarray]:
        """For each place of a block: the data set, and the number of earlier draws from it in the round."""
        begins, ends = ([self._draws_before(turn, s, b) for s in range(len(self.draws))] for b in (block, block + 1))
        counts = np.subtract(ends, begins)
        which = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
        key = (turn,) if self._blocks == 1 else (turn, block)
        which = which[permutation(len(which), self.seed, 1, *key)]
        nth = np.empty(len(which), dtype=np.int64)
        for source, (begin, end) in enumerate(zip(begins, ends, strict=True)):
            nth[which == source] = np.arange(begin, end)
        return which, nth

    def __getstate__(self) -> dict[str, object]:
        return {k: v for k, v in self.__dict__.items() if k != "_places"}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._places = lru_cache(maxsize=2)(self._make_places)


def _apportion(total: int, shares: Sequence[float]) -> list[int]:
    """Whole numbers in proportion to `shares` that sum to `total`, by largest remainders; none is below one."""
    exact = np.asarray(shares, dtype=np.float64)
    exact = exact * (total / exact.sum())
    counts = np.floor(exact).astype(np.int64)
    for index in np.argsort(-(exact - counts), kind="stable")[: total - int(counts.sum())]:
        counts[index] += 1
    return [max(1, int(count)) for count in counts]
