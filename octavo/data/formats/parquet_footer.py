"""The footer of a parquet file: sizes, counts and encodings of its column chunks.

It is parsed here and not by pyarrow, which ends the process (`terminate called after throwing ... ParquetException`)
if a column chunk is accessed and statistics in a damaged footer contradict each other. The footer is a structure of
Thrift's compact protocol (https://github.com/apache/thrift/blob/master/doc/specs/thrift-compact-protocol.md) with the
fields of https://github.com/apache/parquet-format/blob/master/src/main/thrift/parquet.thrift.
"""

from __future__ import annotations

import os
import struct
from typing import Any, BinaryIO, NamedTuple

MAX_FOOTER_BYTES = 64 << 20  # bytes of a footer: 100,000 column chunks take about 20 MB
MAX_DEPTH = 16  # nested structures; the format has 6 levels
DICTIONARY, PREFIXES = (2, 8), (7,)  # Encoding.PLAIN_DICTIONARY and RLE_DICTIONARY; DELTA_BYTE_ARRAY


class Chunk(NamedTuple):
    """A column of a row group. `stored`, `size`: bytes of its pages in the file, and decompressed."""

    path: str
    values: int
    stored: int
    size: int
    encodings: tuple[int, ...]


class Group(NamedTuple):
    """A row group: its number of rows, decompressed bytes, and columns in the order of the schema."""

    rows: int
    size: int
    chunks: tuple[Chunk, ...]


def read_row_groups(file: BinaryIO) -> list[Group]:
    """Return the row groups of a parquet file. Raises ValueError for an invalid footer."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - 8))
    tail = file.read(8)
    if tail[4:] != b"PAR1":
        raise ValueError("it does not end as a parquet file does (PAR1): it is truncated, or not a parquet file")
    length = int.from_bytes(tail[:4], "little")
    if length > min(MAX_FOOTER_BYTES, size - 8):
        raise ValueError(f"its footer claims {length} bytes, of {size} of the file")
    file.seek(size - 8 - length)
    try:
        footer = _Reader(file.read(length)).struct()
        return [_read_group(group) for group in footer.get(4, [])]
    except (IndexError, KeyError, TypeError, AttributeError, UnicodeDecodeError, struct.error) as cause:
        raise ValueError(f"its footer is damaged ({type(cause).__name__})") from cause


def _read_group(group: dict[int, Any]) -> Group:
    chunks = []
    for column in group[1]:
        metadata = column[3]
        path = b".".join(metadata[3]).decode()
        chunks.append(Chunk(path, int(metadata[5]), int(metadata[7]), int(metadata[6]), tuple(map(int, metadata[2]))))
    return Group(int(group[3]), int(group[2]), tuple(chunks))


class _Reader:
    """A parser of Thrift's compact protocol; a structure is returned as {field number: value}."""

    def __init__(self, raw: bytes) -> None:
        self.raw, self.at, self.depth = raw, 0, 0

    def struct(self) -> dict[int, Any]:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise ValueError(f"its footer nests deeper than {MAX_DEPTH}")
        fields: dict[int, Any] = {}
        number = 0
        while head := self.byte():
            number = number + (head >> 4) if head >> 4 else self.integer()
            kind = head & 15
            fields[number] = kind == 1 if kind in (1, 2) else self.value(kind)  # a boolean is encoded in its type
        self.depth -= 1
        return fields

    def value(self, kind: int) -> Any:
        if kind in (4, 5, 6):
            return self.integer()
        if kind == 8:
            return self.bytes(self.varint())
        if kind in (9, 10):
            return self.list()
        if kind == 12:
            return self.struct()
        if kind in (1, 2, 3):  # in a list each boolean is a byte
            return self.byte()
        if kind == 7:
            return struct.unpack("<d", self.bytes(8))[0]
        if kind == 13:
            return self.bytes(16)
        if kind == 11:
            return self.map()
        raise ValueError(f"its footer holds a value of the unknown kind {kind}")

    def list(self) -> list[Any]:
        head = self.byte()
        count = self.varint() if head >> 4 == 15 else head >> 4
        self.check_count(count)
        return [self.value(head & 15) for _ in range(count)]

    def map(self) -> dict[Any, Any]:
        if (count := self.varint()) == 0:
            return {}
        self.check_count(count)
        kinds = self.byte()
        return {str(self.value(kinds >> 4)): self.value(kinds & 15) for _ in range(count)}

    def check_count(self, count: int) -> None:
        if count > len(self.raw) - self.at:  # each entry has at least one byte
            raise ValueError(f"its footer claims a list of {count} entries")

    def byte(self) -> int:
        self.at += 1
        return self.raw[self.at - 1]

    def bytes(self, count: int) -> bytes:
        self.check_count(count)
        self.at += count
        return self.raw[self.at - count : self.at]

    def varint(self) -> int:
        value = shift = 0
        while True:
            byte = self.byte()
            value |= (byte & 127) << shift
            if byte < 128:
                return value
            shift += 7
            if shift > 63:
                raise ValueError("its footer holds a number of more than 64 bits")

    def integer(self) -> int:
        value = self.varint()
        return (value >> 1) ^ -(value & 1)
