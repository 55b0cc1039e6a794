"""Writes and reads weights in the layout of torch.distributed.checkpoint (DCP), tensor by tensor.

    release/__3_0.distcp   concatenated zip streams of torch.save, one per tensor, as DCP's own writer stores them
    release/.metadata      a pickle, by DCP's design: the file and the byte range of each tensor

`.metadata` is read only through `dcp_safe`. The checksum recorded for a tensor is the CRC-32 of its bytes, which
torch.save computes for the zip anyway.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import threading
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from octavo.base import safe_read
from octavo.checkpoint.convert.folder import ByteRange, tensor_bytes
from octavo.checkpoint.convert.values import OpenTensor
from octavo.checkpoint.errors import CheckpointError
from octavo.checkpoint.run_state.dcp_safe import SafeReader, read_item, tensor_entry
from octavo.models.folder.headers import DTYPE_NAMES, DTYPES, Entry, Header

RELEASE, LATEST, METADATA = "release", "latest_checkpointed_iteration.txt", ".metadata"
MODEL = "model"  # the weights are in state_dict["model"], and DCP joins the path with dots
VERSION = ("checkpoint_version", 3.0)  # an entry that Megatron's loaders require


@dataclass(frozen=True)
class WrittenTensor:
    """One tensor of a `*.distcp` file.

    name    name in the Hugging Face folder; "" for the second name of a tied weight, which the folder does not have
    key     key in the state dict of the model that DCP loads into
    shape   shape in the folder; `stored` is the shape in DCP (experts as one matrix)
    offset  start of the tensor's zip stream in the file, `length` bytes long; the tensor's bytes begin at `data` and
            have the CRC-32 `crc`
    """

    name: str
    key: str
    dtype: str
    shape: tuple[int, ...]
    stored: tuple[int, ...]
    file: str
    offset: int
    length: int
    data: int
    crc: int

    @property
    def size(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize

    def place(self, directory: Path) -> ByteRange:
        return ByteRange(directory / self.file, self.data, self.size, self.crc)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, noted: Mapping[str, Any]) -> WrittenTensor:
        """Create an object from the output of `to_json`. Raises CheckpointError for any other value."""
        try:
            tensor = cls(**{**noted, "shape": tuple(noted["shape"]), "stored": tuple(noted["stored"])})
        except (TypeError, KeyError) as error:
            raise CheckpointError(f"conversion.json describes a tensor as {str(noted)[:80]}: {error}") from error
        if os.path.basename(tensor.file) != tensor.file or tensor.dtype not in DTYPES:
            raise CheckpointError(f"conversion.json places {tensor.name} in {tensor.file!r} as {tensor.dtype!r}")
        return tensor


def stored_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape in DCP: experts [E, in, out] are stored as one matrix [E * in, out], which FSDP2 shards by
    rows."""
    fused = len(shape) == 3 and any(part in name for part in ("gate_up_proj", "down_proj"))
    return (shape[0] * shape[1], shape[2]) if fused else shape


def adapter_key(name: str) -> str:
    """Return the key of a tensor of a PEFT adapter file in the state dict of the PEFT model."""
    key = name.replace("base_model.", "base_model.model.", 1)
    return f"{key.removesuffix('.weight')}.default.weight" if key.endswith(".weight") else key


def write_file(
    file: Path,
    shard: Header,
    keys: Mapping[str, tuple[tuple[str, str], ...]],
    opens: OpenTensor,
    stop: threading.Event,
    advance: Callable[[int], None],
) -> list[WrittenTensor]:
    """Write the tensors of a shard as one `*.distcp` file, forced to the disk. Returns what was written.

    keys  name of an entry -> (name, key) of each tensor to write from it (two for a tied weight)
    """
    out: list[WrittenTensor] = []
    with open(file, "wb") as stream:
        for entry in shard.entries:
            if stop.is_set():
                break
            for name, key in keys[entry.name]:
                with opens(entry) as tensor:
                    shape = stored_shape(entry.name, entry.shape)
                    out.append(_write_tensor(stream, file, name, key, entry, tensor.reshape(shape)))
            advance(entry.size)
        stream.flush()
        os.fsync(stream.fileno())
    return out


def _write_tensor(
    stream: io.BufferedWriter, file: Path, name: str, key: str, entry: Entry, tensor: Tensor
) -> WrittenTensor:
    offset = stream.tell()
    torch.save(tensor, stream)
    stream.flush()
    length = stream.tell() - offset
    data, crc = _find_record(file, tensor)
    return WrittenTensor(name, key, entry.dtype, entry.shape, tuple(tensor.shape), file.name, offset, length, data, crc)


def _find_record(file: Path, tensor: Tensor) -> tuple[int, int]:
    """Return (first byte, CRC-32) of the tensor's bytes in the last zip stream of the file."""
    with zipfile.ZipFile(file) as archive, open(file, "rb") as opened:
        record = next(r for r in archive.infolist() if r.filename.endswith("/data/0"))
        opened.seek(record.header_offset + 26)  # a local zip header has the lengths of name and extra field at byte 26
        name, extra = (int.from_bytes(opened.read(2), "little") for _ in range(2))
    crc = record.CRC
    if tensor.numel() and not torch.serialization.get_crc32_options():  # disabled in this process: the zip has zeros
        crc = zlib.crc32(tensor_bytes(tensor))
    return record.header_offset + 30 + name + extra, crc


def write_metadata(directory: Path, written: Iterable[WrittenTensor]) -> None:
    """Write `.metadata` as DCP's FileSystemWriter pickles it, and a file with the version for Megatron's loaders."""
    entries: dict[str, Any] = {}
    places: dict[MetadataIndex, Any] = {}
    paths: dict[str, tuple[str, ...]] = {}
    for tensor in written:
        fqn, size = f"{MODEL}.{tensor.key}", torch.Size(tensor.stored)
        start = torch.Size([0] * len(size))
        if fqn in entries:
            raise CheckpointError(
                f"two tensors would have the key {tensor.key} in DCP; this folder cannot be converted"
            )
        chunk = ChunkStorageMetadata(offsets=start, sizes=size)
        entries[fqn] = TensorStorageMetadata(TensorProperties(dtype=DTYPES[tensor.dtype]), size, [chunk])
        places[MetadataIndex(fqn, start, 0)] = filesystem._StorageInfo(tensor.file, tensor.offset, tensor.length)
        paths[fqn] = (MODEL, tensor.key)
    name, value = VERSION
    stream = io.BytesIO()
    torch.save(value, stream)
    # DCP reads a value that is not a tensor with torch.load, so the version is a torch.save stream in a data file.
    (directory / "__version.distcp").write_bytes(stream.getvalue())
    entries[name], paths[name] = BytesStorageMetadata(), (name,)
    places[MetadataIndex(name)] = filesystem._StorageInfo("__version.distcp", 0, len(stream.getvalue()))
    metadata = Metadata(entries, planner_data=paths, storage_data=places)
    if hasattr(filesystem, "CURRENT_DCP_VERSION") and hasattr(metadata, "version"):
        metadata.version = filesystem.CURRENT_DCP_VERSION
    with open(directory / METADATA, "wb") as file:
        pickle.dump(metadata, file)


def find_checkpoint(source: Path) -> Path:
    """Return the folder with `.metadata`: `source`, or the folder that its `latest_checkpointed_iteration.txt` names.

    Raises CheckpointError for a folder that holds no DCP checkpoint, and for the checkpoint of a run of Octavo.
    """
    if not source.is_dir():
        raise CheckpointError(f"{source} is not a folder; choose a folder with a DCP checkpoint")
    directory = source
    if not (source / METADATA).is_file() and (source / LATEST).is_file():
        word = safe_read.read_text(source / LATEST, CheckpointError, limit=1000).strip()
        directory = source / (f"iter_{int(word):07d}" if word.isdecimal() else os.path.basename(word))
    if not (directory / METADATA).is_file():
        raise CheckpointError(
            f"{directory} has no {METADATA}: it is not a DCP checkpoint. Use the folder that contains it (release/, "
            "iter_0000100/), or the one with latest_checkpointed_iteration.txt"
        )
    if (directory / "state.json").is_file():
        raise CheckpointError(
            f"{directory} is the checkpoint of an Octavo run, with its optimizer; write its model with octavo export "
            "RUN"
        )
    return directory


class Reader:
    """Reads the weights of any DCP checkpoint as full tensors, however they are sharded.

    Entries that are not tensors are skipped unread. Keys are without the path to the model (`model.`) if there is one.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._metadata = metadata = SafeReader(directory, skip_byte_entries=True).read_metadata()
        entries = metadata.state_dict_metadata
        nested = any(key.startswith((f"{MODEL}.{MODEL}.", f"{MODEL}.base_model.")) for key in entries)
        at = self._prefix = f"{MODEL}." if nested else ""
        self._keys = [key.removeprefix(at) for key in entries if key.startswith(at)]
        self._pieces: dict[str, list[tuple[MetadataIndex, Any]]] = {}
        for index, info in metadata.storage_data.items():
            self._pieces.setdefault(index.fqn, []).append((index, info))

    def keys(self) -> Iterator[str]:
        return iter(self._keys)

    def describe(self, key: str) -> tuple[str, tuple[int, ...]]:
        """Return (safetensors' name of the dtype, shape). Raises CheckpointError for a dtype that has no such name."""
        entry = tensor_entry(self._metadata, self._prefix + key)
        if entry.properties.dtype not in DTYPE_NAMES:
            raise CheckpointError(f"{self.directory}: {key} is {entry.properties.dtype}, which safetensors cannot hold")
        return DTYPE_NAMES[entry.properties.dtype], tuple(entry.size)

    @contextmanager
    def tensor(self, key: str) -> Iterator[Tensor]:
        """Assemble the full tensor from its shards. Raises CheckpointError for missing or misplaced shards."""
        entry = tensor_entry(self._metadata, self._prefix + key)
        whole = torch.empty(entry.size, dtype=entry.properties.dtype)
        filled = 0
        for index, info in self._pieces.get(self._prefix + key, []):
            part = read_item(self.directory / info.relative_path, info, key)
            offsets = tuple(index.offset) if index.offset is not None else (0,) * part.dim()
            ends = [start + n for start, n in zip(offsets, part.shape, strict=False)]
            same = part.dim() == whole.dim() and part.dtype == whole.dtype
            if not same or any(end > n for end, n in zip(ends, whole.shape, strict=True)):
                raise CheckpointError(
                    f"{self.directory / info.relative_path}: {key} holds {list(part.shape)} of {part.dtype} at "
                    f"{list(offsets)} where {list(whole.shape)} of {whole.dtype} was announced"
                )
            whole[tuple(slice(start, end) for start, end in zip(offsets, ends, strict=True))].copy_(part)
            filled += part.numel()
        if filled != whole.numel():
            raise CheckpointError(
                f"{self.directory}: of the {whole.numel()} values of {key}, {filled} are present; a file of another "
                "rank is missing, or was not listed"
            )
        yield whole


def is_intact(directory: Path, written: Iterable[WrittenTensor]) -> bool:
    """Return whether a finished file, read as DCP reads it, still matches what was recorded."""
    for entry in written:
        info = filesystem._StorageInfo(entry.file, entry.offset, entry.length)
        try:
            tensor = read_item(directory / entry.file, info, entry.key)
        except CheckpointError:
            return False
        matches = tuple(tensor.shape) == entry.stored and tensor.dtype is DTYPES[entry.dtype]
        if not matches or zlib.crc32(tensor_bytes(tensor)) != entry.crc:
            return False
    return True
