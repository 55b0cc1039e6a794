"""Converts text and images to NVILA's inputs: the `<image>` of an image is repeated for each of its features.

The line breaks that end a tile also have placeholders, which the model replaces with their embedding. As text, they
would be merged with the following characters.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from transformers import BatchFeature, PreTrainedConfig, ProcessorMixin

from octavo.base.wording import count_noun
from octavo.models.custom.nvila.configuration import NvilaLiteConfig
from octavo.models.custom.nvila.images import NvilaImages
from octavo.models.custom.nvila.three_folders import IMAGE, MEDIA
from octavo.models.errors import ModelError
from octavo.models.folder.processor_base import ProcessorTraits

PLACEHOLDER = IMAGE


class NvilaProcessor(ProcessorTraits, ProcessorMixin):
    """`processor(text=, images=)` and `processor.apply_chat_template(messages)` of a model of `config`.

    Chat templates of NVILA take contents as texts, so parts are joined to one text, with images as `<image>`.
    `image_token_ids` are the tokens of all media, which no text may contain. Raises ModelError if tokenizer and
    configuration disagree.
    """

    image_token = PLACEHOLDER
    image_class = NvilaImages

    def __init__(
        self,
        image_processor: Any = None,
        tokenizer: Any = None,
        chat_template: str | None = None,
        config: NvilaLiteConfig | None = None,
    ) -> None:
        assert config is not None
        self.image_token_id = tokenizer.convert_tokens_to_ids(PLACEHOLDER)
        self.image_token_ids = [tokenizer.get_vocab()[token] for token in MEDIA if token in tokenizer.get_vocab()]
        _check_token_ids(config, tokenizer)
        super().__init__(image_processor, tokenizer, chat_template=chat_template)
        image_processor.configure(config)
        patches = config.tile_side // config.patch_side
        self.tile_tokens, self.newlines = config.tile_tokens(patches, patches), config.newlines
        self.grids = bool(config.s2_scales)

    @staticmethod
    def options(config: PreTrainedConfig) -> dict[str, Any]:
        return {"config": config}

    @staticmethod
    def image_options(config: PreTrainedConfig) -> dict[str, Any]:
        side = config.vision_config.image_size
        return {"size": {"height": side, "width": side}}

    def __call__(
        self,
        text: str | Sequence[str] | None = None,
        images: Any = None,
        return_tensors: str | None = None,
        return_text_replacement_offsets: bool = False,
        **options: Any,
    ) -> BatchFeature:
        """Return the outputs of the tokenizer, which takes `options`; for images `pixel_values` [tiles, 3, side, side],
        and with several scales `image_grid_thw`; with `return_text_replacement_offsets` also the characters of each
        image in the text, before and after its placeholder was repeated. Raises ValueError if the texts do not have one
        placeholder for each image."""
        texts = [text] if isinstance(text, str) else list(text or ())
        images = [] if images is None else list(images) if isinstance(images, list | tuple) else [images]
        if (places := sum(one.count(PLACEHOLDER) for one in texts)) != len(images):
            raise ValueError(f"the text has {count_noun(places, 'placeholder')} for {count_noun(len(images), 'image')}")
        inputs: dict[str, Any] = {}
        grids: list[tuple[int, int, int]] = []
        if images:
            batch = self.image_processor(images=images)
            inputs["pixel_values"] = np.stack([np.asarray(tile, dtype=np.float32) for tile in batch["pixel_values"]])
            grids = [tuple(grid) for grid in batch["grids"]]
            if self.grids:
                inputs["image_grid_thw"] = np.array(grids, dtype=np.int64)
        expanded, offsets = _expand_placeholders(texts, [self._count_placeholders(grid) for grid in grids])
        # Callers of stock processors request token types, which the model does not take.
        options.pop("return_mm_token_type_ids", None)
        encoded = dict(self.tokenizer(expanded, return_tensors=return_tensors, **options))
        encoded.pop("token_type_ids", None)
        if return_tensors == "pt":
            inputs = {name: torch.from_numpy(value) for name, value in inputs.items()}
        if return_text_replacement_offsets:
            inputs["text_replacement_offsets"] = offsets
        return BatchFeature({**encoded, **inputs})

    def _count_placeholders(self, grid: tuple[int, int, int]) -> int:
        """Return placeholders of an image: line breaks end each tile, or with several scales the whole image."""
        tiles, rows, columns = grid
        if self.grids:
            return rows * columns * self.tile_tokens + self.newlines
        return tiles * (self.tile_tokens + self.newlines)

    def apply_chat_template(self, conversation: Any, *args: Any, **kwargs: Any) -> Any:
        """Render the chat template, with contents converted to texts."""
        flat = [
            _join_content(message, PLACEHOLDER if self.newlines else f"{PLACEHOLDER}\n") for message in conversation
        ]
        return super().apply_chat_template(flat, *args, **kwargs)

    def _get_num_multimodal_tokens(self, image_sizes: Any = None, **_: Any) -> dict[str, list[int]]:
        """Return the numbers of tokens of images (height, width), in the format of transformers' processors."""
        grids = [self.image_processor.grid(*size) for size in image_sizes or ()]
        return {"num_image_tokens": [self._count_placeholders(grid) for grid in grids]}


def _expand_placeholders(texts: Sequence[str], places: Sequence[int]) -> tuple[list[str], list[list[dict[str, Any]]]]:
    """Return texts in which the `<image>` of each image is repeated to its number of placeholders, and the spans of
    characters of each image before and after."""
    counts = iter(places)
    expanded, offsets = [], []
    for text in texts:
        out, end, spans = "", 0, []
        for match in re.finditer(re.escape(PLACEHOLDER), text):
            out += text[end : match.start()]
            new = PLACEHOLDER * next(counts)
            spans.append({"span": match.span(), "new_span": (len(out), len(out) + len(new))})
            out, end = out + new, match.end()
        expanded.append(out + text[end:])
        offsets.append(spans)
    return expanded, offsets


def _join_content(message: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Return a message with its content as a text. Rows have a line break after `<image>`: it is removed for models
    that end images with their own line breaks, as in VILA's data; VILA 1.5 has it in the text, once."""
    content = message.get("content")
    if not isinstance(content, list):
        return dict(message)
    text, after_image = "", False
    for part in content:
        image = part.get("type") == "image"
        text += place if image else part["text"].removeprefix("\n") if after_image else part["text"]
        after_image = image
    return {**message, "content": text}


def _check_token_ids(config: NvilaLiteConfig, tokenizer: Any) -> None:
    stated = [("image_token_id", config.image_token_id, tokenizer.convert_tokens_to_ids(PLACEHOLDER))]
    if config.newlines:
        ids = tokenizer("\n", add_special_tokens=False)["input_ids"]
        stated.append(("newline_token_id", config.newline_token_id, ids[0] if len(ids) == 1 else ids))
    for key, config_value, tokenizer_value in stated:
        if config_value != tokenizer_value:
            raise ModelError(
                f"{config.name_or_path or 'the model'}: {key} is {config_value!r:.80} in config.json but "
                f"{tokenizer_value!r:.80} in the tokenizer: the model could not use its images. Copy all files from "
                "one model."
            )
