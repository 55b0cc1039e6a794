"""`octavo tiny FAMILY DIR`: a small random checkpoint of a real architecture, complete with tokenizer and processor.

    config.json, generation_config.json, model.safetensors
    tokenizer.json, tokenizer_config.json, chat_template.jinja
    preprocessor_config.json, video_preprocessor_config.json, processor_config.json    (families of images or audio)

All entries name stock transformers classes, or Octavo's classes for families that it implements. The same family, size,
seed and texts give the same bytes (with the same versions of torch and transformers).
"""

from __future__ import annotations

import filecmp
import json
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from transformers import GenerationConfig

from octavo.base import atomic_write, target_folder
from octavo.base.model_families import tiny_families
from octavo.models.errors import ModelError
from octavo.models.folder.folder import silence_transformers
from octavo.models.structure.skeleton import auto_class
from octavo.models.tiny.configs import CHECKPOINTS
from octavo.models.tiny.parts import SIZES
from octavo.models.tiny.tokenizer import train_tokenizer


def write(
    family: str, directory: str | Path, *, seed: int = 0, size: str | None = None, texts: Iterable[str] | None = None
) -> Path:
    """Write a small checkpoint of `family` into `directory` and return the directory.

    seed   of the weights
    size   "small" (the default: trains well from scratch; Qwen3-VL has 1.2 M parameters) or "mini" (for tests)
    texts  additional texts to train the tokenizer on: their words become single tokens

    Raises ModelError for an unknown family or size, and for a directory with different contents; writing the same
    checkpoint again is a no-op.
    """
    if family not in tiny_families():
        raise ModelError(f"unknown tiny family {family!r}; known families: {', '.join(tiny_families())}.")
    size = size or SIZES[0]
    if size not in SIZES:
        raise ModelError(f"unknown size {size!r}; known sizes: {', '.join(SIZES)}.")
    target = Path(directory)
    if target.exists() and not target.is_dir():
        raise ModelError(f"{target} is a file; name a directory that is new, empty, or written by this command.")
    if target_folder.is_free(target):
        with atomic_write.new_folder(target, ModelError, replace=False) as folder:
            _write_all(family, folder, seed, size, texts)  # no fsync: the checkpoint can be written again
    else:
        with tempfile.TemporaryDirectory(prefix="octavo-") as scratch:
            _write_all(family, Path(scratch), seed, size, texts)
            _check_same(Path(scratch), target, family)
    return target


def _write_all(family: str, directory: Path, seed: int, size: str, texts: Iterable[str] | None) -> None:
    small = CHECKPOINTS[family]
    tokens = small.special
    tokenizer = train_tokenizer(tokens, texts)
    ids = tokenizer.get_vocab()
    vocab = -(-len(ids) // 64) * 64
    config = small.config(size, vocab, ids)
    first = None if tokens.bos is None else ids[tokens.bos]
    with silence_transformers():  # SmolVLM's configuration warns that its pad_token_id belongs to its decoder
        for part in (config, config.get_text_config()):
            part.eos_token_id, part.pad_token_id, part.bos_token_id = ids[tokens.eos], ids[tokens.pad], first
    auto = auto_class(config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = auto.from_config(config, dtype=torch.float32)
        _fill_zeros(model)
    model.generation_config = GenerationConfig(
        eos_token_id=ids[tokens.eos], pad_token_id=ids[tokens.pad], bos_token_id=first
    )
    with silence_transformers():
        model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    _write_files(small.files, directory)


def _write_files(files: Mapping[str, Mapping[str, object]], directory: Path) -> None:
    """Write the files of a processor and add its class to the tokenizer's."""
    for name, content in files.items():
        _write_json(directory / name, content)
    if processor := files.get("processor_config.json"):
        file = directory / "tokenizer_config.json"
        _write_json(file, {**json.loads(file.read_text()), "processor_class": processor["processor_class"]})


def _write_json(file: Path, content: Mapping[str, object]) -> None:
    file.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _fill_zeros(model: torch.nn.Module) -> None:
    """Draw weights that transformers initializes to zero, which tests could not distinguish from lost weights. With
    zeros, Gemma 3's projection would pass no image features and no gradient to the tower. The corrections of routers,
    which are not trained, affect the selection of experts."""
    for name, values in model.state_dict().items():
        if name.endswith("mm_input_projection_weight"):
            torch.nn.init.normal_(values, std=values.shape[0] ** -0.5)
        if name.endswith("e_score_correction_bias"):
            torch.nn.init.normal_(values, std=0.01)


def _check_same(expected: Path, target: Path, family: str) -> None:
    wanted, present = {p.name for p in expected.iterdir()}, set(target_folder.contents(target))
    _, different, unreadable = filecmp.cmpfiles(expected, target, sorted(wanted & present), shallow=False)
    if wrong := sorted((wanted ^ present) | set(different) | set(unreadable)):
        raise ModelError(
            f"{target} is not empty and is not the tiny {family} that would be written: {', '.join(wrong[:4])} differ"
            f"{'' if len(wrong) > 1 else 's'}. Name another directory, or delete this one."
        )
