"""The engine beside transformers' own generate, and beside itself in other batches."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image
from transformers import GenerationConfig

from octavo import generation, models
from octavo.models import tiny

FAMILIES = [family for family in tiny.FAMILIES if family != "mpt"]


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """(model, processor) of a mini checkpoint, each made once."""
    known = {}

    def get(family: str):
        if family not in known:
            folder = tiny.write(family, tmp_path_factory.mktemp("generation") / family, size="mini")
            known[family] = models.load(folder), models.load_processor(folder)
        return known[family]

    return get


def questions(model, processor, count: int) -> list[tuple[list, list]]:
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
    asked = questions(model, processor, count)
    return [generation.prompt_of(processor, *question, number=i) for i, question in enumerate(asked)]


def stock(model, processor, question, new: int) -> np.ndarray:
    """The greedy tokens of `model.generate`."""
    batch = models.question(processor, *question)
    settings = GenerationConfig(
        do_sample=False, max_new_tokens=new, eos_token_id=model.generation_config.eos_token_id, pad_token_id=0
    )
    return model.generate(**batch, generation_config=settings)[0, batch["input_ids"].shape[1] :].numpy()


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_answers_are_those_of_transformers(made, family):
    model, processor = made(family)
    engine = generation.Engine(model, processor.tokenizer, slots=5, page=4)
    got = engine.generate(prompts_of(model, processor, 12), generation.Sampling(8, temperature=0))
    for question, completion in zip(questions(model, processor, 12), got, strict=True):
        assert completion.tokens.tolist() == stock(model, processor, question, 8).tolist()
