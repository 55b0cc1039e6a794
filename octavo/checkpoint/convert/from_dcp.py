"""DCP checkpoints as the Hugging Face folders that they are: what lies where, and the shards written from it."""

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
from octavo.checkpoint.convert import dcp, values
from octavo.checkpoint.convert import folder as folders
from octavo.checkpoint.convert.folder import Folder, Place, bytes_of, mapped
from octavo.checkpoint.convert.manifest import CARRIED, MANIFEST
from octavo.checkpoint.errors import CheckpointError
from octavo.models.folder.folder import SINGLE
from octavo.models.folder.headers import DTYPES, Entry, Header, compose

Say = Callable[[str], None]


@dataclass(frozen=True)
class Back:
    """A DCP checkpoint as a folder to be: its shards, their tensors, the places of bytes that are copied as they lie
    (None: none such), the folder whose other files are taken along, and their checksums."""

    shards: tuple[Header, ...]
    opens: values.Opens
    place: Callable[[Entry], Place | None]
    folder: Folder
    sums: Mapping[str, Any] | None = None


def nowhere(entry: Entry) -> Place | None:
    """For tensors that are made, or put together: nothing is copied as it lies."""
    return None


def own(directory: Path, manifest: Mapping[str, Any]) -> Back:
    """What a conversion wrote, laid out as the folder that it was."""
    written = {one.name: one for part in manifest["tensors"] for one in map(dcp.Written.from_json, part) if one.name}
    shards = tuple(folders.from_json(shard) for shard in manifest["shards"])
    for shard in shards:
        for entry in shard.entries:
            one = written.get(entry.name)
            if one is None or (one.dtype, one.shape) != (entry.dtype, entry.shape):
                raise CheckpointError(f"{directory.parent / MANIFEST} does not say where {entry.name} lies")
    if outside := [name for name in manifest["carried"] if Path(name).name != name]:
        raise CheckpointError(f"{directory.parent / MANIFEST} names {outside[0]!r}, which is outside the conversion")
    carried = directory.parent / CARRIED
    return Back(
        shards,
        lambda entry: mapped(written[entry.name].place(directory), DTYPES[entry.dtype], entry.shape),
        lambda entry: written[entry.name].place(directory),
        Folder(carried, shards, tuple(sorted(manifest["carried"])), ()),
        manifest["carried"],
    )


def foreign(directory: Path, like: str | Path | None, say: Say) -> Back:
    """What somebody else's program wrote, laid out as the folder `like`."""
    if like is None:
        raise CheckpointError(
            f"{directory} was not converted by Octavo, so its configuration, tokenizer and shards are not known. Name "
            "the Hugging Face folder that it was trained from: --like FOLDER"
        )
    there = Path(like)
    adapter = (there / folders.ADAPTER).is_file() and not (there / SINGLE).is_file()
    folder, reader = folders.read_folder(there, adapter), dcp.Reader(directory)
    wanted = {entry.name: entry for shard in folder.shards for entry in shard.entries}
    keys = _match(wanted, set(reader.keys()), directory)
    shards = []
    for shard in folder.shards:
        tensors = []
        for entry in shard.entries:
            dtype, shape = reader.describe(keys[entry.name])
            if shape not in (entry.shape, dcp.stored_shape(entry.name, entry.shape)):
                raise CheckpointError(
                    f"{directory}: {keys[entry.name]} has shape {list(shape)}, and {there} has {list(entry.shape)} "
                    "there: it was trained from another model"
                )
            tensors.append((entry.name, dtype, entry.shape))
        same = all(dtype == entry.dtype for (_, dtype, _), entry in zip(tensors, shard.entries, strict=True))
        shards.append(shard if same else compose(shard.file, tensors))
    if spare := sorted(set(reader.keys()) - set(keys.values())):
        say(f"passed over, because {there} has no place for them: {', '.join(spare[:3])} ({len(spare)} in all)")
    say("not converted by Octavo: there are no checksums to compare")

    @contextmanager
    def opens(entry: Entry) -> Iterator[torch.Tensor]:
        with reader.tensor(keys[entry.name]) as tensor:
            if fp8.find_nonfinite([(entry.name, tensor)]):
                raise CheckpointError(
                    f"{directory}: {keys[entry.name]} holds NaN or infinity, and a model that does answers with NaN: "
                    "nothing is written of it. Convert an earlier checkpoint"
                )
            yield tensor.reshape(entry.shape)

    return Back(tuple(shards), opens, nowhere, folder)


def _match(wanted: Iterable[str], keys: set[str], directory: Path) -> dict[str, str]:
    """name -> key, by the one way of naming that finds the most. Raises CheckpointError for names without a key."""
    ways: tuple[Callable[[str], str], ...] = (
        lambda name: f"model.{name}",
        lambda name: name,
        lambda name: f"base_model.model.model.{name}",
        dcp.adapter_key,
    )
    wanted = list(wanted)
    way = max(ways, key=lambda way: sum(way(name) in keys for name in wanted))
    found = {name: way(name) for name in wanted}
    if lacking := [name for name, key in found.items() if key not in keys]:
        raise CheckpointError(
            f"{directory} lacks {len(lacking)} of {len(wanted)} tensors, first {found[lacking[0]]} (for {lacking[0]}); "
            f"it holds such keys as {min(keys, default='none')}: it was trained from another model"
        )
    return found


def write_shard(
    file: Path,
    shard: Header,
    opens: values.Opens,
    place: Callable[[Entry], Place | None],
    stop: threading.Event,
    advance: Callable[[int], None],
) -> list[int]:
    """Write one safetensors file, forced to the disk; the CRC-32 of each tensor."""
    sums = []
    with open(file, "wb", buffering=0) as out:
        folders.write_all(out.fileno(), shard.head)
        for entry in shard.entries:
            if stop.is_set():
                break
            where = place(entry)
            if where is not None and where.crc is not None:
                for piece in folders.pieces(where):
                    folders.write_all(out.fileno(), piece)
                sums.append(where.crc)
            else:
                with opens(entry) as tensor:
                    raw = bytes_of(tensor)
                    folders.write_all(out.fileno(), raw)
                    sums.append(zlib.crc32(raw))
            advance(entry.size)
        os.fsync(out.fileno())
    return sums


def holds(file: Path, shard: Header, sums: Any) -> bool:
    """Whether a finished file is still what was written."""
    head = shard.head
    try:
        with open(file, "rb") as opened:
            same = opened.read(len(head)) == head and file.stat().st_size == len(head) + shard.size
        for entry, crc in zip(shard.entries, sums, strict=True):
            for _ in folders.pieces(Place(file, len(head) + entry.begin, entry.size, crc)):
                pass
    except (OSError, CheckpointError, ValueError):
        return False
    return same
