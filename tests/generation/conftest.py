"""Mini models and distinct prompts for them."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from octavo import generation, models
from octavo.models.tiny import tiny


@pytest.fixture(scope="session")
def load_mini(tmp_path_factory):
    """Return (model, processor) of a mini checkpoint, created once; tests must not change it."""
    cache = {}

    def get(family: str):
        if family not in cache:
            folder = tiny.write(family, tmp_path_factory.mktemp("generation") / family, size="mini")
            cache[family] = models.load(folder), models.load_processor(folder)
        return cache[family]

    return get


def make_conversations(model, count: int) -> list[tuple[list, list]]:
    """Return (messages, images) of distinct prompts with up to two images of two sizes, and texts of several
    lengths."""
    rng = np.random.default_rng(0)
    vision = models.describe(model).has_vision
    conversations = []
    for i in range(count):
        text = f"{i} " + "".join(rng.choice(list("abcdefgh 123"), 5 + i % 7))
        images = [
            Image.fromarray(rng.integers(0, 255, (16, 16 + 8 * (i % 2), 3), dtype=np.uint8))
            for _ in range(i % 3 if vision else 0)
        ]
        parts = [*({"type": "image"} for _ in images), {"type": "text", "text": text}]
        conversations.append(([{"role": "user", "content": parts if vision else text}], images))
    return conversations


def make_prompts(model, processor, count: int) -> list[generation.Prompt]:
    conversations = make_conversations(model, count)
    return [generation.prompt_of(processor, *conversation, number=i) for i, conversation in enumerate(conversations)]
