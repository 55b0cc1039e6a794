"""The formats of files of rows: what files of each are called, and how they are read.

A format is one entry of :data:`FORMATS`: lists of folders and URLs, the cache, what is fetched and what is streamed
follow from it. How names end is in `octavo.base.suffixes`, which the hub's names need without any library.
:func:`of_texts` makes the entry of one whose rows are texts of JSON.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from octavo.base import suffixes
from octavo.data.formats import csv_files, json_files, parquet, tar
from octavo.data.formats.arrow_rows import ColumnRows, Rows, Text, TextRows, write_texts
from octavo.data.formats.streaming import Groups


class Format(NamedTuple):
    """One kind of files of rows.

    `suffixes`: how their names end, in small letters. `write(path, target, progress)`: writes what rows are read from,
    once, to a path or a stream, and gives `progress` the share that is done. `open(name, written)`: the rows of what
    was written, called after the file or its URL. `stream(path)`: the rows where they are, nothing written (None: they
    are read so in any case). `count(name, file)`: how many rows an open file says that it has (None: it does not say).
    `cells`: every value is a text, and a missing one a word. `stays`: what is written is an index of the file, which is
    read too: `open(name, index, file)`.
    """

    suffixes: tuple[str, ...]
    write: Callable[..., None]
    open: Callable[..., Rows]
    stream: Callable[[Path], Rows] | None
    count: Callable[[Any, Any], int] | None = None
    cells: bool = False
    stays: bool = False


def of_texts(
    suffixes: tuple[str, ...],
    texts: Callable[[Path], Iterator[Text]],
    stream: Callable[[Path], Rows],
    cells: bool = False,
) -> Format:
    """The format of files whose rows `texts` gives as texts of JSON, one by one."""
    return Format(suffixes, partial(_write_texts, texts), TextRows, stream, cells=cells)


def _write_texts(
    texts: Callable[[Path], Iterator[Text]],
    path: Path,
    target: Any,
    progress: Callable[[float], None] = lambda share: None,
) -> None:
    size = max(1, path.stat().st_size)
    write_texts(target, texts(path), lambda done: progress(done / size))


_JSON = of_texts((*suffixes.JSON_LINES, *suffixes.JSON), json_files.texts_of, json_files.stream)
FORMATS: tuple[Format, ...] = (
    Format(suffixes.PARQUET, parquet.write_rows, ColumnRows, Groups, parquet.count_rows),
    _JSON,
    of_texts(suffixes.CSV, csv_files.texts_of, csv_files.stream, cells=True),
    Format(suffixes.TAR, tar.write_index, tar.TarRows, None, stays=True),
)


def format_of(name: Path | str) -> Format:
    """The format of a file by its name; JSON where that says nothing: its first characters say of which form."""
    lower = str(name).lower()
    return next((entry for entry in FORMATS if lower.endswith(entry.suffixes)), _JSON)


def endings(stays: bool | None = None) -> tuple[str, ...]:
    """How the names of files of rows end; `stays`: of the formats that stay, or of the others, alone."""
    return tuple(end for entry in FORMATS if stays is None or entry.stays == stays for end in entry.suffixes)
