"""What is made of data files once: a folder of files that processes map into memory and share.

A file of the cache is named after what it was made of (path, and a digest of all bytes: `file_digests.py`), appears
whole or not at all, and is never written or replaced again (but for counts of tokens, which only ever fill up); so
ranks, workers, runs and several machines with one mount may all use the folder. Whoever comes while another process
converts the same file waits for it, where the file system has locks that reach so far; where it has none (NFS without
its lock service, Lustre mounted without flock) two make the file, the first to finish gives it its name by a hard link,
which no file system lets a second one take, and the other's is dropped: what somebody has mapped into memory is never
exchanged beneath it. Nothing is deleted: the folder may be emptied by whoever owns it when nobody trains.

What is made of an encrypted file lies in memory in place of the folder, made anew by each process.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

from filelock import FileLock, Timeout

from octavo.base import atomic_write, suffixes
from octavo.base.encryption import VaultError, check_folder, is_encrypted
from octavo.base.encryption.anonymous_file import anonymous
from octavo.base.hub import is_name
from octavo.data import file_digests
from octavo.data.errors import DataError
from octavo.data.formats import registry

FORM = 1  # of the files; another one is another name
SMALL = 4 << 20  # bytes of a data file below which it is converted in memory, which takes less than a glance
INDEX = "index.json"  # of a folder of tars
EVERY = 5.0  # seconds between words on a conversion

Say = Callable[[str], None]
Write = Callable[[Path, Callable[[float], None]], None]
"""Writes what is kept of a data file to a path; tells from time to time which share of it is done."""


def quiet(text: str) -> None:
    """Says nothing."""


def default_folder() -> Path:
    """`OCTAVO_CACHE`, else `octavo` in the user's folder of caches."""
    if found := os.environ.get("OCTAVO_CACHE"):
        return Path(found)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "octavo"


def cached_file(
    folder: Path | None, source: Path | str, write: Write, say: Say = quiet, more: str = "", form: str = "Arrow"
) -> Path:
    """The file that `write` makes of `source` (a text: of a URL), made now where it is not there. `folder`: of the
    cache (None: the default); `more`: what else the content depends on; `form`: what it becomes, in a word.

    Raises DataError where the folder cannot be written to or the disk is full, and where `source` changes meanwhile.
    """
    if isinstance(source, Path) and any(map(is_encrypted, files_of(source))):
        return _in_memory(source, write, say, more, form)
    before = _identity(source)
    target = path_in_cache(folder, source, more, form, say)
    folder = target.parent
    if target.is_file():
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with lock(target.with_suffix(".lock")):
            if not target.is_file():
                _make(target, source, write, say, form)
                if _identity(source) != before and path_in_cache(folder, source, more, form) != target:
                    target.unlink()
                    raise DataError(f"{source} changed while it was read; start again when it is whole")
                if form in ("Arrow", "index"):  # written here, so it need not be read once more for its form
                    file_digests.note_valid(target, folder)
    except OSError as cause:
        why = atomic_write.no_room(folder, cause) or getattr(cause, "strerror", None) or str(cause)
        raise DataError(
            f"{folder} cannot keep {Path(source).name} as {form}: {why}. Name a folder with room that can be written "
            "to in data.cache (or OCTAVO_CACHE)"
        ) from cause
    return target


def _in_memory(source: Path, write: Write, say: Say, more: str, form: str) -> Path:
    """What is made of an encrypted file, in memory for as long as this process lives: never in plain on a disk."""
    key = f"{_identity(source)}:{more}:{form}"
    if key not in _MADE:
        try:
            handle, path = anonymous(f"{source}")
            write(path, lambda share: None)
        except VaultError as cause:
            raise DataError(f"{cause}.") from cause
        _MADE[key] = path
        say(f"{source.name} is encrypted: {os.fstat(handle).st_size / 1e6:.1f} MB of {form} made of it lie in memory")
    return _MADE[key]


_MADE: dict[str, Path] = {}  # of this process, and open as long as it lives


def path_in_cache(
    folder: Path | None, source: Path | str, more: str = "", form: str = "Arrow", say: Say = quiet
) -> Path:  # fmt: skip
    """Where `kept` has what is made of a source, there or not yet. Raises `DataError` where it cannot be read."""
    folder = default_folder() if folder is None else folder
    held = str(source)
    if not _named_elsewhere(source):
        files = files_of(Path(source))
        of_each = zip(files, file_digests.digests(files, folder, say), strict=True)
        held = ";".join(f"{file.resolve()}:{one.size}:{one.sha256}" for file, one in of_each)
    name = hashlib.sha256(f"{FORM}:{held}:{more}".encode("utf-8", "surrogatepass")).hexdigest()[:20]
    return folder / f"{name}.{form.lower()}"


def _make(target: Path, source: Path | str, write: Write, say: Say, form: str) -> None:
    aside = target.with_name(f".{target.name}.{uuid4().hex}.tmp")
    file, told = Path(source), time.monotonic()
    size = file.stat().st_size / 1e6 if file.is_file() else 0.0

    def progress(share: float) -> None:
        nonlocal told
        if time.monotonic() - told > EVERY:
            told = time.monotonic()
            say(f"{file.name} ({size:.0f} MB): {share:.0%} converted to {form}")

    say(f"{file.name} ({size:.0f} MB) is converted to {form}, once, into {target.parent}")
    try:
        write(aside, progress)
        atomic_write.sync(aside)
        publish(aside, target)
    finally:
        aside.unlink(missing_ok=True)


@contextmanager
def lock(file: Path, wait: bool = True) -> Iterator[bool]:
    """While nobody else has this lock, where the file system has locks at all. False, without `wait`, where somebody
    has it."""
    file_lock = FileLock(file)
    try:
        file_lock.acquire(**({} if wait else {"timeout": 0}))
    except NotImplementedError:  # nobody waits then, and the same work may be done twice
        yield True
        return
    except Timeout:
        yield False
        return
    try:
        yield True
    finally:
        file_lock.release()


def publish(made: Path, target: Path) -> None:
    """Give a file its name, unless somebody gave it to one of the same content."""
    try:
        os.link(made, target)
    except FileExistsError:
        pass
    except OSError:  # a file system without hard links
        os.replace(made, target)


def files_of(source: Path) -> list[Path]:
    """What of a data file or folder holds rows: a folder's own files of data, and none of the images beside or below
    them, of which there may be millions."""
    if not source.is_dir():
        return [source]
    try:
        check_folder(source, deep=False)  # a file of rows that is missing or was added would train unnoticed
    except VaultError as cause:
        raise DataError(str(cause)) from cause
    ends = (*registry.endings(), *suffixes.ARROW)
    with os.scandir(source) as entries:
        names = sorted(e.name for e in entries if Path(e.name).suffix.lower() in ends and e.name[0] != ".")
    files = [source / name for name in row_files(names)]
    if lost := next((file for file in files if not file.exists()), None):
        raise DataError(f"{lost} is a link to a file that is not there; bring it back, or remove the link")
    return [file for file in files if file.is_file()]


def row_files(names: Sequence[str]) -> list[str]:
    """Those names of a folder that are files of rows, or of what `datasets` saved: files that stay, such as tars, where
    there are no others, but for the `index.json` that says how many rows tars have."""
    converted, staying = (*registry.endings(stays=False), *suffixes.ARROW), registry.endings(stays=True)
    usual = [name for name in names if Path(name).suffix.lower() in converted]
    tars = [name for name in names if Path(name).suffix.lower() in staying]
    return tars if tars and not {*usual} - {INDEX} else usual


def _identity(source: Path | str) -> str:
    """What changes whenever a source does, without reading it."""
    if _named_elsewhere(source):
        return str(source)
    return ";".join(f"{file.resolve()}:{file_digests.stat_of(file.stat())}" for file in files_of(Path(source)))


def _named_elsewhere(source: Path | str) -> bool:
    """Whether a source is a URL or of the hub: the caller says which revision, or what it holds."""
    return isinstance(source, str) or is_name(str(source))
