"""Prefetches files of remote data sets before their rows are read.

A thread of the trainer downloads the files that the order needs next: of the current window and of the one after it. A
reader that needs a missing file downloads it, or waits for the process that is downloading it; so the rows never depend
on prefetching.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping, Sequence

from octavo.base.byte_size import format_bytes
from octavo.data.errors import DataError
from octavo.data.order import FullShuffle, Mixture, WindowShuffle
from octavo.data.storage.fetched import FetchedRows


def make_prefetcher(mixture: Mixture) -> Prefetcher | None:
    """Make a prefetcher for the files of a mixture, or return None if no data set is remote. Raises `DataError` as
    `Prefetcher` does."""
    sets = {n: rows for n, source in enumerate(mixture.sources) if (rows := _fetched_rows(source)) is not None}
    return Prefetcher(mixture, sets) if sets else None


class Prefetcher:
    """Downloads the files of the next rows in the background. `sets` maps the number of a remote data set in the
    mixture to its rows.

    Raises `DataError` if the files of a window exceed the disk limit of a data set: nearly every row would download a
    file again.
    """

    def __init__(self, mixture: Mixture, sets: Mapping[int, FetchedRows]) -> None:
        self.mixture, self._sets = mixture, sets
        for number, rows in self._sets.items():
            _check_disk_limit(rows, mixture.sources[number].shards, mixture.orders[number])
        self._wanted: list[tuple[int, int]] = []
        self._changed, self._closed = threading.Event(), False
        self._thread: threading.Thread | None = None

    def prefetch_from(self, n: int) -> None:
        """Download the files that the rows from the n-th on need, in the background."""
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
        """Stop after the current download."""
        self._closed = True
        self._changed.set()

    def _run(self) -> None:
        while not self._closed:
            self._changed.wait()
            self._changed.clear()
            budget = {source: rows.store.limit for source, rows in self._sets.items()}
            largest = dict.fromkeys(budget, 0)
            for source, shard in self._wanted:
                if self._closed or self._changed.is_set():
                    break
                if budget[source] < largest[source]:  # another file could evict the ones downloaded before it
                    continue
                with contextlib.suppress(DataError):  # the reader of the file tries again, and raises
                    size = self._sets[source].fetch(shard)
                    budget[source], largest[source] = budget[source] - size, max(largest[source], size)


def _fetched_rows(source: object) -> FetchedRows | None:
    rows = getattr(source, "rows", None)
    while rows is not None and not isinstance(rows, FetchedRows):
        rows = getattr(rows, "rows", None)  # unwrap rows with renamed columns
    return rows


def _check_disk_limit(rows: FetchedRows, used_rows: Sequence[int], order: FullShuffle | WindowShuffle) -> None:
    """Check that a window fits into the disk limit; `used_rows` is the number of used rows in each file. Raises
    `DataError`."""
    total = sum(shard.size for shard, count in zip(rows.files, used_rows, strict=True) if count)
    needed = total
    if isinstance(order, WindowShuffle):  # a window begins and ends within a file: two more files
        needed = min(total, total * order.window // max(1, order.size) + 2 * max(shard.size for shard in rows.files))
    if needed > rows.store.limit:
        rows_text = f"{order.window} rows" if isinstance(order, WindowShuffle) else "all rows"
        raise DataError(
            f"{rows.path}: {rows_text} are shuffled together, which are in files of up to {format_bytes(needed)}, and "
            f"fetch_gb of this set allows {rows.store.limit / 1e9:.3g} of them here; raise it, or lower shuffle_buffer"
        )
