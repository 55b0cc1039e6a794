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
from typing import Any

import pyarrow as pa

from octavo import reading
from octavo.data.columnar import check_batch, sentence
from octavo.data.errors import DataError
from octavo.vault import is_encrypted

BATCH_ROWS = 1024
BATCH_BYTES = 32 << 20  # of pages that a batch of rows is decoded of, by the mean of its row group
UNFOLDED = 256 << 20  # bytes that a column chunk may take decoded, or else `RATIO` times what it takes in the file
RATIO = 1000


def unreadable(path: Path | str, cause: Exception) -> DataError:
    """What is raised for a parquet file that the library cannot read, whatever its error."""
    return DataError(f"{path} is no parquet file that can be read ({sentence(cause)}); copy or download it again")


def parquet_file(path: Path, open_file: Callable[[], Any] | None = None) -> Any:
    """A parquet file, open, its columns of texts as dictionaries. `open_file`: what is read, where it is not the path.

    Raises DataError where it cannot be read, two of its columns have one name, or a column unfolds without bound.
    """
    import pyarrow.parquet as parquet

    try:
        if open_file is None and is_encrypted(path):
            open_file = partial(reading.open_file, path, DataError, 0)
        opened = partial(parquet.ParquetFile, page_checksum_verification=True)
        source: Any = path if open_file is None else open_file()
        file = opened(source)
        names = file.schema_arrow.names
        if dictionaries := _in_dictionaries(file):
            file = opened(source, metadata=file.metadata, read_dictionary=dictionaries)
    except DataError:
        raise
    except Exception as cause:  # whatever a damaged file makes the library raise
        raise unreadable(path, cause) from cause
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise DataError(f"{path}: its columns are {names!r}, {', '.join(map(repr, twice))} more than once; rename one")
    _check_sizes(path, file)
    return file


def batches(path: Path, file: Any, group: int) -> Iterator[pa.RecordBatch]:
    """The rows of a row group, as many at a time as fit into `BATCH_BYTES` by its mean. Raises DataError."""
    about = file.metadata.row_group(group)
    each = max(1, about.total_byte_size) // max(1, about.num_rows) + _fixed_bytes(file)
    rows = 1 if _shares_prefixes(about) else min(BATCH_ROWS, max(1, BATCH_BYTES // max(1, each)))
    try:
        for batch in file.iter_batches(rows, row_groups=[group], use_threads=False):
            check_batch(batch)
            yield batch
    except Exception as cause:  # of the file, whatever folder is written to meanwhile
        raise unreadable(path, cause) from cause


def read_group(path: Path, file: Any, group: int) -> pa.Table:
    """A whole row group. Raises DataError where it cannot be read, or takes more than `UNFOLDED` bytes by texts that
    share their beginnings."""
    if not _shares_prefixes(file.metadata.row_group(group)):
        try:
            table = file.read_row_group(group, use_threads=False)
            check_batch(table)
        except Exception as cause:  # whatever a damaged file makes the library raise
            raise DataError(f"{path}: row group {group} cannot be read ({sentence(cause)})") from cause
        return table
    read: list[pa.RecordBatch] = []
    size = 0
    for batch in batches(path, file, group):
        size += batch.nbytes
        if size > UNFOLDED:
            raise DataError(f"{path}: row group {group} takes more than {UNFOLDED} bytes decoded, of "
                            f"{file.metadata.row_group(group).total_byte_size}; write smaller ones, or leave `stream` "
                            "out")  # fmt: skip
        read.append(batch)
    return pa.Table.from_batches(read, file.schema_arrow)


def _in_dictionaries(file: Any) -> list[str]:
    """Paths of the columns of texts or bytes that some row group stores in a dictionary."""
    metadata, schema, paths = file.metadata, file.schema, []
    for number in range(len(schema)):
        column = schema.column(number)
        plain = column.physical_type == "BYTE_ARRAY" and column.logical_type.type in ("STRING", "NONE", "ENUM")
        if plain and any(_encoded(metadata.row_group(n).column(number), "DICTIONARY")
                         for n in range(metadata.num_row_groups)):  # fmt: skip
            paths.append(column.path)
    return paths


def _encoded(chunk: Any, word: str) -> bool:
    return any(word in encoding for encoding in chunk.encodings)


def _shares_prefixes(group: Any) -> bool:
    """Whether a column stores texts as differences from the text before: each may be as long as all."""
    return any(_encoded(group.column(n), "DELTA_BYTE_ARRAY") for n in range(group.num_columns))


def _fixed_bytes(file: Any) -> int:
    """Bytes of a row's values of a fixed length, outside of lists."""
    columns = (file.schema.column(n) for n in range(len(file.schema)))
    return sum(column.length for column in columns if column.physical_type == "FIXED_LEN_BYTE_ARRAY")


def _check_sizes(path: Path, file: Any) -> None:
    for number in range(file.metadata.num_row_groups):
        group = file.metadata.row_group(number)
        for place in range(group.num_columns):
            chunk, column = group.column(place), file.schema.column(place)
            entries = chunk.num_values * (8 + max(0, column.length))
            size, stored = max(chunk.total_uncompressed_size, entries), max(1, chunk.total_compressed_size)
            if size > max(UNFOLDED, RATIO * stored):
                raise DataError(
                    f"{path}: column {reading.printable(chunk.path_in_schema)!r} of row group {number} takes {size} "
                    f"bytes decoded, of {stored} in the file; write it in smaller row groups, or leave it out"
                )
