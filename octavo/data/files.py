"""Rows of a JSON or JSONL file, by number.

A JSON file is one list and is read once, whole. A JSONL file holds one JSON value a line; only the byte offsets
of its lines are kept, so a file of any size costs 16 bytes a row and each row is read when it is asked for.
"""

from __future__ import annotations

import codecs
import json
import os
from array import array
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from octavo.data.errors import BadSample, DataError

CHUNK = 1 << 22


class Rows(Protocol):
    """A sequence of decoded JSON values."""

    path: Path

    def __len__(self) -> int: ...

    def __getitem__(self, row: int) -> Any: ...


class JsonRows:
    """The rows of a JSON list, in memory."""

    def __init__(self, path: Path, values: list[Any]) -> None:
        self.path = path
        self._values = values

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, row: int) -> Any:
        return self._values[row]


class JsonlRows:
    """The rows of a JSONL file, found by byte offset. Blank lines are passed over; errors name the line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._handle: int | None = None
        self._starts, self._lines = array("q"), array("q")
        for number, start, line in _numbered_lines(path):
            if line.strip():
                self._starts.append(start)
                self._lines.append(number)
            self._size = start + len(line)

    def __len__(self) -> int:
        return len(self._starts)

    def line(self, row: int) -> int:
        """The line number (from 1) that holds a row."""
        return self._lines[row]

    def __getitem__(self, row: int) -> Any:
        if self._handle is None:
            self._handle = os.open(self.path, os.O_RDONLY)
        start = self._starts[row]
        end = self._starts[row + 1] if row + 1 < len(self._starts) else self._size
        # pread carries its own position, so forked workers can share the descriptor.
        text = os.pread(self._handle, end - start, start).decode("utf-8-sig")
        try:
            return json.loads(text)
        except (json.JSONDecodeError, RecursionError) as cause:
            raise BadSample(
                self.path, row, f"line {self.line(row)} is not JSON ({cause}); mend or remove it"
            ) from cause

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_handle": None}

    def __del__(self) -> None:
        handle: int | None = getattr(self, "_handle", None)
        if handle is not None:
            os.close(handle)


def open_rows(path: str | Path) -> Rows:
    """Open a JSON or JSONL file; which of the two it is follows from its first characters, not from its name.

    Raises `DataError` where the file is missing, empty, not UTF-8, not JSON, or holds no list of rows.
    """
    path = Path(path)
    if path.is_dir():
        raise DataError(f"{path} is a folder; data.path must name a JSON or JSONL file inside it")
    try:
        size = path.stat().st_size
    except OSError as cause:
        raise DataError(f"{path}: cannot be read ({cause.strerror}); check data.path in the configuration") from cause
    if size == 0:
        raise DataError(f"{path} is empty (0 bytes); expected a JSON list of rows or one JSON object a line")
    rows = JsonlRows(path) if _is_jsonl(path) else _read_json(path)
    if len(rows) == 0:
        raise DataError(f"{path} holds no rows; expected a JSON list of rows or one JSON object a line")
    return rows


def _numbered_lines(path: Path) -> Iterator[tuple[int, int, bytes]]:
    """(line number from 1, byte offset, bytes) of each line; proves on the way that the file is UTF-8."""
    start = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                line.decode("utf-8")
            except UnicodeDecodeError as cause:
                raise _not_utf8(path, start + cause.start, number) from cause
            yield number, start, line
            start += len(line)


def _not_utf8(path: Path, offset: int, line: int) -> DataError:
    return DataError(
        f"{path} is not UTF-8 (byte {offset}, line {line}); save it as UTF-8, for example with "
        f"`iconv -f ENCODING -t UTF-8`"
    )


def _is_jsonl(path: Path) -> bool:
    """By its name; else JSONL where the first of several filled lines is a whole JSON object."""
    lines = (line.decode("utf-8-sig").strip() for _, _, line in _numbered_lines(path))
    first, *more = list(islice(filter(None, lines), 2)) or [""]
    if path.suffix.lower() in (".jsonl", ".ndjson"):
        return bool(first)
    try:
        return bool(more) and isinstance(json.loads(first), dict)
    except json.JSONDecodeError:
        return False


def _read_json(path: Path) -> JsonRows:
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    parts: list[str] = []
    with path.open("rb") as file:
        offset = 0
        while chunk := file.read(CHUNK):
            try:
                parts.append(decoder.decode(chunk))
            except UnicodeDecodeError as cause:
                line = "".join(parts).count("\n") + chunk[: cause.start].count(b"\n") + 1
                raise _not_utf8(path, offset + cause.start, line) from cause
            offset += len(chunk)
    try:
        values = json.loads("".join(parts))
    except json.JSONDecodeError as cause:
        raise DataError(
            f"{path} is not JSON: {cause.msg} at line {cause.lineno}, column {cause.colno}; "
            f"mend it there, or if it is one JSON object a line, name it .jsonl"
        ) from cause
    except RecursionError as cause:
        raise DataError(f"{path} is nested too deeply to be a list of conversations") from cause
    if isinstance(values, list):
        return JsonRows(path, values)
    found = f"a {type(values).__name__}"
    if isinstance(values, dict):
        found = f"an object with the keys {', '.join(map(repr, list(values)[:5]))}"
    raise DataError(f"{path}: the top level is {found}; it must be a list of rows (or one object a line, as .jsonl)")
