"""Checks of untrusted Arrow columns: whether their structure is valid, and how large their decoded values are.

Arrow trusts the offsets, lengths and indices in a file. A wrong one crashes the process or returns other bytes, so a
file is fully validated before a value is read. And a value may be referenced many times: by a dictionary, a run of
equal values, views. A row is decoded only if its size is bounded.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from octavo.base.safe_read import first_line, printable
from octavo.data.errors import DataError

TEXT_BYTES = 64 << 20  # bytes of text in a row, the same limit as for a line of JSONL
ROW_BYTES = 1 << 30  # bytes of a row: it may contain a video
#: Decoded bytes of the buffers of a compressed Arrow file, which are decompressed whole when it is read.
COMPRESSED = 1 << 30


def error_line(cause: BaseException) -> str:
    """Return the first line of an error of the Arrow library, printable, at most 160 characters."""
    return printable(first_line(cause))[:160]


# Structure -------------------------------------------------------------------------------------------------------


def check_file(path: Path, refused: Callable[[Exception], DataError]) -> None:
    """Check that an Arrow file (file or stream format, also Feather) has no reference out of its buffers, by reading it
    once. Raises the error that `refused` returns for the cause."""
    try:
        with pa.memory_map(str(path)) as file:
            is_file = file.read(6) == b"ARROW1"
            file.seek(8 if is_file else 0)
            check_compressed(file)
            file.seek(0)
            for batch in _read_batches(file) if is_file else pa.ipc.open_stream(file):
                check_batch(batch)
    except Exception as cause:  # Arrow raises errors of many classes for a damaged file
        raise refused(cause) from cause


def _read_batches(file: pa.NativeFile) -> Iterator[pa.RecordBatch]:
    reader = pa.ipc.open_file(file)
    return (reader.get_batch(number) for number in range(reader.num_record_batches))


def check_batch(batch: pa.RecordBatch | pa.Table) -> None:
    """Check that every offset, length, index and null count of a batch fits its buffers. Raises ArrowInvalid. Text that
    is not UTF-8 passes here, because it is a fault of one row."""
    try:
        batch.validate(full=True)
    except pa.ArrowInvalid as cause:
        if "UTF8" not in str(cause):
            raise
        for column in batch.columns:
            for array in column.chunks if isinstance(column, pa.ChunkedArray) else [column]:
                _as_bytes(array).validate(full=True)


def _as_bytes(array: pa.Array) -> pa.Array:
    """Reinterpret texts of an array as bytes, whose content validation does not check. No value is read."""
    kind = array.type
    if isinstance(kind, pa.BaseExtensionType):
        return _as_bytes(array.storage)
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        plain = pa.binary() if pa.types.is_string(kind) else pa.large_binary()
        return pa.Array.from_buffers(plain, len(array), array.buffers(), offset=array.offset)
    if pa.types.is_dictionary(kind):
        return pa.DictionaryArray.from_arrays(array.indices, _as_bytes(array.dictionary), safe=False)
    if pa.types.is_struct(kind) and array.offset == 0:
        children = [_as_bytes(array.field(n)) for n in range(kind.num_fields)]
        fields = [kind.field(n).with_type(child.type) for n, child in enumerate(children)]
        return pa.Array.from_buffers(pa.struct(fields), len(array), array.buffers()[:1], children=children)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_map(kind):
        make = pa.large_list if pa.types.is_large_list(kind) else pa.list_
        child, buffers = _as_bytes(array.values), array.buffers()[:2]
        return pa.Array.from_buffers(make(child.type), len(array), buffers, offset=array.offset, children=[child])
    if pa.types.is_fixed_size_list(kind):
        child, buffers = _as_bytes(array.values), array.buffers()[:1]
        list_type = pa.list_(child.type, kind.list_size)
        return pa.Array.from_buffers(list_type, len(array), buffers, offset=array.offset, children=[child])
    return array


def check_compressed(file: pa.NativeFile) -> None:
    """Check that the compressed buffers of Arrow messages decompress to at most `COMPRESSED` bytes, by the sizes stored
    before them: nothing is decompressed. Raises ValueError."""
    total, stored = 0, file.size()
    with contextlib.suppress(EOFError, StopIteration):
        while (message := _next_message(file)) is not None:
            total += sum(_decompressed_sizes(message))
            if total > COMPRESSED:
                raise ValueError(
                    f"its compressed buffers take {total} bytes or more decoded, of {stored} in the file, and "
                    f"the limit is {COMPRESSED}; save it without compression, or as parquet"
                )


def _next_message(file: pa.NativeFile) -> pa.Message | None:
    """Read the next message; return None after the last one, where the file format has a footer."""
    at = file.tell()
    head = file.read(8)
    if len(head) < 8 or head[:4] != b"\xff\xff\xff\xff" or head[4:] == b"\0\0\0\0":
        return None
    file.seek(at)
    return pa.ipc.read_message(file)


def _decompressed_sizes(message: pa.Message) -> Iterator[int]:
    """Yield the decompressed size of each compressed buffer of a message, from its FlatBuffers metadata."""
    if message.type not in ("record batch", "dictionary"):
        return
    flat, body = message.metadata.to_pybytes(), message.body
    header = _table_at(flat, struct.unpack_from("<I", flat)[0])(2)
    if header is not None and message.type == "dictionary":  # its second field is a record batch
        header = _table_at(flat, _follow_offset(flat, header))(1)
    if header is None or body is None:
        return
    batch = _table_at(flat, _follow_offset(flat, header))
    buffers = batch(2)
    if batch(3) is None or buffers is None:  # no compression, no buffers
        return
    start = _follow_offset(flat, buffers)
    for number in range(struct.unpack_from("<I", flat, start)[0]):
        offset, length = struct.unpack_from("<qq", flat, start + 4 + 16 * number)
        if length >= 8:
            yield max(0, struct.unpack_from("<q", body, offset)[0])  # -1: this buffer is not compressed


def _table_at(flat: bytes, at: int) -> Callable[[int], int | None]:
    """Return a lookup for a FlatBuffers table: field number -> offset of its value; None for a field that is not
    set."""
    vtable = at - struct.unpack_from("<i", flat, at)[0]
    size = struct.unpack_from("<H", flat, vtable)[0]

    def field(number: int) -> int | None:
        slot = 4 + 2 * number
        offset = struct.unpack_from("<H", flat, vtable + slot)[0] if slot + 2 <= size else 0
        return at + offset if offset else None

    return field


def _follow_offset(flat: bytes, at: int) -> int:
    return at + int(struct.unpack_from("<I", flat, at)[0])


# Sizes -----------------------------------------------------------------------------------------------------------


def may_share_bytes(kind: pa.DataType) -> bool:
    """Return True if values of a type may share bytes, so that they may be larger than their buffers once decoded."""
    if isinstance(kind, pa.BaseExtensionType):
        return may_share_bytes(kind.storage_type)
    if str(kind).startswith(("dictionary", "run_end_encoded", "dense_union", "sparse_union")) or "view" in str(kind):
        return True
    return any(may_share_bytes(kind.field(n).type) for n in range(kind.num_fields))


def plain_type(kind: pa.DataType) -> pa.DataType:
    """Return the type with the same values, each stored separately: dictionaries and views are replaced by their value
    types. (Parquet returns no other types that share bytes.)"""
    if pa.types.is_dictionary(kind):
        return plain_type(kind.value_type)
    if str(kind) in ("string_view", "binary_view"):
        return pa.large_string() if "string" in str(kind) else pa.large_binary()
    if pa.types.is_struct(kind):
        return pa.struct([plain_field(kind.field(n)) for n in range(kind.num_fields)])
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(plain_field(kind.value_field), kind.list_size)
    if pa.types.is_map(kind):
        return pa.map_(plain_field(kind.key_field), plain_field(kind.item_field), kind.keys_sorted)
    if pa.types.is_list(kind):
        return pa.list_(plain_field(kind.value_field))
    if pa.types.is_large_list(kind):
        return pa.large_list(plain_field(kind.value_field))
    return kind


def plain_field(field: pa.Field) -> pa.Field:
    return field.with_type(plain_type(field.type))


def row_bytes(batch: pa.RecordBatch | pa.Table, texts: bool = False) -> np.ndarray:
    """Return [rows] int64: decoded bytes of each row; with `texts` only bytes of text."""
    total = np.zeros(batch.num_rows, np.int64)
    for column in batch.columns:
        chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
        if chunks:
            total += np.concatenate([value_bytes(chunk, texts) for chunk in chunks])
    return total


def find_large_rows(batch: pa.RecordBatch | pa.Table, sizes: np.ndarray | None = None) -> dict[int, str]:
    """Row -> why it is too large to decode. `sizes`: the result of `row_bytes`, if known."""
    sizes = row_bytes(batch) if sizes is None else sizes
    if not len(sizes) or sizes.max() <= min(TEXT_BYTES, ROW_BYTES):
        return {}
    texts = row_bytes(batch, texts=True)
    rows = np.flatnonzero((sizes > ROW_BYTES) | (texts > TEXT_BYTES))
    return {int(row): describe_large_row(int(sizes[row]), int(texts[row])) for row in rows}


def describe_large_row(size: int, texts: int) -> str:
    """Return the reason for a row of `size` bytes, `texts` of them text, that is too large."""
    if texts > TEXT_BYTES:
        return f"has {texts} bytes of text, over the limit of {TEXT_BYTES}; split or remove it"
    return f"takes {size} bytes, over the limit of {ROW_BYTES}; split or remove it"


def value_bytes(array: pa.Array, texts: bool = False) -> np.ndarray:
    """Return [len(array)] int64: decoded bytes of each value; with `texts` only bytes of text. The array must be
    valid."""
    # Sizes follow from offsets and indices; no value is decoded, since that is what may exhaust the memory.
    kind, count = array.type, len(array)
    if isinstance(kind, pa.BaseExtensionType):
        return value_bytes(array.storage, texts)
    if pa.types.is_dictionary(kind):
        each = value_bytes(array.dictionary, texts)
        indices = array.indices.fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
        used = array.is_valid().to_numpy(zero_copy_only=False)
        return np.where(used, each[indices], 0) if len(each) else np.zeros(count, np.int64)
    if pa.types.is_run_end_encoded(kind):
        ends = array.run_ends.to_numpy(zero_copy_only=False)
        run_index = np.searchsorted(ends, np.arange(array.offset, array.offset + count), side="right")
        return value_bytes(array.values, texts)[run_index]
    if pa.types.is_struct(kind):
        return sum((value_bytes(array.field(n), texts) for n in range(kind.num_fields)), np.zeros(count, np.int64))
    if pa.types.is_union(kind):
        return _union_bytes(array, texts)
    if pa.types.is_nested(kind):
        return _list_bytes(array, texts)
    if str(kind) in ("string", "large_string", "string_view", "binary", "large_binary", "binary_view"):
        return _lengths(array) if "string" in str(kind) or not texts else np.zeros(count, np.int64)
    if texts or pa.types.is_null(kind):
        return np.zeros(count, np.int64)
    return np.full(count, max(1, kind.bit_width // 8), np.int64)


def _lengths(array: pa.Array) -> np.ndarray:
    if "view" in str(array.type):  # a view has 16 bytes, of which the first four are the length
        views = np.frombuffer(array.buffers()[1], np.int32).reshape(-1, 4)
        lengths = views[array.offset : array.offset + len(array), 0].astype(np.int64)
        return np.where(array.is_valid().to_numpy(zero_copy_only=False), lengths, 0)
    return pc.binary_length(array).fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)


def _list_bytes(array: pa.Array, texts: bool) -> np.ndarray:
    """Return the bytes of a list: its entries, and 8 bytes for each, because many empty entries take memory too."""
    kind, count = array.type, len(array)
    if pa.types.is_fixed_size_list(kind):
        starts = (array.offset + np.arange(count, dtype=np.int64)) * kind.list_size
        ends = starts + kind.list_size
    elif "view" in str(kind):
        starts = array.offsets.to_numpy(zero_copy_only=False).astype(np.int64)[:count]
        ends = starts + array.sizes.to_numpy(zero_copy_only=False)
    else:
        offsets = array.offsets.to_numpy(zero_copy_only=False).astype(np.int64)
        starts, ends = offsets[:-1], offsets[1:]
    if count == 0:
        return np.zeros(0, np.int64)
    first, last = int(starts.min()), int(max(ends.max(), starts.min()))
    each = value_bytes(array.values.slice(first, last - first), texts) + (0 if texts else 8)
    until = np.concatenate([np.zeros(1, np.int64), np.cumsum(each)])
    return until[ends - first] - until[starts - first]


def _union_bytes(array: pa.Array, texts: bool) -> np.ndarray:
    codes, result = array.type_codes.to_numpy(zero_copy_only=False), np.zeros(len(array), np.int64)
    dense = array.type.mode == "dense"
    places = array.offsets.to_numpy(zero_copy_only=False) if dense else np.arange(len(array))
    for number, code in enumerate(array.type.type_codes):
        selected = codes == code
        if selected.any():
            result[selected] = value_bytes(array.field(number), texts)[places[selected]]
    return result
