"""Digests of files and results of file checks, computed once and cached.

Size and mtime do not identify the content of a file: `cp -p`, `rsync -t` and `tar` write different bytes and restore
the old mtime. But each of them changes the inode or the time of the last status change (ctime), which no program can
set. So a file is unchanged if its size, mtime, ctime and inode equal those in its note; otherwise it is read again and
its digest is compared. An unchanged file is never read twice.

Notes are lines of `CACHE/contents/FOLDER.jsonl`, one append-only file for each folder of data. The last line for a name
is valid; a broken line (two machines without locks) is ignored:

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

from octavo.base.byte_size import format_bytes
from octavo.base.safe_read import printable
from octavo.data.errors import DataError

HEAD = 64 << 20  # bytes covered by the digest `Content.head`, which checkpoints of 0.4.0 compare
PARALLEL_FILES = 4  # files that are read in parallel
#: Nanoseconds. A file that changed less than this before it was read may change again with the same time stamp (the
#: resolution is 4 ms on Linux, 2 s on FAT), so no note is written for it.
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


def stat_key(result: os.stat_result) -> Stat:
    """Return size, mtime, ctime and inode, at least one of which changes whenever a file's bytes do. The device number
    is not included, because it differs between machines that mount the same disk."""
    return result.st_size, result.st_mtime_ns, result.st_ctime_ns, result.st_ino


def compute_digests(files: Sequence[Path], folder: Path, log: Log = lambda text: None) -> list[Content]:
    """Return the digest of each file, from the notes in the cache `folder` or computed now, several files in parallel.

    Raises `DataError` if a file cannot be read or changes while it is read.
    """
    notes = [_find_note(file, folder, "sha256") for file in files]
    missing = [n for n, note in enumerate(notes) if note is None]
    result = [Content(n["stat"][0], n["sha256"], n["head"]) if n else None for n in notes]
    size = sum(files[n].stat().st_size for n in missing)
    if size > HEAD:
        others = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        log(f"{files[missing[0]]}{others}: {format_bytes(size)} are read once to compute digests of their content")
    with ThreadPoolExecutor(PARALLEL_FILES) if len(missing) > 1 else contextlib.nullcontext() as pool:
        run = map if pool is None else pool.map
        for number, content in zip(missing, run(lambda n: _digest(files[n], folder), missing), strict=True):
            result[number] = content
    return [content for content in result if content is not None]


def check_once(file: Path, folder: Path, check: Callable[[], None], ctime_varies: bool = False) -> None:
    """Call `check`, which raises for a damaged file, unless this version of the file has passed it before.

    `ctime_varies`: do not compare the ctime, because the access time, and with it the ctime, is set at each use.
    """
    before = stat_key(file.stat())
    if _find_note(file, folder, "valid", ctime_varies) is None:
        check()
        note_valid(file, folder, before)


def note_valid(file: Path, folder: Path, stat: Stat | None = None) -> None:
    """Record that a file is valid, unless it has changed since `stat`, which the caller took before the check."""
    now = stat_key(file.stat())
    if stat is None or stat == now:
        _append_note(file, folder, now, {"valid": True})


def digest_file(file: Path) -> Content:
    """Compute the digest of a file. Raises `DataError` if it cannot be read or changes while it is read."""
    return _read(file)[0]


def _digest(file: Path, folder: Path) -> Content:
    content, stat = _read(file)
    if time.time_ns() - max(stat[1:3]) > RECENT:
        _append_note(file, folder, stat, {"sha256": content.sha256, "head": content.head})
    return content


def _read(file: Path) -> tuple[Content, Stat]:
    try:
        with open(file, "rb") as source:
            before = stat_key(os.fstat(source.fileno()))
            digest, left, head = hashlib.sha256(), HEAD, None
            while piece := source.read(min(_PIECE, left) if left > 0 else _PIECE):
                digest.update(piece)
                left -= len(piece)
                if left <= 0 and head is None:
                    head = digest.hexdigest()
            after = stat_key(os.fstat(source.fileno()))
    except OSError as cause:
        raise DataError(f"{printable(file)} cannot be read: {cause.strerror}.") from cause
    if before != after:
        raise DataError(f"{printable(file)} changed while it was read; start again when it is complete")
    return Content(before[0], digest.hexdigest(), head or digest.hexdigest()), before


# Notes -----------------------------------------------------------------------------------------------------------

_Names = dict[tuple[str, str], dict[str, Any]]  # (name, "sha256" or "valid") -> note
_LOADED: dict[Path, tuple[tuple[int, int], _Names]] = {}  # note files as this process last read them
_LOCAL_NOTES: dict[
    tuple[Path, str, str], dict[str, Any]
] = {}  # notes of this process, also if the cache cannot be written


def _note_location(file: Path, folder: Path) -> tuple[Path, str]:
    """Return the note file of a data file, and the name of the data file in it."""
    path = file.resolve()
    folder_key = hashlib.sha256(os.fsencode(path.parent)).hexdigest()[:20]
    return folder / "contents" / f"{folder_key}.jsonl", os.fsencode(path.name).decode("utf-8", "backslashreplace")


def _find_note(file: Path, folder: Path, what: str, ctime_varies: bool = False) -> dict[str, Any] | None:
    """Return the newest note of a file that has the key `what`, or None if there is none or the file has changed."""
    note_file, name = _note_location(file, folder)
    now = stat_key(file.stat())
    notes = _LOCAL_NOTES.get((note_file, name, what)), _load_notes(note_file).get((name, what))
    compared = [n for n in range(len(now)) if n != _CTIME or not ctime_varies]
    return next((note for note in notes if note is not None and all(note["stat"][n] == now[n] for n in compared)), None)


def _load_notes(note_file: Path) -> _Names:
    try:
        stat = note_file.stat()
    except OSError:
        return {}
    fingerprint = stat.st_size, stat.st_mtime_ns
    if note_file not in _LOADED or _LOADED[note_file][0] != fingerprint:
        with contextlib.suppress(OSError):
            _LOADED[note_file] = fingerprint, _parse_notes(note_file.read_bytes())
    return _LOADED[note_file][1] if note_file in _LOADED else {}


def _parse_notes(raw: bytes) -> _Names:
    notes: _Names = {}
    for line in raw.split(b"\n"):
        try:
            note = json.loads(line)
        except (ValueError, RecursionError):  # damaged, or written by two processes at once
            continue
        if not (isinstance(note, dict) and isinstance(note.get("name"), str) and _is_stat(note.get("stat"))):
            continue
        if note.get("valid") is True:
            notes[note["name"], "valid"] = note
        elif all(isinstance(note.get(key), str) and len(note[key]) == 64 for key in ("sha256", "head")):
            notes[note["name"], "sha256"] = note
    return notes


def _is_stat(stat: object) -> bool:
    return isinstance(stat, list) and len(stat) == 4 and all(type(n) is int for n in stat)


def _append_note(file: Path, folder: Path, stat: Stat, content: dict[str, object]) -> None:
    """Append a note. If the cache cannot be written, the file is read again next time; the error is reported later,
    when rows are stored in the cache."""
    note_file, name = _note_location(file, folder)
    note = {"name": name, "stat": stat, **content}
    _LOCAL_NOTES[note_file, name, next(iter(content))] = note
    line = json.dumps(note).encode() + b"\n"
    with contextlib.suppress(OSError):
        note_file.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(note_file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o666)
        try:
            os.write(handle, b"\n" + line if _ends_mid_line(note_file) else line)
        finally:
            os.close(handle)


def _ends_mid_line(note_file: Path) -> bool:
    """Return True if the last line has no line break, for example because the disk was full."""
    with open(note_file, "rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return False
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"
