"""The data cache: a folder of converted data files, which processes map into memory and share.

A cache file is named after its source (path, and a digest of all bytes: `file_digests.py`), is published complete, and
is never written or replaced again (except token counts, which are only filled in); so ranks, workers, runs and several
machines with one mount may share the folder. A process waits while another converts the same file, if the file system
has locks between them. Without locks (NFS without its lock service, Lustre mounted without flock) two processes convert
the file; the first to finish publishes it with a hard link, which fails for the second, whose file is dropped: so a
file that a process has mapped into memory is never replaced. Nothing is deleted; the owner may empty the folder when no
run uses it.

Encrypted files are converted in memory instead, separately in each process.
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
from octavo.base.byte_size import format_bytes
from octavo.base.encryption import VaultError, check_folder, is_encrypted
from octavo.base.encryption.anonymous_file import create_memory_file
from octavo.base.env_vars import cache_home
from octavo.base.hub import is_name
from octavo.data import file_digests
from octavo.data.errors import DataError
from octavo.data.formats import registry
from octavo.data.formats.text_files import find_text_files

FORMAT_VERSION = 1  # version of the cache files, part of their names
SMALL_FILE = 4 << 20  # a data file with fewer bytes is converted in memory, in a fraction of a second
INDEX = "index.json"  # in a folder of tars
PROGRESS_SECONDS = 5.0  # seconds between progress messages of a conversion

Log = Callable[[str], None]
Write = Callable[[Path, Callable[[float], None]], None]
"""Writes the converted data file to a path, and reports the share that is done from time to time."""


def no_log(text: str) -> None:
    """Print nothing."""


def cached_file(
    folder: Path | None, source: Path | str, write: Write, log: Log = no_log, depends_on: str = "", form: str = "Arrow"
) -> Path:
    """Return the cache file that `write` creates from `source` (a str for a URL), written now if it is missing.
    `folder` is the cache folder, or None for the default; `depends_on` contains other inputs of the content; `form` is
    its type, in one word.

    Raises DataError if the folder cannot be written or the disk is full, and if `source` changes meanwhile.
    """
    if isinstance(source, Path) and any(map(is_encrypted, list_row_files(source))):
        return _convert_in_memory(source, write, log, depends_on, form)
    before = _identity(source)
    target = path_in_cache(folder, source, depends_on, form, log)
    folder = target.parent
    if target.is_file():
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with lock(target.with_suffix(".lock")):
            if not target.is_file():
                _convert(target, source, write, log, form)
                if _identity(source) != before and path_in_cache(folder, source, depends_on, form) != target:
                    target.unlink()
                    raise DataError(f"{source} changed while it was read; start again when it is complete")
                if form in ("Arrow", "index"):  # just written, so it need not be validated
                    file_digests.note_valid(target, folder)
    except OSError as cause:
        reason = atomic_write.why_no_space(folder, cause) or getattr(cause, "strerror", None) or str(cause)
        raise DataError(
            f"{folder} cannot keep {Path(source).name} as {form}: {reason}. Name a folder with room that can be "
            "written to in data.cache (or OCTAVO_CACHE)"
        ) from cause
    return target


def _convert_in_memory(source: Path, write: Write, log: Log, depends_on: str, form: str) -> Path:
    """Return the converted form of an encrypted file, in memory while this process lives: plain text is never on a
    disk."""
    key = f"{_identity(source)}:{depends_on}:{form}"
    if key not in _IN_MEMORY:
        try:
            handle, path = create_memory_file(f"{source}")
            write(path, lambda share: None)
        except VaultError as cause:
            raise DataError(f"{cause}.") from cause
        _IN_MEMORY[key] = path
        log(f"{source.name} is encrypted: {format_bytes(os.fstat(handle).st_size)} of {form} made of it are in memory")
    return _IN_MEMORY[key]


_IN_MEMORY: dict[str, Path] = {}  # files in memory of this process, open while it lives


def path_in_cache(
    folder: Path | None, source: Path | str, depends_on: str = "", form: str = "Arrow", log: Log = no_log
) -> Path:  # fmt: skip
    """Return the path of the cache file for a source, which may not exist yet. Raises `DataError` for an unreadable
    source."""
    folder = cache_home() if folder is None else folder
    content = str(source)
    if not _is_remote(source):
        files = list_row_files(Path(source))
        digests = zip(files, file_digests.compute_digests(files, folder, log), strict=True)
        content = ";".join(f"{file.resolve()}:{digest.size}:{digest.sha256}" for file, digest in digests)
    name = hashlib.sha256(f"{FORMAT_VERSION}:{content}:{depends_on}".encode("utf-8", "surrogatepass")).hexdigest()[:20]
    return folder / f"{name}.{form.lower()}"


def _convert(target: Path, source: Path | str, write: Write, log: Log, form: str) -> None:
    temporary = target.with_name(f".{target.name}.{uuid4().hex}.tmp")
    file, last = Path(source), time.monotonic()
    name = f"{file.name} ({format_bytes(file.stat().st_size)})" if file.is_file() else file.name

    def progress(share: float) -> None:
        nonlocal last
        if time.monotonic() - last > PROGRESS_SECONDS:
            last = time.monotonic()
            log(f"{name}: {share:.0%} converted to {form}")

    log(f"{name} is converted to {form}, once, into {target.parent}")
    try:
        write(temporary, progress)
        atomic_write.sync(temporary)
        publish(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def lock(file: Path, wait: bool = True) -> Iterator[bool]:
    """Hold a lock, if the file system has locks. Yields False, without `wait`, if another process holds it."""
    file_lock = FileLock(file)
    try:
        if wait:
            file_lock.acquire()
        else:
            file_lock.acquire(timeout=0)
    except NotImplementedError:  # no locks: no process waits, and the same work may be done twice
        yield True
        return
    except Timeout:
        yield False
        return
    try:
        yield True
    finally:
        file_lock.release()


def publish(written: Path, target: Path) -> None:
    """Link a finished file to its name, unless another process has published the same content."""
    try:
        os.link(written, target)
    except FileExistsError:
        pass
    except OSError:  # a file system without hard links
        os.replace(written, target)


def list_row_files(source: Path) -> list[Path]:
    """Return the row files of a data file or folder: the data files directly in a folder, without its images and
    subfolders, which may have millions of files; if it has none, the text files in it and in its subfolders."""
    if not source.is_dir():
        return [source]
    ends = (*registry.row_suffixes(), *suffixes.ARROW)
    with os.scandir(source) as entries:
        names = sorted(e.name for e in entries if Path(e.name).suffix.lower() in ends and e.name[0] != ".")
    files = [source / name for name in select_row_files(names)]
    texts = [] if names else find_text_files(source, ends)[0]
    try:
        check_folder(source, deep=bool(texts))  # a missing or added file would change the data unnoticed
    except VaultError as cause:
        raise DataError(str(cause)) from cause
    if dangling := next((file for file in files if not file.exists()), None):
        raise DataError(f"{dangling} is a link to a missing file; restore the file, or remove the link")
    return texts or [file for file in files if file.is_file()]


def select_row_files(names: Sequence[str]) -> list[str]:
    """Return the names in a folder that are row files, or Arrow files of `datasets`. Formats that are not converted,
    such as tars, count only if there are no others, except the `index.json` with the row counts of tars."""
    converted_suffixes, indexed_suffixes = (
        (*registry.row_suffixes(indexed_only=False), *suffixes.ARROW),
        registry.row_suffixes(indexed_only=True),
    )
    converted_files = [name for name in names if Path(name).suffix.lower() in converted_suffixes]
    indexed_files = [name for name in names if Path(name).suffix.lower() in indexed_suffixes]
    return indexed_files if indexed_files and not {*converted_files} - {INDEX} else converted_files


def _identity(source: Path | str) -> str:
    """Return a text that changes whenever a source changes, without reading the source."""
    if _is_remote(source):
        return str(source)
    return ";".join(f"{file.resolve()}:{file_digests.stat_key(file.stat())}" for file in list_row_files(Path(source)))


def _is_remote(source: Path | str) -> bool:
    """Return True if a source is a URL or a name of the hub; the caller identifies its content or revision."""
    return isinstance(source, str) or is_name(str(source))
