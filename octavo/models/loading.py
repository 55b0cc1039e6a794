"""Models from local Hugging Face folders: built on the meta device, weights streamed in from safetensors.

Only data is read: `config.json` and `*.safetensors`. Pickled weights, remote code and quantised checkpoints are
refused. Every tensor is accounted for: one that the model wants and the folder lacks (transformers would initialise
it at random and only warn), or the other way round, is an error that names it.
"""

from __future__ import annotations

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

from octavo.models.errors import ModelError
from octavo.models.families import VISION_FAMILIES, is_vision_config
from octavo.models.folder import check_weight_files, first_line, quiet, read_json, summary


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
        raise ModelError(f"{folder}/config.json cannot be used: {first_line(error)}") from error
    except Exception as error:  # transformers' strict dataclasses raise their own kinds; the cause is kept
        raise ModelError(f"{folder}/config.json has a field that does not fit: {first_line(error)}") from error


def empty(path_or_config: str | Path | PreTrainedConfig, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The model of a folder or configuration on the meta device: shapes without memory; reads no weights."""
    config = path_or_config if isinstance(path_or_config, PreTrainedConfig) else read_config(path_or_config)
    auto = auto_class(config)
    try:
        with torch.device("meta"):
            model = auto.from_config(config, dtype=dtype)
    except (ValueError, TypeError, RuntimeError, ImportError) as error:
        raise ModelError(f"no {config.model_type!r} model can be built from its config: {summary(error)}") from error
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
        raise ModelError(f"{folder} cannot be loaded as {config.model_type!r}: {summary(error)}") from error
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


def parameter_count(model: nn.Module) -> int:
    """Parameters, tied ones once."""
    return sum(p.numel() for p in model.parameters())
