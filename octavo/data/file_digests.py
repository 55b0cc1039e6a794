"""Digests of files, computed once and stored, and checks that need not be repeated.

Size and mtime do not identify the content of a file: `cp -p`, `rsync -t` and `tar` write other bytes and set the former
mtime. But each of them changes the inode or the time of the last status change (ctime), which no program can set. So a
file with a noted size, mtime, ctime and inode is the file that was read; any other is read again, and its digest
decides. No file is read twice, however large.

Notes are lines of `CACHE/contents/FOLDER.jsonl`, one file for each folder of data, which is only appended to; the last
line for a name counts, and a broken line (two machines without locks) is ignored:

    {"name": "a.jsonl", "stat": [size, mtime_ns, ctime_ns, inode], "sha256": "...", "head": "..."}
    {"name": "a.arrow", "stat": [size, mtime_ns, ctime_ns, inode], "valid": true}
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from octavo.base.safe_read import printable
from octavo.data.errors import DataError

HEAD = 64 << 20  # bytes in the digest `Content.head`, which checkpoints of 0.4.0 compare
AT_ONCE = 4  # files that are read in parallel
#: Nanoseconds: a file that changed less than this before it was read may change again with the same time stamp (the
#: resolution is 4 ms on Linux, 2 s on FAT), so nothing is noted for it.
RECENT = 2 * 10**9
_PIECE = 1 << 20

Log = Callable[[str], None]
Stat = tuple[int, int, int, int]
_CTIME = 2  # index of the ctime in a Stat


class Content(NamedTuple):
    """Size of a file, and SHA-256 of all its bytes and of the first `HEAD`."""

    size: int
    sha256: str
    head: str


def stat_of(result: os.stat_result) -> Stat:
    """Values that change whenever a file's bytes do: size, mtime, ctime, inode. (Not the device number, which differs
    between machines that mount one disk.)"""
    return result.st_size, result.st_mtime_ns, result.st_ctime_ns, result.st_ino


def digests(files: Sequence[Path], folder: Path, log: Log = lambda text: None) -> list[Content]:
    """The digest of each file, from the notes in `folder` (of the cache) or computed now, several files in parallel.

    Raises `DataError` if a file cannot be read, or changes while it is read.
    """
    noted = [_find_note(file, folder, "sha256") for file in files]
    new = [n for n, note in enumerate(noted) if note is None]
    result = [Content(n["stat"][0], n["sha256"], n["head"]) if n else None for n in noted]
    size = sum(files[n].stat().st_size for n in new)
    if size > HEAD:
        log(f"{files[new[0]]}{f' and {len(new) - 1} more' * (len(new) > 1)}: {size / 1e9:.3g} GB are read for a digest "
            "of their content, once")  # fmt: skip
    with ThreadPoolExecutor(AT_ONCE) if len(new) > 1 else contextlib.nullcontext() as pool:
        run = map if pool is None else pool.map
        for number, content in zip(new, run(lambda n: _digest(files[n], folder), new), strict=True):
            result[number] = content
    return [content for content in result if content is not None]


def check_once(file: Path, folder: Path, check: Callable[[], None], used: bool = False) -> None:
    """Call `check`, which raises for a damaged file, unless this version of the file has passed it before. `used`: the
    access time is set when the file is used, which changes its ctime, so the ctime is not compared."""
    before = stat_of(file.stat())
    if _find_note(file, folder, "valid", used) is None:
        check()
        note_valid(file, folder, before)


def note_valid(file: Path, folder: Path, stat: Stat | None = None) -> None:
    """Note that a file is valid. `stat`: of the checked file; nothing is noted if it has changed since."""
    now = stat_of(file.stat())
    if stat is None or stat == now:
        _note(file, folder, now, {"valid": True})


def content_of(file: Path) -> Content:
    """The digest of a file, computed now. Raises `DataError` if it cannot be read, or changes while it is read."""
    return _read(file)[0]


def _digest(file: Path, folder: Path) -> Content:
    content, stat = _read(file)
    if time.time_ns() - max(stat[1:3]) > RECENT:
        _note(file, folder, stat, {"sha256": content.sha256, "head": content.head})
    return content


def _read(file: Path) -> tuple[Content, Stat]:
    try:
        with open(file, "rb") as source:
            before = stat_of(os.fstat(source.fileno()))
            digest, left, head = hashlib.sha256(), HEAD, None
            while piece := source.read(min(_PIECE, left) if left > 0 else _PIECE):
                digest.update(piece)
                left -= len(piece)
                if left <= 0 and head is None:
                    head = digest.hexdigest()
            after = stat_of(os.fstat(source.fileno()))
    except OSError as cause:
        raise DataError(f"{printable(file)} cannot be read: {cause.strerror}.") from cause
    if before != after:
        raise DataError(f"{printable(file)} changed while it was read; start again when it is whole")
    return Content(before[0], digest.hexdigest(), head or digest.hexdigest()), before


# Notes -----------------------------------------------------------------------------------------------------------

_Names = dict[tuple[str, str], dict[str, Any]]  # (name, "sha256" or "valid") -> note
_READ: dict[Path, tuple[tuple[int, int], _Names]] = {}  # note files as this process last read them
_OWN: dict[tuple[Path, str, str], dict[str, Any]] = {}  # notes of this process, also if the cache cannot be written


def _home(file: Path, folder: Path) -> tuple[Path, str]:
    """(note file, name in it) of a data file."""
    path = file.resolve()
    named = hashlib.sha256(os.fsencode(path.parent)).hexdigest()[:20]
    return folder / "contents" / f"{named}.jsonl", os.fsencode(path.name).decode("utf-8", "backslashreplace")


def _find_note(file: Path, folder: Path, what: str, used: bool = False) -> dict[str, Any] | None:
    """The newest note of a file with the key `what`, if the file is unchanged."""
    home, name = _home(file, folder)
    now = stat_of(file.stat())
    notes = _OWN.get((home, name, what)), _notes(home).get((name, what))
    same = [n for n in range(len(now)) if n != _CTIME or not used]
    return next((note for note in notes if note is not None and all(note["stat"][n] == now[n] for n in same)), None)


def _notes(home: Path) -> _Names:
    try:
        stat = home.stat()
    except OSError:
        return {}
    print_ = stat.st_size, stat.st_mtime_ns
    if home not in _READ or _READ[home][0] != print_:
        with contextlib.suppress(OSError):
            _READ[home] = print_, _parsed(home.read_bytes())
    return _READ[home][1] if home in _READ else {}


def _parsed(raw: bytes) -> _Names:
    notes: _Names = {}
    for line in raw.split(b"\n"):
        try:
            note = json.loads(line)
        except (ValueError, RecursionError):  # damaged, or written by two processes at once
            continue
        if not (isinstance(note, dict) and isinstance(note.get("name"), str) and _whole(note.get("stat"))):
            continue
        if note.get("valid") is True:
            notes[note["name"], "valid"] = note
        elif all(isinstance(note.get(key), str) and len(note[key]) == 64 for key in ("sha256", "head")):
            notes[note["name"], "sha256"] = note
    return notes


def _whole(stat: object) -> bool:
    return isinstance(stat, list) and len(stat) == 4 and all(type(n) is int for n in stat)


def _note(file: Path, folder: Path, stat: Stat, what: dict[str, object]) -> None:
    """Append a note. If the cache cannot be written, the file is read again next time; the error is reported when rows
    are stored in the cache."""
    home, name = _home(file, folder)
    note = {"name": name, "stat": stat, **what}
    _OWN[home, name, next(iter(what))] = note
    line = json.dumps(note).encode() + b"\n"
    with contextlib.suppress(OSError):
        home.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(home, os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o666)
        try:
            os.write(handle, b"\n" + line if _lacks_line_end(home) else line)
        finally:
            os.close(handle)


def _lacks_line_end(home: Path) -> bool:
    """Whether the last line has no line break, as a full disk leaves it."""
    with open(home, "rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return False
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"
