"""Rows in Arrow tables, as JSON texts or as typed columns, returned as JSON values (and bytes of media files)."""

from __future__ import annotations

import contextlib
import json
import math
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias

import pyarrow as pa

from octavo.base.atomic_write import write_bytes
from octavo.base.safe_read import Unreadable, parse_json
from octavo.data import file_digests
from octavo.data.errors import BadSample, DataError
from octavo.data.formats import columnar, json_columns

BATCH_ROWS, BATCH_BYTES = 1024, 4 << 20  # of a record batch, which is written at a time
TEXTS = pa.schema([("text", pa.large_binary()), ("line", pa.int64()), ("problem", pa.string())])
PROBLEM = "octavo: problem"  # a column of `ColumnRows`
# The errors of Arrow for a value that Python cannot hold; KeyError: for an unknown time zone.
UNREADABLE = (ValueError, OverflowError, KeyError, pa.ArrowException)


Sink: TypeAlias = Path | pa.NativeFile
"""A path to write, or an open Arrow stream."""


class Rows(Protocol):
    """A sequence of decoded JSON values; a row that cannot be read raises `BadSample`."""

    @property
    def path(self) -> Path | str:
        """The file or folder; a hub name or a URL is a str."""
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, row: int) -> Any: ...

    def keys(self) -> set[str]:
        """Return all keys that any row has."""
        ...


class Text(NamedTuple):
    """The text of a row in its file. `line`: line number from 1; 0 in a list. `problem`: why it cannot be stored."""

    text: bytes
    line: int = 0
    problem: str | None = None


class MappedTable:
    """An Arrow table in memory, or in a memory-mapped file; for a file only its path is pickled."""

    schema: pa.Schema | None = None
    """The schema that the table must have, or None for any schema."""

    def __init__(self, path: Path | str, stored: Path | pa.Buffer) -> None:
        self.path, self.kept = path, stored
        self._open()

    def _open(self) -> None:
        if isinstance(self.kept, Path):
            self._validate(self.kept)
        try:
            file = pa.memory_map(str(self.kept)) if isinstance(self.kept, Path) else pa.BufferReader(self.kept)
            self._table = pa.ipc.open_file(file).read_all()
        except FileNotFoundError:  # another process evicted it since it was validated
            raise
        except Exception as cause:  # Arrow raises errors of many classes for a damaged file
            raise self._damaged(cause) from cause
        if self.schema is not None and self._table.schema != self.schema:
            # The names are not quoted: damaged ones may not be UTF-8, for which Arrow would raise.
            raise self._damaged(ValueError("its columns are not those that Octavo writes"))
        self._batches = self._table.to_batches()
        self._ends = list(accumulate(batch.num_rows for batch in self._batches))

    def _validate(self, file: Path) -> None:
        """Read the whole file and check it, once for each version of a file."""
        fetched = isinstance(self.path, str)  # in CACHE/fetched/SET, where reading sets the time of use of a file
        notes_folder = file.parents[1] if fetched else self._notes_in(file)
        try:
            file_digests.check_once(
                file, notes_folder, lambda: columnar.check_file(file, self._damaged), ctime_varies=fetched
            )
        except OSError as cause:
            if isinstance(cause, FileNotFoundError):  # another process removed it
                raise
            raise self._damaged(cause) from cause

    def _notes_in(self, file: Path) -> Path:
        """Return the folder of the cache with the notes on valid files."""
        return file.parent

    def _damaged(self, cause: Exception) -> DataError:
        return DataError(f"{self.kept} is not a valid Arrow file ({columnar.error_line(cause)}); delete it")

    def _row(self, row: int) -> pa.RecordBatch:
        """One row, as a batch of length 1. Raises `DataError`."""
        number = bisect_right(self._ends, row)
        batch = self._batches[number].slice(row - (self._ends[number - 1] if number else 0), 1)
        try:
            # The file was validated when it was opened, but the disk may fail later: wrong offsets would end the
            # process. The check of one row takes microseconds.
            batch.validate()
        except pa.ArrowInvalid as cause:
            raise self._damaged(cause) from cause
        return batch

    def __len__(self) -> int:
        return int(self._table.num_rows)

    @property
    def is_deleted(self) -> bool:
        """True if the file that rows are read from was deleted: another process evicted it."""
        return not self._on_disk().exists()

    def _on_disk(self) -> Path:
        assert isinstance(self.kept, Path)
        return self.kept

    def __getstate__(self) -> dict[str, object]:
        return {"path": self.path, "kept": self.kept}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._open()


class TextRows(MappedTable):
    """Rows stored as JSON texts of any structure, so that a fault in one row does not affect others."""

    schema = TEXTS

    def line(self, row: int) -> int:
        """Return the line number (from 1) of a row, in a file of lines."""
        return int(self._table.column("line")[row].as_py())

    def __getitem__(self, row: int) -> Any:
        batch = self._row(row)
        try:
            values = [batch.column(name)[0].as_py() for name in TEXTS.names]
        except UNREADABLE as cause:  # validation does not check the content of texts
            raise self._damaged(cause) from cause
        return parse_row(self.path, row, *values)

    def keys(self) -> set[str]:
        """Return all keys of the rows that can be read: a pass over all rows, whose result is stored next to a cached
        file."""
        stored = self.kept.with_suffix(".keys") if isinstance(self.kept, Path) else None
        if stored is not None and (names := _names_in(stored)) is not None:
            return names
        names = collect_keys(self)
        if stored is not None:
            with contextlib.suppress(OSError):  # a folder without write access: the next run computes them again
                write_bytes(stored, json.dumps(sorted(names)).encode())
        return names


def _names_in(file: Path) -> set[str] | None:
    """Return the texts of a JSON list in a file, or None if the file is missing or damaged."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        names = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(names, list) and all(isinstance(name, str) for name in names):
            return {*names}
    return None


def parse_row(path: Path | str, row: int, raw: bytes, line: int, problem: str | None, where: str = "its text") -> Any:
    """Return the value of a row from the fields of a :class:`Text`. `where` names the location of the text if it is not
    a line. Raises `BadSample`."""
    where = f"line {line}" if line else where
    if problem is not None:
        raise BadSample(path, row, f"{where} {problem}")
    try:
        return parse_json(raw.decode("utf-8-sig"), where, Unreadable, None)
    except UnicodeDecodeError as cause:
        raise BadSample(
            path, row, f"{where} is not UTF-8 (its byte {cause.start}); save it as UTF-8, for example with "
            "`iconv -f ENCODING -t UTF-8`"
        ) from cause  # fmt: skip
    except Unreadable as cause:
        raise BadSample(path, row, f"{cause} Fix or remove the row.") from cause


def collect_keys(rows: Rows) -> set[str]:
    """Return all keys of the rows that can be read, by a pass over all rows."""
    keys: set[str] = set()
    for number in range(len(rows)):
        with contextlib.suppress(BadSample):  # reported when the row is used
            row = rows[number]
            keys |= row.keys() if isinstance(row, dict) else set()
    return keys


class ColumnRows(MappedTable):
    """Rows of typed columns. Columns, and fields in them, that are null in a row are missing keys of that row. A last
    column `PROBLEM` holds the reason for a row that could not be stored."""

    def keys(self) -> set[str]:
        return {*self._table.column_names} - {PROBLEM}

    def __getitem__(self, row: int) -> Any:
        batch = self._row(row)
        if batch.schema.names[-1:] == [PROBLEM]:
            try:
                problem = batch.column(batch.num_columns - 1)[0].as_py()
            except UNREADABLE as cause:  # validation does not check the content of texts
                raise self._damaged(cause) from cause
            if problem is not None:
                raise BadSample(self.path, row, problem)
            batch = batch.select(range(batch.num_columns - 1))
        return decode_row(self.path, row, batch)


def decode_row(path: Path | str, row: int, table: pa.Table | pa.RecordBatch) -> Any:
    """Return the row of a table of one row, as `json_values`. A time that Python cannot hold (in the year 10,000, or
    with an unknown time zone) becomes the text that Arrow prints for it. Raises `BadSample`, which names the column,
    for other values that cannot be read, such as text that is not UTF-8, or JSON columns whose text is not JSON."""
    try:
        values = json_values(table.to_pylist()[0])
    except UNREADABLE:  # convert column by column, to find the one at fault
        values = json_values({name: _value(path, row, name, table.column(name)) for name in table.column_names})
    for name, places in json_columns.places_in(table.schema).items():
        if name in values:
            values[name] = _from_json(path, row, name, values[name], places)
    return values


def _from_json(path: Path | str, row: int, name: str, value: Any, places: json_columns.ChunkSampler) -> Any:
    try:
        return json_columns.parse_values(value, places, f"its JSON column {name!r}", json_columns.octavo_name(name))
    except Unreadable as cause:
        raise BadSample(path, row, f"{cause} Fix the value, or remove the row or the column.") from cause


def _value(path: Path | str, row: int, name: str, column: pa.Array | pa.ChunkedArray) -> Any:
    try:
        return column[0].as_py()
    except UNREADABLE as cause:
        if pa.types.is_temporal(column.type):
            without_zone = pa.timestamp(column.type.unit) if pa.types.is_timestamp(column.type) else column.type
            return column.cast(without_zone).cast(pa.string())[0].as_py()
        raise BadSample(
            path, row, f"its column {name!r} ({columnar.plain_type(column.type)}) cannot be read ({cause}); fix the "
            "value, or remove the row or the column"
        ) from cause  # fmt: skip


def json_values(value: Any) -> Any:
    """Return a value from Arrow as JSON would have it: null entries of objects are left out, times and decimals are
    text. Bytes stay bytes, because media files are stored so."""
    if isinstance(value, dict):
        return {str(key): json_values(entry) for key, entry in value.items() if entry is not None}
    if isinstance(value, list | tuple):
        return [json_values(entry) for entry in value]
    if value is None or isinstance(value, str | int | float | bytes):
        return value
    return str(value) if value == value else math.nan  # NaT is not equal to itself, and its text would be a word


@contextmanager
def open_writer(sink: Sink, schema: pa.Schema) -> Iterator[pa.RecordBatchWriter]:
    """A writer of record batches to a path or a stream."""
    with pa.OSFile(str(sink), "wb") if isinstance(sink, Path) else sink as out, pa.ipc.new_file(out, schema) as into:
        yield into


def write_texts(sink: Sink, rows: Iterator[Text], done: Callable[[int], None] = lambda size: None) -> None:
    """Write rows as `TextRows` reads them; `done` is called with the bytes of text written so far."""
    with open_writer(sink, TEXTS) as out:
        batch: list[Text] = []
        size = written = 0
        for row in rows:
            batch.append(row)
            size += len(row.text)
            if len(batch) == BATCH_ROWS or size >= BATCH_BYTES:
                out.write_batch(_batch(batch))
                written, size, batch = written + size, 0, []
                done(written)
        out.write_batch(_batch(batch))


def _batch(rows: list[Text]) -> pa.RecordBatch:
    columns = zip(*rows, strict=True) if rows else ([],) * len(TEXTS)
    return pa.record_batch(
        [pa.array(list(values), field.type) for values, field in zip(columns, TEXTS, strict=True)], schema=TEXTS
    )
