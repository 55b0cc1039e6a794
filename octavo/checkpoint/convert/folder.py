"""A Hugging Face folder as bytes: safetensors shards with their headers verbatim, and the other files.

A conversion that restores the folder bit for bit needs each header as it was written (order, metadata, padding) and the
positions of the bytes, so that they are copied and not rebuilt.
"""

from __future__ import annotations

import io
import mmap
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from octavo.base import safe_read
from octavo.checkpoint.errors import CheckpointError
from octavo.models.folder import headers
from octavo.models.folder.folder import INDEX, PICKLES, SINGLE, missing_weights_error, weight_map
from octavo.models.folder.headers import Entry, Header

ADAPTER = "adapter_model.safetensors"
_PIECE = 1 << 20


@dataclass(frozen=True)
class ByteRange:
    """The position of the bytes of one tensor in a file, with their CRC-32 (None: not known)."""

    file: Path
    offset: int
    size: int
    crc: int | None = None


@dataclass(frozen=True)
class Folder:
    """A folder's shards, the names of other files that a conversion copies (`carried`) and of those it leaves out
    (`left`)."""

    path: Path
    shards: tuple[Header, ...]
    carried: tuple[str, ...]
    left: tuple[str, ...]

    def place(self, shard: Header, entry: Entry) -> ByteRange:
        return ByteRange(self.path / shard.file, len(shard.head) + entry.begin, entry.size)


def read_folder(path: Path, adapter: bool = False) -> Folder:
    """Read the headers of a folder's shards. `adapter`: a PEFT folder, whose only weights are
    adapter_model.safetensors.

    Raises CheckpointError or ModelError, naming the file, for a folder without safetensors (naming pickles, if there
    are any), a missing or truncated shard, a damaged header, and an index that does not match the shards.
    """
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a folder; choose a local Hugging Face folder")
    present = sorted(entry.name for entry in path.iterdir() if entry.is_file())
    placed = weight_map(path / INDEX) if not adapter and INDEX in present and SINGLE not in present else None
    files = [ADAPTER if adapter else SINGLE] if placed is None else sorted(set(placed.values()))
    for name in files:
        if name not in present:
            raise CheckpointError(_missing_file_error(path, name, present, placed is not None))
    shards = tuple(read_shard(path / name) for name in files)
    if placed is not None:
        _check_index(path, shards, placed)
    others = [name for name in present if name not in files and not (name == INDEX and placed is None)]
    left = [name for name in others if name.endswith((".safetensors", *PICKLES))]
    left += [name for name in present if name == INDEX and placed is None]
    left += [f"{entry.name}/" for entry in path.iterdir() if entry.is_dir()]
    return Folder(path, shards, tuple(name for name in others if name not in left), tuple(sorted(left)))


def read_shard(file: Path) -> Header:
    """Read the header of a safetensors file. Raises CheckpointError, naming the file."""
    try:
        return headers.read(file)
    except headers.HeaderError as error:
        raise CheckpointError(f"{file} is damaged or not a safetensors file: {error}") from error


def _check_index(path: Path, shards: Iterable[Header], placed: Mapping[str, str]) -> None:
    """Raise CheckpointError unless the index and the shards name the same tensors."""
    shard_of = {entry.name: shard.file for shard in shards for entry in shard.entries}
    for name, file in placed.items():
        if shard_of.get(name) != file:
            where = f"it is in {shard_of[name]}" if name in shard_of else "no shard holds it"
            raise CheckpointError(f"{path / INDEX} places {name} in {file}, and {where}. Download both again")
    if unlisted := [name for name in shard_of if name not in placed]:
        raise CheckpointError(
            f"{path / shard_of[unlisted[0]]} contains {unlisted[0]}, which {INDEX} does not list. Write it again"
        )


def _missing_file_error(path: Path, name: str, present: list[str], indexed: bool) -> str:
    if name == SINGLE and ADAPTER in present:
        return f"{path} holds an adapter, not {name}: convert it with lora_hf_to_dcp"
    if name == ADAPTER and (SINGLE in present or INDEX in present):
        return f"{path} holds a whole model, not {name}: convert it with hf_to_dcp"
    return missing_weights_error(path / name, indexed).removesuffix(".")


def to_json(shard: Header) -> dict[str, Any]:
    return {"file": shard.file, "header": shard.text}


def from_json(noted: Mapping[str, Any]) -> Header:
    """Read what `to_json` wrote. Raises CheckpointError for anything else."""
    text, file = noted.get("header"), noted.get("file")
    if not isinstance(text, str) or not isinstance(file, str) or Path(file).name != file:
        raise CheckpointError(f"{file!r} is not a shard of a conversion")
    try:
        return headers.parse(file, text)
    except headers.HeaderError as error:
        raise CheckpointError(f"{file}: {error}") from error


@contextmanager
def map_tensor(place: ByteRange, dtype: torch.dtype, shape: Iterable[int]) -> Iterator[Tensor]:
    """Map the tensor at a place into memory for the duration of the block; nothing else of the file is read.

    Raises CheckpointError if the place has a checksum and the bytes do not match it.
    """
    shape = tuple(shape)
    if place.size == 0:
        yield torch.empty(shape, dtype=dtype)
        return
    start = place.offset - place.offset % mmap.ALLOCATIONGRANULARITY
    try:
        with safe_read.open_file(place.file, CheckpointError) as opened:
            length = place.offset + place.size - start
            # Writable, because torch.frombuffer warns about read-only memory. Nothing writes to it, so the private
            # mapping copies no page.
            view = mmap.mmap(opened.fileno(), length, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE, offset=start)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{place.file} cannot be read: {error}") from error
    flat = torch.frombuffer(view, dtype=torch.uint8, count=place.size, offset=place.offset - start)
    if place.crc is not None and zlib.crc32(memoryview(view)[place.offset - start :]) != place.crc:
        raise CheckpointError(corruption_error(place))
    # Tensors in files of other writers may not be aligned to their dtype: these are copied.
    yield (flat if flat.data_ptr() % dtype.itemsize == 0 else flat.clone()).view(dtype).reshape(shape)
    del flat  # the mapping is released with its last tensor


def read_pieces(place: ByteRange) -> Iterator[memoryview]:
    """Yield the bytes at a place, a mebibyte at a time. Raises CheckpointError at the end for a wrong checksum."""
    buffer = bytearray(min(_PIECE, max(place.size, 1)))
    view, left, crc = memoryview(buffer), place.size, 0
    try:
        with safe_read.open_file(place.file, CheckpointError, buffering=0) as opened:
            opened.seek(place.offset)
            raw = cast(io.RawIOBase, opened)  # BinaryIO does not declare readinto
            while left:
                count = raw.readinto(view[: min(left, len(buffer))]) or 0
                if not count:
                    raise CheckpointError(f"{place.file} is truncated: {left} bytes are missing at its end")
                if place.crc is not None:
                    crc = zlib.crc32(view[:count], crc)
                yield view[:count]
                left -= count
    except FileNotFoundError as error:
        raise CheckpointError(f"{place.file} is missing") from error
    if place.crc is not None and crc != place.crc:
        raise CheckpointError(corruption_error(place))


def corruption_error(place: ByteRange) -> str:
    """Return the message for bytes that do not match their checksum."""
    return (
        f"{place.file} is corrupt between bytes {place.offset} and {place.offset + place.size}: the checksum differs "
        "from the one recorded when it was written"
    )


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """Return a tensor's bytes in row-major order."""
    flat = tensor.detach().contiguous().flatten()
    return flat.view(torch.uint8).numpy().data.cast("B") if flat.numel() else memoryview(b"")


def write_all(opened: int, data: bytes | memoryview) -> None:
    """Call `os.write`, which may write less than it gets, until everything is written."""
    view = memoryview(data)
    while view:
        view = view[os.write(opened, view) :]
