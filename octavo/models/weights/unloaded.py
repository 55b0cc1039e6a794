"""The tensors of a folder that its model class does not load, and that folders written from it keep unchanged.

Published folders hold more than the model: layers for multi-token prediction (`mtp.*`, or `model.layers.61.*` after the
60 that config.json counts), towers that the class drops, the head of a reward model. Servers load some of them, so a
trained, exported or merged folder without them would be less than its source. Any other tensor that the model has no
place for is an error (`assembly.check_loading_report`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from torch import nn
from transformers import PreTrainedModel

from octavo.models.folder.quantization import read_quantization
from octavo.models.weights.name_mapping import map_sources
from octavo.models.weights.shards import StoredTensor, open_weights

#: keys of config.json that count the layers for multi-token prediction, in transformers 5.23 and vLLM 0.32
PREDICTION_KEYS = (
    "mtp_num_hidden_layers",
    "mtp_num_layers",
    "n_mtp_layers",
    "num_mtp_layers",
    "num_mtp_modules",
    "num_nextn_layers",
    "num_nextn_predict_layers",
)
#: heads that score texts: transformers' sequence classification, and the value heads of TRL
_HEADS = re.compile(r"(score|v_head|value_head|reward_head)\.")
_PREDICTION = re.compile(r"(.*\.)?(mtp|mtp_layers|mtp_block|nextn)\.")
_LAYER = re.compile(r"((?:model\.)?(?:language_model\.)?(?:model\.)?layers)\.(\d+)\.")
#: suffix of a scale -> the suffix of its weight
_SCALE_SUFFIXES = {"_scale_inv": "", "_scale": "", ".input_scale": ".weight", ".output_scale": ".weight"}


def loaders_ignore(model: nn.Module, name: str) -> bool:
    """Return whether transformers' class leaves out a tensor of this name without a warning.

    Classes name the layers for multi-token prediction by the number of one published model (`model.layers.61`). Here
    the number follows from config.json, so that another size of the same family has the same rule.
    """
    patterns = tuple(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())
    if any(re.search(pattern, name) for pattern in patterns):
        return True
    numbered = any(re.search(r"layers\\?\.\d+", pattern) for pattern in patterns)
    return numbered and _predicts(model, name)


def is_unloaded(model: nn.Module, name: str) -> bool:
    """Return whether a tensor that the model has no place for is one that Octavo copies unchanged."""
    if loaders_ignore(model, name) or _HEADS.match(name):
        return True
    return _predicted_layers(model) > 0 and is_prediction(model, name)


def is_prediction(model: nn.Module, name: str) -> bool:
    """Return whether a tensor is part of a layer for multi-token prediction, by its name."""
    return _predicts(model, name) or _PREDICTION.match(name) is not None


def _predicts(model: nn.Module, name: str) -> bool:
    """Return whether a tensor is part of a layer after the model's last one that config.json counts as a layer for
    multi-token prediction."""
    if (match := _LAYER.match(name)) is None:
        return False
    layers = getattr(_text_config(model), "num_hidden_layers", None)
    return type(layers) is int and layers <= int(match[2]) < layers + _predicted_layers(model)


def _predicted_layers(model: nn.Module) -> int:
    counts = [getattr(_text_config(model), key, 0) for key in PREDICTION_KEYS]
    return max((count for count in counts if type(count) is int), default=0)


def _text_config(model: nn.Module) -> object:
    config = getattr(model, "config", None)
    get = getattr(config, "get_text_config", None)
    return config if get is None else get()


def find_unloaded(folder: str | Path, model: PreTrainedModel) -> list[StoredTensor]:
    """Return the tensors of a folder that its model does not load, in the order of their names; codes with their
    scales. Reads only headers.

    model  the folder's model, which may be on the meta device

    Raises ModelError for files that are missing or damaged.
    """
    folder = Path(folder)
    with open_weights(folder, read_quantization(folder) is not None)[0] as shards:
        stored = dict(shards.stored)
    weights = [entry for entry in stored.values() if _scaled_weight(entry.name, stored) is None]
    unknown = {entry.name for entry in map_sources(model, weights).unknown if is_unloaded(model, entry.name)}
    return [stored[name] for name in sorted(stored) if (_scaled_weight(name, stored) or name) in unknown]


def _scaled_weight(name: str, stored: Iterable[str]) -> str | None:
    """Return the weight in the folder to which a scale belongs, or None for a tensor that is not a scale."""
    weights = (name.removesuffix(end) + weight for end, weight in _SCALE_SUFFIXES.items() if name.endswith(end))
    return next((weight for weight in weights if weight in stored), None)


def describe_names(names: Iterable[str]) -> str:
    """Return the names of tensors in short, for a message: `mtp.*, model.layers.61.*, score.weight`."""
    grouped: dict[str, list[str]] = {}
    for name in sorted(names):
        grouped.setdefault(group_of(name), []).append(name)
    return ", ".join(f"{group}.*" if len(each) > 1 else each[0] for group, each in grouped.items())


def group_of(name: str) -> str:
    """Return the part that a tensor belongs to: a layer for multi-token prediction, a tower, a head."""
    if match := _LAYER.match(name):
        return f"{match[1]}.{match[2]}"
    if match := _PREDICTION.match(name):
        return match[0].removesuffix(".")
    head, dot, rest = name.partition(".")
    return f"{head}.{rest.partition('.')[0]}" if head == "model" and "." in rest else head
