"""Remote row files: listing the files at a URL, and downloading them, with fsspec.

`s3://`, `gs://`, `hf://`, `https://` and others need the fsspec package for the protocol (s3fs, gcsfs, aiohttp); fsspec
reports a missing one. Keys and endpoints are configured in fsspec or in the environment variables of the provider.
Operations that fail with a temporary error are repeated, up to `TRIES` times, and each failure is reported. A server
that accepts a connection and sends nothing for `STALL_SECONDS` also counts as failed: fsspec's packages wait for
minutes, some of them forever.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from octavo.base import atomic_write
from octavo.base.safe_read import COUNT, TEXT, check_schema, first_line, parse_json
from octavo.base.wording import count_noun
from octavo.data.errors import DataError
from octavo.data.formats import registry
from octavo.data.storage import cache

TRIES = 4
STALL_SECONDS = 120.0  # without a byte after which a try has failed
RETRY_SECONDS = 0.5  # seconds before the second try, doubled before each further one
_BLOCK = 16 << 20  # bytes requested at a time; divided by 16 for each further try
_MIN_BLOCK = 1 << 12
_PERMANENT_ERRORS = (FileNotFoundError, PermissionError, NotADirectoryError, IsADirectoryError, ImportError, ValueError)
#: keys under which services report a value that changes with the content of a file
_MARKS = ("ETag", "etag", "md5Hash", "blob_id", "oid", "LastModified", "last_modified", "mtime", "created")
_MARK_SEPARATOR = "|"  # separator of marks; only the first mark is in the fingerprint of a run
_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
_SHARDS = {"shardlist!": [{"url!": TEXT, "nsamples!": COUNT}]}
_T = TypeVar("_T")


class Remote(NamedTuple):
    """A file at a URL. `mark`: a text that changes with its content; `rows`: its number of rows, if known."""

    url: str
    size: int
    mark: str
    rows: int | None = None

    @property
    def suffix(self) -> str:
        return Path(self.url).suffix.lower()

    @property
    def key(self) -> str:
        """A name that identifies its content."""
        return hashlib.sha256(f"{self.url}:{self.size}:{self.mark}".encode("utf-8", "surrogatepass")).hexdigest()[:20]


@lru_cache(maxsize=64)
def list_files(url: str) -> tuple[Remote, ...]:
    """Return the row files at a URL: one file, numbered files (`shard-{000..127}.tar`), or the files of a folder by
    name. If a folder of tars has an `index.json` as WebDataset writes it, they have the row counts in it. Raises
    `DataError`. The server is queried once in a process."""
    files = _with_retries(url, lambda watch: _list_files(url))
    if kinds := sorted({remote.suffix for remote in files} - {*registry.row_suffixes()}):
        raise DataError(
            f"{url} has a format that is not supported ({', '.join(kinds) or 'without a suffix'}); supported are "
            f"{', '.join(registry.row_suffixes())}"
        )
    if len({remote.suffix for remote in files}) != 1:
        kinds_text = ", ".join(sorted({remote.suffix for remote in files})) or "none"
        raise DataError(f"{url} has files of several formats ({kinds_text}); all must have one format")
    return tuple(files)


def fingerprint(url: str) -> dict[str, Any]:
    """Return {"size": total bytes, "sha256": of names, sizes and marks} of the files at a URL. Raises `DataError`."""
    files = list_files(url)
    marks = [(remote.url, remote.size, remote.mark.partition(_MARK_SEPARATOR)[0]) for remote in files]
    digest = hashlib.sha256(json.dumps(marks).encode("utf-8", "surrogatepass"))
    return {"size": sum(remote.size for remote in files), "sha256": digest.hexdigest()}


def local_files(url: str) -> list[Path]:
    """Return the local files at a `file://` URL; [] for another URL. Raises `DataError`."""
    if not url.startswith("file://"):
        return []
    return [Path(remote.url.removeprefix("file://")) for remote in list_files(url)]


def download(remote: Remote, to: Path) -> None:
    """Copy a whole file to an existing path. Raises `DataError`, and OSError if the path cannot be written."""
    _with_retries(remote.url, lambda watch: _copy(remote, to, watch))


def read(url: str, work: Callable[[Any], _T]) -> _T:
    """Return the result of `work` for a file at a URL, opened for random access. Raises `DataError`."""

    def opened(watch: _Watch) -> _T:
        system, path = _open_filesystem(url)
        with system.open(path, "rb") as file:
            return work(file)

    return _with_retries(url, opened)


class _TemporaryError(Exception):
    """A failure that may not happen at the next try."""


def report(text: str) -> None:
    """Print a failed try, to standard error, because threads and workers download files too."""
    print(text, file=sys.stderr, flush=True)


def _with_retries(url: str, work: Callable[[_Watch], _T]) -> _T:
    for tries in range(1, TRIES + 1):
        try:
            return _run_watched(work, max(_MIN_BLOCK, _BLOCK >> 4 * (tries - 1)))
        except DataError:
            raise
        except Exception as cause:  # errors of many classes, of the network and of the package for the protocol
            if isinstance(cause, _PERMANENT_ERRORS) and not _is_network_error(cause):
                raise DataError(
                    f"{url} cannot be read ({_describe_failure(cause)}); check the URL and who may read it, or copy it "
                    "here and name the folder"
                ) from cause
            if atomic_write.why_no_space(Path(), cause):
                raise
            why = _describe_failure(cause)
            report(f"{url}: try {tries} of {TRIES} failed ({why})")
            if tries == TRIES:
                raise DataError(
                    f"{url} could not be read in {TRIES} tries ({why}); check that this machine reaches it"
                ) from cause
            time.sleep(RETRY_SECONDS * 2 ** (tries - 1))
    raise AssertionError


def _describe_failure(cause: Exception) -> str:
    """Return the reason of a failure in one line; for a FileNotFoundError that a server error caused, the reason of the
    server error."""
    if isinstance(cause, _TemporaryError):
        return str(cause)
    return first_line(cause.__cause__ if isinstance(cause, _PERMANENT_ERRORS) and cause.__cause__ else cause)[:300]


def _is_network_error(cause: BaseException) -> bool:
    """Return True if a FileNotFoundError comes from a failed server: fsspec's HTTP raises it for any error, with that
    error as its cause. Only the status 404 or 410 means a missing file."""
    before = cause.__cause__
    status = getattr(before, "status", None)
    if isinstance(status, int):
        return status >= 500 or status in (408, 425, 429)
    network = (TimeoutError, ConnectionError)
    return isinstance(before, network) or type(before).__module__.partition(".")[0] in ("aiohttp", "botocore")


class _Watch:
    """State shared by a try and the thread that waits for it: whether it made progress, ended or was abandoned.
    `block`: bytes requested at a time, fewer with each try, because a large block takes too long on a slow line."""

    def __init__(self, block: int = _BLOCK) -> None:
        self.block = block
        self.progressed, self.ended = threading.Event(), threading.Event()
        self.lock, self.abandoned = threading.Lock(), False

    def note_progress(self) -> None:
        self.progressed.set()


def _run_watched(work: Callable[[_Watch], _T], block: int) -> _T:
    """Run `work` in a thread, while it makes progress every `STALL_SECONDS`. A thread that waits for a server cannot be
    stopped: it is abandoned, and writes nothing afterwards."""
    watch, results, errors = _Watch(block), [], []

    def run() -> None:
        try:
            results.append(work(watch))
        except BaseException as cause:
            errors.append(cause)
        watch.ended.set()
        watch.progressed.set()

    threading.Thread(target=run, daemon=True, name="octavo-fetch").start()
    while not watch.ended.is_set():
        if not watch.progressed.wait(STALL_SECONDS):
            with watch.lock:  # the abandoned thread must not write into the file of the next try
                if watch.ended.is_set():
                    break
                watch.abandoned = True
            raise _TemporaryError(f"no data received for {STALL_SECONDS:g} s")
        watch.progressed.clear()
    if errors:
        raise errors[0]
    return results[0]


def _open_filesystem(url: str) -> tuple[Any, str]:
    """Return (file system, path in it), created for each call, because a forked process must not use its parent's
    connections."""
    import fsspec

    system, path = fsspec.core.url_to_fs(url)
    return system, str(path)


def _copy(remote: Remote, to: Path, watch: _Watch) -> None:
    system, path = _open_filesystem(remote.url)
    with system.open(path, "rb", block_size=watch.block) as source, open(to, "r+b") as out:
        out.truncate(remote.size)  # an earlier try may have written more
        while piece := source.read(watch.block):
            watch.note_progress()
            with watch.lock:
                if watch.abandoned:  # another try writes there now
                    return
                out.write(piece)
                out.flush()
            if out.tell() > remote.size:  # it grew, or it is compressed and decoded during the transfer
                break
        if out.tell() != remote.size:
            at_least = " or more" if out.tell() > remote.size else ""
            raise _TemporaryError(f"{out.tell()} bytes{at_least} received, expected {remote.size}")


def _list_files(url: str) -> list[Remote]:
    if _RANGE.search(url):
        return _numbered_files(url)
    system, path = _open_filesystem(url)
    info = system.info(path)
    if info["type"] != "directory":
        return [_remote_file(system, url, info)]
    inside = {Path(entry["name"]).name: entry for entry in system.ls(path, detail=True) if entry["type"] == "file"}
    names = cache.select_row_files(sorted(name for name in inside if not name.startswith(".")))
    files = [_remote_file(system, system.unstrip_protocol(inside[name]["name"]), inside[name]) for name in names]
    if not files:
        raise DataError(f"{url} is a folder without files of rows ({', '.join(registry.row_suffixes())})")
    if cache.INDEX in inside and registry.format_of(files[0].url).indexed_only:
        return _with_row_counts(files, url, system.cat_file(inside[cache.INDEX]["name"]))
    return files


def _numbered_files(url: str) -> list[Remote]:
    """Return the files of a URL with `{000..127}`, from one listing of their folder."""
    folder = url[: url.index("{")].rpartition("/")[0]
    system, path = _open_filesystem(folder)
    inside = {entry["name"].rpartition("/")[2]: entry for entry in system.ls(path, detail=True)}
    files = []
    for file_url in _expand_numbers(url):
        name = file_url.rpartition("/")[2]
        if file_url.rpartition("/")[0] != folder:
            raise DataError(f"{url}: numbers {{..}} are only possible in a file name; give each folder a data set")
        if name not in inside:
            raise DataError(
                f"{file_url} is missing, which {url} names; its folder has {count_noun(len(inside), 'file')}"
            )
        files.append(_remote_file(system, file_url, inside[name]))
    return files


def _expand_numbers(url: str) -> Iterator[str]:
    if (match := _RANGE.search(url)) is None:
        yield url
        return
    first, last = match.groups()
    for number in range(int(first), int(last) + 1):
        yield from _expand_numbers(url[: match.start()] + f"{number:0{len(first)}}" + url[match.end() :])


def _remote_file(system: Any, url: str, info: dict[str, Any]) -> Remote:
    if info.get("size") is None:
        raise DataError(f"{url}: its server does not say how many bytes it has; copy it here and name the file")
    mark = next((str(info[name]) for name in _MARKS if info.get(name) is not None), "")
    if "ino" in info:  # a local file: a copy may keep the mtime, but gets another inode or ctime
        mark += f"{_MARK_SEPARATOR}{info.get('created')}{_MARK_SEPARATOR}{info['ino']}"
    return Remote(url, int(info["size"]), mark)


def _with_row_counts(files: Sequence[Remote], url: str, index: bytes) -> list[Remote]:
    """Files with the row counts in WebDataset's index. Raises `DataError` if it lists other files."""
    where = f"{url}/{cache.INDEX}"
    content = parse_json(index.decode("utf-8", "replace"), where, DataError)
    check_schema(content, _SHARDS, where, DataError)
    rows = {entry["url"].rpartition("/")[2]: entry["nsamples"] for entry in content["shardlist"]}
    by_name = {remote.url.rpartition("/")[2]: remote for remote in files}
    if unmatched := sorted({*rows} ^ {*by_name}):
        difference = (
            "is missing, and the index names it" if unmatched[0] in rows else "is there, and the index does not name it"
        )
        raise DataError(
            f"{where} does not match these files: {unmatched[0]} {difference} ({len(unmatched)} such); write it again"
        )
    return [remote._replace(rows=rows[name]) for name, remote in by_name.items()]
