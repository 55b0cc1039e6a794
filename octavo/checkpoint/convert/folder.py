"""A Hugging Face folder as bytes: safetensors shards with their headers word for word, and the files beside them.

A conversion that comes back bit for bit needs each header as it was written (order, metadata, padding), and the places
of the bytes, so that they are copied and not rebuilt.
"""

from __future__ import annotations

import mmap
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from octavo.base import safe_read
from octavo.checkpoint.errors import CheckpointError
from octavo.models.folder import headers
from octavo.models.folder.folder import INDEX, PICKLES, SINGLE, no_weights, weight_map
from octavo.models.folder.headers import Entry, Header

ADAPTER = "adapter_model.safetensors"
_PIECE = 1 << 20


@dataclass(frozen=True)
class Place:
    """Where the bytes of one tensor lie. `crc` (CRC-32) is what they must sum to; None: not known."""

    file: Path
    offset: int
    size: int
    crc: int | None = None


@dataclass(frozen=True)
class Folder:
    """`carried`: names of the files that belong to it beside the shards; `left`: files that are not taken along."""

    path: Path
    shards: tuple[Header, ...]
    carried: tuple[str, ...]
    left: tuple[str, ...]

    def place(self, shard: Header, entry: Entry) -> Place:
        return Place(self.path / shard.file, len(shard.head) + entry.begin, entry.size)


def read_folder(path: Path, adapter: bool = False) -> Folder:
    """A folder's shards, headers alone. `adapter`: a PEFT folder, whose one file is adapter_model.safetensors.

    Raises CheckpointError or ModelError, naming the file, for a folder without safetensors (saying so where there are
    pickles), a shard that is missing or cut short, a damaged header, and an index that does not list what is there.
    """
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a folder; name a local Hugging Face folder")
    there = sorted(entry.name for entry in path.iterdir() if entry.is_file())
    placed = weight_map(path / INDEX) if not adapter and INDEX in there and SINGLE not in there else None
    files = [ADAPTER if adapter else SINGLE] if placed is None else sorted(set(placed.values()))
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


def read_shard(file: Path) -> Header:
    """The header of a safetensors file. Raises CheckpointError naming the file."""
    try:
        return headers.read(file)
    except headers.HeaderError as error:
        raise CheckpointError(f"{file} is damaged or no safetensors file: {error}") from error


def _agree(path: Path, shards: Iterable[Header], placed: Mapping[str, str]) -> None:
    """That the index and the shards name the same tensors."""
    there = {entry.name: shard.file for shard in shards for entry in shard.entries}
    for name, file in placed.items():
        if there.get(name) != file:
            where = f"it is in {there[name]}" if name in there else "no shard holds it"
            raise CheckpointError(f"{path / INDEX} places {name} in {file}, and {where}. Download both again")
    if spare := [name for name in there if name not in placed]:
        raise CheckpointError(f"{path / there[spare[0]]} holds {spare[0]}, which {INDEX} does not list. Write it again")


def _missing(path: Path, name: str, there: list[str], indexed: bool) -> str:
    if name == SINGLE and ADAPTER in there:
        return f"{path} holds no {name} but an adapter: convert it with lora_hf_to_dcp"
    if name == ADAPTER and (SINGLE in there or INDEX in there):
        return f"{path} holds no {name} but a whole model: convert it with hf_to_dcp"
    return no_weights(path / name, indexed).removesuffix(".")


def to_json(shard: Header) -> dict[str, Any]:
    return {"file": shard.file, "header": shard.text}


def from_json(found: Mapping[str, Any]) -> Header:
    """What `to_json` wrote. Raises CheckpointError for anything else."""
    text, file = found.get("header"), found.get("file")
    if not isinstance(text, str) or not isinstance(file, str) or Path(file).name != file:
        raise CheckpointError(f"{file!r} is no shard of a conversion")
    try:
        return headers.parse(file, text)
    except headers.HeaderError as error:
        raise CheckpointError(f"{file}: {error}") from error


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
        with safe_read.open_file(place.file, CheckpointError) as opened:
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


def pieces(place: Place) -> Iterator[memoryview]:
    """The bytes at a place, a mebibyte at a time; checked against its checksum once all were given."""
    buffer = bytearray(min(_PIECE, max(place.size, 1)))
    view, left, crc = memoryview(buffer), place.size, 0
    try:
        with safe_read.open_file(place.file, CheckpointError, buffering=0) as opened:
            opened.seek(place.offset)
            while left:
                got = opened.readinto(view[: min(left, len(buffer))]) or 0
                if not got:
                    raise CheckpointError(f"{place.file} is cut short: {left} bytes are missing at its end")
                if place.crc is not None:
                    crc = zlib.crc32(view[:got], crc)
                yield view[:got]
                left -= got
    except FileNotFoundError as error:
        raise CheckpointError(f"{place.file} is missing") from error
    if place.crc is not None and crc != place.crc:
        raise CheckpointError(corrupt(place))


def corrupt(place: Place) -> str:
    return (
        f"{place.file} is corrupt between bytes {place.offset} and {place.offset + place.size}: the checksum is not "
        "the one that was noted when it was written"
    )


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """A tensor's bytes, row by row."""
    flat = tensor.detach().contiguous().flatten()
    return memoryview(flat.view(torch.uint8).numpy()).cast("B") if flat.numel() else memoryview(b"")


def write_all(opened: int, data: bytes | memoryview) -> None:
    """`os.write` until everything is written."""
    view = memoryview(data)
    while view:
        view = view[os.write(opened, view) :]
