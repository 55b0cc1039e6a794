"""Rows read from the original file (`stream: true`) by number, without a copy in the cache; order and resume do not
change.

Lines of JSONL and CSV are located once, by reading the whole file, and then read one by one; the start, end and line of
each row are kept, 24 bytes. From parquet the row group of the row is read, and the last groups stay in memory: in a
shuffled order nearly every row reads a group, so groups should be small (`datasets` writes about 100 to 1,000 rows).
"""

from __future__ import annotations

import os
from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable
from itertools import accumulate, count, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from octavo.base.encryption import Reader, has_magic
from octavo.data.errors import BadSample, DataError
from octavo.data.file_digests import stat_key
from octavo.data.formats.arrow_rows import Text, collect_keys, decode_row, parse_row
from octavo.data.formats.columnar import find_large_rows
from octavo.data.formats.parquet import Parquet, parquet_file, read_group

CACHE_BYTES = 64 << 20  # bytes of row groups that stay in memory; the newest always does


class Place(NamedTuple):
    """The position of a row: its first line (from 1), first byte and end byte; `problem`: why it cannot be read."""

    line: int
    start: int
    end: int
    problem: str | None = None


class ByteReader:
    """Reads bytes of a file by position: `pieces.read(start, size)`. The file is opened at the first read. `in_store`:
    it is in a store that sets its access time, which changes its ctime."""

    def __init__(self, path: Path, in_store: bool = False) -> None:
        self.path, self._used = path, in_store
        self._file: int | None = None
        self._plain: Reader | None = None  # of an encrypted file
        self._at = self._file_key(os.stat(path))

    def _file_key(self, stat: os.stat_result) -> tuple[int, ...]:
        """Values that change with the content, even if a program sets the mtime. The ctime of a file in a store changes
        whenever it is used (`fetched.Store`). Not the inode: some network file systems change it for an open file."""
        return (stat.st_size, stat.st_mtime_ns) if self._used else stat_key(stat)[:3]

    def open(self) -> int:
        """Return the file descriptor, which stays valid if the file is renamed or removed."""
        if self._file is None:
            self._file = os.open(self.path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
            if has_magic(os.pread(self._file, 8, 0)):
                self._plain = Reader(os.dup(self._file), self.path)
        return self._file

    def read(self, start: int, size: int) -> bytes:
        """Bytes of plain text. Raises `DataError` if the file changed since this object was created, and VaultError for
        an encrypted file that is damaged."""
        file = self.open()
        if self._file_key(os.fstat(file)) != self._at:
            raise DataError(f"{self.path} changed while it was read; start again when it is complete")
        return os.pread(file, size, start) if self._plain is None else self._plain.read_at(start, size)

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_file": None, "_plain": None}

    def __del__(self) -> None:
        if self._file is not None:
            os.close(self._file)


class Lines:
    """Rows of a file of lines. `read` converts the bytes of a row to its `Text`, if they are not JSON."""

    def __init__(self, path: Path, places: Iterable[Place], read: Callable[[bytes, int], Text] = Text) -> None:
        self.path, self._read = path, read
        self._pieces = ByteReader(path)
        self._lines, self._starts, self._ends = array("q"), array("q"), array("q")
        self._problems: dict[int, str] = {}
        for row, place in enumerate(places):
            self._lines.append(place.line)
            self._starts.append(place.start)
            self._ends.append(place.end)
            if place.problem is not None:
                self._problems[row] = place.problem

    def __len__(self) -> int:
        return len(self._starts)

    def line(self, row: int) -> int:
        """Return the line number (from 1) at which a row begins."""
        return self._lines[row]

    def keys(self) -> set[str]:
        """Return all keys of the rows; reads the whole file again."""
        return collect_keys(self)

    def __getitem__(self, row: int) -> Any:
        line, start, problem = self._lines[row], self._starts[row], self._problems.get(row)
        raw = self._pieces.read(start, 0 if problem else self._ends[row] - start)
        return parse_row(self.path, row, *(Text(b"", line, problem) if problem else self._read(raw, line)))


class _Group(NamedTuple):
    """A row group, with texts in dictionaries; `problems`: row -> reason, for rows that are too large to decode."""

    table: pa.Table
    problems: dict[int, str]


class _GroupCache:
    """A cache of row groups of all files that this process reads: up to `CACHE_BYTES` bytes, the least recently used
    goes first."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[int, int], _Group] = OrderedDict()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, key: tuple[int, int], read: Callable[[], _Group]) -> _Group:
        """Return the row group with this key; `read` is called if it is not cached."""
        if (group := self._kept.get(key)) is None:
            group = self._kept[key] = read()
            self._bytes += group.table.nbytes
            while len(self._kept) > 1 and self._bytes > CACHE_BYTES:
                self._bytes -= self._kept.popitem(last=False)[1].table.nbytes
        self._kept.move_to_end(key)
        return group


TABLES = _GroupCache()
_NUMBERS = count()  # keys in TABLES of the files of this process


class Groups:
    """Rows of a parquet file, read by row group. `open_file`: opens the file object to read, by default the path."""

    def __init__(self, path: Path, open_file: Callable[[], Any] | None = None) -> None:
        self.path, self._open, self._number = path, open_file, next(_NUMBERS)
        self._parquet: Parquet | None = None
        self._stat = stat_key(os.stat(path))[:3] if open_file is None else None
        self._ends = list(accumulate(group.rows for group in self._file().groups))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getstate__(self) -> dict[str, object]:
        return {key: value for key, value in self.__dict__.items() if key != "_number"} | {"_parquet": None}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state, _number=next(_NUMBERS))

    @property
    def shards(self) -> list[int]:
        """The number of rows in each row group."""
        return [end - start for start, end in pairwise([0, *self._ends])]

    def keys(self) -> set[str]:
        return {*self._file().schema.names}

    def __getitem__(self, row: int) -> Any:
        number = bisect_right(self._ends, row)
        first = self._ends[number - 1] if number else 0
        group = self._group(number)
        if (problem := group.problems.get(row - first)) is not None:
            raise BadSample(self.path, row, problem)
        return decode_row(self.path, row, group.table.slice(row - first, 1))

    def _file(self) -> Parquet:
        if self._parquet is None:
            self._parquet = parquet_file(self.path, self._open)
        return self._parquet

    def _group(self, number: int) -> _Group:
        return TABLES.get((self._number, number), lambda: self._read(number))

    def _read(self, number: int) -> _Group:
        if self._stat is not None and stat_key(os.stat(self.path))[:3] != self._stat:
            raise DataError(f"{self.path} changed while it was read; start again when it is complete")
        table = read_group(self.path, self._file(), number)
        return _Group(table, find_large_rows(table))
