"""Rows of a JSON or JSONL file, by number.

Of a JSON file, which is one list, the text is kept; of a JSONL file, which holds one JSON value a line, nothing. Both
keep where their rows begin (16 bytes a row), and a row becomes values when it is asked for. So what is wrong with a
row, whatever it is, is wrong with that row alone; only a list whose form is broken is refused whole.
"""

from __future__ import annotations

import json
import os
import re
import reprlib
from array import array
from collections.abc import Iterator
from itertools import islice
from json.decoder import scanstring
from pathlib import Path
from typing import Any, Protocol

from octavo.data.errors import BadSample, DataError
from octavo.reading import Unreadable, decode, open_file, parse_json, read_bytes

ROW_BYTES = 64 << 20  # of a line of JSONL; a million tokens written as \uXXXX have a tenth of it
_NO_LIMIT = 1 << 62
_SPACE = re.compile(r"[ \t\r\n]*")
_MARK = re.compile(r'["\[\]{},]')
_SCAN = json.JSONDecoder(parse_int=len).raw_decode  # finds where values end; a number of any length passes


class Rows(Protocol):
    """A sequence of decoded JSON values; one that cannot be read raises `BadSample`."""

    path: Path

    def __len__(self) -> int: ...

    def __getitem__(self, row: int) -> Any: ...


class JsonRows:
    """The rows of a JSON list, whose text stays in memory."""

    def __init__(self, path: Path, text: str) -> None:
        self.path, self._text = path, text
        self._starts, self._ends = array("q"), array("q")
        for start, end in _elements(text):
            self._starts.append(start)
            self._ends.append(end)

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, row: int) -> Any:
        return _value(self._text[self._starts[row] : self._ends[row]], self.path, row, "its text")


class JsonlRows:
    """The rows of a JSONL file, found by byte offset. Blank lines are passed over; errors name the line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._handle: int | None = None
        self._starts, self._lines = array("q"), array("q")
        for number, start, self._size, line in _numbered_lines(path):
            if line.strip():
                self._starts.append(start)
                self._lines.append(number)

    def __len__(self) -> int:
        return len(self._starts)

    def line(self, row: int) -> int:
        """The line number (from 1) that holds a row."""
        return self._lines[row]

    def __getitem__(self, row: int) -> Any:
        if self._handle is None:
            self._handle = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK)
        start, line = self._starts[row], f"line {self.line(row)}"
        size = (self._starts[row + 1] if row + 1 < len(self._starts) else self._size) - start
        if size > ROW_BYTES:
            raise BadSample(
                self.path, row, f"{line} has {size} bytes, and {ROW_BYTES} are the most; split or remove it"
            )
        # pread carries its own position, so forked workers can share the descriptor.
        raw = os.pread(self._handle, size, start)
        if len(raw) != size:
            raise DataError(f"{self.path} is shorter than when it was opened ({line} is gone); leave it as it is")
        try:
            text = raw.decode("utf-8-sig")
        except UnicodeDecodeError as cause:
            raise BadSample(
                self.path, row, f"{line} is not UTF-8 (its byte {cause.start}); save it as UTF-8, for example with "
                "`iconv -f ENCODING -t UTF-8`"
            ) from cause  # fmt: skip
        return _value(text, self.path, row, line)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_handle": None}

    def __del__(self) -> None:
        handle: int | None = getattr(self, "_handle", None)
        if handle is not None:
            os.close(handle)


def open_rows(path: str | Path) -> Rows:
    """Open a JSON or JSONL file; which of the two it is follows from its first characters, not from its name.

    Raises `DataError` where the file is missing, no regular file, empty, or holds no list of rows; of a JSON list also
    where it is not UTF-8 or its form is broken.
    """
    path = Path(path)
    try:
        with open_file(path, DataError) as file:
            size = os.fstat(file.fileno()).st_size
    except DataError as cause:
        raise DataError(f"{cause} Check data.path in the configuration: it must name a JSON or JSONL file") from cause
    if size == 0:
        raise DataError(f"{path} is empty (0 bytes); expected a JSON list of rows or one JSON object a line")
    rows = JsonlRows(path) if _is_jsonl(path) else _read_json(path)
    if len(rows) == 0:
        raise DataError(f"{path} holds no rows; expected a JSON list of rows or one JSON object a line")
    return rows


def _value(text: str, path: Path, row: int, where: str) -> Any:
    try:
        return parse_json(text, where, Unreadable, None)
    except Unreadable as cause:
        raise BadSample(path, row, f"{cause} Mend or remove the row.") from cause


def _numbered_lines(path: Path) -> Iterator[tuple[int, int, int, bytes]]:
    """(line number from 1, byte offset, offset of its end, the first ROW_BYTES of it) of each line."""
    number, start = 1, 0
    with open_file(path, DataError) as file:
        while head := file.readline(ROW_BYTES):
            end, piece = start + len(head), head
            while len(piece) == ROW_BYTES and not piece.endswith(b"\n"):
                piece = file.readline(ROW_BYTES)
                end += len(piece)
            yield number, start, end, head
            number, start = number + 1, end


def _is_jsonl(path: Path) -> bool:
    """By its name; else JSONL where the first of several filled lines is a whole JSON object."""
    lines = (line.decode("utf-8-sig", "ignore").strip() for *_, line in _numbered_lines(path))
    first, *more = list(islice(filter(None, lines), 2)) or [""]
    if path.suffix.lower() in (".jsonl", ".ndjson"):
        return bool(first)
    try:
        return bool(more) and first.startswith("{") and _SCAN(first)[1] == len(first)
    except json.JSONDecodeError:
        return False
    except RecursionError:  # a bad row; what follows is another line
        return True


def _read_json(path: Path) -> JsonRows:
    text = decode(read_bytes(path, DataError, _NO_LIMIT), path, DataError, "utf-8-sig")
    try:
        return JsonRows(path, text)
    except json.JSONDecodeError as cause:
        raise DataError(
            f"{path} is not JSON: {cause.msg} at line {cause.lineno}, column {cause.colno}; "
            f"mend it there, or if it is one JSON object a line, name it .jsonl"
        ) from cause
    except _NoList as cause:
        raise DataError(
            f"{path}: the top level is {cause}; it must be a list of rows (or one object a line, as .jsonl)"
        ) from cause


class _NoList(Exception):
    """What JSON holds in place of a list."""


def _elements(text: str) -> Iterator[tuple[int, int]]:
    """(start, end) of each element of a JSON list. Raises JSONDecodeError where its form is broken, and _NoList."""
    at = _after_space(text, 0)
    if text[at : at + 1] != "[":
        try:
            found = json.loads(text, parse_int=len)
        except RecursionError as cause:
            raise _NoList("nested too deeply") from cause
        keys = (
            f"an object with the keys {', '.join(map(reprlib.repr, list(found)[:5]))}"
            if isinstance(found, dict)
            else ""
        )
        raise _NoList(keys or f"a {type(found).__name__}")
    start = _after_space(text, at + 1)
    more = text[start : start + 1] != "]"
    at = start
    while more:
        try:
            end = _SCAN(text, start)[1]
        except RecursionError:  # nested deeper than Python walks
            end = _end_of(text, start)
        yield start, end
        at = _after_space(text, end)
        more = text[at : at + 1] == ","
        if more:
            start = _after_space(text, at + 1)
    if text[at : at + 1] != "]":
        raise json.JSONDecodeError("Expecting ',' delimiter", text, at)
    if (at := _after_space(text, at + 1)) < len(text):
        raise json.JSONDecodeError("Extra data", text, at)


def _after_space(text: str, at: int) -> int:
    return _SPACE.match(text, at).end()  # type: ignore[union-attr]


def _end_of(text: str, at: int) -> int:
    """Where the element of a list that begins at `at` ends, by counting brackets. Raises JSONDecodeError where it does
    not end."""
    begin, depth = at, 0
    while found := _MARK.search(text, at):
        at, mark = found.end(), found.group()
        if depth == 0 and mark in ",]}":
            return found.start()
        if mark == '"':
            _, at = scanstring(text, at)
        depth += (mark in "[{") - (mark in "]}")
    raise json.JSONDecodeError("Nested too deeply, and never closed", text, begin)
