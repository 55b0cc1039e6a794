"""Reads rows of JSON files as texts: a list, or one object per line.

Any fault within a row affects only that row; a file is rejected only if the structure of its list is broken.
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

ROW_BYTES = 64 << 20  # of a line of JSONL; a million tokens written as \uXXXX take a tenth of it
_NO_LIMIT = 1 << 62
_SPACE = re.compile(r"[ \t\r\n]*")
_MARK = re.compile(r'["\[\]{},]')
_SCAN = json.JSONDecoder(parse_int=len).raw_decode  # finds the end of a value; parse_int=len accepts long numbers


def read_texts(path: Path) -> Iterator[Text]:
    """Return the rows of a JSON or JSONL file as texts. Raises `DataError` if its structure is broken."""
    if not _is_jsonl(path):
        return _read_list(path)
    return (
        Text(b"", number, _describe_long_line(end - start))
        if end - start > ROW_BYTES else Text(line, number)
        for number, start, end, line in _numbered_lines(path)
        if line.strip()
    )  # fmt: skip


def stream(path: Path) -> Lines:
    """Open the rows of a JSONL file without conversion. Raises `DataError` for a JSON list, which has no
    lines."""
    if not _is_jsonl(path):
        raise DataError(
            f"{path}: `stream` needs rows that can be read one by one, and this is one JSON list. Save it as JSONL (an "
            "object a line), CSV or parquet, or remove `stream`"
        )
    places = (
        Place(number, start, end, None if end - start <= ROW_BYTES else _describe_long_line(end - start))
        for number, start, end, line in _numbered_lines(path)
        if line.strip()
    )
    return Lines(path, places)


def _describe_long_line(size: int) -> str:
    return f"has {size} bytes, over the limit of {ROW_BYTES}; split or remove it"


def _numbered_lines(path: Path) -> Iterator[tuple[int, int, int, bytes]]:
    """Yield (line number from 1, first byte, end byte, its first ROW_BYTES bytes) of each line."""
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
    """Return True if a file is JSONL: by its suffix; else if the first of several nonblank lines is a complete JSON
    object."""
    lines = (line.decode("utf-8-sig", "ignore").strip() for *_, line in _numbered_lines(path))
    first, *others = list(islice(filter(None, lines), 2)) or [""]
    if path.suffix.lower() in suffixes.JSON_LINES:
        return bool(first)
    try:
        return bool(others) and first.startswith("{") and _SCAN(first)[1] == len(first)
    except json.JSONDecodeError:
        return False
    except RecursionError:  # the first line is a bad row, and another line follows
        return True


def _read_list(path: Path) -> Iterator[Text]:
    text = decode(read_bytes(path, DataError, _NO_LIMIT), path, DataError, "utf-8-sig")
    try:
        for start, end in _find_elements(text):
            yield Text(text[start:end].encode("utf-8", "surrogatepass"))
    except json.JSONDecodeError as cause:
        raise DataError(
            f"{path} is not JSON: {cause.msg} at line {cause.lineno}, column {cause.colno}; "
            f"fix it there, or if it is one JSON object per line, name it .jsonl"
        ) from cause
    except _NotAList as cause:
        raise DataError(
            f"{path}: the top level is {cause}; it must be a list of rows (or one object per line, as .jsonl)"
        ) from cause


class _NotAList(Exception):
    """The top level of a JSON file is not a list; the argument says what it is."""


def _find_elements(text: str) -> Iterator[tuple[int, int]]:
    """(start, end) of each element of a JSON list. Raises JSONDecodeError if its structure is broken, and _NoList."""
    # Elements are scanned one by one, so that a fault within one is found when that row is parsed, not here.
    at = _skip_space(text, 0)
    if text[at : at + 1] != "[":
        try:
            value = json.loads(text, parse_int=len)
        except RecursionError as cause:
            raise _NotAList("nested too deeply") from cause
        keys = (
            f"an object with the keys {', '.join(map(reprlib.repr, list(value)[:5]))}"
            if isinstance(value, dict)
            else ""
        )
        raise _NotAList(keys or f"a {type(value).__name__}")
    start = _skip_space(text, at + 1)
    has_next = text[start : start + 1] != "]"
    at = start
    while has_next:
        try:
            end = _SCAN(text, start)[1]
        except RecursionError:  # nested deeper than Python's recursion limit
            end = _find_element_end(text, start)
        yield start, end
        at = _skip_space(text, end)
        has_next = text[at : at + 1] == ","
        if has_next:
            start = _skip_space(text, at + 1)
    if text[at : at + 1] != "]":
        raise json.JSONDecodeError("Expecting ',' delimiter", text, at)
    if (at := _skip_space(text, at + 1)) < len(text):
        raise json.JSONDecodeError("Extra data", text, at)


def _skip_space(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    assert match is not None  # the pattern matches the empty string
    return match.end()


def _find_element_end(text: str, at: int) -> int:
    """Return the end of the list element that begins at `at`, found by counting brackets. Raises JSONDecodeError if it
    does not end."""
    begin, depth = at, 0
    while match := _MARK.search(text, at):
        at, mark = match.end(), match.group()
        if depth == 0 and mark in ",]}":
            return match.start()
        if mark == '"':
            at = _SCAN(text, match.start())[1]
        depth += (mark in "[{") - (mark in "]}")
    raise json.JSONDecodeError("Nested too deeply, and never closed", text, begin)
