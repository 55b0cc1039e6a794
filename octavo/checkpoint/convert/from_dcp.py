"""Plans how a DCP checkpoint becomes a Hugging Face folder, and writes its shards."""

from __future__ import annotations

import os
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from octavo import fp8
from octavo.base.wording import count_noun
from octavo.checkpoint.convert import dcp, values
from octavo.checkpoint.convert import folder as folders
from octavo.checkpoint.convert.folder import ByteRange, Folder, map_tensor, tensor_bytes
from octavo.checkpoint.convert.judge_settings import judge_settings
from octavo.checkpoint.convert.manifest import CARRIED, MANIFEST
from octavo.checkpoint.errors import CheckpointError
from octavo.models.folder.folder import SINGLE
from octavo.models.folder.headers import DTYPES, Entry, Header, compose
from octavo.models.structure.skeleton import empty
from octavo.models.weights.unloaded import describe_names, find_unloaded

Log = Callable[[str], None]


@dataclass(frozen=True)
class FolderPlan:
    """How a DCP checkpoint is written as a folder.

    shards  the headers of the files to write
    opens   opens the tensor of an entry
    place   position of the bytes of an entry that are copied unchanged; None if the tensor is written from its values
    folder  the folder whose other files are copied
    sums    checksums of these files, or None if unknown
    """

    shards: tuple[Header, ...]
    opens: values.OpenTensor
    place: Callable[[Entry], ByteRange | None]
    folder: Folder
    sums: Mapping[str, Any] | None = None


def no_byte_range(entry: Entry) -> ByteRange | None:
    """Return None: the tensors are converted or assembled, so no bytes are copied unchanged."""
    return None


def plan_converted(directory: Path, manifest: Mapping[str, Any]) -> FolderPlan:
    """Plan the reverse of a conversion from its manifest."""
    written = {
        one.name: one for part in manifest["tensors"] for one in map(dcp.WrittenTensor.from_json, part) if one.name
    }
    shards = tuple(folders.from_json(shard) for shard in manifest["shards"])
    for shard in shards:
        for entry in shard.entries:
            tensor = written.get(entry.name)
            if tensor is None or (tensor.dtype, tensor.shape) != (entry.dtype, entry.shape):
                raise CheckpointError(f"{directory.parent / MANIFEST} has no position for {entry.name}")
    if outside := [name for name in manifest["carried"] if Path(name).name != name]:
        raise CheckpointError(f"{directory.parent / MANIFEST} names {outside[0]!r}, which is outside the conversion")
    carried = directory.parent / CARRIED
    return FolderPlan(
        shards,
        lambda entry: map_tensor(written[entry.name].place(directory), DTYPES[entry.dtype], entry.shape),
        lambda entry: written[entry.name].place(directory),
        Folder(carried, shards, tuple(sorted(manifest["carried"])), ()),
        manifest["carried"],
    )


def plan_foreign(directory: Path, like: str | Path | None, log: Log) -> FolderPlan:
    """Plan to write a checkpoint of another program in the form of the folder `like`."""
    if like is None:
        raise CheckpointError(
            f"{directory} was not converted by Octavo, so its configuration, tokenizer and shards are not known. Pass "
            "the Hugging Face folder that it was trained from: --like FOLDER"
        )
    like_folder = Path(like)
    adapter = (like_folder / folders.ADAPTER).is_file() and not (like_folder / SINGLE).is_file()
    folder, reader = folders.read_folder(like_folder, adapter), dcp.Reader(directory)
    wanted = {entry.name: entry for shard in folder.shards for entry in shard.entries}
    is_judged = judge_settings(like_folder, log)
    keys, copied = _match_keys(wanted, set(reader.keys()), directory, like_folder if is_judged else None)
    shards = []
    for shard in folder.shards:
        tensors = []
        for entry in shard.entries:
            if entry.name in copied:
                tensors.append((entry.name, entry.dtype, entry.shape))
                continue
            dtype, shape = reader.describe(keys[entry.name])
            if shape not in (entry.shape, dcp.stored_shape(entry.name, entry.shape)):
                raise CheckpointError(
                    f"{directory}: {keys[entry.name]} has shape {list(shape)}, and {like_folder} has "
                    f"{list(entry.shape)}: it was trained from another model"
                )
            tensors.append((entry.name, dtype, entry.shape))
        # With unchanged dtypes the header is copied verbatim, so that an untrained shard keeps its bytes.
        same = all(dtype == entry.dtype for (_, dtype, _), entry in zip(tensors, shard.entries, strict=True))
        shards.append(shard if same else compose(shard.file, tensors))
    if unplaced := sorted(set(reader.keys()) - set(keys.values())):
        log(f"skipped, because {like_folder} has no place for them: {', '.join(unplaced[:3])} ({len(unplaced)} in all)")
    if copied:
        verb = "was" if len(copied) == 1 else "were"
        log(
            f"{count_noun(len(copied), 'tensor')} that the model does not load "
            f"({describe_names(copied)}) {verb} copied unchanged from {like_folder}"
        )
    log("not converted by Octavo: there are no checksums to compare")
    copied_opener = values.folder_opener(folder)

    @contextmanager
    def opens(entry: Entry) -> Iterator[torch.Tensor]:
        if entry.name in copied:
            with copied_opener(wanted[entry.name]) as tensor:
                yield tensor
            return
        with reader.tensor(keys[entry.name]) as tensor:
            if fp8.find_nonfinite([(entry.name, tensor)]):
                raise CheckpointError(
                    f"{directory}: {keys[entry.name]} holds NaN or infinity, so the model would return NaN: "
                    "nothing is written. Convert an earlier checkpoint"
                )
            yield tensor.reshape(entry.shape)

    return FolderPlan(tuple(shards), opens, no_byte_range, folder)


def _match_keys(
    wanted: Iterable[str], keys: set[str], directory: Path, like: Path | None
) -> tuple[dict[str, str], list[str]]:
    """Return (name -> key, by the naming scheme that matches most names; the names without a key that the model of the
    folder `like` does not load, and that no training can have changed). Raises CheckpointError for other names without
    a key."""
    schemes: tuple[Callable[[str], str], ...] = (
        lambda name: f"model.{name}",
        lambda name: name,
        lambda name: f"base_model.model.model.{name}",
        dcp.adapter_key,
    )
    wanted = list(wanted)
    scheme = max(schemes, key=lambda scheme: sum(scheme(name) in keys for name in wanted))
    key_of = {name: scheme(name) for name in wanted}
    missing = [name for name, key in key_of.items() if key not in keys]
    copied: list[str] = []
    if missing and like is not None:
        unloaded = {entry.name for entry in find_unloaded(like, empty(like))}
        copied = [name for name in missing if name in unloaded]
    if missing := [name for name in missing if name not in copied]:
        raise CheckpointError(
            f"{directory} has no values for {len(missing)} of {len(wanted)} tensors, first {key_of[missing[0]]} (for "
            f"{missing[0]}); its keys look like {min(keys, default='none')}: it was trained from another model"
        )
    return key_of, copied


def write_shard(
    file: Path,
    shard: Header,
    opens: values.OpenTensor,
    place: Callable[[Entry], ByteRange | None],
    stop: threading.Event,
    advance: Callable[[int], None],
) -> list[int]:
    """Write one safetensors file, forced to the disk. Returns the CRC-32 of each tensor."""
    sums = []
    with open(file, "wb", buffering=0) as out:
        folders.write_all(out.fileno(), shard.head)
        for entry in shard.entries:
            if stop.is_set():
                break
            where = place(entry)
            # Bytes with a known CRC-32 are copied without building a tensor.
            if where is not None and where.crc is not None:
                for piece in folders.read_pieces(where):
                    folders.write_all(out.fileno(), piece)
                sums.append(where.crc)
            else:
                with opens(entry) as tensor:
                    raw = tensor_bytes(tensor)
                    folders.write_all(out.fileno(), raw)
                    sums.append(zlib.crc32(raw))
            advance(entry.size)
        os.fsync(out.fileno())
    return sums


def is_intact(file: Path, shard: Header, sums: Any) -> bool:
    """Return whether a finished file is unchanged."""
    head = shard.head
    try:
        with open(file, "rb") as opened:
            same = opened.read(len(head)) == head and file.stat().st_size == len(head) + shard.size
        for entry, crc in zip(shard.entries, sums, strict=True):
            for _ in folders.read_pieces(ByteRange(file, len(head) + entry.begin, entry.size, crc)):
                pass
    except (OSError, CheckpointError, ValueError):
        return False
    return same
