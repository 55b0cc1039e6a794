"""`octavo tiny FAMILY DIR`: a small random checkpoint of a real architecture, complete with tokenizer and processor.

    config.json, generation_config.json, model.safetensors
    tokenizer.json, tokenizer_config.json, chat_template.jinja
    preprocessor_config.json, video_preprocessor_config.json, processor_config.json    (vision families)

All entries name stock transformers classes. The same family, size, seed and texts give the same bytes (with the same
versions of torch and transformers).
"""

from __future__ import annotations

import filecmp
import json
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, GenerationConfig, PreTrainedTokenizerFast

from octavo.models.errors import ModelError
from octavo.models.folder import quiet
from octavo.models.skeleton import is_vision_config
from octavo.models.tiny_configs import CONFIGS, INTERNVL_IMAGE, NVILA_IMAGE, PATCH, SIZES
from octavo.models.tokens import INTERNVL, LLAMA, NVILA, QWEN, QWEN_VL, Special, train_tokenizer

FAMILIES = tuple(CONFIGS)
_SPECIAL: Mapping[str, Special] = {
    "qwen3_vl": QWEN_VL,
    "qwen3_vl_moe": QWEN_VL,
    "qwen2_5_vl": QWEN_VL,
    "internvl": INTERNVL,
    "nvila_lite": NVILA,
    "qwen3": QWEN,
    "qwen3_moe": QWEN,
    "llama": LLAMA,
    "mpt": QWEN,
}
_HALF = [0.5, 0.5, 0.5]


def write(
    family: str, directory: str | Path, *, seed: int = 0, size: str | None = None, texts: Iterable[str] | None = None
) -> Path:
    """Write a small checkpoint of `family` into `directory` and return the directory.

    seed   of the weights
    size   "small" (the default: trains well from scratch; Qwen3-VL has 1.2 M parameters) or "mini" (for tests)
    texts  added to what the tokenizer is trained on: words in them become single tokens

    Raises ModelError for an unknown family or size, and for a directory that holds anything else than exactly what
    would be written; writing the same again is a no-op.
    """
    if family not in CONFIGS:
        raise ModelError(f"there is no tiny family {family!r}; known: {', '.join(FAMILIES)}.")
    size = size or SIZES[0]
    if size not in SIZES:
        raise ModelError(f"there is no size {size!r}; known: {', '.join(SIZES)}.")
    target = Path(directory)
    if target.exists() and not target.is_dir():
        raise ModelError(f"{target} is a file; name a directory that is new, empty, or written by this command.")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as scratch:
        made = Path(scratch) / "model"
        _write_all(family, made, seed, size, texts)
        if target.exists() and any(target.iterdir()):
            _require_same(made, target, family)
        else:
            if target.exists():
                target.rmdir()
            shutil.move(made, target)
    return target


def _write_all(family: str, directory: Path, seed: int, size: str, texts: Iterable[str] | None) -> None:
    special = _SPECIAL[family]
    tokenizer = train_tokenizer(special, texts)
    ids = tokenizer.get_vocab()
    vocab = -(-len(ids) // 64) * 64
    config = CONFIGS[family](size, vocab, ids)
    config.eos_token_id = ids[special.eos]
    config.pad_token_id = ids[special.pad]
    config.bos_token_id = ids[special.bos] if special.bos else None
    text_config = config.get_text_config()
    text_config.eos_token_id, text_config.pad_token_id = config.eos_token_id, config.pad_token_id
    text_config.bos_token_id = config.bos_token_id
    auto = AutoModelForImageTextToText if is_vision_config(config) else AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = auto.from_config(config, dtype=torch.float32)
    model.generation_config = GenerationConfig(
        eos_token_id=ids[special.eos], pad_token_id=ids[special.pad], bos_token_id=config.bos_token_id
    )
    with quiet():
        model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    _write_processor(family, directory, tokenizer)


def _require_same(made: Path, target: Path, family: str) -> None:
    here, there = {p.name for p in made.iterdir()}, {p.name for p in target.iterdir()}
    _, different, unreadable = filecmp.cmpfiles(made, target, sorted(here & there), shallow=False)
    if wrong := sorted((here ^ there) | set(different) | set(unreadable)):
        raise ModelError(
            f"{target} is not empty and is not the tiny {family} that would be written: {', '.join(wrong[:4])} differ"
            f"{'' if len(wrong) > 1 else 's'}. Name another directory, or delete this one."
        )


def _write_processor(family: str, directory: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """The entries a stock AutoProcessor reads (it needs torchvision and the video entry; Octavo reads the rest)."""
    if family in ("qwen3", "qwen3_moe", "llama", "mpt"):
        return
    if family == "nvila_lite":  # as published: the tower's own processor, and no other
        image = {"image_processor_type": "SiglipImageProcessor", "size": {"height": NVILA_IMAGE, "width": NVILA_IMAGE}}
        more = {"image_mean": _HALF, "image_std": _HALF, "rescale_factor": 1 / 255, "resample": 3}
        _dump(directory / "preprocessor_config.json", {**image, **more})
        return
    if family == "internvl":
        side = {"height": INTERNVL_IMAGE, "width": INTERNVL_IMAGE}
        image = {
            "image_processor_type": "GotOcr2ImageProcessor",
            "size": side,
            "crop_to_patches": True,
            "min_patches": 1,
            "max_patches": 4,
        }
        video = {"video_processor_type": "InternVLVideoProcessor", "size": side}
        processor = {"processor_class": "InternVLProcessor", "image_seq_length": 4}
    else:
        cell = (2 * PATCH) ** 2  # pixels a token
        image = {
            "image_processor_type": "Qwen2VLImageProcessor",
            "size": {"shortest_edge": cell, "longest_edge": 256 * cell},
            "patch_size": PATCH,
            "temporal_patch_size": 2,
            "merge_size": 2,
        }
        third = family != "qwen2_5_vl"
        video = {**image, "video_processor_type": "Qwen3VLVideoProcessor" if third else "Qwen2VLVideoProcessor"}
        video.pop("image_processor_type")
        processor = {"processor_class": "Qwen3VLProcessor" if third else "Qwen2_5_VLProcessor"}
    name = processor["processor_class"]
    common = {"image_mean": _HALF, "image_std": _HALF, "do_convert_rgb": True, "processor_class": name}
    _dump(directory / "preprocessor_config.json", {**image, **common})
    _dump(directory / "video_preprocessor_config.json", {**video, **common})
    _dump(directory / "processor_config.json", processor)
    file = directory / "tokenizer_config.json"
    _dump(file, {**json.loads(file.read_text()), "processor_class": name})


def _dump(file: Path, content: dict) -> None:
    file.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
