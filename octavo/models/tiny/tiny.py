"""`octavo tiny FAMILY DIR`: a small random checkpoint of a real architecture, complete with tokenizer and processor.

    config.json, generation_config.json, model.safetensors
    tokenizer.json, tokenizer_config.json, chat_template.jinja
    preprocessor_config.json, video_preprocessor_config.json, processor_config.json    (families that see or hear)

All entries name stock transformers classes, or those of Octavo's own families. The same family, size, seed and texts
give the same bytes (with the same versions of torch and transformers).
"""

from __future__ import annotations

import filecmp
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from transformers import GenerationConfig

from octavo.base import atomic_write, target_folder
from octavo.models.errors import ModelError
from octavo.models.folder.folder import quiet
from octavo.models.structure.skeleton import auto_class
from octavo.models.tiny import special_tokens
from octavo.models.tiny.configs import CONFIGS
from octavo.models.tiny.files import write_processor
from octavo.models.tiny.parts import SIZES
from octavo.models.tiny.special_tokens import Special
from octavo.models.tiny.tokenizer import train_tokenizer

FAMILIES = tuple(CONFIGS)
_SPECIAL: Mapping[str, Special] = {
    **dict.fromkeys(
        ("qwen3_vl", "qwen3_vl_moe", "qwen2_vl", "qwen2_5_vl", "qwen3_5", "qwen3_5_moe"), special_tokens.QWEN_VL
    ),
    "llavaonevision1_5": special_tokens.QWEN_VL,
    "internvl": special_tokens.INTERNVL,
    "mistral3": special_tokens.MISTRAL3,
    "llava_onevision": special_tokens.LLAVA_ONEVISION,
    "smolvlm": special_tokens.SMOLVLM,
    "gemma3": special_tokens.GEMMA3,
    **dict.fromkeys(("glm4v", "glm46v", "glm4v_moe", "glm_ocr"), special_tokens.GLM4V),
    "ernie4_5_vl_moe": special_tokens.ERNIE4_5_VL,
    "qwen2_audio": special_tokens.QWEN2_AUDIO,
    **dict.fromkeys(("qwen3", "qwen3_moe", "mpt"), special_tokens.QWEN),
    **dict.fromkeys(("nvila", "nvila_lite"), special_tokens.NVILA),
    "llama": special_tokens.LLAMA,
}


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
    if target_folder.is_free(target):
        with atomic_write.folder(target, ModelError, replace=False) as made:
            _write_all(family, made, seed, size, texts)  # not forced to the disk: the seed makes it again
    else:
        with tempfile.TemporaryDirectory(prefix="octavo-") as scratch:
            _write_all(family, Path(scratch), seed, size, texts)
            _require_same(Path(scratch), target, family)
    return target


def _write_all(family: str, directory: Path, seed: int, size: str, texts: Iterable[str] | None) -> None:
    tokens = _SPECIAL[family]
    tokenizer = train_tokenizer(tokens, texts)
    ids = tokenizer.get_vocab()
    vocab = -(-len(ids) // 64) * 64
    config = CONFIGS[family](size, vocab, ids)
    first = None if tokens.bos is None else ids[tokens.bos]
    with quiet():  # SmolVLM's says that its pad_token_id is its decoder's business
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
    with quiet():
        model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    write_processor(family, directory)


def _fill_zeros(model: torch.nn.Module) -> None:
    """What transformers begins at zero and no test could tell from what was lost. Nothing of an image would come
    through Gemma 3's projection, and no gradient would reach the tower; the corrections of routers, which training
    without them leaves as they are, choose experts with the scores."""
    for name, values in model.state_dict().items():
        if name.endswith("mm_input_projection_weight"):
            torch.nn.init.normal_(values, std=values.shape[0] ** -0.5)
        if name.endswith("e_score_correction_bias"):
            torch.nn.init.normal_(values, std=0.01)


def _require_same(made: Path, target: Path, family: str) -> None:
    here, there = {p.name for p in made.iterdir()}, set(target_folder.contents(target))
    _, different, unreadable = filecmp.cmpfiles(made, target, sorted(here & there), shallow=False)
    if wrong := sorted((here ^ there) | set(different) | set(unreadable)):
        raise ModelError(
            f"{target} is not empty and is not the tiny {family} that would be written: {', '.join(wrong[:4])} differ"
            f"{'' if len(wrong) > 1 else 's'}. Name another directory, or delete this one."
        )
