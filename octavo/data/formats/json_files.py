"""Rows of JSON: a list, or an object a line, as texts, one bad row among good ones.

What is wrong with a row, whatever it is, is wrong with that row alone; only a list whose form is broken is refused
whole.
"""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from octavo.base import suffixes
from octavo.base.safe_read import decode, open_file, read_bytes
from octavo.data.errors import DataError
from octavo.data.formats.arrow_rows import Text
from octavo.data.formats.streaming import Lines, Place

ROW_BYTES = 64 << 20  # of a line of JSONL; a million tokens written as \uXXXX have a tenth of it
_NO_LIMIT = 1 << 62
_SPACE = re.compile(r"[ \t\r\n]*")
_MARK = re.compile(r'["\[\]{},]')
_SCAN = json.JSONDecoder(parse_int=len).raw_decode  # finds where values end; a number of any length passes


def texts_of(path: Path) -> Iterator[Text]:
    """The rows of a file of JSON or JSONL as texts. Raises `DataError` where its form is broken."""
    if not _is_jsonl(path):
        return _of_list(path)
    return (
        Text(b"", number, _too_long(end - start))
        if end - start > ROW_BYTES else Text(line, number)
        for number, start, end, line in _numbered_lines(path)
        if line.strip()
    )  # fmt: skip


def stream(path: Path) -> Lines:
    """The rows of a file of JSONL, read where they are. Raises `DataError` for a list, which has no lines to find."""
    if not _is_jsonl(path):
        raise DataError(
            f"{path}: `stream` needs rows that can be read one by one, and this is one JSON list. Save it as JSONL (an "
            "object a line), CSV or parquet, or leave `stream` out"
        )
    places = (
        Place(number, start, end, None if end - start <= ROW_BYTES else _too_long(end - start))
        for number, start, end, line in _numbered_lines(path)
        if line.strip()
    )
    return Lines(path, places)


def _too_long(size: int) -> str:
    return f"has {size} bytes, and {ROW_BYTES} are the most; split or remove it"


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
    if path.suffix.lower() in suffixes.JSON_LINES:
        return bool(first)
    try:
        return bool(more) and first.startswith("{") and _SCAN(first)[1] == len(first)
    except json.JSONDecodeError:
        return False
    except RecursionError:  # a bad row; what follows is another line
        return True


def _of_list(path: Path) -> Iterator[Text]:
    text = decode(read_bytes(path, DataError, _NO_LIMIT), path, DataError, "utf-8-sig")
    try:
        for start, end in _elements(text):
            yield Text(text[start:end].encode("utf-8", "surrogatepass"))
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
            at = _SCAN(text, found.start())[1]
        depth += (mark in "[{") - (mark in "]}")
    raise json.JSONDecodeError("Nested too deeply, and never closed", text, begin)
