"""Writes the files of a model other than its weights to a new folder: copied, or merged from three folders.

The tensors of a model in three folders already have the names of the one-folder layout. Its configuration is converted
to that layout, and the tokens of media, which VILA adds when it loads a tokenizer, are saved with the tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import torch

from octavo.models.folder.folder import companions, copy_companions, find_file, parts_of, read_companion, write_config
from octavo.models.processors.processors import load_processor, load_tokenizer
from octavo.models.processors.stop_tokens import EndToken, add_end_token
from octavo.models.structure.skeleton import image_text_class, read_config, untie

_TOKENIZER = ("tokenizer", "vocab", "merges", "special_tokens", "added_tokens", "chat_template")


def write_companions(
    source: Path,
    target: Path,
    dtype: torch.dtype,
    quantization: Mapping[str, object] | None = None,
    changes: Mapping[str, object] = MappingProxyType({}),
    untied: bool = False,
) -> EndToken | None:
    """Write config.json, tokenizer, processor, chat template and generation settings of `source` to the folder
    `target`, for weights with this dtype and quantization, with `changes` of config.json and, if `untied`, no tied
    weights (`write_config`).

    Returns the token that ends answers in the chat template if the generation settings of `source` do not stop at it;
    the settings of `target` do. Raises ModelError for files that cannot be read or copied.
    """
    if not parts_of(source):
        write_config(source, target, dtype, quantization, changes=changes, untied=untied)
        copy_companions(source, target)
        return add_end_token(source, target)
    _write_config(source, target, dtype, quantization, untied)
    for file in companions(source):
        if not file.name.startswith(_TOKENIZER):
            (target / file.name).write_bytes(read_companion(file))
    tokenizer = load_tokenizer(source)
    if find_file(source, "preprocessor_config.json").exists():
        tokenizer.chat_template = load_processor(source).chat_template
    tokenizer.save_pretrained(target)
    return add_end_token(source, target)


def _write_config(
    source: Path, target: Path, dtype: torch.dtype, quantization: Mapping[str, object] | None, untied: bool
) -> None:
    config = read_config(source)
    if untied:
        untie(config)
    config.architectures, config.dtype = [image_text_class(type(config)).__name__], dtype
    for part in (config.text_config, config.vision_config):
        part.dtype = dtype
    raw = config.to_dict()
    raw.pop("_name_or_path", None)
    if quantization is not None:
        raw["quantization_config"] = dict(quantization)
    (target / "config.json").write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
