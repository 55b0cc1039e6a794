"""Models from local Hugging Face folders: built on the meta device, with weights streamed from safetensors.

Only data is read: `config.json` and `*.safetensors`. Pickled weights, remote code and all quantized checkpoints except
FP8 (`octavo.models.folder.quantization`) are rejected. A tensor that the model needs but the folder does not have
(transformers would initialize it randomly and only warn), or the reverse, is an error that names it.

A folder in high precision is read by transformers. FP8 and encrypted weights are read by Octavo
(`octavo.models.weights.assembly`): transformers' quantizers never run, and only the part being read is decrypted.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from octavo import fp8
from octavo.base import accelerator
from octavo.models.errors import ModelError
from octavo.models.folder.folder import check_companions, check_weight_files, parts_of, wrap_errors
from octavo.models.folder.headers import DTYPES, HeaderError, read
from octavo.models.folder.quantization import Quantization, is_cache_scale, read_quantization
from octavo.models.structure.skeleton import auto_class, empty, read_config, skeleton
from octavo.models.weights.assembly import (
    assemble,
    check_dtype_kinds,
    check_loading_report,
    keep_single_features,
    map_tensors,
    note_unloaded,
    prepare,
    requested_kinds,
)
from octavo.models.weights.name_mapping import map_sources
from octavo.models.weights.shards import Shards, open_weights
from octavo.models.weights.ties import settle_config
from octavo.models.weights.unloaded import is_unloaded

#: dtypes on disk with values that BF16 cannot represent
WIDER_THAN_BF16 = {torch.float64, torch.float32, torch.float16}


def load(
    path: str | Path,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    attn_implementation: str | None = None,
    load_in_fp8: str | bool | Mapping[str, str | None] | None = None,
    keep_fp8: bool = True,
    log: Callable[[str], None] = lambda text: None,
    progress: Callable[[int, int], None] | None = None,
    scores: bool = False,
) -> PreTrainedModel:
    """Load a model from a local folder.

    dtype                of all parameters; buffers such as rotary tables stay in fp32
    device               of the returned model
    attn_implementation  "sdpa", "eager", ...; None lets transformers choose (sdpa if the family supports it)
    load_in_fp8          "rowwise", "blockwise" or "tensorwise" ("row", "block", "tensor" mean the same, True "row"):
                         linear layers and experts of the language model become frozen FP8 weights while they are read,
                         and no weight is in memory in two precisions. A mapping has a value for each of foundation,
                         image_encoder, image_projector. Embeddings, the output projection, routers, norms and the patch
                         embedding are not quantized
    keep_fp8             for a folder in FP8: True keeps the codes (frozen weights), False dequantizes them to `dtype`
    log                  called with notes for the user: which of two sets of weights is used, which tensors are not
    used progress             called with (bytes read, total bytes) after every parameter, if FP8 is involved scores
    build the model that scores texts (sequence classification, a reward model), not the one that
                         generates

    The model is in eval mode, as from_pretrained returns it. Parameters that its code excludes from training (positions
    of an audio tower) stay excluded, which from_pretrained does not ensure. Raises ModelError, naming the file or
    tensor, for tensors or files that are missing, truncated, unexpected, mis-shaped, unscaled, pickled or have an
    unsupported quantization.
    """
    folder, kinds = Path(path), requested_kinds(load_in_fp8)
    config = read_config(folder)
    quantization, shards = open_folder(folder, log)
    codes = quantization is not None or any(entry.is_codes for entry in shards.stored.values())
    cached = any(map(is_cache_scale, shards.stored))
    # Octavo loads everything that from_pretrained would load incorrectly or not at all.
    if kinds or codes or cached or shards.differs_from_stock or parts_of(folder) or shards.encrypted:
        on = torch.device(device)
        with shards:
            build = partial(skeleton, config, dtype, attn_implementation, scores)
            prepared = prepare(folder, build, shards, quantization, kinds, dtype, on, keep_fp8, log)
            model = assemble(folder, prepared, on, log, progress)
            settle_config(folder, model, log)
            return model
    if any(not entry.dtype.is_floating_point for entry in shards.stored.values()):
        # transformers casts integers to floating point: `map_tensors` refuses them for parameters.
        map_tensors(folder, skeleton(config, dtype, None, scores), shards, quantization, keep_fp8)
    model = _load_stock(folder, config, dtype, attn_implementation, scores, log)
    settle_config(folder, model, log)
    return accelerator.move(model, torch.device(device))


def open_folder(folder: Path, log: Callable[[str], None]) -> tuple[Quantization | None, Shards]:
    """Return the quantization of a model folder and its tensors; `log` is called with a note if it has two sets of
    weights. Raises ModelError for a folder that also contains an adapter or has missing files."""
    check_companions(folder)
    if os.path.lexists(folder / "adapter_config.json"):
        raise ModelError(
            f"{folder} contains a model and an adapter_config.json, so transformers would load a different "
            "model. Move the adapter to a separate folder (`lora.adapter`, or octavo merge)."
        )
    quantization = read_quantization(folder)
    shards, notes = open_weights(folder, quantization is not None)
    for note in notes:
        log(note)
    return quantization, shards


def check_no_integers(path: str | Path, model: PreTrainedModel) -> None:
    """Raise ModelError, naming the tensor, if weights of a folder are integers. Reads only the headers of its files;
    there may be none yet. `model` is the folder's model on the meta device."""
    folder, headers = Path(path), []
    for home in (folder, *(folder / part for part in parts_of(folder))):
        for file in sorted(home.glob("*.safetensors")):
            with suppress(HeaderError):  # damaged files are reported when weights are read
                headers.append(read(file))
    integers = [entry for entry in Shards(folder, headers).stored.values() if not entry.dtype.is_floating_point]
    check_dtype_kinds(folder, model, map_sources(model, integers).origins if integers else ())


def _load_stock(
    folder: Path,
    config: PreTrainedConfig,
    dtype: torch.dtype,
    attn_implementation: str | None,
    scores: bool,
    log: Callable[[str], None],
) -> PreTrainedModel:
    extra = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
    untrainable = _untrainable_names(config, scores)  # builds the model: a wrong config.json is named as such
    with wrap_errors(f"{folder} cannot be loaded as {config.model_type!r}"):
        model, info = auto_class(config, scores).from_pretrained(
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
    note_unloaded(folder, model, sorted(info["unexpected_keys"]), log)
    info["unexpected_keys"] = [name for name in info["unexpected_keys"] if not is_unloaded(model, name)]
    check_loading_report(folder, info)
    if bad := fp8.find_nonfinite(model.named_parameters()):
        raise ModelError(_nonfinite_error(folder, bad))
    for name in untrainable:  # sinusoid tables; from_pretrained makes all parameters trainable
        model.get_parameter(name).requires_grad_(False)
    keep_single_features(model)
    return model


_UNTRAINABLE: dict[tuple[type, bool, str], list[str]] = {}


def _untrainable_names(config: PreTrainedConfig, scores: bool) -> list[str]:
    """Return the parameters that a model's own code excludes from training; cached for the next load in this
    process."""
    key = type(config), scores, config.to_json_string(use_diff=False)
    if key not in _UNTRAINABLE:
        model = skeleton(config, torch.float32, None, scores)
        _UNTRAINABLE[key] = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    return _UNTRAINABLE[key]


def _nonfinite_error(folder: Path, bad: list[str]) -> str:
    """Return the error message for parameters with NaN or infinity; it names the tensor on disk if the values are in
    the file."""
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                if fp8.find_nonfinite([(name, tensors.get_tensor(name))]):
                    return (
                        f"{file}: {name} holds NaN or infinity ({len(bad)} weights of the model do). Download or "
                        "write it again; `octavo verify` lists all of them."
                    )
    return f"{folder}: {bad[0]} has values outside the range of the requested dtype. Load in fp32."


def load_split(
    path: str | Path,
    device: str | torch.device = "cpu",
    attn_implementation: str | None = None,
    log: Callable[[str], None] = lambda text: None,
) -> tuple[PreTrainedModel, dict[str, torch.Tensor]]:
    """Load a model in BF16 and, by parameter name, the lower halves (int16, of the same shape) of its fp32 weights:
    both together are the fp32 values exactly.

    For an optimizer with weights of 16 + 16 bits (`fp8.AdamW`, master bf16+16; `set_low` takes them). A parameter
    whose lower halves are all zero has none: the dict is empty for a BF16 checkpoint, which is never in memory in fp32.
    For any other checkpoint the host holds the fp32 model, which is released parameter by parameter. BF16 values are
    rounded to nearest with ties away from zero (`octavo.fp8.arithmetic.master`); `load(path, torch.bfloat16)` rounds
    ties to even. For a folder in FP8 the fp32 weights are code * scale. Buffers have the dtypes of a BF16 model. Raises
    ModelError as `load` does.
    """
    folder = Path(path)
    read_config(folder)  # raises for a folder that is not a model
    dtypes = {DTYPES[entry.dtype] for header in check_weight_files(folder) for entry in header.entries}
    if read_quantization(folder) is None and not dtypes & WIDER_THAN_BF16:
        return load(folder, torch.bfloat16, device, attn_implementation, log=log), {}
    model = load(folder, torch.float32, "cpu", attn_implementation, keep_fp8=False, log=log)
    return split_model(model, device)


def split_model(model: PreTrainedModel, device: str | torch.device) -> tuple[PreTrainedModel, dict[str, torch.Tensor]]:
    """Convert an fp32 model on the host to the result of `load_split`; the model is released parameter by parameter."""
    config = copy.deepcopy(model.config)
    lower_halves: dict[str, torch.Tensor] = {}
    device = torch.device(device)
    at_once = accelerator.accepts_parameter_data(device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dtype == torch.float32:
                high, low = fp8.arithmetic.split_master(parameter.detach())
                parameter.data = high.to(device) if at_once else high
                if low.any():
                    lower_halves[name] = low.to(device)
        stock_buffers = dict(empty(config, torch.bfloat16).named_buffers())
        for name, buffer in model.named_buffers():
            if name in stock_buffers and stock_buffers[name].dtype != buffer.dtype:
                buffer.data = buffer.data.to(stock_buffers[name].dtype)
    for part in (model.config, *(getattr(model.config, name) for name in model.config.sub_configs)):
        part.dtype = torch.bfloat16
    return accelerator.move(model, device), lower_halves


def parameter_count(model: nn.Module) -> int:
    """Return the number of parameters; tied ones count once."""
    return sum(p.numel() for p in model.parameters())
