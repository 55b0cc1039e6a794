"""Converts conversations to prompts, and completions to text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from octavo import models
from octavo.data.encoding.sample import inputs_of_processor
from octavo.generation.caller import Context
from octavo.generation.engine import Engine
from octavo.generation.errors import GenerationError
from octavo.generation.request import Prompt, Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SLOTS = 64
"""Number of answers that are generated at a time."""
Messages = Sequence[dict[str, Any]]
Conversation = tuple[Messages, Sequence[Any]] | tuple[Messages, Sequence[Any], Sequence[Any]]


def prompt_of(
    processor: Any, messages: Messages, images: Sequence[Any] = (), videos: Sequence[Any] = (),
    number: int = 0,
) -> Prompt:  # fmt: skip
    """The prompt of a conversation without its answer, by the model's processor and chat template.

    messages  `[{"role", "content"}]`, content a string or parts (`{"type": "image"}`, `{"type": "text", "text": ...}`)
    images    a PIL image for each image part, in reading order
    videos    an `octavo.data` Shot for each video part, in reading order; needs a processor whose `why_not_images` is
              None
    number    the prompt's identity for randomness

    Raises ModelError as `models.encode_conversation` does.
    """
    encoded = models.encode_conversation(processor, messages, images, videos=videos)
    if "video_grid_thw" in encoded:
        encoded = processor.as_images(encoded)
    batch = {name: value.numpy() for name, value in encoded.items()}
    kinds = batch.get("mm_token_type_ids")
    return Prompt(
        batch["input_ids"][0], number, batch.get("pixel_values"), batch.get("image_grid_thw"),
        None if kinds is None else kinds[0], len(images) + len(videos),
        more=inputs_of_processor(processor, batch) if images else {},
    )  # fmt: skip


def answers(
    model: PreTrainedModel, processor: Any, conversations: Sequence[Conversation],
    sampling: Sampling, context: Context | None = None, *, samples: int = 1, kv: str = "bf16",
    log: Callable[[str], None] = lambda text: None,
) -> list[list[str]]:  # fmt: skip
    """`samples` answers to each conversation (messages, images and optionally videos, as :func:`prompt_of` takes them),
    as text without special tokens and without the stop text.

    A model whose attention cannot be replaced answers greedily by transformers' own loop, one question after the
    other, and `log` receives the reason. Raises GenerationError and ModelError.
    """
    context = context or Context()
    questions = [(*c, ()) if len(c) == 2 else c for c in conversations]  # (messages, images, videos)
    has_videos = any(videos for _, _, videos in questions)
    if why := models.why_not_paged(model) or (has_videos and getattr(processor, "why_not_images", None)):
        if sampling.temperature or sampling.stop or samples > 1 or kv != "bf16":
            raise GenerationError(f"{why}: only greedy decoding is possible. Remove temperature, stop, samples and kv.")
        log(f"answers come from transformers, one by one: {why}")
        device, autocast = next(model.parameters()).device.type, context.autocast
        with torch.autocast(device, dtype=autocast, enabled=autocast is not None):
            limit = sampling.max_new_tokens
            return [
                [models.generate(model, processor, messages, images, limit, videos)]
                for messages, images, videos in questions
            ]
    prompts = [
        prompt_of(processor, messages, images, videos, number)
        for number, (messages, images, videos) in enumerate(questions)
    ]
    engine = Engine(model, processor, context, slots=SLOTS, kv=kv, log=log)
    texts: list[list[str]] = [[] for _ in prompts]
    for completion in engine.generate(prompts, sampling, samples):
        text = processor.tokenizer.decode(completion.tokens.tolist(), skip_special_tokens=True)
        ends = [place for stop in sampling.stop if (place := text.find(stop)) >= 0]
        texts[completion.prompt].append(text[: min(ends, default=len(text))].strip())
    return texts
