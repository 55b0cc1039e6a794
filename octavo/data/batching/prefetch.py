"""Files of fetched data sets, brought before their rows are asked for.

A thread of the trainer fetches what the order says of the rows to come: the files of the window under way and of the
next one. Who needs a file that is not there yet fetches it itself, or waits for whoever is at it, so that rows never
depend on this.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from octavo.data.errors import DataError
from octavo.data.order import Mixture, Windows
from octavo.data.storage.fetched import Fetched


def make_prefetcher(mixture: Mixture) -> Prefetcher | None:
    """What fetches files before they are asked for; None where no data set of the mixture is fetched. Raises
    `DataError` as `Ahead` does."""
    sets = {n: rows for n, source in enumerate(mixture.sources) if (rows := _fetched_rows(source)) is not None}
    return Prefetcher(mixture, sets) if sets else None


class Prefetcher:
    """`ahead.at(n)`: the rows from the n-th on are next. `sets`: number in the mixture -> a data set that is fetched.

    Raises `DataError` where the files of a window do not fit into what a data set may take: each of its rows would be
    fetched for itself."""

    def __init__(self, mixture: Mixture, sets: Mapping[int, Fetched]) -> None:
        self.mixture, self._sets = mixture, sets
        for number, rows in self._sets.items():
            _check(rows, mixture.sources[number].shards, mixture.orders[number])
        self._wanted: list[tuple[int, int]] = []
        self._changed, self._closed = threading.Event(), False
        self._thread: threading.Thread | None = None

    def at(self, n: int) -> None:
        """Have what the rows from the n-th on need fetched, by and by."""
        if self._closed:
            return
        wanted = [*self.mixture.shards(n, self._sets)]
        if wanted == self._wanted:
            return
        self._wanted = wanted
        self._changed.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="fetch ahead", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """No further file is begun."""
        self._closed = True
        self._changed.set()

    def _run(self) -> None:
        while not self._closed:
            self._changed.wait()
            self._changed.clear()
            left = {source: rows.store.limit for source, rows in self._sets.items()}
            most = dict.fromkeys(left, 0)
            for source, shard in self._wanted:
                if self._closed or self._changed.is_set():
                    break
                if left[source] < most[source]:  # the next one would take the room of those before it
                    continue
                with contextlib.suppress(DataError):  # who needs it tries again, and says so
                    size = self._sets[source].fetch(shard)
                    left[source], most[source] = left[source] - size, max(most[source], size)


def _fetched_rows(source: Any) -> Fetched | None:
    rows = getattr(source, "rows", None)
    while rows is not None and not isinstance(rows, Fetched):
        rows = getattr(rows, "rows", None)  # under other names of its columns
    return rows


def _check(rows: Fetched, taken: Sequence[int], order: Any) -> None:
    """`taken`: how many rows of each file."""
    total = sum(shard.size for shard, count in zip(rows.found, taken, strict=True) if count)
    need = total
    if isinstance(order, Windows):  # a window begins and ends within a file
        need = min(total, total * order.window // max(1, order.size) + 2 * max(shard.size for shard in rows.found))
    if need > rows.store.limit:
        which = f"{order.window} rows" if isinstance(order, Windows) else "all rows"
        raise DataError(
            f"{rows.path}: {which} are shuffled together, which lie in files of up to {need / 1e9:.3g} GB, and "
            f"fetch_gb of this set allows {rows.store.limit / 1e9:.3g} of them here; raise it, or lower shuffle_buffer"
        )
