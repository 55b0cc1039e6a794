"""Mini models and distinct questions for them."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from octavo import generation, models
from octavo.models.tiny import tiny


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """(model, processor) of a mini checkpoint, each made once: tests leave models as they were."""
    known = {}

    def get(family: str):
        if family not in known:
            folder = tiny.write(family, tmp_path_factory.mktemp("generation") / family, size="mini")
            known[family] = models.load(folder), models.load_processor(folder)
        return known[family]

    return get


def questions(model, count: int) -> list[tuple[list, list]]:
    """Messages and images of distinct prompts: none, one or two images of two sizes, texts of several lengths."""
    rng = np.random.default_rng(0)
    vision = models.describe(model).has_vision
    found = []
    for i in range(count):
        text = f"{i} " + "".join(rng.choice(list("abcdefgh 123"), 5 + i % 7))
        images = [
            Image.fromarray(rng.integers(0, 255, (16, 16 + 8 * (i % 2), 3), dtype=np.uint8))
            for _ in range(i % 3 if vision else 0)
        ]
        parts = [*({"type": "image"} for _ in images), {"type": "text", "text": text}]
        found.append(([{"role": "user", "content": parts if vision else text}], images))
    return found


def prompts_of(model, processor, count: int) -> list[generation.Prompt]:
    asked = questions(model, count)
    return [generation.prompt_of(processor, *question, number=i) for i, question in enumerate(asked)]
