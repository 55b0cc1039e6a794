"""Converts Hugging Face folders to DCP checkpoints and back bit for bit, for training with MindSpeed-MM's workflow.

    hf_to_dcp         folder -> DST/release/ (DCP), DST/latest_checkpointed_iteration.txt
    lora_hf_to_dcp    PEFT adapter folder -> the same
    dcp_to_hf         back, or from a checkpoint trained there (then `like` names the folder that it came from)

Keys are those that MindSpeed-MM's FSDP2 loaders expect, under `model` in the state dict:

    a model                  NAME -> model.NAME
    the base of LoRA         NAME -> base_model.model.model.NAME
    an adapter               base_model.X.weight -> base_model.model.X.default.weight

DST also holds what DCP cannot store, so that the folder can be restored exactly: `hf/` with the other files of the
folder, and `conversion.json` with each shard's header verbatim and, for each tensor, the position and the CRC-32 of its
bytes. The CRC-32 is compared when converting back.

Tensors are converted one by one (each worker holds one), shards in parallel. When a conversion is killed, finished
shards are kept, and checked when it is resumed. The result appears complete or not at all
(`convert/resumable_work.py`).
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
from octavo.checkpoint.convert.from_dcp import is_intact, no_byte_range, plan_converted, plan_foreign, write_shard
from octavo.checkpoint.convert.judge_settings import judge_settings
from octavo.checkpoint.convert.manifest import CARRIED, read_manifest, write_manifest
from octavo.checkpoint.convert.resumable_work import SUFFIX, Advance, begin_work, write_parts
from octavo.checkpoint.errors import CheckpointError
from octavo.checkpoint.run_state.files import fingerprint
from octavo.models.folder.folder import INDEX, refuse_outside, require_one_folder, write_config
from octavo.models.folder.headers import Header, make_index
from octavo.models.folder.quantization import Quantization, read_quantization

Log = Callable[[str], None]
Progress = Callable[[int, int], None]
KeyMap = dict[str, tuple[tuple[str, str], ...]]

CONFIG = "config.json"


@dataclass(frozen=True)
class ConversionResult:
    """The outcome of a conversion.

    directory  the new folder
    tensors    tensors written, with `bytes` in all
    files      files of weights
    kept       how many of these files an earlier attempt had finished
    """

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
    log: Log = lambda text: None,
    progress: Progress = lambda done, total: None,
) -> ConversionResult:
    """Write a Hugging Face folder as a DCP checkpoint.

    lora_base    use the keys of the frozen base of a PEFT model
    to_bf16      write FP8 weights dequantized, and every other floating-point tensor, in BF16
    tie_weights  also write lm_head.weight if the folder has it only as the embeddings
    workers      number of files written at a time; up to 4 by default
    progress     called with bytes done and total bytes

    Raises CheckpointError and ModelError, naming the file, for files that cannot be read, a destination that exists or
    is inside the source, and a full disk. Finished files are kept, and the same call continues from them.
    """
    source, destination = _check_paths(source, destination)
    judge_settings(source, log)
    folder = folders.read_folder(source)
    quantization = read_quantization(source) if (source / CONFIG).is_file() else None
    prefix = "base_model.model.model." if lora_base else "model."
    options = {"lora_base": lora_base, "to_bf16": to_bf16, "tie_weights": tie_weights}
    return _to_dcp(
        "hf_to_dcp", folder, quantization, lambda name: prefix + name, destination, options, workers, log, progress
    )


def lora_hf_to_dcp(
    source: str | Path,
    destination: str | Path,
    *,
    to_bf16: bool = False,
    workers: int | None = None,
    log: Log = lambda text: None,
    progress: Progress = lambda done, total: None,
) -> ConversionResult:
    """Write a PEFT adapter folder as a DCP checkpoint. See `hf_to_dcp`."""
    source, destination = _check_paths(source, destination)
    folder = folders.read_folder(source, adapter=True)
    options = {"to_bf16": to_bf16}
    return _to_dcp("lora_hf_to_dcp", folder, None, dcp.adapter_key, destination, options, workers, log, progress)


def dcp_to_hf(
    source: str | Path,
    destination: str | Path,
    *,
    to_bf16: bool = False,
    like: str | Path | None = None,
    workers: int | None = None,
    log: Log = lambda text: None,
    progress: Progress = lambda done, total: None,
) -> ConversionResult:
    """Write a DCP checkpoint as a Hugging Face folder (or a PEFT adapter folder).

    like  the folder that the checkpoint was trained from, which provides configuration, tokenizer and the division
          into shards. Required for a checkpoint that Octavo did not convert

    Raises as `hf_to_dcp` does; also for a checksum that differs from the recorded one, and for missing tensors, which
    the message names.
    """
    source, destination = _check_paths(source, destination)
    directory = dcp.find_checkpoint(source)
    manifest = read_manifest(directory)
    if manifest is not None and like is not None:
        raise CheckpointError(
            f"{directory} was converted by Octavo and records its source folder; leave out --like {like}"
        )
    plan = plan_converted(directory, manifest) if manifest is not None else plan_foreign(directory, like, log)
    shards, opens, places, folder = plan.shards, plan.opens, plan.place, plan.folder
    if to_bf16:
        quantization = read_quantization(folder.path) if (folder.path / CONFIG).is_file() else None
        shards, opens = values.convert_to_bf16(shards, opens, quantization, directory)
        places = no_byte_range
    task = {"command": "dcp_to_hf", "source": _source_identity(directory), "to_bf16": to_bf16}
    task["like"] = None if like is None else str(Path(like).resolve())
    with begin_work(destination, task) as work:
        # A part is one output file; its note is the list of the CRC-32 of its tensors.

        def write(part: int, stop: threading.Event, advance: Advance) -> Any:
            return write_shard(work.result_dir / shards[part].file, shards[part], opens, places, stop, advance)

        def whole(part: int, note: Any) -> bool:
            return is_intact(work.result_dir / shards[part].file, shards[part], note)

        resumed = write_parts(work, [shard.size for shard in shards], write, whole, workers, log, progress)
        _copy_companions(folder, work.result_dir, plan.sums)
        if to_bf16:
            _write_bf16_config(folder, shards, work.result_dir)
        work.publish()
    return _conversion_result(destination, shards, resumed)


def was_converted_by_octavo(source: str | Path) -> bool:
    """Return whether Octavo converted a DCP checkpoint, so that `dcp_to_hf` needs no `like`.

    Raises CheckpointError if there is no DCP checkpoint.
    """
    return read_manifest(dcp.find_checkpoint(Path(source))) is not None


# To DCP --------------------------------------------------------------------------------------------------------------


def _to_dcp(
    command: str,
    folder: Folder,
    quantization: Quantization | None,
    key: Callable[[str], str],
    destination: Path,
    options: Mapping[str, Any],
    workers: int | None,
    log: Log,
    progress: Progress,
) -> ConversionResult:
    """Write a folder as a DCP checkpoint. `key` maps a tensor's name in the folder to its key under `model` in DCP."""
    shards, opens = folder.shards, values.folder_opener(folder)
    if options["to_bf16"]:
        shards, opens = values.convert_to_bf16(shards, opens, quantization, folder.path)
    elif quantization is not None:
        values.match_codes_and_scales(
            shards, quantization, folder.path
        )  # bytes are only copied, but codes must have their scales
    keys: KeyMap = {entry.name: ((entry.name, key(entry.name)),) for shard in shards for entry in shard.entries}
    if options.get("tie_weights"):
        keys |= _add_tied_head(keys, key, folder.path)
    if folder.left:
        log(f"not copied: {', '.join(folder.left[:4])}{' ...' if len(folder.left) > 4 else ''}")
    with begin_work(destination, {"command": command, "source": _source_identity(folder.path), **options}) as work:
        release = work.result_dir / dcp.RELEASE
        release.mkdir(exist_ok=True)

        def write(part: int, stop: threading.Event, advance: Advance) -> Any:
            written = dcp.write_file(release / f"__{part}_0.distcp", shards[part], keys, opens, stop, advance)
            return [tensor.to_json() for tensor in written]

        def whole(part: int, note: Any) -> bool:
            return dcp.is_intact(release, [dcp.WrittenTensor.from_json(entry) for entry in note])

        resumed = write_parts(work, [shard.size for shard in shards], write, whole, workers, log, progress)
        written = [
            [dcp.WrittenTensor.from_json(entry) for entry in work.read_note(part)] for part in range(len(shards))
        ]
        dcp.write_metadata(release, (tensor for part in written for tensor in part))
        (work.result_dir / dcp.LATEST).write_text(dcp.RELEASE, encoding="utf-8")
        (work.result_dir / CARRIED).mkdir(exist_ok=True)
        _copy_companions(folder, work.result_dir / CARRIED)
        if options["to_bf16"]:
            _write_bf16_config(folder, shards, work.result_dir / CARRIED)
        write_manifest(work.result_dir, command, options, shards, written)
        work.publish()
    return _conversion_result(destination, shards, resumed)


def _add_tied_head(keys: KeyMap, key: Callable[[str], str], source: Path) -> KeyMap:
    """Return the embeddings with a second key, the one of the output projection. Raises CheckpointError if the folder
    has an output projection, or not exactly one embedding."""
    embeddings = [name for name in keys if name.endswith("embed_tokens.weight")]
    if "lm_head.weight" in keys or len(embeddings) != 1:
        found = "a separate lm_head.weight" if "lm_head.weight" in keys else f"{len(embeddings)} embed_tokens.weight"
        raise CheckpointError(f"tie_weights was requested, but {source} has {found}: no weights are tied. Leave it out")
    name = embeddings[0]
    return {name: (*keys[name], ("", key("lm_head.weight")))}


# Shared --------------------------------------------------------------------------------------------------------------


def _check_paths(source: str | Path, destination: str | Path) -> tuple[Path, Path]:
    """Return both as paths. Raises CheckpointError for a source of several folders and an impossible destination."""
    source, destination = Path(source), Path(destination)
    require_one_folder(source, "octavo convert")
    read_from, written_to = source.resolve(), destination.resolve()
    if written_to == read_from or read_from in written_to.parents:
        raise CheckpointError(f"{destination} is inside {source}, which must not change; choose another directory")
    if destination.name in ("", ".", "..") or destination.name.endswith(SUFFIX):
        raise CheckpointError(f"{destination} is not a valid name for a new directory; choose another")
    return source, destination


def _source_identity(folder: Path) -> dict[str, Any]:
    """Return the identity of a source and its state: its path, and the name, size and times of each file.

    ctime and inode reveal a file that was replaced with its old mtime restored (`cp -p`, `rsync -t`).
    """
    stats = {p.name: p.stat() for p in sorted(folder.iterdir()) if p.is_file()}
    files = {name: [s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino] for name, s in stats.items()}
    return {"path": str(folder.resolve()), "files": files}


def _copy_companions(folder: Folder, target: Path, sums: Mapping[str, Any] | None = None) -> None:
    """Copy the files of a folder other than its shards, and compare them with the checksums `sums` if given."""
    for name in folder.carried:
        if not (folder.path / name).is_file():
            raise CheckpointError(f"{folder.path / name} is missing")
        refuse_outside(folder.path / name, folder.path)
        shutil.copyfile(folder.path / name, target / name)
        if sums is not None and fingerprint(target / name) != sums[name]:
            raise CheckpointError(
                f"{folder.path / name} is corrupt: its checksum differs from the one recorded when it was written"
            )


def _write_bf16_config(folder: Folder, shards: tuple[Header, ...], target: Path) -> None:
    """Write config.json and the index for a folder whose values are all BF16."""
    if CONFIG in folder.carried:
        write_config(folder.path, target, torch.bfloat16)
    if INDEX in folder.carried:
        (target / INDEX).write_text(make_index(shards), encoding="utf-8")


def _conversion_result(destination: Path, shards: tuple[Header, ...], resumed: int) -> ConversionResult:
    tensors = sum(len(shard.entries) for shard in shards)
    return ConversionResult(destination, tensors, sum(shard.size for shard in shards), len(shards), resumed)
