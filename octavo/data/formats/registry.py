"""The table of file formats for rows: their suffixes and how they are read.

A format is one entry of :data:`FORMATS`; listing folders and URLs, the cache, downloads and streaming are derived from
it. The suffixes are defined in `octavo.base.suffixes`, because names of the hub are checked without importing any
library. :func:`text_format` builds the entry of a format whose rows are JSON texts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import BinaryIO, NamedTuple

from octavo.base import suffixes
from octavo.data.formats import csv_files, json_files, parquet, tar
from octavo.data.formats.arrow_rows import ColumnRows, Rows, Sink, Text, TextRows, write_texts
from octavo.data.formats.streaming import Groups


class Format(NamedTuple):
    """One format of row files.

    `suffixes`: of the file names, in lower case. `write(path, target, progress)`: converts a file once, to a path or a
    stream, and calls `progress` with the share that is done. `open(name, written)`: the rows of a converted file;
    `name` is the original file or its URL. `stream(path)`: the rows read from the file without conversion, or None if
    the format is never converted. `count_rows(name, file)`: the number of rows by the footer of an open file, or None
    if the format has no footer. `cells`: every value is a text, and a missing value is a word. `indexed_only`: only an
    index is written, and the file itself is read: `open(name, index, file)`.
    """

    suffixes: tuple[str, ...]
    write: Callable[..., None]
    open: Callable[..., Rows]
    stream: Callable[[Path], Rows] | None
    count_rows: Callable[[Path | str, BinaryIO], int] | None = None
    cells: bool = False
    indexed_only: bool = False


def text_format(
    suffixes: tuple[str, ...],
    texts: Callable[[Path], Iterator[Text]],
    stream: Callable[[Path], Rows],
    cells: bool = False,
) -> Format:
    """Return the format of files whose rows `texts` yields as JSON texts."""
    return Format(suffixes, partial(_write_texts, texts), TextRows, stream, cells=cells)


def _write_texts(
    texts: Callable[[Path], Iterator[Text]],
    path: Path,
    target: Sink,
    progress: Callable[[float], None] = lambda share: None,
) -> None:
    size = max(1, path.stat().st_size)
    write_texts(target, texts(path), lambda done: progress(done / size))


_JSON = text_format((*suffixes.JSON_LINES, *suffixes.JSON), json_files.read_texts, json_files.stream)
FORMATS: tuple[Format, ...] = (
    Format(suffixes.PARQUET, parquet.write_rows, ColumnRows, Groups, parquet.count_rows),
    _JSON,
    text_format(suffixes.CSV, csv_files.read_texts, csv_files.stream, cells=True),
    Format(suffixes.TAR, tar.write_index, tar.TarRows, None, indexed_only=True),
)


def format_of(name: Path | str) -> Format:
    """Return the format of a file by its suffix; JSON for an unknown one, whose first characters decide between a list
    and lines."""
    lower = str(name).lower()
    return next((entry for entry in FORMATS if lower.endswith(entry.suffixes)), _JSON)


def row_suffixes(indexed_only: bool | None = None) -> tuple[str, ...]:
    """Return the suffixes of row files, of all formats or only of those with this value of `indexed_only`."""
    return tuple(
        end for entry in FORMATS if indexed_only is None or entry.indexed_only == indexed_only for end in entry.suffixes
    )
