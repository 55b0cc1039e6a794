"""Untrusted parquet files, read with memory bounded by the size of the file, not by its decoded size.

A column chunk may reference one long text a million times: 1 kB of file, gigabytes decoded. Texts and bytes that are
stored in a dictionary are therefore read as a dictionary (indices, and each value once), and a row is converted to
plain values only if its size, which is then known, is bounded. Data that is always decoded (pages, entries of lists) is
checked against the sizes in the footer before a byte is decoded.
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
from octavo.data.formats.arrow_rows import BATCH_BYTES, PROBLEM, Sink, open_writer
from octavo.data.formats.columnar import check_batch, error_line, find_large_rows, plain_field, row_bytes
from octavo.data.formats.parquet_footer import DICTIONARY, PREFIXES, Group, read_row_groups

BATCH_ROWS = 1024
PAGE_BYTES = 32 << 20  # of the pages that a batch of rows is decoded from, by the mean size in its row group
#: A column chunk may take this many bytes decoded, or `MAX_RATIO` times its bytes in the file if that is more.
MAX_DECODED_BYTES = 256 << 20
MAX_RATIO = 1000


def unreadable_error(path: Path | str, cause: Exception) -> DataError:
    """Return the error for a parquet file that the library cannot read, for any of its errors."""
    return DataError(f"{path} is not a readable parquet file ({error_line(cause)}); copy or download it again")


class Parquet(NamedTuple):
    """An open parquet file, with columns of texts as dictionaries, and its footer. A context manager that closes it."""

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
    """Open a parquet file. `open_file`: opens the file object to read; by default the path is opened.

    Raises DataError if it cannot be read, if two columns have one name, or if a column's decoded size is not bounded.
    """
    import pyarrow.parquet as parquet

    try:
        if open_file is None and is_encrypted(path):
            open_file = partial(safe_read.open_file, path, DataError, 0)
        elif open_file is None:
            check_plain(path, DataError)
        source: Any = path if open_file is None else open_file()
        groups = _read_footer(path if open_file is None else source)
        open_parquet = partial(parquet.ParquetFile, page_checksum_verification=True)
        file = open_parquet(source)
        names, columns = file.schema_arrow.names, [file.schema.column(n) for n in range(len(file.schema))]
        _check_sizes(path, groups, columns)
        if dictionaries := _dictionary_columns(groups, columns):
            file = open_parquet(source, metadata=file.metadata, read_dictionary=dictionaries)
    except DataError:
        raise
    except Exception as cause:  # pyarrow raises errors of many classes for a damaged file
        raise unreadable_error(path, cause) from cause
    if duplicates := sorted({name for name in names if names.count(name) > 1}):
        raise DataError(
            f"{path}: its columns are {names!r}, {', '.join(map(repr, duplicates))} more than once; rename one"
        )
    return Parquet(file, groups)


def _read_footer(source: Any) -> list[Group]:
    if isinstance(source, Path):
        with open(source, "rb") as file:
            return read_row_groups(file)
    groups = read_row_groups(source)
    source.seek(0)
    return groups


def read_batches(path: Path, file: Parquet, number: int) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a row group, as many at a time as fit into `PAGE_BYTES` by their mean size. Raises
    DataError."""
    group = file.groups[number]
    each = max(1, max(1, group.size) // max(1, group.rows) + _fixed_bytes(file))
    rows = 1 if _shares_prefixes(group) else min(BATCH_ROWS, max(1, PAGE_BYTES // each))
    try:
        for batch in file.reader.iter_batches(rows, row_groups=[number], use_threads=False):
            check_batch(batch)
            yield batch
    except Exception as cause:  # a fault of the file read, also if it comes while another file is written
        raise unreadable_error(path, cause) from cause


def read_group(path: Path, file: Parquet, number: int) -> pa.Table:
    """Read a whole row group. Raises DataError if it cannot be read, or if texts with shared prefixes decode to more
    than `MAX_DECODED_BYTES` bytes."""
    group = file.groups[number]
    if not _shares_prefixes(group):
        try:
            table = file.reader.read_row_group(number, use_threads=False)
            check_batch(table)
        except Exception as cause:  # pyarrow raises errors of many classes for a damaged file
            raise DataError(f"{path}: row group {number} cannot be read ({error_line(cause)})") from cause
        return table
    read: list[pa.RecordBatch] = []
    size = 0
    for batch in read_batches(path, file, number):
        size += batch.nbytes
        if size > MAX_DECODED_BYTES:
            raise DataError(
                f"{path}: row group {number} takes more than {MAX_DECODED_BYTES} bytes decoded (its footer says "
                f"{group.size}); write smaller row groups, or remove `stream`"
            )
        read.append(batch)
    return pa.Table.from_batches(read, file.schema)


def write_rows(path: Path, target: Sink, progress: Callable[[float], None] = lambda share: None) -> None:
    """Write the rows of a parquet file as Arrow, a few decoded MB at a time. For a row that is too large, the reason is
    written. Raises DataError for a file that is not parquet, and if its rows decode to more than `MAX_DECODED_BYTES`
    bytes and `MAX_RATIO` times the file."""
    stored = path.stat().st_size
    with parquet_file(path) as file:
        done, size, rows = 0, 0, max(1, file.rows)
        try:
            fields = [*map(plain_field, file.schema), pa.field(PROBLEM, pa.string())]
            schema = pa.schema(fields, file.schema.metadata)  # the metadata names the JSON columns of `datasets`
        except Exception as cause:
            raise unreadable_error(path, cause) from cause
        with open_writer(target, schema) as out:
            for group in range(len(file.groups)):
                for batch in read_batches(path, file, group):
                    for piece in _split_batch(path, batch, schema):
                        size += piece.nbytes
                        if size > max(MAX_DECODED_BYTES, MAX_RATIO * stored):
                            raise DataError(
                                f"{path} has {stored} bytes and takes more than {size} decoded, up to row "
                                f"{done + batch.num_rows} of {rows}; remove what is repeated, or set `stream: true`"
                            )
                        out.write_batch(piece)
                        progress(done / rows)
                    done += batch.num_rows


def _split_batch(path: Path, batch: pa.RecordBatch, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Convert a batch of dictionaries to batches of plain values, each of at most `BATCH_BYTES` or one row."""
    # The size of each row is known before it is decoded, so no piece exceeds the bound in memory.
    sizes = row_bytes(batch)
    problems, start, until = find_large_rows(batch, sizes), 0, np.cumsum(np.minimum(sizes, BATCH_BYTES))
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
                if end - start < batch.num_rows:  # casting a slice would decode all list entries of the whole batch
                    part = part.take(pa.array(range(start, end)))
                plain = part.cast(pa.schema([*schema][:-1])).append_column(schema[-1], pa.nulls(len(part), pa.string()))
            except Exception as cause:  # a type that has no plain form
                raise unreadable_error(path, cause) from cause
            yield from plain.to_batches()
        start = end


def _dictionary_columns(groups: list[Group], columns: list[Any]) -> list[str]:
    """Paths of the text and bytes columns that some row group stores in a dictionary."""
    paths = []
    for number, column in enumerate(columns):
        plain = column.physical_type == "BYTE_ARRAY" and column.logical_type.type in ("STRING", "NONE", "ENUM")
        if plain and any({*DICTIONARY} & {*group.chunks[number].encodings} for group in groups):
            paths.append(column.path)
    return paths


def _shares_prefixes(group: Group) -> bool:
    """Return True if a column stores texts as suffixes of the previous text: each may be as long as all texts
    together."""
    return any({*PREFIXES} & {*chunk.encodings} for chunk in group.chunks)


def _fixed_bytes(file: Parquet) -> int:
    """Bytes of the fixed-length values of a row, outside of lists."""
    schema = file.reader.schema
    columns = (schema.column(number) for number in range(len(schema)))
    return sum(column.length for column in columns if column.physical_type == "FIXED_LEN_BYTE_ARRAY")


def _check_sizes(path: Path, groups: list[Group], columns: list[Any]) -> None:
    """Check that the decoded size of each column chunk is bounded, by the footer. Raises DataError."""
    for number, group in enumerate(groups):
        if len(group.chunks) != len(columns):
            raise ValueError(f"row group {number} has {len(group.chunks)} columns, of {len(columns)} in its schema")
        for chunk, column in zip(group.chunks, columns, strict=True):
            size = max(chunk.size, chunk.values * (8 + max(0, column.length)))
            if size > max(MAX_DECODED_BYTES, MAX_RATIO * max(1, chunk.stored)):
                raise DataError(
                    f"{path}: column {safe_read.printable(chunk.path)!r} of row group {number} takes {size} bytes "
                    f"decoded, of {chunk.stored} in the file; write it in smaller row groups, or leave it out"
                )


def count_rows(path: Path | str, file: BinaryIO) -> int:
    """Return the number of rows by the footer of an open parquet file. Raises DataError."""
    try:
        return sum(group.rows for group in read_row_groups(file))
    except ValueError as cause:
        raise unreadable_error(path, cause) from cause
