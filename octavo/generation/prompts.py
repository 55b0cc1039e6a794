"""Prompts from conversations, and answers as text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from octavo import models
from octavo.data.inputs import of_processor
from octavo.generation.caller import Context
from octavo.generation.engine import Engine
from octavo.generation.errors import GenerationError
from octavo.generation.request import Prompt, Sampling

SLOTS = 64
"""Answers at a time."""


def prompt_of(
    processor: Any, messages: Sequence[dict[str, Any]], images: Sequence[Any] = (), number: int = 0
) -> Prompt:
    """The prompt of a conversation that waits for an answer, by the model's processor and chat template.

    messages  `[{"role", "content"}]`, content a string or parts (`{"type": "image"}`, `{"type": "text", "text": ...}`)
    images    one PIL image for each image part, in reading order
    number    the prompt's identity for randomness

    Raises ModelError as `models.question`.
    """
    batch = {name: value.numpy() for name, value in models.question(processor, messages, images).items()}
    kinds = batch.get("mm_token_type_ids")
    return Prompt(
        batch["input_ids"][0], number, batch.get("pixel_values"), batch.get("image_grid_thw"),
        None if kinds is None else kinds[0], len(images), more=of_processor(processor, batch) if images else {},
    )  # fmt: skip


def answers(
    model: Any, processor: Any, conversations: Sequence[tuple[Sequence[dict[str, Any]], Sequence[Any]]],
    sampling: Sampling, context: Context | None = None, *, samples: int = 1, kv: str = "bf16",
    say: Callable[[str], None] = lambda text: None,
) -> list[list[str]]:  # fmt: skip
    """`samples` answers to each conversation (messages and images, as :func:`prompt_of` takes them), as text without
    special tokens and without the text that stopped them.

    A model whose attention cannot be handed over answers greedily by transformers' own loop, one question after the
    other, and `say` gets why. Raises GenerationError and ModelError.
    """
    context = context or Context()
    if why := models.why_not_paged(model):
        if sampling.temperature or sampling.stop or samples > 1 or kv != "bf16":
            raise GenerationError(f"{why}: it answers greedily alone. Leave temperature, stop, samples and kv out.")
        say(f"answers come from transformers, one by one: {why}")
        device, low = next(model.parameters()).device.type, context.autocast
        with torch.autocast(device, dtype=low, enabled=low is not None):
            new = sampling.max_new_tokens
            return [[models.generate(model, processor, *asked, new)] for asked in conversations]
    prompts = [prompt_of(processor, *asked, number=number) for number, asked in enumerate(conversations)]
    engine = Engine(model, processor.tokenizer, context, slots=SLOTS, kv=kv, say=say)
    found: list[list[str]] = [[] for _ in prompts]
    for completion in engine.generate(prompts, sampling, samples):
        text = processor.tokenizer.decode(completion.tokens.tolist(), skip_special_tokens=True)
        ends = [place for stop in sampling.stop if (place := text.find(stop)) >= 0]
        found[completion.prompt].append(text[: min(ends, default=len(text))].strip())
    return found
