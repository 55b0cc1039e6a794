"""Files of rows that lie elsewhere: which there are at a URL, and how they come here. All by fsspec.

`s3://`, `gs://`, `hf://`, `https://` and the like need fsspec's package for them (s3fs, gcsfs, aiohttp), which says so
itself; keys and endpoints are told to fsspec, by its own configuration or the provider's environment. What fails in a
way that may pass is tried again, `TRIES` times in all, and each try is reported. A server that accepts and sends
nothing for `SECONDS` has failed, too: fsspec's packages wait for minutes, some of them without end.
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
from octavo.base.safe_read import COUNT, TEXT, check_form, first_line, parse_json
from octavo.data.errors import DataError
from octavo.data.formats import registry
from octavo.data.storage import cache

TRIES = 4
SECONDS = 120.0  # without a byte, after which a try has failed
WAIT = 0.5  # seconds before the second try; twice as long before each further one
_BLOCK = 16 << 20  # bytes that are asked for at a time; a 16th with each further try
_LEAST = 1 << 12
_LASTING = (FileNotFoundError, PermissionError, NotADirectoryError, IsADirectoryError, ImportError, ValueError)
#: what services call that by which one sees that a file holds something else
_MARKS = ("ETag", "etag", "md5Hash", "blob_id", "oid", "LastModified", "last_modified", "mtime", "created")
_AND = "|"  # between marks of which only the first is in the fingerprint of a run
_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
_SHARDS = {"shardlist!": [{"url!": TEXT, "nsamples!": COUNT}]}
_T = TypeVar("_T")


class Remote(NamedTuple):
    """A file at a URL. `mark` is another when it holds something else; `rows`: how many it is said to have."""

    url: str
    size: int
    mark: str
    rows: int | None = None

    @property
    def suffix(self) -> str:
        return Path(self.url).suffix.lower()

    @property
    def key(self) -> str:
        """A name for what it holds."""
        return hashlib.sha256(f"{self.url}:{self.size}:{self.mark}".encode("utf-8", "surrogatepass")).hexdigest()[:20]


@lru_cache(maxsize=64)
def list_files(url: str) -> tuple[Remote, ...]:
    """The files of rows at a URL: a file, files by number (`shard-{000..127}.tar`), or those of a folder by name. Where
    a folder of tars has an `index.json` as WebDataset writes it, each with the rows that it says. Raises `DataError`;
    and it is asked once in a process."""
    found = _with_retries(url, lambda watch: _list_files(url))
    if kinds := sorted({remote.suffix for remote in found} - {*registry.endings()}):
        raise DataError(f"{url} is of a kind that holds no rows ({', '.join(kinds) or 'without an ending'}); there are "
                        f"{', '.join(registry.endings())}")  # fmt: skip
    if len({remote.suffix for remote in found}) != 1:
        held = ", ".join(sorted({remote.suffix for remote in found})) or "none"
        raise DataError(f"{url} has files of rows of these kinds: {held}; it must have files of one kind")
    return tuple(found)


def fingerprint(url: str) -> dict[str, Any]:
    """{"size": bytes in all, "sha256": of names, sizes and marks} of the files at a URL. Raises `DataError`."""
    found = list_files(url)
    marks = [(remote.url, remote.size, remote.mark.partition(_AND)[0]) for remote in found]
    digest = hashlib.sha256(json.dumps(marks).encode("utf-8", "surrogatepass"))
    return {"size": sum(remote.size for remote in found), "sha256": digest.hexdigest()}


def local_files(url: str) -> list[Path]:
    """The files at a URL of this machine (`file://`); none at another. Raises `DataError`."""
    if not url.startswith("file://"):
        return []
    return [Path(remote.url.removeprefix("file://")) for remote in list_files(url)]


def download(remote: Remote, to: Path) -> None:
    """Copy a file to a path that is there, whole. Raises `DataError`, and OSError where the path cannot be written."""
    _with_retries(remote.url, lambda watch: _copy(remote, to, watch))


def read(url: str, work: Callable[[Any], _T]) -> _T:
    """What `work` makes of a file, open for reading by place. Raises `DataError`."""

    def opened(watch: _Watch) -> _T:
        system, path = _system(url)
        with system.open(path, "rb") as file:
            return work(file)

    return _with_retries(url, opened)


class _Lost(Exception):
    """What may be there at the next try."""


def report(text: str) -> None:
    """Where tries are reported: on standard error, since files are fetched by threads and workers too."""
    print(text, file=sys.stderr, flush=True)


def _with_retries(url: str, work: Callable[[_Watch], _T]) -> _T:
    for tries in range(1, TRIES + 1):
        try:
            return _run_watched(work, max(_LEAST, _BLOCK >> 4 * (tries - 1)))
        except DataError:
            raise
        except Exception as cause:  # of a network, of whatever package serves this kind of URL
            if isinstance(cause, _LASTING) and not _of_network(cause):
                raise DataError(
                    f"{url} cannot be had ({_why(cause)}); check the URL and who may read it, or copy it here and name "
                    "the folder"
                ) from cause
            if atomic_write.no_room(Path(), cause):
                raise
            why = _why(cause)
            report(f"{url}: try {tries} of {TRIES} failed ({why})")
            if tries == TRIES:
                raise DataError(
                    f"{url} cannot be had, in {TRIES} tries ({why}); check that this machine reaches it"
                ) from cause
            time.sleep(WAIT * 2 ** (tries - 1))
    raise AssertionError


def _why(cause: Exception) -> str:
    """What failed, in a line: of a file that is called missing what its server said, a refusal or a circle too."""
    if isinstance(cause, _Lost):
        return str(cause)
    return first_line(cause.__cause__ if isinstance(cause, _LASTING) and cause.__cause__ else cause)[:300]


def _of_network(cause: BaseException) -> bool:
    """Whether a file that is called missing is one whose server failed: fsspec's HTTP says FileNotFoundError of any
    error, with that error as its cause. A server that says 404 or 410 means it."""
    before = cause.__cause__
    status = getattr(before, "status", None)
    if isinstance(status, int):
        return status >= 500 or status in (408, 425, 429)
    network = (TimeoutError, ConnectionError)
    return isinstance(before, network) or type(before).__module__.partition(".")[0] in ("aiohttp", "botocore")


class _Watch:
    """What a try has in common with those who wait for it: when it last came on, and whether it was given up. `block`:
    bytes that it asks for at a time, fewer with each try: of a slow line no large block comes in time."""

    def __init__(self, block: int = _BLOCK) -> None:
        self.block = block
        self.moved, self.ended = threading.Event(), threading.Event()
        self.lock, self.given_up = threading.Lock(), False

    def move(self) -> None:
        self.moved.set()


def _run_watched(work: Callable[[_Watch], _T], block: int) -> _T:
    """Do it in a thread, as long as something comes every `SECONDS`. A thread that waits for a server cannot be ended:
    it is left behind, and writes nothing any more."""
    watch, results, errors = _Watch(block), [], []

    def run() -> None:
        try:
            results.append(work(watch))
        except BaseException as cause:
            errors.append(cause)
        watch.ended.set()
        watch.moved.set()

    threading.Thread(target=run, daemon=True, name="octavo-fetch").start()
    while not watch.ended.is_set():
        if not watch.moved.wait(SECONDS):
            with watch.lock:
                if watch.ended.is_set():
                    break
                watch.given_up = True
            raise _Lost(f"nothing came for {SECONDS:g} s")
        watch.moved.clear()
    if errors:
        raise errors[0]
    return results[0]


def _system(url: str) -> tuple[Any, str]:
    """(file system, path in it): anew each time, since a fork must not use its parent's connections."""
    import fsspec

    system, path = fsspec.core.url_to_fs(url)
    return system, str(path)


def _copy(remote: Remote, to: Path, watch: _Watch) -> None:
    system, path = _system(remote.url)
    with system.open(path, "rb", block_size=watch.block) as source, open(to, "r+b") as out:
        out.truncate(remote.size)  # of an earlier try that brought more
        while piece := source.read(watch.block):
            watch.move()
            with watch.lock:
                if watch.given_up:  # another try writes there now
                    return
                out.write(piece)
                out.flush()
            if out.tell() > remote.size:  # it grew, or it is packed and unfolds on its way
                break
        if out.tell() != remote.size:
            more = " or more" if out.tell() > remote.size else ""
            raise _Lost(f"{out.tell()} bytes{more} came, and it has {remote.size}")


def _list_files(url: str) -> list[Remote]:
    if _RANGE.search(url):
        return _numbered_files(url)
    system, path = _system(url)
    about = system.info(path)
    if about["type"] != "directory":
        return [_remote_file(system, url, about)]
    inside = {Path(entry["name"]).name: entry for entry in system.ls(path, detail=True) if entry["type"] == "file"}
    names = cache.row_files(sorted(name for name in inside if not name.startswith(".")))
    found = [_remote_file(system, system.unstrip_protocol(inside[name]["name"]), inside[name]) for name in names]
    if not found:
        raise DataError(f"{url} is a folder without files of rows ({', '.join(registry.endings())})")
    if cache.INDEX in inside and registry.format_of(found[0].url).stays:
        return _with_row_counts(found, url, system.cat_file(inside[cache.INDEX]["name"]))
    return found


def _numbered_files(url: str) -> list[Remote]:
    """The files that `{000..127}` in a URL names, found by looking into their folder once."""
    folder = url[: url.index("{")].rpartition("/")[0]
    system, path = _system(folder)
    inside = {entry["name"].rpartition("/")[2]: entry for entry in system.ls(path, detail=True)}
    found = []
    for one in _expand_numbers(url):
        name = one.rpartition("/")[2]
        if one.rpartition("/")[0] != folder:
            raise DataError(f"{url}: numbers {{..}} stand in a file's name alone; give each folder a data set")
        if name not in inside:
            raise DataError(f"{one} is missing, which {url} names; there are {len(inside)} files beside it")
        found.append(_remote_file(system, one, inside[name]))
    return found


def _expand_numbers(url: str) -> Iterator[str]:
    if (found := _RANGE.search(url)) is None:
        yield url
        return
    first, last = found.groups()
    for number in range(int(first), int(last) + 1):
        yield from _expand_numbers(url[: found.start()] + f"{number:0{len(first)}}" + url[found.end() :])


def _remote_file(system: Any, url: str, about: dict[str, Any]) -> Remote:
    if about.get("size") is None:
        raise DataError(f"{url}: its server does not say how many bytes it has; copy it here and name the file")
    mark = next((str(about[name]) for name in _MARKS if about.get(name) is not None), "")
    if "ino" in about:  # of this machine: a copy may have the former time, and has another inode or ctime
        mark += f"{_AND}{about.get('created')}{_AND}{about['ino']}"
    return Remote(url, int(about["size"]), mark)


def _with_row_counts(found: Sequence[Remote], url: str, index: bytes) -> list[Remote]:
    """Files with the rows that WebDataset's index says."""
    where = f"{url}/{cache.INDEX}"
    told = parse_json(index.decode("utf-8", "replace"), where, DataError)
    check_form(told, _SHARDS, where, DataError)
    rows = {entry["url"].rpartition("/")[2]: entry["nsamples"] for entry in told["shardlist"]}
    there = {remote.url.rpartition("/")[2]: remote for remote in found}
    if apart := sorted({*rows} ^ {*there}):
        how = "is missing, and the index names it" if apart[0] in rows else "is there, and the index does not name it"
        raise DataError(f"{where} is not of these files: {apart[0]} {how} ({len(apart)} such); write it anew")
    return [remote._replace(rows=rows[name]) for name, remote in there.items()]
