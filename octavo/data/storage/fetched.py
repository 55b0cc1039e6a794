"""Data sets that are fetched: each file comes whole, becomes what it is read from (Arrow; a tar stays one), and lies in
a bounded folder of the cache until others need its room.

All ranks, workers and runs of a machine share the folder: a file is fetched by one while others wait for it, and who
has opened one keeps it, whoever removes its name. The one that was used longest ago goes first. Which files the rows
to come need is the order's word (`order.Windows`), and `ahead` fetches them before.
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
from octavo.base.safe_read import read_json
from octavo.data import file_digests
from octavo.data.errors import DataError
from octavo.data.formats.arrow_rows import Mapped, Rows
from octavo.data.formats.registry import format_of
from octavo.data.order import WINDOW
from octavo.data.storage import cache, remote
from octavo.data.storage.remote import Remote
from octavo.data.storage.shards import Shards

BYTES = 50 * 10**9  # of a data set's files, where nobody says
AT_ONCE = 8  # files that are counted at a time
OPEN = 512  # files that stay open at a time
_STALE = 3600.0  # seconds after which what nobody writes to any more was left behind


class Store:
    """A folder of fetched files of up to `limit` bytes."""

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder, self.limit = folder, limit

    def file(self, shard: Remote, wait: bool = True) -> Path | None:
        """Where a file lies here, fetched now where it is not there; None, without `wait`, where somebody is at it.
        Raises `DataError`."""
        target = self.folder / f"{shard.key}{shard.suffix if format_of(shard.url).stays else '.arrow'}"
        try:
            if not self._touch(target):
                self.folder.mkdir(parents=True, exist_ok=True)
                with cache.lock(self.folder / f".{shard.key}.lock", wait) as mine:
                    if not mine:
                        return None
                    if not self._touch(target):
                        self._fetch(shard, target)
        except OSError as cause:
            raise self._full(shard, cause) from cause
        return target

    def _full(self, shard: Remote, cause: OSError) -> DataError:
        why = atomic_write.no_room(self.folder, cause) or cause.strerror or str(cause)
        return DataError(
            f"{self.folder} cannot keep {shard.url} ({shard.size} bytes): {why}. Lower fetch_gb of this data set, "
            "or name a folder with room in data.cache (or OCTAVO_CACHE)"
        )

    def index(self, shard: Remote, file: Path) -> Path:
        """Where the index of a tar lies, made now where it is not there. It stays when the tar goes: it is small.
        Raises `DataError`, and FileNotFoundError where the tar is gone."""
        folder = self.folder.with_name(f"{self.folder.name}.indexes")
        target = folder / f"{shard.key}.index"
        if not target.is_file():
            folder.mkdir(parents=True, exist_ok=True)
            aside = folder / f".{shard.key}.{uuid4().hex}.tmp"
            try:
                format_of(shard.url).write(file, aside)
                cache.publish(aside, target)
            except OSError as cause:
                if isinstance(cause, FileNotFoundError):
                    raise
                raise self._full(shard, cause) from cause
            finally:
                aside.unlink(missing_ok=True)
        return target

    def _touch(self, target: Path) -> bool:
        """Whether a file is here; from now on it is the one used last. Its time of change stays."""
        try:
            os.utime(target, ns=(time.time_ns(), target.stat().st_mtime_ns))
        except FileNotFoundError:
            return False
        return True

    def _fetch(self, shard: Remote, target: Path) -> None:
        aside = self.folder / f".{shard.key}.{uuid4().hex}.tmp{shard.suffix}"
        made, stays = aside, format_of(shard.url).stays
        try:
            with self._room(shard, shard.size), open(aside, "wb") as file:
                file.truncate(shard.size)  # nothing takes room yet, and others leave it
            remote.download(shard, aside)
            if not stays:
                made = aside.with_suffix(".arrow")
                _convert(shard, aside, made)
            atomic_write.sync(made)
            with self._room(shard, made.stat().st_size, aside, made):
                cache.publish(made, target)
        finally:
            aside.unlink(missing_ok=True)
            made.unlink(missing_ok=True)
        if not stays:  # written here, so it need not be read once more for its form
            with contextlib.suppress(FileNotFoundError):  # another process needed its room
                file_digests.note_valid(target, self.folder.parent)

    @contextlib.contextmanager
    def _room(self, shard: Remote, size: int, *own: Path) -> Iterator[None]:
        """While nobody else puts a file here: what was used longest ago is removed until `size` bytes fit. `own` files
        are in these bytes."""
        if size > self.limit:
            raise DataError(f"{shard.url} takes {size / 1e9:.3g} GB here, and fetch_gb of its data set allows "
                            f"{self.limit / 1e9:.3g}; raise it, or cut the data into smaller files")  # fmt: skip
        with cache.lock(self.folder / ".room.lock"):
            found = {path: stat for path, stat in _inside(self.folder) if path not in own}
            drop = sum(stat.st_size for stat in found.values()) + size - self.limit
            for path, stat in sorted(found.items(), key=lambda item: item[1].st_atime_ns):
                under_way = ".tmp" in path.name
                if (drop > 0 and not under_way) or (under_way and stat.st_mtime < time.time() - _STALE):
                    path.unlink(missing_ok=True)
                    drop -= stat.st_size
            yield


def _inside(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """The files of a store, those under way too, whose names others may remove meanwhile."""
    for entry in os.scandir(folder):
        if not entry.name.endswith(".lock"):
            with contextlib.suppress(FileNotFoundError):
                yield Path(entry.path), entry.stat()


def _convert(shard: Remote, file: Path, target: Path) -> None:
    """What a file of rows is read from: an Arrow table. Errors name the URL."""
    try:
        format_of(shard.url).write(file, target)
    except DataError as cause:
        raise DataError(str(cause).replace(str(file), shard.url)) from cause


class Fetched(Shards):
    """The rows of files at a URL. `window`: rows that are shuffled together where nobody says."""

    window = WINDOW

    def __init__(self, url: str, store: Store, found: Sequence[Remote], counts: Sequence[int]) -> None:
        self.store, self.files = store, [shard._replace(rows=n) for shard, n in zip(found, counts, strict=True)]
        super().__init__(url, self.files, self._open_shard, counts, OPEN)

    def fetch(self, number: int) -> int:
        """Have a file here before it is asked for, unless somebody is at it; how many bytes it takes. Raises
        `DataError`."""
        file = self.store.file(self.files[number], wait=False)
        with contextlib.suppress(OSError):
            if file is not None:
                return file.stat().st_size
        return self.files[number].size

    def _open_shard(self, shard: Remote) -> Rows:
        for number in [n for n, rows in self._rows.items() if isinstance(rows, Mapped) and rows.gone]:
            del self._rows[number]  # its name is gone, and its room is free once nobody has it open
        rows = open_shard(self.store, shard)
        if len(rows) != shard.rows:
            raise DataError(
                f"{shard.url} has {len(rows)} rows, and {shard.rows} are said of it: it changed, was not copied whole, "
                "or its index is of another"
            )
        return rows


def open_shard(store: Store, shard: Remote) -> Rows:
    """The rows of a file, called by its URL. Raises `DataError`."""
    form = format_of(shard.url)
    for _ in range(remote.TRIES):
        file = store.file(shard)
        assert file is not None
        try:
            if form.stays:
                return form.open(shard.url, store.index(shard, file), file)
            return form.open(shard.url, file)
        except FileNotFoundError:  # somebody needed its room in this very moment
            continue
        except DataError as cause:
            raise DataError(f"{shard.url}, kept as {cause}") from cause
    raise DataError(f"{shard.url} is removed as soon as it comes; raise fetch_gb of its data set, which others share")


def open_fetched(url: str, folder: Path | None, say: cache.Say = cache.quiet, limit: int | None = None) -> Fetched:
    """The rows of the files at a URL; `limit`: bytes of them that may lie here. Raises `DataError`.

    How many rows each has is asked of `index.json`, of parquet's footers, or of each file, which is then fetched for
    it; what came of it is kept."""
    folder = cache.default_folder() if folder is None else folder
    found = remote.list_files(url)
    store = Store(folder / "fetched" / sha256(url.encode("utf-8", "surrogatepass")).hexdigest()[:20], limit or BYTES)
    counts = [shard.rows for shard in found]
    if None in counts:
        counts = _counts(store, url, found, say)
    rows = Fetched(url, store, found, [int(count or 0) for count in counts])
    if len(rows) == 0:
        raise DataError(f"{url} holds no rows")
    return rows


def _counts(store: Store, url: str, found: Sequence[Remote], say: cache.Say) -> list[int | None]:
    named = sha256("".join(shard.key for shard in found).encode()).hexdigest()[:20]
    beside = store.folder.with_name(f"{named}.rows")
    if beside.is_file():
        told = read_json(beside, DataError, wanted=list)
        if len(told) == len(found) and all(type(count) is int and count >= 0 for count in told):
            return list(told)
    count_rows = format_of(found[0].url).count
    of_footer = count_rows is not None
    say(f"{url}: the rows of {len(found)} file(s) are counted, once" + ("" if of_footer else ", for which each comes"))

    def count(shard: Remote) -> int:
        if count_rows is None:
            return len(open_shard(store, shard))
        return remote.read(shard.url, lambda file: count_rows(shard.url, file))

    room = store.limit // (2 * max(1, *(shard.size for shard in found)))  # each lies there as it came and as Arrow
    with ThreadPoolExecutor(AT_ONCE if of_footer else max(1, min(AT_ONCE, room))) as pool:
        counts = [*pool.map(count, found)]
    store.folder.mkdir(parents=True, exist_ok=True)
    atomic_write.write_bytes(beside, json.dumps(counts).encode(), shared=True)
    return counts
