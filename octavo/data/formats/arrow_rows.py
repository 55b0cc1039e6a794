"""Rows in Arrow tables: texts of JSON, and columns with types, as values that JSON has (and bytes of images)."""

from __future__ import annotations

import contextlib
import json
import math
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import pyarrow as pa

from octavo.base.atomic_write import write_bytes
from octavo.base.safe_read import Unreadable, parse_json
from octavo.data import file_digests
from octavo.data.errors import BadSample, DataError
from octavo.data.formats import columnar, json_columns

BATCH_ROWS, BATCH_BYTES = 1024, 4 << 20  # of a record batch: what is written at a time
TEXTS = pa.schema([("text", pa.large_binary()), ("line", pa.int64()), ("problem", pa.string())])
PROBLEM = "octavo: problem"  # a column of `ColumnRows`
# What Arrow says of a value that Python cannot hold; KeyError: of a time zone.
UNREADABLE = (ValueError, OverflowError, KeyError, pa.ArrowException)


class Rows(Protocol):
    """A sequence of decoded JSON values; one that cannot be read raises `BadSample`."""

    path: Path | str  # a name of the hub or a URL is a text

    def __len__(self) -> int: ...

    def __getitem__(self, row: int) -> Any: ...

    def keys(self) -> set[str]:
        """Every key that some row has."""
        ...


class Text(NamedTuple):
    """A row as its file has it. `line`: of a file of lines, from 1; 0 of a list. `problem`: why it cannot be kept."""

    text: bytes
    line: int = 0
    problem: str | None = None


class Mapped:
    """An Arrow table in memory, or in a file that is mapped into it; then the file's name is what is pickled."""

    schema: pa.Schema | None = None
    """What the table must have, where every one of a kind has the same."""

    def __init__(self, path: Path | str, kept: Path | pa.Buffer) -> None:
        self.path, self.kept = path, kept
        self._open()

    def _open(self) -> None:
        if isinstance(self.kept, Path):
            self._validate(self.kept)
        try:
            file = pa.memory_map(str(self.kept)) if isinstance(self.kept, Path) else pa.BufferReader(self.kept)
            self._table = pa.ipc.open_file(file).read_all()
        except FileNotFoundError:  # another process needed its room since it was validated
            raise
        except Exception as cause:  # whatever a damaged file makes the library raise
            raise self._damaged(cause) from cause
        if self.schema is not None and self._table.schema != self.schema:
            # its names are not quoted: damaged ones are no UTF-8, and Arrow then raises for them
            raise self._damaged(ValueError("its columns are not those that Octavo writes"))
        self._batches = self._table.to_batches()
        self._ends = list(accumulate(batch.num_rows for batch in self._batches))

    def _validate(self, file: Path) -> None:
        """Once for a file as it is: all of it is read."""
        fetched = isinstance(self.path, str)  # into CACHE/fetched/SET, where the time of use is kept with the file
        home = file.parents[1] if fetched else self._notes_in(file)
        try:
            file_digests.check_once(file, home, lambda: columnar.check_file(file, self._damaged), used=fetched)
        except OSError as cause:
            if isinstance(cause, FileNotFoundError):  # another process removed it
                raise
            raise self._damaged(cause) from cause

    def _notes_in(self, file: Path) -> Path:
        """The folder of the cache that notes which files are whole."""
        return file.parent

    def _damaged(self, cause: Exception) -> DataError:
        return DataError(f"{self.kept} is no whole Arrow file any more ({columnar.error_line(cause)}); delete it")

    def _row(self, row: int) -> pa.RecordBatch:
        """One row. The file was validated when it was opened; its own offsets are looked at again, which costs
        microseconds, since a disk may fail later. Raises `DataError`."""
        number = bisect_right(self._ends, row)
        found = self._batches[number].slice(row - (self._ends[number - 1] if number else 0), 1)
        try:
            found.validate()
        except pa.ArrowInvalid as cause:
            raise self._damaged(cause) from cause
        return found

    def __len__(self) -> int:
        return int(self._table.num_rows)

    @property
    def gone(self) -> bool:
        """Whether the file that rows are read from has lost its name: others needed its room."""
        return not self._on_disk().exists()

    def _on_disk(self) -> Path:
        assert isinstance(self.kept, Path)
        return self.kept

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "kept": self.kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()


class TextRows(Mapped):
    """Rows kept as the text of their JSON, of whatever shape: what is wrong with one is wrong with it alone."""

    schema = TEXTS

    def line(self, row: int) -> int:
        """The line number (from 1) that holds a row of a file of lines."""
        return int(self._table.column("line")[row].as_py())

    def __getitem__(self, row: int) -> Any:
        found = self._row(row)
        try:
            values = [found.column(name)[0].as_py() for name in TEXTS.names]
        except UNREADABLE as cause:  # validation does not look into texts
            raise self._damaged(cause) from cause
        return parse_row(self.path, row, *values)

    def keys(self) -> set[str]:
        """Every key that some row has which can be read: a pass over all rows, kept beside them where they are kept."""
        beside = self.kept.with_suffix(".keys") if isinstance(self.kept, Path) else None
        if beside is not None and (told := _names_in(beside)) is not None:
            return told
        found = keys_of(self)
        if beside is not None:
            with contextlib.suppress(OSError):  # a folder that others filled: the next run looks again
                write_bytes(beside, json.dumps(sorted(found)).encode())
        return found


def _names_in(file: Path) -> set[str] | None:
    """The texts of a JSON list; None where there is none, or it is damaged."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        found = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(found, list) and all(isinstance(name, str) for name in found):
            return {*found}
    return None


def parse_row(path: Path | str, row: int, raw: bytes, line: int, problem: str | None, where: str = "its text") -> Any:
    """The value of a row that is a :class:`Text`; `where` it stands, if not in a line. Raises `BadSample`."""
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
        raise BadSample(path, row, f"{cause} Mend or remove the row.") from cause


def keys_of(rows: Rows) -> set[str]:
    """Every key that some row has, by a pass over all that can be read."""
    found: set[str] = set()
    for number in range(len(rows)):
        with contextlib.suppress(BadSample):  # it is reported when its turn comes
            row = rows[number]
            found |= row.keys() if isinstance(row, dict) else set()
    return found


class ColumnRows(Mapped):
    """Rows of columns with types. What a row has not, it lacks: a column, or a field in it, that is null there. In
    the column `PROBLEM`, the last one, is why a row could not be kept."""

    def keys(self) -> set[str]:
        return {*self._table.column_names} - {PROBLEM}

    def __getitem__(self, row: int) -> Any:
        found = self._row(row)
        if found.schema.names[-1:] == [PROBLEM]:
            try:
                problem = found.column(found.num_columns - 1)[0].as_py()
            except UNREADABLE as cause:  # validation does not look into texts
                raise self._damaged(cause) from cause
            if problem is not None:
                raise BadSample(self.path, row, problem)
            found = found.select(range(found.num_columns - 1))
        return row_of(self.path, row, found)


def row_of(path: Path | str, row: int, table: pa.Table | pa.RecordBatch) -> Any:
    """The one row of a table, `plain`. A time that Python cannot hold (of the year 10,000, of a zone that nobody knows)
    is the text that Arrow writes for it. Raises `BadSample`, which names the column, for other values that cannot be
    read, such as bytes that are no UTF-8, or JSON columns whose text is no JSON."""
    try:
        found = json_values(table.to_pylist()[0])
    except UNREADABLE:  # which column it is, only then is it asked
        found = json_values({name: _value(path, row, name, table.column(name)) for name in table.column_names})
    for name, places in json_columns.places_in(table.schema).items():
        if name in found:
            found[name] = _from_json(path, row, name, found[name], places)
    return found


def _from_json(path: Path | str, row: int, name: str, value: Any, places: json_columns.Places) -> Any:
    try:
        return json_columns.parse_values(value, places, f"its JSON column {name!r}", json_columns.our_name(name))
    except Unreadable as cause:
        raise BadSample(path, row, f"{cause} Mend the value, or leave out the row or the column.") from cause


def _value(path: Path | str, row: int, name: str, column: pa.Array | pa.ChunkedArray) -> Any:
    try:
        return column[0].as_py()
    except UNREADABLE as cause:
        if pa.types.is_temporal(column.type):
            plainly = pa.timestamp(column.type.unit) if pa.types.is_timestamp(column.type) else column.type
            return column.cast(plainly).cast(pa.string())[0].as_py()
        raise BadSample(
            path, row, f"its column {name!r} ({columnar.plain_type(column.type)}) cannot be read ({cause}); mend the "
            "value, or leave out the row or the column"
        ) from cause  # fmt: skip


def json_values(value: Any) -> Any:
    """What Arrow gives, as JSON would have it: entries that are null left out of objects; times and decimals as text.
    Bytes stay, for images are some."""
    if isinstance(value, dict):
        return {str(key): json_values(entry) for key, entry in value.items() if entry is not None}
    if isinstance(value, list | tuple):
        return [json_values(entry) for entry in value]
    if value is None or isinstance(value, str | int | float | bytes):
        return value
    return str(value) if value == value else math.nan  # NaT, whose text is a word


@contextmanager
def writer(sink: Any, schema: pa.Schema) -> Iterator[pa.RecordBatchWriter]:
    """Writes record batches to a path or a stream."""
    with pa.OSFile(str(sink), "wb") if isinstance(sink, Path) else sink as out, pa.ipc.new_file(out, schema) as into:
        yield into


def write_texts(sink: Any, rows: Iterator[Text], done: Callable[[int], None] = lambda size: None) -> None:
    """Write rows as `TextRows` reads them; `done` is told how many bytes of text have been written."""
    with writer(sink, TEXTS) as out:
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
