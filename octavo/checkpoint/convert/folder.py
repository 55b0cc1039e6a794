"""A Hugging Face folder as bytes: safetensors shards with their headers word for word, and the files beside them.

    file of a shard:  8 bytes (length n of the header) | n bytes of JSON | the tensors, end to end

safetensors' own library gives tensors; a conversion that comes back bit for bit needs the header as it was written too
(order, metadata, padding), and the places of the bytes, so that they are copied and not rebuilt.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from octavo.checkpoint.errors import CheckpointError

INDEX, SINGLE, ADAPTER = "model.safetensors.index.json", "model.safetensors", "adapter_model.safetensors"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")

#: safetensors' words for the dtypes of torch
DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
    "BOOL": torch.bool, "C64": torch.complex64,
}  # fmt: skip
WORDS = {dtype: word for word, dtype in DTYPES.items()}
_LONGEST_HEADER = 100_000_000  # safetensors' own limit
_PIECE = 1 << 20


@dataclass(frozen=True)
class Place:
    """Where the bytes of one tensor lie. `crc` (CRC-32) is what they must sum to; None: nobody has said."""

    file: Path
    offset: int
    size: int
    crc: int | None = None


@dataclass(frozen=True)
class Entry:
    """One tensor of a shard: dtype in safetensors' words, and its first byte behind the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int

    @property
    def size(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class Shard:
    """A safetensors file: its name, its header's JSON as it stands in the file, and its tensors in their order."""

    file: str
    header: str
    entries: tuple[Entry, ...]

    @property
    def head(self) -> bytes:
        """What stands in the file before the first tensor."""
        text = self.header.encode()
        return len(text).to_bytes(8, "little") + text

    @property
    def size(self) -> int:
        """Of the tensors, in bytes."""
        return sum(entry.size for entry in self.entries)


@dataclass(frozen=True)
class Folder:
    """`carried`: names of the files that belong to it beside the shards; `left`: files that are not taken along."""

    path: Path
    shards: tuple[Shard, ...]
    carried: tuple[str, ...]
    left: tuple[str, ...]

    def place(self, shard: Shard, entry: Entry) -> Place:
        return Place(self.path / shard.file, len(shard.head) + entry.begin, entry.size)


def read_folder(path: Path, adapter: bool = False) -> Folder:
    """A folder's shards, headers alone. `adapter`: a PEFT folder, whose one file is adapter_model.safetensors.

    Raises CheckpointError, naming the file, for a folder without safetensors (saying so where there are pickles), a
    shard that is missing or cut short, a header that makes no sense, and an index that does not tell what is there.
    """
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a folder; name a local Hugging Face folder")
    there = sorted(entry.name for entry in path.iterdir() if entry.is_file())
    index = path / INDEX
    if adapter:
        files, placed = [ADAPTER], None
    elif index.is_file() and SINGLE not in there:
        placed = _weight_map(index)
        files = sorted(set(placed.values()))
    else:
        files, placed = [SINGLE], None
    for name in files:
        if name not in there:
            raise CheckpointError(_missing(path, name, there, placed is not None))
    shards = tuple(read_shard(path / name) for name in files)
    if placed is not None:
        _agree(path, shards, placed)
    others = [name for name in there if name not in files and not (name == INDEX and placed is None)]
    left = [name for name in others if name.endswith((".safetensors", *PICKLES))]
    left += [name for name in there if name == INDEX and placed is None]
    left += [f"{entry.name}/" for entry in path.iterdir() if entry.is_dir()]
    return Folder(path, shards, tuple(name for name in others if name not in left), tuple(sorted(left)))


def read_shard(file: Path) -> Shard:
    """The header of a safetensors file, checked against the file's size. Raises CheckpointError naming the file."""

    def bad(why: str) -> CheckpointError:
        return CheckpointError(f"{file} is damaged or no safetensors file: {why}. Download or write it again")

    try:
        size = file.stat().st_size
        with open(file, "rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            if size < 8 or length > min(_LONGEST_HEADER, size - 8):
                raise bad(f"it has {size} bytes and announces a header of {length}")
            text = opened.read(length).decode()
            found = json.loads(text)
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise bad(f"its header is no JSON ({str(error).splitlines()[0]})") from error
    if not isinstance(found, dict):
        raise bad(f"its header is a {type(found).__name__}")
    found.pop("__metadata__", None)
    entries, end = [], 0
    for name, said in sorted(found.items(), key=lambda item: _begin(item[1])):
        entry = _entry(name, said)
        if isinstance(entry, str):
            raise bad(f"{name} {entry}")
        if entry.begin != end:
            raise bad(f"{name} begins at byte {entry.begin} behind the header, and what is before it ends at {end}")
        entries.append(entry)
        end += entry.size
    if size != 8 + length + end:
        raise bad(f"it has {size} bytes where its header announces {8 + length + end}")
    return Shard(file.name, text, tuple(entries))


def _begin(said: Any) -> tuple[int, ...]:
    """What tensors are sorted by: their first byte, then their last, so that empty ones come before what follows."""
    offsets = said.get("data_offsets") if isinstance(said, dict) else None
    return tuple(offsets) if isinstance(offsets, list) and all(type(n) is int for n in offsets) else ()


def _entry(name: str, said: Any) -> Entry | str:
    """A tensor of a header, or what is wrong with it."""
    if not isinstance(said, dict) or said.get("dtype") not in DTYPES:
        return f"has the dtype {said.get('dtype') if isinstance(said, dict) else said!r}, which Octavo does not know"
    shape, offsets = said.get("shape"), said.get("data_offsets")
    for numbers in (shape, offsets):
        if not isinstance(numbers, list) or not all(type(n) is int and n >= 0 for n in numbers):
            return f"has the shape {shape!r} and lies at {offsets!r}"
    entry = Entry(name, said["dtype"], tuple(shape), offsets[0])
    if offsets[1:] != [entry.begin + entry.size]:
        return f"is {said['dtype']} {shape}, {entry.size} bytes, and lies at {offsets!r}"
    return entry


def _weight_map(index: Path) -> dict[str, str]:
    try:
        found = json.loads(index.read_text(encoding="utf-8")).get("weight_map")
    except (ValueError, AttributeError) as error:
        raise CheckpointError(f"{index} is not JSON: {error}. Download or write it again") from error
    if not isinstance(found, dict) or not found or not all(isinstance(f, str) for f in found.values()):
        raise CheckpointError(f"{index} has no weight_map of tensor names to files. Download or write it again")
    if outside := [f for f in found.values() if Path(f).name != f or not f.endswith(".safetensors")]:
        raise CheckpointError(f"{index} names {outside[0]!r}, which is no safetensors file of this folder")
    return found


def _agree(path: Path, shards: Iterable[Shard], placed: Mapping[str, str]) -> None:
    """That the index and the shards tell of the same tensors."""
    there = {entry.name: shard.file for shard in shards for entry in shard.entries}
    for name, file in placed.items():
        if there.get(name) != file:
            where = f"it is in {there[name]}" if name in there else "no shard holds it"
            raise CheckpointError(f"{path / INDEX} places {name} in {file}, and {where}. Download both again")
    if spare := [name for name in there if name not in placed]:
        raise CheckpointError(f"{path / there[spare[0]]} holds {spare[0]}, which {INDEX} does not list. Write it again")


def _missing(path: Path, name: str, there: list[str], indexed: bool) -> str:
    if indexed:
        return f"{path / name} is missing, though {INDEX} names it. Download the shard again"
    pickles = [other for other in there if other.endswith(PICKLES)]
    if pickles:
        return (
            f"{path} holds only pickled weights ({', '.join(pickles[:3])}); a pickle can run code when it is read, so "
            "Octavo reads safetensors alone. Save the model with save_pretrained (safetensors is its format) first"
        )
    other = " but an adapter: convert it with lora_hf_to_dcp" if name == SINGLE and ADAPTER in there else ""
    if name == ADAPTER and (SINGLE in there or INDEX in there):
        other = " but a whole model: convert it with hf_to_dcp"
    return f"{path} holds no {name}{other or f' and no {INDEX}: there are no weights to convert'}"


def make_shard(file: str, tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> Shard:
    """A shard of (name, dtype, shape) in this order, with the header that safetensors would write for it."""
    entries: list[Entry] = []
    said: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name, dtype, shape in tensors:
        entry = Entry(name, dtype, tuple(shape), begin)
        said[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, begin + entry.size]}
        entries.append(entry)
        begin += entry.size
    text = json.dumps(said, separators=(",", ":"), ensure_ascii=False)
    return Shard(file, text + " " * (-(8 + len(text.encode())) % 8), tuple(entries))


def to_json(shard: Shard) -> dict[str, Any]:
    return {"file": shard.file, "header": shard.header}


def from_json(said: Mapping[str, Any]) -> Shard:
    """What `to_json` wrote. Raises CheckpointError for anything else."""
    header, file = said.get("header"), said.get("file")
    if not isinstance(header, str) or not isinstance(file, str) or Path(file).name != file:
        raise CheckpointError(f"{file!r} is no shard of a conversion")
    found = json.loads(header)
    found.pop("__metadata__", None)
    entries = []
    for name, said_of in sorted(found.items(), key=lambda item: _begin(item[1])):
        entry = _entry(name, said_of)
        if isinstance(entry, str):
            raise CheckpointError(f"{file}: {name} {entry}")
        entries.append(entry)
    return Shard(file, header, tuple(entries))


@contextmanager
def mapped(place: Place, dtype: torch.dtype, shape: Iterable[int]) -> Iterator[Tensor]:
    """The tensor at a place, its bytes mapped from the file for as long as the block runs; nothing else is read.

    Raises CheckpointError where the place has a checksum and the bytes another.
    """
    shape = tuple(shape)
    if place.size == 0:
        yield torch.empty(shape, dtype=dtype)
        return
    start = place.offset - place.offset % mmap.ALLOCATIONGRANULARITY
    try:
        with open(place.file, "rb") as opened:
            length = place.offset + place.size - start
            # Private and writable, as torch wants it; nobody writes, so no page is copied.
            view = mmap.mmap(opened.fileno(), length, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE, offset=start)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{place.file} cannot be read: {error}") from error
    flat = torch.frombuffer(view, dtype=torch.uint8, count=place.size, offset=place.offset - start)
    if place.crc is not None and zlib.crc32(memoryview(view)[place.offset - start :]) != place.crc:
        raise CheckpointError(corrupt(place))
    yield (flat if flat.data_ptr() % dtype.itemsize == 0 else flat.clone()).view(dtype).reshape(shape)
    del flat  # the map is released with its last tensor


def pieces(place: Place, tell: Callable[[int], None] = lambda n: None) -> Iterator[memoryview]:
    """The bytes at a place, a mebibyte at a time; checked against its checksum once all were given."""
    buffer = bytearray(min(_PIECE, max(place.size, 1)))
    view, left, crc = memoryview(buffer), place.size, 0
    try:
        with open(place.file, "rb", buffering=0) as opened:
            opened.seek(place.offset)
            while left:
                got = opened.readinto(view[: min(left, len(buffer))]) or 0
                if not got:
                    raise CheckpointError(f"{place.file} is cut short: {left} bytes are missing at its end")
                if place.crc is not None:
                    crc = zlib.crc32(view[:got], crc)
                yield view[:got]
                left -= got
                tell(got)
    except FileNotFoundError as error:
        raise CheckpointError(f"{place.file} is missing") from error
    if place.crc is not None and crc != place.crc:
        raise CheckpointError(corrupt(place))


def corrupt(place: Place) -> str:
    return (
        f"{place.file} is corrupt between bytes {place.offset} and {place.offset + place.size}: the checksum is not "
        "the one that was noted when it was written"
    )


def write_all(opened: int, data: bytes | memoryview) -> None:
    """`os.write` until everything is written."""
    view = memoryview(data)
    while view:
        view = view[os.write(opened, view) :]
