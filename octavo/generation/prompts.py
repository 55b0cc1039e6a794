"""Prompts from conversations, and answers as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from octavo import models
from octavo.generation.request import Prompt


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
        None if kinds is None else kinds[0], len(images),
    )  # fmt: skip
