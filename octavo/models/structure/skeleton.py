"""A model without weights: the configuration of a folder, the class that transformers builds from it, and that model on
the meta device."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from copy import deepcopy
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Protocol, cast

import torch
import transformers
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.modeling_layers import GenericForSequenceClassification

from octavo.base.safe_read import read_bytes
from octavo.models.custom import mpt
from octavo.models.custom.nvila.three_folders import IN_THREE_FOLDERS, check_parts, read_three_folders
from octavo.models.custom.register import REPLACED_FAMILIES, may_name_code
from octavo.models.errors import ModelError
from octavo.models.folder.folder import TIED, check_sizes, open_plain, parts_of, read_json, wrap_errors
from octavo.models.folder.quantization import (
    QUANTIZED_KEYS,
    check_mapping,
    quantization_block,
    read_quantization,
)

#: suffix of architectures that score conversations
SCORING_SUFFIX = "ForSequenceClassification"


class ModelClass(Protocol):
    """A class that builds models: one of transformers' Auto classes, or :func:`_scoring_class`."""

    def from_config(self, config: PreTrainedConfig, **options: Any) -> PreTrainedModel:
        """Return a model with random weights."""

    def from_pretrained(self, pretrained_model_name_or_path: Path, **options: Any) -> Any:
        """Return a model with the weights of a folder; with `output_loading_info` also a dict of missing keys and
        others."""


def read_config(path: str | Path) -> PreTrainedConfig:
    """Read the configuration of a local model folder.

    For a folder in FP8 this is the configuration of the stock model; `read_quantization` returns how it is stored.

    Raises ModelError if the folder or `config.json` is missing, if the JSON is invalid, if the model needs code from
    the folder (`auto_map`; Octavo runs none, and the families that it implements need none), if its `model_type` is
    unknown to the installed transformers, or if its weights have a quantization that Octavo does not read.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise ModelError(
            f"{folder} is not a folder: a model is loaded from a local Hugging Face folder (config.json, safetensors, "
            "tokenizer). Download it first, or make a small one with `octavo tiny`."
        )
    read_quantization(folder)  # raises for a quantization that cannot be read
    return stock_config(folder)


def untie(config: PreTrainedConfig) -> None:
    """Set `tie_word_embeddings` of a configuration and its parts to false."""
    for part in (config, *(getattr(config, name, None) for name in config.sub_configs)):
        if part is not None and (part is config or getattr(part, TIED, False)):
            setattr(part, TIED, False)


def config_ties(config: PreTrainedConfig) -> bool:
    """Return whether `tie_word_embeddings` of a configuration or of one of its parts is true."""
    return any(getattr(part, TIED, False) for part in (config, *(getattr(config, n, None) for n in config.sub_configs)))


def is_known_family(raw: Mapping[str, object]) -> bool:
    """Return whether the contents of a config.json name a family that transformers or Octavo has."""
    return raw.get("model_type") in CONFIG_MAPPING


def stock_config(folder: Path) -> PreTrainedConfig:
    """Return the configuration of the stock model of a folder, independent of the format of its weights.

    This is where config.json is judged. Tokenizers, processors and generation settings depend on it, and transformers
    blames them for its mistakes, so everything that loads these calls this first.

    Raises ModelError, naming config.json.
    """
    if parts_of(folder):
        with wrap_errors(f"{folder}/config.json cannot be used"):
            return read_three_folders(folder)
    raw = read_json(folder / "config.json")
    if raw.get("model_type") in IN_THREE_FOLDERS:
        check_parts(folder, raw["model_type"])
    if "auto_map" in raw and not may_name_code(raw.get("model_type")):
        raise ModelError(
            f"{folder}/config.json requires Python code from the folder (auto_map), which Octavo does not run. Use the "
            "checkpoint in its transformers form (InternVL: the -HF folders)."
        )
    if "configuration_files" in raw:  # transformers would read another file, which nothing here has checked
        raise ModelError(
            f"{folder}/config.json names other files with the configuration (configuration_files), which Octavo does "
            "not read. Copy the file for your version of transformers to config.json."
        )
    if not is_known_family(raw):
        named, version = raw.get("model_type"), transformers.__version__
        what = f"model_type {named!r:.80}, which transformers {version} does not know" if named else "no model_type"
        raise ModelError(
            f"{folder}/config.json has {what}. Correct the field, or take config.json from the original model; a newer "
            "family needs a newer transformers."
        )
    check_sizes(folder / "config.json")
    _check_dtypes(folder / "config.json")
    if (block := quantization_block(raw)) is not None:
        check_mapping(block, f"{folder}/config.json")
    with wrap_errors(f"{folder}/config.json cannot be used"):
        if raw.get("model_type") in REPLACED_FAMILIES:
            config: PreTrainedConfig = mpt.read(folder, raw)
        else:
            with open_plain(folder) as plain:
                config = deepcopy(_parsed(plain, read_bytes(folder / "config.json", ModelError)))
        config.name_or_path = str(folder)
    if hasattr(config, "auto_map"):  # otherwise transformers would look for the code
        del config.auto_map
    for part in (config, *(getattr(config, name, None) for name in config.sub_configs)):
        for key in QUANTIZED_KEYS:  # these describe the weights on disk, not the model
            if hasattr(part, key):
                delattr(part, key)
    if getattr(config.get_text_config(), "num_hidden_layers", None) == 0:
        raise ModelError(f"{folder}/config.json gives num_hidden_layers=0; it must be above 0. Correct the field.")
    return config


@lru_cache(maxsize=8)
def _parsed(plain: Path, content: bytes) -> PreTrainedConfig:
    """Return transformers' configuration of a folder, which callers must copy before they change it.

    A command asks for it up to eight times, and transformers takes about 10 ms each time. `content`, the bytes of
    config.json, is only the key of the cache: a file that was changed is parsed again. For an encrypted folder, `plain`
    is a temporary folder, so its configuration is parsed each time, with the key.
    """
    return cast(PreTrainedConfig, AutoConfig.from_pretrained(plain, local_files_only=True, trust_remote_code=False))


def _check_dtypes(file: Path) -> None:
    """Raise ModelError for dtypes of a configuration that are not floating point: transformers would load weights in
    any dtype."""
    raw = read_json(file)
    for part in (raw, *(one for key, one in raw.items() if isinstance(one, dict) and key not in QUANTIZED_KEYS)):
        for key in ("dtype", "torch_dtype"):
            named = part.get(key)
            dtype = getattr(torch, named.removeprefix("torch."), None) if isinstance(named, str) else None
            if named in (None, "auto") or isinstance(named, dict):  # a dict has one dtype for each part
                continue
            if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
                raise ModelError(f"{file} has {key}={named!r:.80}; weights must be bfloat16, float16 or float32.")


def is_vision_config(config: PreTrainedConfig) -> bool:
    """Return whether transformers has a composite model for this configuration that takes images and generates text."""
    return type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and bool(config.sub_configs)


def is_audio_config(config: PreTrainedConfig) -> bool:
    """Return whether transformers has a composite model for this configuration that takes audio and generates text."""
    known = type(config) in MODEL_FOR_MULTIMODAL_LM_MAPPING or type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    return known and getattr(config, "audio_config", None) is not None


def why_too_long(config: PreTrainedConfig, length: int) -> str | None:
    """Return why a model does not take rows of `length` tokens, as the end of a sentence with the fix, or None if it
    does. Only MPT is checked here; positions of other models are computed or checked elsewhere."""
    return mpt.why_too_long(config, length) if isinstance(config, mpt.MPTConfig) else None


def image_text_class(config_class: type[PreTrainedConfig]) -> type[PreTrainedModel]:
    """Return transformers' model class for a configuration of images and text. Raises KeyError if there is none."""
    return cast(type[PreTrainedModel], MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[config_class])


def auto_class(config: PreTrainedConfig, scores: bool = False) -> ModelClass:
    """Return the class that builds the generating model of a configuration, or with `scores` the one that scores
    conversations. Raises ModelError."""
    if scores:
        if is_vision_config(config):
            return _scoring_class(cast(Hashable, type(config)))  # mypy does not consider classes hashable
        if type(config) in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
            return AutoModelForSequenceClassification
        raise ModelError(
            f"model_type {config.model_type!r} is neither a model of images and text nor a text model for which "
            "transformers has a scoring class."
        )
    if type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return AutoModelForImageTextToText
    if is_audio_config(config):
        return AutoModelForMultimodalLM
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return AutoModelForCausalLM
    where = f"{config.name_or_path}/config.json: " if config.name_or_path else ""
    raise ModelError(
        f"{where}model_type {config.model_type!r} is neither a model of images or audio and text nor a text-only "
        "decoder that transformers knows."
    )


@cache
def _scoring_class(config_class: type[PreTrainedConfig]) -> ModelClass:
    """Create a sequence classification model of a vision-language family, for which transformers has no class:
    transformers' head for text models (`score` without a bias, applied to the last hidden state of the last token that
    is not padding) replaces the output projection. Weights have the names that vLLM and SGLang use."""
    writes = image_text_class(config_class)
    family = next(base for base in writes.__mro__ if base.__name__.endswith("PreTrainedModel"))

    class Scoring(GenericForSequenceClassification, family):  # type: ignore[misc, valid-type]
        @classmethod
        def from_config(cls, config: PreTrainedConfig, **options: Any) -> PreTrainedModel:
            return cls._from_config(config, **options)

    Scoring.__name__ = Scoring.__qualname__ = writes.__name__.replace("ForConditionalGeneration", SCORING_SUFFIX)
    if (names := get_checkpoint_conversion_mapping(writes.__name__)) is not None:  # names on disk may differ
        register_checkpoint_conversion_mapping(Scoring.__name__, names, overwrite=True)
    return Scoring


def skeleton(
    config: PreTrainedConfig, dtype: torch.dtype, attn_implementation: str | None = None, scores: bool = False
) -> PreTrainedModel:
    """Build the model on the meta device, as from_pretrained does before it reads weights. Raises ModelError."""
    extra = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
    where = f"{config.name_or_path}/config.json" if config.name_or_path else "the configuration"
    with wrap_errors(f"no {config.model_type!r} model can be built from {where}"), torch.device("meta"):
        try:
            return auto_class(config, scores).from_config(config, dtype=dtype, **extra)
        except KeyError as error:
            value = error.args[0] if error.args else None
            if isinstance(value, str) and (keys := _keys_with_value(config.to_dict(), value)):
                raise ModelError(
                    f"{where} has {keys[0]}={value!r:.80}, a value that transformers {transformers.__version__} "
                    "does not know. Correct the field."
                ) from error
            raise
        except AssertionError as error:
            text = config.get_text_config()
            if "Padding_idx" not in str(error):  # torch's, of an embedding with a token of padding
                raise
            raise ModelError(
                f"{where} gives pad_token_id={text.pad_token_id} beyond vocab_size={text.vocab_size}. Correct the one "
                "that is wrong."
            ) from error


def _keys_with_value(part: Mapping[str, object], value: str, prefix: str = "") -> list[str]:
    """Return the keys of a configuration that have a value, such as the name of an activation that a table of
    transformers lacks; `prefix`: the keys above, with dots."""
    keys = [f"{prefix}{key}" for key, one in part.items() if one == value]
    inner = ((key, one) for key, one in part.items() if isinstance(one, Mapping))
    return keys + [name for key, one in inner for name in _keys_with_value(one, value, f"{prefix}{key}.")]


def empty(path_or_config: str | Path | PreTrainedConfig, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Build the model of a folder or configuration on the meta device, without memory. Reads no weights."""
    config = path_or_config if isinstance(path_or_config, PreTrainedConfig) else read_config(path_or_config)
    model = skeleton(config, dtype)
    with wrap_errors(f"the weights of {config.model_type!r} cannot be tied"):
        model.tie_weights()
    return model
