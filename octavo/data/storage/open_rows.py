"""Rows of a data file, by number: JSON and JSONL as texts, one bad row among good ones.

All become Arrow tables (`table.py`); those of larger files lie in the cache, mapped into memory (`cache.py`). What is
wrong with a row of JSON, whatever it is, is wrong with that row alone; only a list whose form is broken is refused
whole.
"""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from itertools import islice
from json.decoder import scanstring
from pathlib import Path

import pyarrow as pa

from octavo.base.safe_read import decode, open_file, read_bytes, size_of
from octavo.data.content import Stat, stat_of
from octavo.data.errors import DataError
from octavo.data.formats.arrow_rows import Rows, Text, TextRows, write_texts
from octavo.data.formats.streaming import Groups, Lines, Place
from octavo.data.formats.tar import look_up, open_tar
from octavo.data.storage import cache, tables

ROW_BYTES = 64 << 20  # of a line of JSONL; a million tokens written as \uXXXX have a tenth of it
_NO_LIMIT = 1 << 62
_SPACE = re.compile(r"[ \t\r\n]*")
_MARK = re.compile(r'["\[\]{},]')
_SCAN = json.JSONDecoder(parse_int=len).raw_decode  # finds where values end; a number of any length passes


EXPECTED = "a JSON, JSONL, CSV, parquet or tar file, a folder of such files, or one that `datasets` saved"
FEW, TOGETHER = 16, 64 << 20  # files of a folder, and their bytes, above which none is converted in memory
OPEN = 128  # files of the cache, and tars, that stay open at a time


def open_rows(path: str | Path, folder: Path | None = None, say: cache.Say = cache.quiet, stream: bool = False) -> Rows:
    """Open a data file: parquet and CSV by their names, JSON and JSONL by their first characters; or a folder that
    `datasets` saved or that holds files of one of these kinds, in the order of their names. `folder`: of the cache
    (None: the default). `stream`: rows are read where they lie, and nothing is put into the cache.

    Raises `DataError` where the file is missing, no regular file, empty, or holds no rows; of a JSON list also where it
    is not UTF-8 or its form is broken; of tables as :mod:`octavo.data.storage.tables` does; and as `cache.kept` does.
    """
    path = Path(path)
    rows = _open_folder(path, folder, say, stream) if path.is_dir() else _open_file(path, folder, say, stream)
    if len(rows) == 0:
        raise DataError(f"{path} holds no rows; expected a JSON list of rows, one JSON object a line, or a table")
    return rows


def _open_folder(path: Path, folder: Path | None, say: cache.Say, stream: bool) -> Rows:
    if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
        if stream:
            raise DataError(f"{path}: what `datasets` saved is read where it lies in any case; leave `stream` out")
        return tables.open_saved(path, folder)
    files = [file for file in cache.files_of(path) if file.suffix.lower() in (*cache.SHARDS, cache.TAR)]
    kinds = sorted({file.suffix.lower() for file in files})
    if len(kinds) != 1:
        held = f"files of several kinds ({', '.join(kinds)})" if kinds else "none of them"
        raise DataError(
            f"{path} is a folder with {held}. Check data.path in the configuration: it must name {EXPECTED}"
        )
    few = len(files) <= FEW and sum(file.stat().st_size for file in files) < TOGETHER
    small = cache.SMALL if few else 0  # what is converted in memory stays there
    open_one = partial(_open_file, folder=folder, say=say, stream=stream, small=small)
    if kinds != [cache.TAR]:
        return tables.Shards(path, files, open_one, most=None if small or stream else OPEN)
    _refuse_stream(path, stream)
    look_up(files, folder, say)
    return tables.Shards(path, files, open_one, [len(open_one(file)) for file in files], OPEN)


def _refuse_stream(path: Path, stream: bool) -> None:
    if stream:
        raise DataError(f"{path}: rows of a tar are read where they lie in any case; leave `stream` out")


def _open_file(path: Path, folder: Path | None, say: cache.Say, stream: bool, small: int | None = None) -> Rows:
    small = cache.SMALL if small is None else small
    try:
        with open_file(path, DataError) as file:
            size = size_of(file)
    except DataError as cause:
        raise DataError(f"{cause} Check data.path in the configuration: it must name {EXPECTED}") from cause
    if size == 0:
        raise DataError(f"{path} is empty (0 bytes); expected a JSON list of rows or one JSON object a line")
    if path.suffix.lower() == cache.TAR:
        _refuse_stream(path, stream)
        look_up([path], folder, say)
        return open_tar(path, folder)
    if stream:
        return _where_it_lies(path, stat_of(path.stat()))
    if path.suffix.lower() == ".parquet":
        return tables.open_parquet(path, folder, say, small)
    if size < small:
        sink = pa.BufferOutputStream()
        write_texts(sink, texts_of(path))
        return TextRows(path, sink.getvalue())

    def write(target: Path, progress: Callable[[float], None]) -> None:
        write_texts(target, texts_of(path), lambda done: progress(done / size))

    return TextRows(path, cache.kept(folder, path, write, say))


@lru_cache(maxsize=64)
def _where_it_lies(path: Path, stat: Stat) -> Rows:
    """The rows of a file that is streamed. Several readers of one file, as it is, share what says where they are."""
    if path.suffix.lower() == ".parquet":
        return Groups(path)
    if path.suffix.lower() in (".csv", ".tsv"):
        return tables.open_csv(path)
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


def texts_of(path: Path) -> Iterator[Text]:
    """The rows of a file of JSON, JSONL or CSV as texts. Raises `DataError` where its form is broken."""
    if path.suffix.lower() in (".csv", ".tsv"):
        return tables.csv_texts(path)
    if not _is_jsonl(path):
        return _of_list(path)
    return (
        Text(b"", number, _too_long(end - start))
        if end - start > ROW_BYTES else Text(line, number)
        for number, start, end, line in _numbered_lines(path)
        if line.strip()
    )  # fmt: skip


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
    if path.suffix.lower() in (".jsonl", ".ndjson"):
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
            _, at = scanstring(text, at)
        depth += (mark in "[{") - (mark in "]}")
    raise json.JSONDecodeError("Nested too deeply, and never closed", text, begin)
