"""Rows of CSV files: the first line names the columns, and all cells are texts."""

from __future__ import annotations

import codecs
import csv
import io
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import BinaryIO

from octavo.base.safe_read import open_file
from octavo.data.errors import DataError
from octavo.data.formats.arrow_rows import Text
from octavo.data.formats.streaming import Lines, Place

_CELL = 1 << 30  # characters of a cell; the default limit of the csv module, 128 KiB, applies to the whole process


def read_texts(path: Path) -> Iterator[Text]:
    """Yield the rows of a CSV file (.tsv: with tabs) as texts of JSON objects, with the names in its first line as
    keys.

    Raises DataError if that line repeats a name or leaves one out, and for a quote that is never closed."""
    with (
        open_file(path, DataError) as raw,
        io.TextIOWrapper(raw, encoding="utf-8-sig", errors="surrogateescape", newline="") as file,
    ):
        for names, cells, line in _read_cells(path, file):
            if cells and cells is not names:
                yield _make_row(names, cells, line)


def _find_places(path: Path) -> Iterator[Place]:
    """Yield the positions of the rows in the file; the first is the line of names."""
    at = row_start = 0

    def lines(file: BinaryIO) -> Iterator[str]:
        nonlocal at
        for raw in (line for chunk in file for line in chunk.splitlines(keepends=True)):  # a bare CR also ends a line
            at += len(raw)
            yield raw.decode("utf-8-sig" if at == len(raw) else "utf-8", "surrogateescape")

    with open_file(path, DataError) as file:
        for _, cells, line in _read_cells(path, lines(file)):
            if cells:
                yield Place(line, row_start, at)
            row_start = at


def stream(path: Path) -> Lines:
    """Open the rows of a CSV file without conversion. Raises DataError as `read_texts` does."""
    places = _find_places(path)
    first = next(places)
    with open_file(path, DataError) as file:
        names = _parse_cells(path, file.read(first.end).removeprefix(codecs.BOM_UTF8))
    return Lines(path, places, partial(_row_at, path, names))


def _row_at(path: Path, names: list[str], raw: bytes, line: int) -> Text:
    return _make_row(names, _parse_cells(path, raw), line)


def _parse_cells(path: Path, raw: bytes) -> list[str]:
    """Parse the cells of one row."""
    with _allow_long_cells():
        return next(
            csv.reader(io.StringIO(raw.decode("utf-8", "surrogateescape"), newline=""), delimiter=_delimiter(path))
        )


def _make_row(names: list[str], cells: list[str], line: int) -> Text:
    if len(cells) == len(names):
        return Text(json.dumps(dict(zip(names, cells, strict=True))).encode(), line)
    return Text(b"", line, f"has {len(cells)} cells, and the first line names {len(names)} columns")


@contextmanager
def _allow_long_cells() -> Iterator[None]:
    before = csv.field_size_limit(_CELL)
    try:
        yield
    finally:
        csv.field_size_limit(before)


def _delimiter(path: Path) -> str:
    return "\t" if path.suffix.lower() == ".tsv" else ","


def _read_cells(path: Path, lines: Iterable[str]) -> Iterator[tuple[list[str], list[str], int]]:
    """Yield (names, cells, number of the last line) of each row of a CSV file; the first row is the names."""
    reader = csv.reader(lines, delimiter=_delimiter(path), strict=True)
    try:
        with _allow_long_cells():
            names = next(reader, [])
            if not names or len({*names}) < len(names) or not all(name.strip() for name in names):
                raise DataError(f"{path}: its first line is {names!r}; it must name every column, each once")
            yield names, names, reader.line_num
            for cells in reader:
                yield names, cells, reader.line_num
    except csv.Error as cause:
        raise DataError(f"{path} is no CSV file: {cause} (line {reader.line_num}); fix it there") from cause
