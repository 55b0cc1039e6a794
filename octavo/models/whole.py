"""Model folders that appear whole or not at all, and what stands in them beside the weights.

A folder is written aside (`.NAME.part`, beside it, on the same disk), every file and directory is forced to the disk,
and only then it is renamed into place. Whatever stops the writing, a kill or a full disk included, leaves an earlier
folder of that name as it was; what a kill left aside is removed by the next one who writes there. Two who write to one
place at once would mix their files: the second is refused. A link is followed, and what it points to is replaced.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from octavo.models.errors import ModelError
from octavo.models.folder import read_json

#: what belongs to a model besides config.json and weights: tokenizer, processor, chat template, generation settings
COMPANIONS = (
    "generation_config.json",
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "processor_config.json",
)
_QUANTIZED = ("quantization_config", "compression_config")


@contextmanager
def whole(target: Path) -> Iterator[Path]:
    """A new directory to write into, which becomes `target` when the block ends, and vanishes when it raises.

    A directory at `target` is replaced: whether it may be is for the caller to ask first. The block forces its files to
    the disk (`sync`). Raises ModelError where the disk, the quota or the file size limit is reached, and where another
    process is writing the same directory.
    """
    target = target.resolve() if target.is_symlink() else target
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = target.parent / f".{target.name}.part"
    with _alone(scratch, target):
        _clear(scratch, target)
        try:
            made = scratch / "new"
            with _disk_space(target):
                made.mkdir()
                yield made
            if target.exists():
                target.rename(scratch / "old")
            made.rename(target)
            sync_directory(target.parent)
        finally:
            _clear(scratch, target)
            shutil.rmtree(scratch, ignore_errors=True)


@contextmanager
def _alone(scratch: Path, target: Path) -> Iterator[None]:
    """Hold the scratch directory, made if need be. The lock is the kernel's: it ends with the process."""
    while True:
        scratch.mkdir(exist_ok=True)
        held = os.open(scratch, os.O_RDONLY)
        try:
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ModelError(
                    f"{target} is being written by another process; wait for it, or name another directory."
                ) from error
            except OSError:
                pass  # a file system without locks: go on as one who is alone
            # whoever held it before may have removed the directory since: then it is no longer the one of this name
            if scratch.is_dir() and os.path.samestat(os.fstat(held), scratch.stat()):
                yield
                return
        finally:
            os.close(held)


def _clear(scratch: Path, target: Path) -> None:
    """Remove what was written aside; an earlier folder that was moved there returns where no new one took its place."""
    if (scratch / "old").is_dir() and not target.exists():
        (scratch / "old").rename(target)
    for aside in ("old", "new"):
        shutil.rmtree(scratch / aside, ignore_errors=True)


@contextmanager
def _disk_space(target: Path) -> Iterator[None]:
    """A disk without room as a ModelError; safetensors has the machine's word in its text alone."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        words = str(error)
        numbers = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        if getattr(error, "errno", None) not in numbers and not any(f"(os error {n})" in words for n in numbers):
            raise
        raise ModelError(
            f"the model could not be written to {target}: {words}. Nothing was left half-written; free some space (or "
            "your quota, or the limit of ulimit -f), or export to another disk."
        ) from error


def sync(directory: Path) -> None:
    """Force a directory's files, and its list of names, to the disk."""
    for file in directory.iterdir():
        with open(file, "rb") as opened:
            os.fsync(opened.fileno())
    sync_directory(directory)


def sync_directory(directory: Path) -> None:
    """Force a directory's list of names to the disk."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def copy_companions(source: Path, made: Path) -> None:
    """Copy tokenizer, processor, chat template and generation settings from one model folder into another."""
    for pattern in COMPANIONS:
        for file in source.glob(pattern):
            if file.is_file():
                shutil.copy(file, made / file.name)


def write_config(source: Path, made: Path, dtype: torch.dtype, quantization: Mapping[str, Any] | None = None) -> None:
    """The source's config.json with the dtype of what was written, and what it says of quantization replaced."""
    config = read_json(source / "config.json")
    name = str(dtype).removeprefix("torch.")

    def rewrite(node: Any) -> Any:
        if not isinstance(node, dict):
            return node
        kept = {key: value for key, value in node.items() if key not in _QUANTIZED}
        return {key: name if key in ("dtype", "torch_dtype") else rewrite(value) for key, value in kept.items()}

    config = rewrite(config)
    if "torch_dtype" not in config:
        config["dtype"] = name
    if quantization is not None:
        config["quantization_config"] = dict(quantization)
    (made / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
