"""Models from local Hugging Face folders: built on the meta device, weights streamed in from safetensors.

Only data is read: `config.json` and `*.safetensors`. Pickled weights, remote code and quantised checkpoints are
refused. Every tensor is accounted for: one that the model wants and the folder lacks (transformers would initialise
it at random and only warn), or the other way round, is an error that names it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils import logging as transformers_logging

from octavo.models.errors import ModelError
from octavo.models.families import VISION_FAMILIES, is_vision_config

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


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


def read_config(path: str | Path) -> PreTrainedConfig:
    """The configuration of a local model folder.

    Raises ModelError when the folder or `config.json` is missing, when the JSON is broken, when the model needs code
    from the folder (`auto_map`), or when its `model_type` is unknown to the installed transformers.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise ModelError(
            f"{folder} is not a folder: a model is loaded from a local Hugging Face folder (config.json, safetensors, "
            "tokenizer). Download it first, or make a small one with `octavo tiny`."
        )
    raw = read_json(folder / "config.json")
    if "auto_map" in raw:
        raise ModelError(
            f"{folder}/config.json asks to run Python code from the folder (auto_map); Octavo runs none. Use the "
            "checkpoint in its transformers form (InternVL: the -HF folders)."
        )
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "unknown")
        raise ModelError(
            f"{folder}/config.json holds quantised weights (quant_method {method!r}); training starts from BF16 or "
            "FP32 weights. Use the unquantised checkpoint."
        )
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (ValueError, KeyError, OSError, TypeError, AttributeError) as error:
        raise ModelError(f"{folder}/config.json cannot be used: {_first_line(error)}") from error
    except Exception as error:  # transformers' strict dataclasses raise their own kinds; the cause is kept
        raise ModelError(f"{folder}/config.json has a field that does not fit: {_first_line(error)}") from error


def read_json(file: Path) -> dict:
    """A JSON object from a file; ModelError when it is missing, broken or no object."""
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{file} is missing: {file.parent} is not a complete Hugging Face folder.") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ModelError(f"{file} is not JSON: {error}. Download or write the file again.") from error
    if not isinstance(raw, dict):
        raise ModelError(f"{file} holds a {type(raw).__name__}, not a JSON object. Download or write the file again.")
    return raw


def empty(path_or_config: str | Path | PreTrainedConfig, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The model of a folder or configuration on the meta device: shapes without memory; reads no weights."""
    config = path_or_config if isinstance(path_or_config, PreTrainedConfig) else read_config(path_or_config)
    auto = auto_class(config)
    try:
        with torch.device("meta"):
            model = auto.from_config(config, dtype=dtype)
    except (ValueError, TypeError, RuntimeError, ImportError) as error:
        raise ModelError(f"no {config.model_type!r} model can be built from its config: {_summary(error)}") from error
    model.tie_weights()
    return model


def load(
    path: str | Path,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    attn_implementation: str | None = None,
) -> PreTrainedModel:
    """Load a model from a local folder.

    dtype                of all parameters; buffers such as rotary tables keep their fp32
    device               where it ends up
    attn_implementation  "sdpa", "eager", ...; None lets transformers choose (sdpa where the family has it)

    The model is in eval mode, as from_pretrained gives it. Raises ModelError for anything missing, truncated,
    unexpected, mis-shaped, pickled or quantised, naming the file or the tensor.
    """
    folder = Path(path)
    config = read_config(folder)
    check_weight_files(folder)
    extra = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
    try:
        with quiet():
            model, info = auto_class(config).from_pretrained(
                folder,
                config=config,
                dtype=dtype,
                local_files_only=True,
                use_safetensors=True,
                trust_remote_code=False,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # reported below, by name and shape; never accepted
                **extra,
            )
    except (RuntimeError, ValueError, OSError, SafetensorError, ImportError) as error:
        raise ModelError(f"{folder} cannot be loaded as {config.model_type!r}: {_summary(error)}") from error
    _refuse_incomplete(folder, info)
    return model.to(device)


def load_split(
    path: str | Path, device: str | torch.device = "cpu", attn_implementation: str | None = None
) -> tuple[PreTrainedModel, dict[str, torch.Tensor]]:
    """A model in BF16 and, by parameter name, the lower halves (int16, of its shape) that make it the fp32 one exactly.

    For an optimizer that keeps weights as 16 + 16 bits (`fp8.AdamW`, master bf16+16; `fp8.set_low` takes them).
    A parameter whose lower halves are all zero has none: the dict of a BF16 checkpoint is empty, and such a checkpoint
    is never held in fp32. Of any other, the host holds the fp32 model, given up parameter by parameter. The BF16
    values are nearest with ties away from zero (`octavo.fp8.optim.master`); `load(path, torch.bfloat16)` takes ties to
    even. Buffers are as that leaves them. Raises ModelError as `load` does.
    """
    folder = Path(path)
    config = read_config(folder)
    if not _finer_than_bf16(check_weight_files(folder)):
        return load(folder, torch.bfloat16, device, attn_implementation), {}
    from octavo import fp8  # the arithmetic of two halves is the optimizer's

    model = load(folder, torch.float32, "cpu", attn_implementation)
    lows: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dtype == torch.float32:
                high, low = fp8.optim.master.split(parameter.detach())
                parameter.data = high.to(device)
                if low.any():
                    lows[name] = low.to(device)
        stock = dict(empty(config, torch.bfloat16).named_buffers())
        for name, buffer in model.named_buffers():
            if name in stock and stock[name].dtype != buffer.dtype:
                buffer.data = buffer.data.to(stock[name].dtype)
    for part in (model.config, *(getattr(model.config, name) for name in model.config.sub_configs)):
        part.dtype = torch.bfloat16
    return model.to(device), lows


def _finer_than_bf16(files: list[Path]) -> bool:
    """Whether a tensor of these files may hold values that BF16 does not; read from the headers alone."""
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            if any(tensors.get_slice(name).get_dtype() in ("F64", "F32", "F16") for name in tensors.keys()):  # noqa: SIM118
                return True
    return False


def check_weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder, each opened and found whole (header only; no tensor is read).

    Raises ModelError when there are none (saying so when there are only pickles), when a shard of the index is
    missing or truncated, or when a shard lacks a tensor that the index places in it.
    """
    index = folder / _INDEX
    indexed = index.exists() and not (folder / _SINGLE).exists()  # transformers, too, prefers the single file
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
        weight_map, files = {}, [folder / _SINGLE]
    for file in files:
        if not file.exists():
            raise ModelError(_no_weights(folder, file, indexed))
        expected = {name for name, shard in weight_map.items() if folder / shard == file}
        try:
            with safe_open(file, framework="pt") as tensors:
                absent = sorted(expected - set(tensors.keys()))
        except (SafetensorError, OSError) as error:
            raise ModelError(
                f"{file} is damaged or truncated ({file.stat().st_size} bytes): {_first_line(error)}. Download "
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
        return f"{file} is missing, though {_INDEX} names it. Download the shard again."
    pickles = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt") for p in folder.glob(pattern))
    if pickles:
        return (
            f"{folder} holds only pickled weights ({', '.join(pickles[:3])}); a pickle can run code when it is read, "
            "so Octavo reads safetensors alone. Save the model with save_pretrained (safetensors is its format) first."
        )
    return f"{folder} holds no {_SINGLE} and no {_INDEX}: there are no weights to load."


def _refuse_incomplete(folder: Path, info: dict) -> None:
    wrong = []
    for key, what in (
        ("missing_keys", "missing in the folder (transformers would fill it with random numbers)"),
        ("unexpected_keys", "in the folder but unknown to the model"),
        ("mismatched_keys", "of another shape than the model's"),
        ("error_msgs", "reported while loading"),
    ):
        found = sorted(_named(item) for item in info.get(key, ()))
        if found:
            wrong.append(f"{len(found)} {what}: {', '.join(found[:3])}{' ...' if len(found) > 3 else ''}")
    if wrong:
        raise ModelError(
            f"{folder}: tensors do not match the model that config.json describes. {'; '.join(wrong)}. Check that "
            "config.json and the weights belong together, or download them again."
        )


def _named(item: object) -> str:
    """A loading report's entry: a name, or (name, shape on disk, shape of the model)."""
    if isinstance(item, tuple) and len(item) == 3:
        name, disk, model = item
        return f"{name} {tuple(disk)} instead of {tuple(model)}"
    return str(item)


def auto_class(config: PreTrainedConfig) -> type:
    if is_vision_config(config):
        return AutoModelForImageTextToText
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return AutoModelForCausalLM
    raise ModelError(
        f"model_type {config.model_type!r} is neither a described vision-language family "
        f"({', '.join(VISION_FAMILIES)}) nor a text-only decoder that transformers knows."
    )


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _summary(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 600 else text[:600] + " ..."


def parameter_count(model: nn.Module) -> int:
    """Parameters, tied ones once."""
    return sum(p.numel() for p in model.parameters())
