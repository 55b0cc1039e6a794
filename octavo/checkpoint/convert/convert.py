"""Between Hugging Face folders and DCP checkpoints, for those who train by MindSpeed-MM's workflow; there and back bit
for bit.

    hf_to_dcp         folder -> DST/release/ (DCP), DST/latest_checkpointed_iteration.txt
    lora_hf_to_dcp    PEFT adapter folder -> the same
    dcp_to_hf         back, or from what was trained there (then `like` names the folder that it came from)

Keys are those that MindSpeed-MM's FSDP2 loaders want, below `model` of the state dict:

    a model                  NAME -> model.NAME
    the base of LoRA         NAME -> base_model.model.model.NAME
    an adapter               base_model.X.weight -> base_model.model.X.default.weight

DST also holds what DCP has no place for, so that the folder comes back as it was: `hf/`, the files beside the shards,
and `conversion.json`, each shard's header word for word, and for each tensor where its bytes lie and their CRC-32,
which is compared on the way back.

Tensors pass one by one (each worker holds one), shards in parallel. What is finished is kept when a conversion is
killed, and checked when it goes on; the result appears whole or not at all (`convert/resumable_work.py`).
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from octavo.checkpoint.convert import dcp, values
from octavo.checkpoint.convert import folder as folders
from octavo.checkpoint.convert.folder import Folder
from octavo.checkpoint.convert.from_dcp import foreign, holds, nowhere, own, write_shard
from octavo.checkpoint.convert.manifest import CARRIED, read_manifest, write_manifest
from octavo.checkpoint.convert.resumable_work import SUFFIX, Advance, all_parts, begin
from octavo.checkpoint.errors import CheckpointError
from octavo.checkpoint.run_state.files import fingerprint
from octavo.models.folder.folder import INDEX, one_folder, refuse_outside, write_config
from octavo.models.folder.headers import Header, index_of
from octavo.models.folder.quantization import Quantization, read_quantization

Say = Callable[[str], None]
Progress = Callable[[int, int], None]
Keys = dict[str, tuple[tuple[str, str], ...]]

CONFIG = "config.json"


@dataclass(frozen=True)
class Converted:
    """What came of it: the directory, tensors and bytes written, files of weights, and how many of these an earlier
    attempt had finished."""

    directory: Path
    tensors: int
    bytes: int
    files: int
    kept: int


def hf_to_dcp(
    source: str | Path,
    destination: str | Path,
    *,
    lora_base: bool = False,
    to_bf16: bool = False,
    tie_weights: bool = False,
    workers: int | None = None,
    say: Say = lambda text: None,
    progress: Progress = lambda done, total: None,
) -> Converted:
    """Write a Hugging Face folder as a DCP checkpoint.

    lora_base    keys of the frozen base of a PEFT model
    to_bf16      FP8 codes times their scales, and every other floating-point tensor, in BF16
    tie_weights  write lm_head.weight too, where the folder has it only as the embeddings'
    workers      files written at a time; None: up to 4
    progress     called with bytes done and bytes in all

    Raises CheckpointError and ModelError, naming the file, for what cannot be read; the destination exists or lies in
    the source; the disk is full. What was finished until then is kept for the same call.
    """
    source, destination = _ends(source, destination)
    folder = folders.read_folder(source)
    quantization = read_quantization(source) if (source / CONFIG).is_file() else None
    prefix = "base_model.model.model." if lora_base else "model."
    options = {"lora_base": lora_base, "to_bf16": to_bf16, "tie_weights": tie_weights}
    return _to_dcp(
        "hf_to_dcp", folder, quantization, lambda name: prefix + name, destination, options, workers, say, progress
    )


def lora_hf_to_dcp(
    source: str | Path,
    destination: str | Path,
    *,
    to_bf16: bool = False,
    workers: int | None = None,
    say: Say = lambda text: None,
    progress: Progress = lambda done, total: None,
) -> Converted:
    """Write a PEFT adapter folder as a DCP checkpoint. See `hf_to_dcp`."""
    source, destination = _ends(source, destination)
    folder = folders.read_folder(source, adapter=True)
    options = {"to_bf16": to_bf16}
    return _to_dcp("lora_hf_to_dcp", folder, None, dcp.adapter_key, destination, options, workers, say, progress)


def dcp_to_hf(
    source: str | Path,
    destination: str | Path,
    *,
    to_bf16: bool = False,
    like: str | Path | None = None,
    workers: int | None = None,
    say: Say = lambda text: None,
    progress: Progress = lambda done, total: None,
) -> Converted:
    """Write a DCP checkpoint as the Hugging Face folder (or PEFT adapter folder) that it is.

    like  the folder that the checkpoint was trained from: configuration, tokenizer and the division into shards come
          from there. Needed for a checkpoint that no conversion of Octavo made; such a one is checked bit by bit

    Raises as `hf_to_dcp` does; also where a checksum is not the one noted, or tensors are missing, naming them.
    """
    source, destination = _ends(source, destination)
    directory = dcp.find(source)
    manifest = read_manifest(directory)
    if manifest is not None and like is not None:
        raise CheckpointError(
            f"{directory} was converted by Octavo and knows the folder that it came from; leave out --like {like}"
        )
    back = own(directory, manifest) if manifest is not None else foreign(directory, like, say)
    shards, opens, places, beside = back.shards, back.opens, back.place, back.folder
    if to_bf16:
        quantization = read_quantization(beside.path) if (beside.path / CONFIG).is_file() else None
        shards, opens = values.in_bf16(shards, opens, quantization, directory)
        places = nowhere
    task = {"command": "dcp_to_hf", "source": _identity(directory), "to_bf16": to_bf16}
    task["like"] = None if like is None else str(Path(like).resolve())
    with begin(destination, task) as work:

        def write(part: int, stop: threading.Event, advance: Advance) -> Any:
            return write_shard(work.made / shards[part].file, shards[part], opens, places, stop, advance)

        def whole(part: int, note: Any) -> bool:
            return holds(work.made / shards[part].file, shards[part], note)

        kept = all_parts(work, [shard.size for shard in shards], write, whole, workers, say, progress)
        _carry(beside, work.made, back.sums)
        if to_bf16:
            _in_bf16(beside, shards, work.made)
        work.publish()
    return _result(destination, shards, kept)


def knows_its_folder(source: str | Path) -> bool:
    """Whether a DCP checkpoint was converted by Octavo, and so knows the folder that it came from.

    Raises CheckpointError where there is no such checkpoint."""
    return read_manifest(dcp.find(Path(source))) is not None


# One way -------------------------------------------------------------------------------------------------------------


def _to_dcp(
    command: str,
    folder: Folder,
    quantization: Quantization | None,
    key: Callable[[str], str],
    destination: Path,
    options: Mapping[str, Any],
    workers: int | None,
    say: Say,
    progress: Progress,
) -> Converted:
    """`key`: what a tensor of the folder is called in DCP, below `model`."""
    shards, opens = folder.shards, values.of_folder(folder)
    if options["to_bf16"]:
        shards, opens = values.in_bf16(shards, opens, quantization, folder.path)
    elif quantization is not None:
        values.scales_of(shards, quantization, folder.path)  # bytes are copied; codes and scales must still be pairs
    keys: Keys = {entry.name: ((entry.name, key(entry.name)),) for shard in shards for entry in shard.entries}
    if options.get("tie_weights"):
        keys |= _tied(keys, key, folder.path)
    if folder.left:
        say(f"left behind: {', '.join(folder.left[:4])}{' ...' if len(folder.left) > 4 else ''}")
    with begin(destination, {"command": command, "source": _identity(folder.path), **options}) as work:
        release = work.made / dcp.RELEASE
        release.mkdir(exist_ok=True)

        def write(part: int, stop: threading.Event, advance: Advance) -> Any:
            written = dcp.write_file(release / f"__{part}_0.distcp", shards[part], keys, opens, stop, advance)
            return [one.to_json() for one in written]

        def whole(part: int, note: Any) -> bool:
            return dcp.intact(release, [dcp.Written.from_json(one) for one in note])

        kept = all_parts(work, [shard.size for shard in shards], write, whole, workers, say, progress)
        written = [[dcp.Written.from_json(one) for one in work.finished(part)] for part in range(len(shards))]
        dcp.write_metadata(release, (one for part in written for one in part))
        (work.made / dcp.LATEST).write_text(dcp.RELEASE, encoding="utf-8")
        (work.made / CARRIED).mkdir(exist_ok=True)
        _carry(folder, work.made / CARRIED)
        if options["to_bf16"]:
            _in_bf16(folder, shards, work.made / CARRIED)
        write_manifest(work.made, command, options, shards, written)
        work.publish()
    return _result(destination, shards, kept)


def _tied(keys: Keys, key: Callable[[str], str], source: Path) -> Keys:
    """The embeddings under a second key, that of the output projection."""
    embeddings = [name for name in keys if name.endswith("embed_tokens.weight")]
    if "lm_head.weight" in keys or len(embeddings) != 1:
        found = "lm_head.weight of its own" if "lm_head.weight" in keys else f"{len(embeddings)} embed_tokens.weight"
        raise CheckpointError(f"tie_weights was asked, and {source} has {found}: nothing is tied. Leave it out")
    name = embeddings[0]
    return {name: (*keys[name], ("", key("lm_head.weight")))}


# Shared --------------------------------------------------------------------------------------------------------------


def _ends(source: str | Path, destination: str | Path) -> tuple[Path, Path]:
    """Both as paths, the destination made fit. Raises CheckpointError for a destination that cannot be."""
    source, destination = Path(source), Path(destination)
    one_folder(source, "octavo convert")
    there, here = source.resolve(), destination.resolve()
    if here == there or there in here.parents:
        raise CheckpointError(f"{destination} lies in {source}, which is only read; name a directory elsewhere")
    if destination.name in ("", ".", "..") or destination.name.endswith(SUFFIX):
        raise CheckpointError(f"{destination} is no name for a new directory; choose another")
    return source, destination


def _identity(folder: Path) -> dict[str, Any]:
    """What tells a source from another: its place, and of each file name, size and what a copy over it changes, also
    one that sets the former time (`cp -p`, `rsync -t`): ctime or inode."""
    stats = {p.name: p.stat() for p in sorted(folder.iterdir()) if p.is_file()}
    files = {name: [s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino] for name, s in stats.items()}
    return {"path": str(folder.resolve()), "files": files}


def _carry(folder: Folder, target: Path, sums: Mapping[str, Any] | None = None) -> None:
    """Copy what belongs to a folder beside its shards; compared to its checksums where there are some."""
    for name in folder.carried:
        if not (folder.path / name).is_file():
            raise CheckpointError(f"{folder.path / name} is missing")
        refuse_outside(folder.path / name, folder.path)
        shutil.copyfile(folder.path / name, target / name)
        if sums is not None and fingerprint(target / name) != sums[name]:
            raise CheckpointError(
                f"{folder.path / name} is corrupt: its checksum is not the one noted when it was written"
            )


def _in_bf16(folder: Folder, shards: tuple[Header, ...], target: Path) -> None:
    """config.json and the index as they are with every value in BF16."""
    if CONFIG in folder.carried:
        write_config(folder.path, target, torch.bfloat16)
    if INDEX in folder.carried:
        (target / INDEX).write_text(index_of(shards), encoding="utf-8")


def _result(destination: Path, shards: tuple[Header, ...], kept: int) -> Converted:
    tensors = sum(len(shard.entries) for shard in shards)
    return Converted(destination, tensors, sum(shard.size for shard in shards), len(shards), kept)
