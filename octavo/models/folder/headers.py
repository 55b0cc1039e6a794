"""Reads and writes headers of safetensors files: the tensors of a file and their offsets.

    n (8 bytes, little-endian) | n bytes of JSON | the bytes of the tensors, without gaps {"name": {"dtype": "F8_E4M3",
    "shape": [N, K], "data_offsets": [begin, end]}, ...}

Loading, verification and conversion use this reader. It is as strict as safetensors' own library, names the fault, and
keeps the JSON unchanged, so that a conversion can be reversed bit for bit.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from octavo.base import encryption, safe_read

#: safetensors' name of a dtype -> torch's dtype
DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
    "BOOL": torch.bool, "C64": torch.complex64,
}  # fmt: skip
DTYPE_NAMES = {dtype: word for word, dtype in DTYPES.items()}
_MAX_HEADER_BYTES = 100_000_000  # limit of the safetensors library


class HeaderError(ValueError):
    """Raised if a file is not a complete safetensors file; the message has the reason and the fix.

    kind  "truncated" (bytes are missing), "pickle", "unread" (it cannot be opened), or "header" (anything else)
    """

    def __init__(self, why: str, kind: str = "header", fix: str = "Download or write it again") -> None:
        super().__init__(f"{why}. {fix}" if fix else why)
        self.kind = kind


@dataclass(frozen=True)
class Entry:
    """One tensor: safetensors' name of its dtype, its shape, and the offset of its first byte after the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int

    @property
    def size(self) -> int:
        """The size in bytes."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class Header:
    """A file's name, the unchanged JSON of its header, and its tensors in the order of their bytes."""

    file: str
    text: str
    entries: tuple[Entry, ...]

    @property
    def head(self) -> bytes:
        """The bytes of the file before the first tensor."""
        text = self.text.encode()
        return len(text).to_bytes(8, "little") + text

    @property
    def size(self) -> int:
        """The size of all tensors in bytes."""
        return sum(entry.size for entry in self.entries)


def is_pickle(file: Path) -> bool:
    """Return whether a file is a pickle or torch's zip of one, by its first bytes."""
    with safe_read.open_file(file) as opened:
        start = opened.read(4)
    return start == b"PK\x03\x04" or (len(start) > 1 and start[0] == 0x80 and 2 <= start[1] <= 5)


def read(file: Path) -> Header:
    """Read the header of a file and check it against the file's size. Raises HeaderError."""
    try:
        opened = safe_read.open_file(file)
    except safe_read.Unreadable as error:
        raise HeaderError(str(error).rstrip("."), "unread", "") from error
    with opened, _convert_errors():
        size = safe_read.size_of(opened)
        length, first = int.from_bytes(opened.read(8), "little"), opened.read(1)
        # A header length may look like the start of a pickle, so the bytes are decisive only if no header follows.
        if (first != b"{" or length > size - 8) and is_pickle(file):
            why = "it is a pickle with the suffix of a different format, and a pickle can run code when it is read"
            raise HeaderError(why, "pickle", "Save the model as safetensors")
        if size < 8 or length > min(_MAX_HEADER_BYTES, size - 8):
            kind = "header" if size >= 8 and length > _MAX_HEADER_BYTES else "truncated"
            raise HeaderError(f"it has {size} bytes but declares a header of {length} bytes", kind)
        opened.seek(8)
        raw = opened.read(length)
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise HeaderError(f"its header is not JSON ({error})") from error
    header = parse(file.name, text)
    end = 8 + length + header.size
    if size != end:
        cut = next((e.name for e in header.entries if 8 + length + e.begin + e.size > size), None)
        consequence = f", so {cut} and the tensors after it are truncated" if cut is not None else ""
        kind = "truncated" if size < end else "header"
        raise HeaderError(f"it has {size} bytes, but its header declares {end}{consequence}", kind)
    return header


@contextmanager
def _convert_errors() -> Iterator[None]:
    """Context in which errors of a damaged encrypted file become HeaderErrors."""
    try:
        yield
    except encryption.VaultError as error:
        raise HeaderError(str(error), "unread", "") from error


def parse(file: str, text: str) -> Header:
    """Parse the JSON of a header. Raises HeaderError."""
    try:
        table = safe_read.parse_json(text, "its header")
    except safe_read.Unreadable as error:
        raise HeaderError(str(error).rstrip("."), fix="") from error
    words = table.pop("__metadata__", None) or {}
    if not isinstance(words, dict) or not all(isinstance(word, str) for word in words.values()):
        raise HeaderError("its __metadata__ is not an object of strings, which all readers of safetensors require")
    # An empty tensor begins at the same offset as the next one, and is sorted before it.
    entries = sorted((_entry(name, info) for name, info in table.items()), key=lambda e: (e.begin, e.size))
    end = 0
    for entry in entries:
        if entry.begin != end:
            raise HeaderError(
                f"{entry.name} begins at byte {entry.begin} after the header, but the previous tensor ends at {end}"
            )
        end += entry.size
    return Header(file, text, tuple(entries))


def _entry(name: str, info: Any) -> Entry:
    info = info if isinstance(info, dict) else {}
    dtype, shape, offsets = info.get("dtype"), info.get("shape"), info.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise HeaderError(
            f"{name} has the dtype {dtype!r}, which Octavo does not support; it supports {', '.join(DTYPES)}"
        )
    for numbers in (shape, offsets):
        if not isinstance(numbers, list) or not all(type(n) is int and n >= 0 for n in numbers):
            raise HeaderError(f"{name} has the shape {shape!r} and the offsets {offsets!r}")
    entry = Entry(name, dtype, tuple(shape), offsets[0] if offsets else 0)
    if offsets != [entry.begin, entry.begin + entry.size]:
        raise HeaderError(f"{name} is {dtype} {shape}, {entry.size} bytes, but has the offsets {offsets!r}")
    return entry


def compose(file: str, tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> Header:
    """Return the header of a file with these tensors (name, dtype, shape) in this order, as safetensors would write
    it."""
    entries: list[Entry] = []
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name, dtype, shape in tensors:
        entries.append(entry := Entry(name, dtype, tuple(shape), begin))
        begin += entry.size
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [entry.begin, begin]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False)
    return Header(file, text + " " * (-len(text.encode()) % 8), tuple(entries))


def make_index(headers: Iterable[Header]) -> str:
    """Create the text of model.safetensors.index.json for these files."""
    headers = tuple(headers)
    index = {
        "metadata": {"total_size": sum(header.size for header in headers)},
        "weight_map": dict(sorted((entry.name, header.file) for header in headers for entry in header.entries)),
    }
    return json.dumps(index, indent=2) + "\n"
