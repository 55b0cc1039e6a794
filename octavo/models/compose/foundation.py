"""The decoder of a composed model: its configuration, its tokenizer with a token for images, and room for that token
in embeddings and head."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from tokenizers import AddedToken
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from octavo.base import safe_read
from octavo.models.compose.template import IMAGE_TOKEN, add_images
from octavo.models.errors import ModelError
from octavo.models.folder.chat import check_template, render
from octavo.models.processors.processors import load_tokenizer
from octavo.models.processors.vocabulary import check_vocabulary
from octavo.models.structure.describe import describe
from octavo.models.structure.skeleton import is_vision_config, read_config
from octavo.models.weights.iterate import stored_dtypes
from octavo.models.weights.loading import load

_ROWS = 64
"""Embeddings that have to grow get a multiple of this: FP8 GEMMs of a head need multiples of 16."""
_QUESTION = "What is this?"


@dataclass(frozen=True)
class Foundation:
    """A decoder, read without its weights.

    config       with the rows of the composed model's embeddings
    tokenizer    with the token of images and the chat template of the composed model
    stored_rows  of the folder's embeddings
    """

    folder: Path
    config: PreTrainedConfig
    tokenizer: PreTrainedTokenizerBase
    stored_rows: int

    @property
    def image_token_id(self) -> int:
        return cast(int, self.tokenizer.convert_tokens_to_ids(IMAGE_TOKEN))

    def load(self, dtype: torch.dtype, log: Callable[[str], None]) -> PreTrainedModel:
        """Return the decoder with its weights, on the CPU, whose embeddings and head have a row for each token. Raises
        ModelError."""
        decoder = load(self.folder, dtype, keep_fp8=False, log=log)
        if self.config.vocab_size > self.stored_rows:
            grow_vocabulary(decoder, self.config.vocab_size)
        return decoder

    def dtype(self) -> torch.dtype:
        """Return the dtype of most of the folder's weights; bfloat16 for FP8 codes."""
        most = Counter(stored_dtypes(self.folder).values()).most_common(1)[0][0]
        return most if most in (torch.float32, torch.float16) else torch.bfloat16


def grow_vocabulary(decoder: PreTrainedModel, rows: int) -> None:
    """Add rows to the embeddings of a decoder, and to its head if that is not tied. A new row is the mean of the
    present ones, so that a new token is as likely as an average one."""
    embeddings = cast(nn.Embedding, decoder.get_input_embeddings())
    head = decoder.get_output_embeddings()
    tied = head is not None and head.weight is embeddings.weight
    embeddings.weight = nn.Parameter(_with_mean_rows(embeddings.weight.detach(), rows))
    embeddings.num_embeddings = rows
    if head is not None:
        head.weight = embeddings.weight if tied else nn.Parameter(_with_mean_rows(head.weight.detach(), rows))
        head.out_features = rows
    decoder.config.get_text_config().vocab_size = rows


def _with_mean_rows(values: Tensor, rows: int) -> Tensor:
    mean = values.float().mean(0, keepdim=True).to(values.dtype)
    return torch.cat([values, mean.expand(rows - len(values), *values.shape[1:])])


def read_foundation(
    folder: Path, template: Path | None, image_tokens: int | None, problems: list[str]
) -> Foundation | None:
    """Read the configuration and the tokenizer of a decoder's folder, and give the tokenizer the token of images. Adds
    a sentence to `problems` for each thing that keeps it from being composed, and returns None if there is any.
    `image_tokens`: tokens of an image, None if they are not known."""
    before = len(problems)
    try:
        config = read_config(folder)
        if is_vision_config(config) or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
            raise ModelError(
                f"{folder}/config.json: model_type {config.model_type!r} is no decoder of text; name a language model"
            )
        describe(config)  # raises for a model whose parts are not found
        tokenizer = load_tokenizer(folder)
        rows = config.vocab_size
        check_vocabulary(tokenizer, rows, folder)
    except ModelError as error:
        problems.append(str(error).removesuffix("."))
        return None
    positions = getattr(config, "max_position_embeddings", None)
    if isinstance(positions, int) and image_tokens is not None and image_tokens >= positions:
        problems.append(
            f"{folder}: its rows have at most {positions} tokens, and an image has {image_tokens}; use smaller images "
            "(--image-size), or a decoder for longer rows"
        )
    try:
        tokenizer.chat_template = _template(folder, tokenizer, template)
    except ModelError as error:
        problems.append(str(error).removesuffix("."))
    if len(problems) > before:
        return None
    if IMAGE_TOKEN not in tokenizer.get_vocab():
        tokenizer.add_tokens([AddedToken(IMAGE_TOKEN, special=True, normalized=False)], special_tokens=True)
    needed = cast(int, tokenizer.convert_tokens_to_ids(IMAGE_TOKEN)) + 1
    if needed > rows:
        config.vocab_size = -(-needed // _ROWS) * _ROWS
    return Foundation(folder, config, tokenizer, rows)


def _default_template(templates: object) -> str | None:
    """Return a chat template, or of several with names the one that is used if none is named."""
    template = templates.get("default") if isinstance(templates, dict) else templates
    return template if isinstance(template, str) else None


def _template(folder: Path, tokenizer: PreTrainedTokenizerBase, file: Path | None) -> str:
    """Return the chat template of the composed model: the one of the file, or the decoder's own with images. Raises
    ModelError for one that leaves out the user's words or the image."""
    if file is not None:
        name, template = str(file), safe_read.read_text(file, ModelError)
    elif text := _default_template(tokenizer.chat_template):
        name, template = f"the chat template of {folder}", add_images(text)
    else:
        raise ModelError(f"{folder} has no chat template; give one with --chat-template FILE")
    before, tokenizer.chat_template = tokenizer.chat_template, template
    try:
        parts = [{"type": "image"}, {"type": "text", "text": _QUESTION}]
        check_template(tokenizer, folder)  # before it is rendered here, without limits
        text = render(tokenizer, [{"role": "user", "content": parts}], add_generation_prompt=True)
    except ModelError as error:
        raise ModelError(f"{name} cannot be used: {error}") from error
    finally:
        tokenizer.chat_template = before
    if _QUESTION not in text:
        raise ModelError(f"{name} has no turn of the user: it leaves out the words of a question")
    if text.count(IMAGE_TOKEN) != 1:
        raise ModelError(f"{name} writes {IMAGE_TOKEN} {text.count(IMAGE_TOKEN)} times for a question about one image")
    return template
