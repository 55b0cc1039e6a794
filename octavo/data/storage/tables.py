"""Rows of files that are tables: CSV, parquet, folders of shards, and what Hugging Face's `datasets` saved.

A cell of a CSV file is a text. Columns of parquet and Arrow have types; where one is null the row lacks it. Images may
stand in the rows themselves, as `datasets` writes them: {"bytes": ..., "path": ...}.
"""

from __future__ import annotations

import codecs
import contextlib
import csv
import io
import json
import os
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa

from octavo.base.encryption import is_encrypted
from octavo.base.safe_read import open_file
from octavo.data import content
from octavo.data.errors import BadSample, DataError
from octavo.data.formats import columnar, parquet
from octavo.data.formats.arrow_rows import BATCH_BYTES, PROBLEM, ColumnRows, Rows, Text, row_of, writer
from octavo.data.formats.columnar import plain_field, row_bytes, too_large
from octavo.data.formats.parquet import RATIO, UNFOLDED, parquet_file, unreadable
from octavo.data.formats.streaming import Lines, Place
from octavo.data.storage import cache

_CELL = 1 << 30  # characters of a cell; the module's own limit, 128 KiB, is that of all readers of this process
_COUNT = -1  # of a shard that was not opened yet


def csv_texts(path: Path) -> Iterator[Text]:
    """The rows of a CSV file (of a .tsv file with tabs) as texts of JSON objects, by the names in its first line.

    Raises DataError where that line names a column twice or not at all, and where a quote is never closed."""
    with (
        open_file(path, DataError) as raw,
        io.TextIOWrapper(raw, encoding="utf-8-sig", errors="surrogateescape", newline="") as file,
    ):
        for names, cells, line in _cells(path, file):
            if cells and cells is not names:
                yield _row_of(names, cells, line)


def csv_places(path: Path) -> Iterator[Place]:
    """The same rows by where they lie in the file, behind one for the line of names."""
    at = begun = 0

    def lines(file: BinaryIO) -> Iterator[str]:
        nonlocal at
        for raw in (line for some in file for line in some.splitlines(keepends=True)):  # a bare CR ends one too
            at += len(raw)
            yield raw.decode("utf-8-sig" if at == len(raw) else "utf-8", "surrogateescape")

    with open_file(path, DataError) as file:
        for _, cells, line in _cells(path, lines(file)):
            if cells:
                yield Place(line, begun, at)
            begun = at


def open_csv(path: Path) -> Lines:
    """The rows of a CSV file, read where they lie. Raises DataError as `csv_texts` does."""
    places = csv_places(path)
    first = next(places)
    with open_file(path, DataError) as file:
        names = _one(path, file.read(first.end).removeprefix(codecs.BOM_UTF8))
    return Lines(path, places, partial(_row_at, path, names))


def _row_at(path: Path, names: list[str], raw: bytes, line: int) -> Text:
    return _row_of(names, _one(path, raw), line)


def _one(path: Path, raw: bytes) -> list[str]:
    """The cells of one row."""
    with _long_cells():
        return next(csv.reader(io.StringIO(raw.decode("utf-8", "surrogateescape"), newline=""), delimiter=_mark(path)))


def _row_of(names: list[str], cells: list[str], line: int) -> Text:
    if len(cells) == len(names):
        return Text(json.dumps(dict(zip(names, cells, strict=True))).encode(), line)
    return Text(b"", line, f"has {len(cells)} cells, and the first line names {len(names)} columns")


@contextmanager
def _long_cells() -> Iterator[None]:
    before = csv.field_size_limit(_CELL)
    try:
        yield
    finally:
        csv.field_size_limit(before)


def _mark(path: Path) -> str:
    return "\t" if path.suffix.lower() == ".tsv" else ","


def _cells(path: Path, lines: Iterable[str]) -> Iterator[tuple[list[str], list[str], int]]:
    """(names, cells, line that they end in) of each row of a CSV file, the names as the first."""
    reader = csv.reader(lines, delimiter=_mark(path), strict=True)
    try:
        with _long_cells():
            names = next(reader, [])
            if not names or len({*names}) < len(names) or not all(name.strip() for name in names):
                raise DataError(f"{path}: its first line is {names!r}; it must name every column, each once")
            yield names, names, reader.line_num
            for cells in reader:
                yield names, cells, reader.line_num
    except csv.Error as cause:
        raise DataError(f"{path} is no CSV file: {cause} (line {reader.line_num}); mend it there") from cause


class _TooMuch(Exception):
    """Rows of a small file that take more memory than a small file is worth."""


def open_parquet(path: Path, folder: Path | None, say: cache.Say, small: int) -> ColumnRows:
    """The rows of a parquet file, converted in memory below `small` bytes. Raises DataError where it is none, and as
    `cache.kept` does."""
    write = partial(write_parquet, path)
    if path.stat().st_size < small:
        sink = pa.BufferOutputStream()

        def bounded(share: float) -> None:
            if sink.tell() > 4 * small:
                raise _TooMuch

        with contextlib.suppress(_TooMuch):
            write(sink, bounded)
            return ColumnRows(path, sink.getvalue())
    return ColumnRows(path, cache.kept(folder, path, write, say))


def write_parquet(path: Path, target: Any, progress: Callable[[float], None] = lambda share: None) -> None:
    """Write the rows of a parquet file as Arrow, a few MB at a time whatever they take decoded. A row that is too large
    is kept as the reason. Raises DataError where the file is none, and where its rows take more than `UNFOLDED` bytes
    and `RATIO` times the file."""
    stored = path.stat().st_size
    with parquet_file(path) as file:
        done, size, rows = 0, 0, max(1, file.rows)
        try:
            fields = [*map(plain_field, file.schema), pa.field(PROBLEM, pa.string())]
            schema = pa.schema(fields, file.schema.metadata)  # which names the JSON columns of `datasets`
        except Exception as cause:
            raise unreadable(path, cause) from cause
        with writer(target, schema) as out:
            for group in range(len(file.groups)):
                for batch in parquet.batches(path, file, group):
                    for piece in _pieces(path, batch, schema):
                        size += piece.nbytes
                        if size > max(UNFOLDED, RATIO * stored):
                            raise DataError(
                                f"{path} has {stored} bytes and takes more than {size} decoded, up to row "
                                f"{done + batch.num_rows} of {rows}; remove what is repeated, or set `stream: true`"
                            )
                        out.write_batch(piece)
                        progress(done / rows)
                    done += batch.num_rows


def _pieces(path: Path, batch: pa.RecordBatch, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """A batch of dictionaries as batches of plain values, each of at most `BATCH_BYTES` or of one row."""
    every = row_bytes(batch)
    problems, start, until = too_large(batch, every), 0, np.cumsum(np.minimum(every, BATCH_BYTES))
    while start < batch.num_rows:
        end = start + 1
        if start in problems:
            columns = [pa.nulls(1, field.type) for field in schema][:-1]
            yield pa.RecordBatch.from_arrays([*columns, pa.array([problems[start]], pa.string())], schema=schema)
        else:
            before = int(until[start - 1]) if start else 0
            end = max(end, int(np.searchsorted(until, before + BATCH_BYTES, side="right")))
            end = min([end, *(row for row in problems if row > start)])
            try:
                part = pa.Table.from_batches([batch])
                if end - start < batch.num_rows:  # a cast of a slice decodes all entries of the lists that it is of
                    part = part.take(pa.array(range(start, end)))
                plain = part.cast(pa.schema([*schema][:-1])).append_column(schema[-1], pa.nulls(len(part), pa.string()))
            except Exception as cause:  # of a type that cannot be stored plain
                raise unreadable(path, cause) from cause
            yield from plain.to_batches()
        start = end


class Shards:
    """The rows of several files, one behind the other; each is opened when a row of it is asked for, where its length
    is known without. `counts`: how many rows each has, where somebody knows; `most`: files that stay open at a time
    (None: all)."""

    def __init__(
        self, path: Path | str, files: Sequence[Any], open_file: Callable[[Any], Rows],
        counts: Sequence[int] | None = None, most: int | None = None,
    ) -> None:  # fmt: skip
        self.path, self._files, self._open, self._most = path, files, open_file, most
        self._rows: OrderedDict[int, Rows] = OrderedDict()
        if counts is None:
            counts = [_rows_of(file) if isinstance(file, Path) else _COUNT for file in files]
        self._ends = list(accumulate(len(self._part(n)) if c == _COUNT else c for n, c in enumerate(counts)))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, row: int) -> Any:
        part = bisect_right(self._ends, row)
        return self._part(part)[row - (self._ends[part - 1] if part else 0)]

    @property
    def shards(self) -> list[int]:
        """How many rows each file has."""
        return [end - start for start, end in pairwise([0, *self._ends])]

    @property
    def suffix(self) -> str:
        """What the names of its files end with; "" where they are no files."""
        return str(getattr(self._files[0], "suffix", "")) if self._files else ""

    def keys(self) -> set[str]:
        return set[str]().union(*(self._part(number).keys() for number in range(len(self._files))))

    def _part(self, number: int) -> Rows:
        if number not in self._rows:
            self._rows[number] = self._open(self._files[number])
            if self._most is not None and len(self._rows) > self._most:
                self._rows.popitem(last=False)
        self._rows.move_to_end(number)
        return self._rows[number]

    def __getstate__(self) -> dict[str, Any]:
        """Files that may be opened again stay behind."""
        return {**self.__dict__, "_rows": self._rows if self._most is None else OrderedDict()}


def _rows_of(file: Path) -> int:
    """How many rows a file says that it has."""
    if file.suffix.lower() != ".parquet":
        return _COUNT
    with parquet_file(file) as opened:
        return opened.rows


class DatasetRows:
    """The rows of a `datasets.Dataset`, memory-mapped by that library. Its files are validated first, once. `folder`:
    of the cache that notes it (None: the default). Raises DataError where one is damaged."""

    def __init__(self, path: Path, dataset: Any, folder: Path | None = None) -> None:
        for file in dataset.cache_files:
            validate(Path(file["filename"]), folder)
        self.path, self._dataset = path, dataset.with_format("arrow")
        self._repeats = any(columnar.repeats(field.type) for field in dataset.data.schema)

    def __len__(self) -> int:
        return len(self._dataset)

    def keys(self) -> set[str]:
        return {*self._dataset.column_names}

    def __getitem__(self, row: int) -> Any:
        found = self._dataset[row : row + 1]
        if (self._repeats or found.nbytes > columnar.TEXT_BYTES) and (problems := too_large(found)):
            raise BadSample(self.path, row, problems[0])
        return row_of(self.path, row, found)


def validate(file: Path, folder: Path | None) -> None:
    """That an Arrow file that `datasets` wrote is whole: read through once for a file as it is. Raises DataError."""

    def damaged(cause: Exception) -> DataError:
        return DataError(f"{file} is damaged ({columnar.sentence(cause)}); copy it again, or save the data set again")

    try:
        content.once(
            file, cache.default_folder() if folder is None else folder, lambda: columnar.check_file(file, damaged)
        )
    except OSError as cause:
        raise damaged(cause) from cause


def open_saved(path: Path, folder: Path | None = None) -> DatasetRows:
    """A folder that `Dataset.save_to_disk` wrote. Raises DataError where it cannot be read, and for one of several
    splits."""
    import datasets

    if lost := next(filter(is_encrypted, sorted(path.iterdir())), None):
        raise DataError(f"{lost} is encrypted, and what `datasets` saved is mapped from the disk. Save it as parquet "
                        "(Dataset.to_parquet) and encrypt that")  # fmt: skip
    if (path / "dataset_dict.json").is_file():
        splits = sorted(entry.name for entry in path.iterdir() if (entry / "state.json").is_file())
        raise DataError(f"{path} holds several splits: name the folder of one of them, such as {path / splits[0]}"
                        if splits else f"{path} names splits, and none of them is there")  # fmt: skip
    for file in sorted(path.glob("*.arrow")):
        validate(file, folder)
    try:
        return DatasetRows(path, datasets.load_from_disk(os.fspath(path)), folder)
    except DataError:
        raise
    except Exception as cause:  # whatever a stranger's files make that library run into
        raise DataError(
            f"{path} is no folder of `datasets` that can be read ({type(cause).__name__}: {cause})"
        ) from cause
