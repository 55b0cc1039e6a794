"""Remote data sets: each file is downloaded whole, converted (to Arrow; a tar stays a tar) and stored in a bounded
folder of the cache, until it is evicted.

All ranks, workers and runs of a machine share the folder: one process downloads a file while others wait for it, and an
open file stays readable when its name is removed. The least recently used file is evicted first. The order of rows
(`order.WindowShuffle`) determines which files come next, and the prefetcher downloads them in advance.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from uuid import uuid4

from octavo.base import atomic_write
from octavo.base.byte_size import format_bytes
from octavo.base.env_vars import cache_home
from octavo.base.safe_read import read_json
from octavo.data import file_digests
from octavo.data.errors import DataError
from octavo.data.formats.arrow_rows import MappedTable, Rows
from octavo.data.formats.registry import format_of
from octavo.data.order import WINDOW
from octavo.data.storage import cache, remote
from octavo.data.storage.remote import Remote
from octavo.data.storage.shards import Shards

BYTES = 50 * 10**9  # default limit for the files of a data set
PARALLEL_COUNTS = 8  # files whose rows are counted in parallel
MAX_OPEN_FILES = 512  # files that stay open
_STALE_SECONDS = 3600.0  # seconds without a write after which a temporary file is a leftover


class Store:
    """A folder of downloaded files of up to `limit` bytes in total."""

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder, self.limit = folder, limit

    def file(self, shard: Remote, wait: bool = True) -> Path | None:
        """Return the path of a file in the store, downloaded now if it is missing, or None, without `wait`, if another
        process is downloading it. Raises `DataError`."""
        target = self.folder / f"{shard.key}{shard.suffix if format_of(shard.url).indexed_only else '.arrow'}"
        try:
            if not self._touch(target):
                self.folder.mkdir(parents=True, exist_ok=True)
                with cache.lock(self.folder / f".{shard.key}.lock", wait) as acquired:
                    if not acquired:
                        return None
                    if not self._touch(target):
                        self._fetch(shard, target)
        except OSError as cause:
            raise self._storage_error(shard, cause) from cause
        return target

    def _storage_error(self, shard: Remote, cause: OSError) -> DataError:
        why = atomic_write.why_no_space(self.folder, cause) or cause.strerror or str(cause)
        return DataError(
            f"{self.folder} cannot keep {shard.url} ({shard.size} bytes): {why}. Lower fetch_gb of this data set, "
            "or name a folder with room in data.cache (or OCTAVO_CACHE)"
        )

    def index(self, shard: Remote, file: Path) -> Path:
        """Return the path of the index of a tar, written now if it is missing. It is small and stays when the tar is
        evicted.
        Raises `DataError`, and FileNotFoundError if the tar was evicted."""
        folder = self.folder.with_name(f"{self.folder.name}.indexes")
        target = folder / f"{shard.key}.index"
        if not target.is_file():
            folder.mkdir(parents=True, exist_ok=True)
            temporary = folder / f".{shard.key}.{uuid4().hex}.tmp"
            try:
                format_of(shard.url).write(file, temporary)
                cache.publish(temporary, target)
            except OSError as cause:
                if isinstance(cause, FileNotFoundError):
                    raise
                raise self._storage_error(shard, cause) from cause
            finally:
                temporary.unlink(missing_ok=True)
        return target

    def _touch(self, target: Path) -> bool:
        """Return True if a file is in the store; marks it as the most recently used, without changing its mtime."""
        try:
            os.utime(target, ns=(time.time_ns(), target.stat().st_mtime_ns))
        except FileNotFoundError:
            return False
        return True

    def _fetch(self, shard: Remote, target: Path) -> None:
        temporary = self.folder / f".{shard.key}.{uuid4().hex}.tmp{shard.suffix}"
        result, indexed_only = temporary, format_of(shard.url).indexed_only
        try:
            with self._reserve(shard, shard.size), open(temporary, "wb") as file:
                file.truncate(shard.size)  # a sparse file: it reserves its size in the sums of other processes
            remote.download(shard, temporary)
            if not indexed_only:
                result = temporary.with_suffix(".arrow")
                _convert(shard, temporary, result)
            atomic_write.sync(result)
            with self._reserve(shard, result.stat().st_size, temporary, result):
                cache.publish(result, target)
        finally:
            temporary.unlink(missing_ok=True)
            result.unlink(missing_ok=True)
        if not indexed_only:  # just written, so it need not be validated
            with contextlib.suppress(FileNotFoundError):  # another process evicted it
                file_digests.note_valid(target, self.folder.parent)

    @contextlib.contextmanager
    def _reserve(self, shard: Remote, size: int, *counted: Path) -> Iterator[None]:
        """Evict the least recently used files until `size` bytes fit, and hold the lock of the store in the block, so
        that no other process adds a file. `counted`: files that are included in `size`. Raises `DataError` for a file
        over the limit."""
        if size > self.limit:
            raise DataError(f"{shard.url} takes {format_bytes(size)} here, and fetch_gb of its data set allows "
                            f"{self.limit / 1e9:.3g}; raise it, or cut the data into smaller files")  # fmt: skip
        with cache.lock(self.folder / ".room.lock"):
            files = {path: stat for path, stat in _list_store(self.folder) if path not in counted}
            excess = sum(stat.st_size for stat in files.values()) + size - self.limit
            for path, stat in sorted(files.items(), key=lambda item: item[1].st_atime_ns):
                is_partial = ".tmp" in path.name
                if (excess > 0 and not is_partial) or (is_partial and stat.st_mtime < time.time() - _STALE_SECONDS):
                    path.unlink(missing_ok=True)
                    excess -= stat.st_size
            yield


def _list_store(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Yield the files of a store, including temporary ones; other processes may remove files meanwhile."""
    for entry in os.scandir(folder):
        if not entry.name.endswith(".lock"):
            with contextlib.suppress(FileNotFoundError):
                yield Path(entry.path), entry.stat()


def _convert(shard: Remote, file: Path, target: Path) -> None:
    """Convert a row file to Arrow. Raises `DataError`, which names the URL."""
    try:
        format_of(shard.url).write(file, target)
    except DataError as cause:
        raise DataError(str(cause).replace(str(file), shard.url)) from cause


class FetchedRows(Shards):
    """The rows of files at a URL. `window`: the default number of rows that are shuffled together."""

    window = WINDOW

    def __init__(self, url: str, store: Store, files: Sequence[Remote], counts: Sequence[int]) -> None:
        self.store, self.files = store, [shard._replace(rows=n) for shard, n in zip(files, counts, strict=True)]
        super().__init__(url, self.files, self._open_shard, counts, MAX_OPEN_FILES)

    def fetch(self, number: int) -> int:
        """Download a file in advance, unless another process is doing it; returns its size in bytes. Raises
        `DataError`."""
        file = self.store.file(self.files[number], wait=False)
        with contextlib.suppress(OSError):
            if file is not None:
                return file.stat().st_size
        return self.files[number].size

    def _open_shard(self, shard: Remote) -> Rows:
        for number in [n for n, rows in self._rows.items() if isinstance(rows, MappedTable) and rows.is_deleted]:
            del self._rows[number]  # it was evicted; its disk space is freed when no process has it open
        rows = open_shard(self.store, shard)
        if len(rows) != shard.rows:
            raise DataError(
                f"{shard.url} has {len(rows)} rows, and {shard.rows} were expected: it changed, was not copied whole, "
                "or its index belongs to another file"
            )
        return rows


def open_shard(store: Store, shard: Remote) -> Rows:
    """Open the rows of a file at a URL. Raises `DataError`."""
    form = format_of(shard.url)
    for _ in range(remote.TRIES):
        file = store.file(shard)
        assert file is not None
        try:
            if form.indexed_only:
                return form.open(shard.url, store.index(shard, file), file)
            return form.open(shard.url, file)
        except FileNotFoundError:  # another process evicted it before it was opened
            continue
        except DataError as cause:
            raise DataError(f"{shard.url}, kept as {cause}") from cause
    raise DataError(
        f"{shard.url} is evicted as soon as it is downloaded; raise fetch_gb of its data set, which processes share"
    )


def open_fetched(url: str, folder: Path | None, log: cache.Log = cache.no_log, limit: int | None = None) -> FetchedRows:
    """Open the rows of the files at a URL; `limit` is the number of bytes that may be stored locally. Raises
    `DataError`.

    The number of rows in each file comes from `index.json` or the parquet footers; else each file is downloaded to
    count them, and the counts are stored."""
    folder = cache_home() if folder is None else folder
    files = remote.list_files(url)
    store = Store(folder / "fetched" / sha256(url.encode("utf-8", "surrogatepass")).hexdigest()[:20], limit or BYTES)
    counts = [shard.rows for shard in files if shard.rows is not None]
    if len(counts) < len(files):
        counts = _row_counts(store, url, files, log)
    rows = FetchedRows(url, store, files, counts)
    if len(rows) == 0:
        raise DataError(f"{url} has no rows")
    return rows


def _row_counts(store: Store, url: str, files: Sequence[Remote], log: cache.Log) -> list[int]:
    """Return the number of rows in each file, from the store or counted now."""
    files_key = sha256("".join(shard.key for shard in files).encode()).hexdigest()[:20]
    stored = store.folder.with_name(f"{files_key}.rows")
    if stored.is_file():
        counts = read_json(stored, DataError, wanted=list)
        if len(counts) == len(files) and all(type(count) is int and count >= 0 for count in counts):
            return list(counts)
    count_rows = format_of(files[0].url).count_rows
    has_footer = count_rows is not None
    download = "" if has_footer else ", for which each is downloaded"
    log(f"{url}: the rows of {len(files)} file(s) are counted, once{download}")

    def count(shard: Remote) -> int:
        if count_rows is None:
            return len(open_shard(store, shard))
        return remote.read(shard.url, lambda file: count_rows(shard.url, file))

    # While it is counted, a file is in the store twice: as downloaded, and as Arrow.
    room = store.limit // (2 * max(1, *(shard.size for shard in files)))
    with ThreadPoolExecutor(PARALLEL_COUNTS if has_footer else max(1, min(PARALLEL_COUNTS, room))) as pool:
        counts = [*pool.map(count, files)]
    store.folder.mkdir(parents=True, exist_ok=True)
    atomic_write.write_bytes(stored, json.dumps(counts).encode(), shared=True)
    return counts
