"""Notes about the end tokens and the vocabulary of a model folder, before weights are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from octavo import models
from octavo.config import Config
from octavo.models.processors import stop_tokens

_MAX_LETTERS = 12  # maximum number of letters in a sentence


def notes(cfg: Config, processor: Any) -> tuple[str, ...]:
    """Return sentences about the folder's tokenizer and generation settings: a missing end token, tokens beyond the
    model's embedding, letters without tokens. Raises ModelError.

    processor  the model's processor, or only its tokenizer
    """
    folder = Path(cfg.model.path)
    sentences = []
    if (end := stop_tokens.missing_end_token(folder, processor)) is not None:
        sentences.append(_describe_end_token(cfg, end))
    rows, largest = models.read_config(folder).get_text_config().vocab_size, models.largest_id(processor)
    if largest >= rows:
        sentences.append(
            f"the tokenizer has tokens up to number {largest}, but the model's embedding has {rows} rows: data rows "
            "with larger tokens are refused. Use the tokenizer that belongs to the model"
        )
    if letters := models.missing_letters(processor, folder):
        listed = ", ".join(letters[:_MAX_LETTERS]) + (", ..." if len(letters) > _MAX_LETTERS else "")
        sentences.append(
            f"the tokenizer has no token for {len(letters)} of the 62 letters and digits of ASCII ({listed}): they "
            "vanish from all texts. Use the tokenizer that belongs to the model"
        )
    return tuple(sentences)


def _describe_end_token(cfg: Config, end: stop_tokens.EndToken) -> str:
    stated = stop_tokens.stated_stop_ids(Path(cfg.model.path))
    stops = f"stop at {', '.join(map(str, stated))}" if stated else "name no end token"
    ends = stop_tokens.required_stop_ids(Path(cfg.model.path), end)
    pronoun = {1: "it", 2: "both"}.get(len(ends), "all")
    if not stated and len(ends) > 1:
        stops += f", so that the tokenizer's counts, {ends[0]}"
    written = f"hf/ and exports name {pronoun}"
    if cfg.lora is not None:
        written = f"octavo merge names {pronoun}, and a server of adapter/ needs stop_token_ids [{end.id}]"
    return (
        f"the chat template ends answers with {end}, and the folder's generation settings {stops}: Octavo stops at "
        f"{pronoun}, {written}"
    )
