"""Small checkpoints of every family, written once per session, and inputs for them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoConfig, PreTrainedConfig

from octavo import models
from octavo.models.tiny import tiny
from tests.models.small_towers import TOWERS, write_settings

MANY = ("qwen3_vl", "qwen3_vl_moe", "qwen2_5_vl", "internvl", "qwen3", "qwen3_moe", "llama", "mpt")
"""Families for what costs much and hangs on how weights lie: the others bring other towers."""


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """family -> folder of its mini checkpoint; tests that change one copy it."""
    created: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in created:
            created[family] = tiny.write(family, tmp_path_factory.mktemp("tiny") / family, size="mini")
        return created[family]

    return get


@pytest.fixture(scope="session")
def tower(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """kind -> folder of a small image encoder with random weights."""
    home = tmp_path_factory.mktemp("towers")

    def get(kind: str) -> Path:
        folder = home / kind
        if not folder.exists():
            model, config, settings = TOWERS[kind]
            torch.manual_seed(1)
            model(config).save_pretrained(folder)
            write_settings(folder, settings)
        return folder

    return get


def auto_config(folder: Path) -> PreTrainedConfig:
    """Return the arguments for transformers' classes: the folder's configuration, or for MPT Octavo's."""
    config = AutoConfig.from_pretrained(folder)
    return models.read_config(folder) if config.model_type == "mpt" else config


def some_image(seed: int = 0, size: tuple[int, int] = (16, 16)) -> Image.Image:
    """A grey-scale image of random pixels, (width, height)."""
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0]), dtype=np.uint8)
    return Image.fromarray(pixels)


def conversation(image: bool) -> list[dict]:
    """Two questions with answers, with or without an image."""
    first = [{"type": "image"}, {"type": "text", "text": "first?"}] if image else "first?"
    return [
        {"role": "user", "content": first},
        {"role": "assistant", "content": "3"},
        {"role": "user", "content": "second?"},
        {"role": "assistant", "content": "4"},
    ]


def batch(processor, image: bool, seed: int = 0):
    """Encode a conversation as tensors, optionally with an image."""
    text = processor.apply_chat_template(conversation(image), tokenize=False)
    images = [some_image(seed)] if image else None
    return processor(text=[text], images=images, return_tensors="pt", add_special_tokens=False)


def labels(model, inputs):
    """Return the token ids as labels, without ids outside the embedding table."""
    ids = inputs["input_ids"]
    return ids.masked_fill(ids >= model.config.get_text_config().vocab_size, -100)
