"""What stands beside the weights of a model, written for a folder of them: copied, or of three folders made one's.

A model in three folders has its tensors' names in one folder already. Its configuration becomes that of the one-folder
layout, and tokens of media, which VILA adds when it loads a tokenizer, become part of it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from octavo.models.folder.folder import at, companions, copy_companions, parts_of, read_companion, write_config
from octavo.models.processors.processors import load_processor, load_tokenizer
from octavo.models.processors.stop_tokens import EndToken, state_end
from octavo.models.structure.skeleton import auto_class, read_config

_TOKENIZER = ("tokenizer", "vocab", "merges", "special_tokens", "added_tokens", "chat_template")


def write_beside(
    source: Path, made: Path, dtype: torch.dtype, quantization: Mapping[str, Any] | None = None
) -> EndToken | None:
    """config.json, tokenizer, processor, chat template and generation settings of `source` in `made`, one folder, for
    weights of this dtype and quantization.

    Returns the token by which the chat template ends answers where the settings of `source` do not stop at it: those
    of `made` do. Raises ModelError for what cannot be read or copied.
    """
    if not parts_of(source):
        write_config(source, made, dtype, quantization)
        copy_companions(source, made)
        return state_end(source, made)
    _write_config(source, made, dtype, quantization)
    for file in companions(source):
        if not file.name.startswith(_TOKENIZER):
            (made / file.name).write_bytes(read_companion(file))
    tokenizer = load_tokenizer(source)
    if at(source, "preprocessor_config.json").exists():
        tokenizer.chat_template = load_processor(source).chat_template
    tokenizer.save_pretrained(made)
    return state_end(source, made)


def _write_config(source: Path, made: Path, dtype: torch.dtype, quantization: Mapping[str, Any] | None) -> None:
    config = read_config(source)
    model = auto_class(config)._model_mapping[type(config)]
    config.architectures, config.dtype = [model.__name__], dtype
    for part in (config.text_config, config.vision_config):
        part.dtype = dtype
    raw = config.to_dict()
    raw.pop("_name_or_path", None)
    if quantization is not None:
        raw["quantization_config"] = dict(quantization)
    (made / "config.json").write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
