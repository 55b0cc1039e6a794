"""Parquet files that others wrote, read in memory that is bounded by the file, not by what it unfolds to.

A column chunk may name one long text a million times: 1 kB of file, gigabytes decoded. Texts and bytes that are stored
in a dictionary are therefore read as one (indices and each value once), and a row becomes plain values only where its
size, which is then known, is bounded. What is decoded whatever is asked for (pages, entries of lists) is held against
what the file's footer says before a byte is decoded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import pyarrow as pa

from octavo.base import safe_read
from octavo.base.encryption import check_plain, is_encrypted
from octavo.data.errors import DataError
from octavo.data.formats.arrow_rows import BATCH_BYTES, PROBLEM, writer
from octavo.data.formats.columnar import check_batch, error_line, plain_field, row_bytes, too_large
from octavo.data.formats.parquet_footer import DICTIONARY, PREFIXES, Group, groups_of

BATCH_ROWS = 1024
PAGE_BYTES = 32 << 20  # of pages that a batch of rows is decoded of, by the mean of its row group
UNFOLDED = 256 << 20  # bytes that a column chunk may take decoded, or else `RATIO` times what it takes in the file
RATIO = 1000


def unreadable(path: Path | str, cause: Exception) -> DataError:
    """What is raised for a parquet file that the library cannot read, whatever its error."""
    return DataError(f"{path} is no parquet file that can be read ({error_line(cause)}); copy or download it again")


class Parquet(NamedTuple):
    """A parquet file, open, its columns of texts as dictionaries; and what its footer says. Closed by `with`."""

    reader: Any
    groups: list[Group]

    @property
    def schema(self) -> pa.Schema:
        return self.reader.schema_arrow

    @property
    def rows(self) -> int:
        return sum(group.rows for group in self.groups)

    def __enter__(self) -> Parquet:
        return self

    def __exit__(self, *error: object) -> None:
        self.reader.close()


def parquet_file(path: Path, open_file: Callable[[], Any] | None = None) -> Parquet:
    """A parquet file, open. `open_file`: what is read, where it is not the path.

    Raises DataError where it cannot be read, two of its columns have one name, or a column unfolds without bound.
    """
    import pyarrow.parquet as parquet

    try:
        if open_file is None and is_encrypted(path):
            open_file = partial(safe_read.open_file, path, DataError, 0)
        elif open_file is None:
            check_plain(path, DataError)
        source: Any = path if open_file is None else open_file()
        groups = _footer(path if open_file is None else source)
        opened = partial(parquet.ParquetFile, page_checksum_verification=True)
        file = opened(source)
        names, columns = file.schema_arrow.names, [file.schema.column(n) for n in range(len(file.schema))]
        _check_sizes(path, groups, columns)
        if dictionaries := _in_dictionaries(groups, columns):
            file = opened(source, metadata=file.metadata, read_dictionary=dictionaries)
    except DataError:
        raise
    except Exception as cause:  # whatever a damaged file makes the library raise
        raise unreadable(path, cause) from cause
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise DataError(f"{path}: its columns are {names!r}, {', '.join(map(repr, twice))} more than once; rename one")
    return Parquet(file, groups)


def _footer(source: Any) -> list[Group]:
    if isinstance(source, Path):
        with open(source, "rb") as file:
            return groups_of(file)
    groups = groups_of(source)
    source.seek(0)
    return groups


def batches(path: Path, file: Parquet, number: int) -> Iterator[pa.RecordBatch]:
    """The rows of a row group, as many at a time as fit into `PAGE_BYTES` by its mean. Raises DataError."""
    group = file.groups[number]
    each = max(1, max(1, group.size) // max(1, group.rows) + _fixed_bytes(file))
    rows = 1 if _shares_prefixes(group) else min(BATCH_ROWS, max(1, PAGE_BYTES // each))
    try:
        for batch in file.reader.iter_batches(rows, row_groups=[number], use_threads=False):
            check_batch(batch)
            yield batch
    except Exception as cause:  # of the file, whatever folder is written to meanwhile
        raise unreadable(path, cause) from cause


def read_group(path: Path, file: Parquet, number: int) -> pa.Table:
    """A whole row group. Raises DataError where it cannot be read, or takes more than `UNFOLDED` bytes by texts that
    share their beginnings."""
    group = file.groups[number]
    if not _shares_prefixes(group):
        try:
            table = file.reader.read_row_group(number, use_threads=False)
            check_batch(table)
        except Exception as cause:  # whatever a damaged file makes the library raise
            raise DataError(f"{path}: row group {number} cannot be read ({error_line(cause)})") from cause
        return table
    read: list[pa.RecordBatch] = []
    size = 0
    for batch in batches(path, file, number):
        size += batch.nbytes
        if size > UNFOLDED:
            raise DataError(f"{path}: row group {number} takes more than {UNFOLDED} bytes decoded, of {group.size}; "
                            "write smaller ones, or leave `stream` out")  # fmt: skip
        read.append(batch)
    return pa.Table.from_batches(read, file.schema)


def write_rows(path: Path, target: Any, progress: Callable[[float], None] = lambda share: None) -> None:
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
                for batch in batches(path, file, group):
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


def _in_dictionaries(groups: list[Group], columns: list[Any]) -> list[str]:
    """Paths of the columns of texts or bytes that some row group stores in a dictionary."""
    paths = []
    for number, column in enumerate(columns):
        plain = column.physical_type == "BYTE_ARRAY" and column.logical_type.type in ("STRING", "NONE", "ENUM")
        if plain and any({*DICTIONARY} & {*group.chunks[number].encodings} for group in groups):
            paths.append(column.path)
    return paths


def _shares_prefixes(group: Group) -> bool:
    """Whether a column stores texts as differences from the text before: each may be as long as all."""
    return any({*PREFIXES} & {*chunk.encodings} for chunk in group.chunks)


def _fixed_bytes(file: Parquet) -> int:
    """Bytes of a row's values of a fixed length, outside of lists."""
    schema = file.reader.schema
    columns = (schema.column(number) for number in range(len(schema)))
    return sum(column.length for column in columns if column.physical_type == "FIXED_LEN_BYTE_ARRAY")


def _check_sizes(path: Path, groups: list[Group], columns: list[Any]) -> None:
    """That no column chunk unfolds without bound, as far as the footer says. Raises DataError."""
    for number, group in enumerate(groups):
        if len(group.chunks) != len(columns):
            raise ValueError(f"row group {number} has {len(group.chunks)} columns, of {len(columns)} in its schema")
        for chunk, column in zip(group.chunks, columns, strict=True):
            size = max(chunk.size, chunk.values * (8 + max(0, column.length)))
            if size > max(UNFOLDED, RATIO * max(1, chunk.stored)):
                raise DataError(
                    f"{path}: column {safe_read.printable(chunk.path)!r} of row group {number} takes {size} bytes "
                    f"decoded, of {chunk.stored} in the file; write it in smaller row groups, or leave it out"
                )


def count_rows(path: Path | str, file: BinaryIO) -> int:
    """How many rows the footer of an open parquet file says that it has. Raises DataError."""
    try:
        return sum(group.rows for group in groups_of(file))
    except ValueError as cause:
        raise unreadable(path, cause) from cause
