"""The files of a Hugging Face folder: config.json and safetensors, opened and found whole before anything is built.

Only data is read; pickled weights are refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError, safe_open
from transformers.utils import logging as transformers_logging

from octavo.models.errors import ModelError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


@contextmanager
def quiet() -> Iterator[None]:
    """No progress bars and only errors from transformers inside: what it would warn about is checked here."""
    bars, level = transformers_logging.is_progress_bar_enabled(), transformers_logging.get_verbosity()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()


def read_json(file: Path) -> dict:
    """A JSON object from a file; ModelError when it is missing, broken or no object."""
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{file} is missing: {file.parent} is {_what(file.parent)}") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ModelError(f"{file} is not JSON: {error}. Download or write the file again.") from error
    if not isinstance(raw, dict):
        raise ModelError(f"{file} holds a {type(raw).__name__}, not a JSON object. Download or write the file again.")
    return raw


def check_generation_config(folder: Path) -> None:
    """Raises ModelError for a generation_config.json that is no JSON object, or whose stop tokens are no numbers."""
    file = folder / "generation_config.json"
    if not file.is_file():
        return
    stop = read_json(file).get("eos_token_id")
    if stop is not None and not all(type(one) is int for one in (stop if isinstance(stop, list) else [stop])):
        raise ModelError(f"{file}: eos_token_id is {stop!r}; it is the number of a token, or a list of numbers.")


def _what(folder: Path) -> str:
    """What a folder that lacks a file of a checkpoint is instead, and what to name in its place."""
    if (folder / "adapter_config.json").is_file():
        return (
            "a PEFT adapter. Name its base here and the adapter beside it (`lora.adapter` trains on), or make one "
            "model of both: octavo merge."
        )
    if (folder / "config.yaml").is_file() and (folder / "checkpoints").is_dir():
        return "a run of octavo train. Make a Hugging Face folder of it: octavo export, or octavo merge for LoRA."
    return "not a complete Hugging Face folder."


def check_weight_files(folder: Path, indexed: bool | None = None) -> list[Path]:
    """The safetensors files of a folder, each opened and found whole (header only; no tensor is read).

    indexed: whether to go by the index; None: where there is no model.safetensors.

    Raises ModelError when there are none (saying so when there are only pickles), when a shard of the index is
    missing or truncated, or when a shard lacks a tensor that the index places in it.
    """
    index = folder / INDEX
    if indexed is None:
        indexed = index.exists() and not (folder / SINGLE).exists()  # transformers, too, prefers the single file
    if indexed:
        weight_map = read_json(index).get("weight_map")
        if (
            not isinstance(weight_map, dict)
            or not weight_map
            or not all(isinstance(f, str) for f in weight_map.values())
        ):
            raise ModelError(f"{index} has no weight_map of tensor names to files. Download or write the file again.")
        shards = sorted(set(weight_map.values()))
        if outside := [name for name in shards if Path(name).name != name]:
            raise ModelError(
                f"{index} names {outside[0]!r}, which is not a file of this folder. Write the index again."
            )
        files = [folder / name for name in shards]
    else:
        weight_map, files = {}, [folder / SINGLE]
    for file in files:
        if not file.exists():
            raise ModelError(_no_weights(folder, file, indexed))
        expected = {name for name, shard in weight_map.items() if folder / shard == file}
        try:
            with safe_open(file, framework="pt") as tensors:
                absent = sorted(expected - set(tensors.keys()))
        except (SafetensorError, OSError) as error:
            raise ModelError(
                f"{file} is damaged or truncated ({file.stat().st_size} bytes): {first_line(error)}. Download "
                "or write it again."
            ) from error
        if absent:
            raise ModelError(
                f"{file} lacks {absent[0]!r} ({len(absent)} such tensors), which {index.name} places in it. Download "
                "both again."
            )
    return files


def _no_weights(folder: Path, file: Path, indexed: bool) -> str:
    if indexed:
        return f"{file} is missing, though {INDEX} names it. Download the shard again."
    pickles = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt") for p in folder.glob(pattern))
    if pickles:
        return (
            f"{folder} holds only pickled weights ({', '.join(pickles[:3])}); a pickle can run code when it is read, "
            "so Octavo reads safetensors alone. Save the model with save_pretrained (safetensors is its format) first."
        )
    return f"{folder} holds no {SINGLE} and no {INDEX}: there are no weights to load."


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def summary(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 600 else text[:600] + " ..."
