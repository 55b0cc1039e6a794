"""Prompts from conversations, and answers as text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from octavo import models
from octavo.data.encoding.sample import inputs_of_processor
from octavo.generation.caller import Context
from octavo.generation.engine import Engine
from octavo.generation.errors import GenerationError
from octavo.generation.request import Prompt, Sampling

SLOTS = 64
"""Answers at a time."""


def prompt_of(
    processor: Any, messages: Sequence[dict[str, Any]], images: Sequence[Any] = (), videos: Sequence[Any] = (),
    number: int = 0,
) -> Prompt:  # fmt: skip
    """The prompt of a conversation that waits for an answer, by the model's processor and chat template.

    messages  `[{"role", "content"}]`, content a string or parts (`{"type": "image"}`, `{"type": "text", "text": ...}`)
    images    one PIL image for each image part, in reading order
    videos    one `octavo.data` Shot for each video part, likewise, of a processor whose `why_not_images` is None
    number    the prompt's identity for randomness

    Raises ModelError as `models.question`.
    """
    asked = models.question(processor, messages, images, videos=videos)
    if "video_grid_thw" in asked:
        asked = processor.as_images(asked)
    batch = {name: value.numpy() for name, value in asked.items()}
    kinds = batch.get("mm_token_type_ids")
    return Prompt(
        batch["input_ids"][0], number, batch.get("pixel_values"), batch.get("image_grid_thw"),
        None if kinds is None else kinds[0], len(images) + len(videos),
        more=inputs_of_processor(processor, batch) if images else {},
    )  # fmt: skip


def answers(
    model: Any, processor: Any, conversations: Sequence[tuple[Any, ...]],
    sampling: Sampling, context: Context | None = None, *, samples: int = 1, kv: str = "bf16",
    say: Callable[[str], None] = lambda text: None,
) -> list[list[str]]:  # fmt: skip
    """`samples` answers to each conversation (messages, images and, if there are any, videos, as
    :func:`prompt_of` takes them), as text without
    special tokens and without the text that stopped them.

    A model whose attention cannot be handed over answers greedily by transformers' own loop, one question after the
    other, and `say` gets why. Raises GenerationError and ModelError.
    """
    context = context or Context()
    films = [asked[2] if len(asked) > 2 else () for asked in conversations]
    if why := models.why_not_paged(model) or (any(films) and getattr(processor, "why_not_images", None)):
        if sampling.temperature or sampling.stop or samples > 1 or kv != "bf16":
            raise GenerationError(f"{why}: it answers greedily alone. Leave temperature, stop, samples and kv out.")
        say(f"answers come from transformers, one by one: {why}")
        device, low = next(model.parameters()).device.type, context.autocast
        with torch.autocast(device, dtype=low, enabled=low is not None):
            new = sampling.max_new_tokens
            given = zip(conversations, films, strict=True)
            return [[models.generate(model, processor, *asked[:2], new, shown)] for asked, shown in given]
    prompts = [prompt_of(processor, *asked, number=number) for number, asked in enumerate(conversations)]
    engine = Engine(model, processor, context, slots=SLOTS, kv=kv, say=say)
    found: list[list[str]] = [[] for _ in prompts]
    for completion in engine.generate(prompts, sampling, samples):
        text = processor.tokenizer.decode(completion.tokens.tolist(), skip_special_tokens=True)
        ends = [place for stop in sampling.stop if (place := text.find(stop)) >= 0]
        found[completion.prompt].append(text[: min(ends, default=len(text))].strip())
    return found
