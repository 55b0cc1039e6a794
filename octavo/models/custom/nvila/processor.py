"""Text and images to NVILA's inputs: each image's `<image>` becomes as many as the model has features for it.

The line breaks that end a tile are places too, filled by the model with their embedding. Written as text they would be
joined with what follows them into other tokens.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from transformers import BatchFeature, PreTrainedConfig, ProcessorMixin

from octavo.models.custom.nvila.configuration import NvilaLiteConfig
from octavo.models.custom.nvila.images import NvilaImages
from octavo.models.custom.nvila.three_folders import IMAGE, MEDIA
from octavo.models.errors import ModelError
from octavo.models.folder.processor_base import Telling

PLACE = IMAGE


class NvilaProcessor(Telling, ProcessorMixin):
    """`processor(text=, images=)` and `processor.apply_chat_template(messages)` of a model of `config`.

    Chat templates of NVILA take contents as texts, so parts are written as one, images as `<image>`. Tokens of media
    are no words: those of all of them are `image_token_ids`, which no text may spell. Raises ModelError where the
    tokenizer is not that of the configuration.
    """

    image_token = PLACE
    image_class = NvilaImages

    def __init__(
        self,
        image_processor: Any = None,
        tokenizer: Any = None,
        chat_template: str | None = None,
        config: NvilaLiteConfig | None = None,
    ) -> None:
        assert config is not None
        self.image_token_id = tokenizer.convert_tokens_to_ids(PLACE)
        self.image_token_ids = [tokenizer.get_vocab()[token] for token in MEDIA if token in tokenizer.get_vocab()]
        _check(config, tokenizer)
        super().__init__(image_processor, tokenizer, chat_template=chat_template)  # type: ignore[call-arg]
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

    def __call__(  # type: ignore[override]
        self,
        text: str | Sequence[str] | None = None,
        images: Any = None,
        return_tensors: str | None = None,
        return_text_replacement_offsets: bool = False,
        **more: Any,
    ) -> BatchFeature:
        """`input_ids` and what the tokenizer adds, of images `pixel_values` [tiles, 3, side, side], and of several
        scales `image_grid_thw`; if asked, which characters of a text each image took and grew into. Raises ValueError
        where texts have not one place for each image."""
        texts = [text] if isinstance(text, str) else list(text or ())
        images = [] if images is None else list(images) if isinstance(images, list | tuple) else [images]
        if (places := sum(one.count(PLACE) for one in texts)) != len(images):
            raise ValueError(f"the text has {places} places for {len(images)} images")
        made: dict[str, Any] = {}
        grids: list[tuple[int, int, int]] = []
        if images:
            found = self.image_processor(images=images)
            made["pixel_values"] = np.stack([np.asarray(tile, dtype=np.float32) for tile in found["pixel_values"]])
            grids = [tuple(grid) for grid in found["grids"]]
            if self.grids:
                made["image_grid_thw"] = np.array(grids, dtype=np.int64)
        grown, told = _grown(texts, [self._places(grid) for grid in grids])
        more.pop("return_mm_token_type_ids", None)
        encoded = dict(self.tokenizer(grown, return_tensors=return_tensors, **more))
        encoded.pop("token_type_ids", None)
        if return_tensors == "pt":
            made = {name: torch.from_numpy(value) for name, value in made.items()}
        if return_text_replacement_offsets:
            made["text_replacement_offsets"] = told
        return BatchFeature({**encoded, **made})

    def _places(self, grid: tuple[int, int, int]) -> int:
        """Of an image: line breaks end each tile, or of several scales the whole."""
        tiles, rows, columns = grid
        if self.grids:
            return rows * columns * self.tile_tokens + self.newlines
        return tiles * (self.tile_tokens + self.newlines)

    def apply_chat_template(self, conversation: Any, *args: Any, **kwargs: Any) -> Any:
        """The chat template over contents that are texts."""
        flat = [_flat(message, PLACE if self.newlines else f"{PLACE}\n") for message in conversation]
        return super().apply_chat_template(flat, *args, **kwargs)

    def _get_num_multimodal_tokens(self, image_sizes: Any = None, **_: Any) -> dict[str, list[int]]:
        """Of images (height, width), as transformers' processors say it."""
        grids = [self.image_processor.grid(*size) for size in image_sizes or ()]
        return {"num_image_tokens": [self._places(grid) for grid in grids]}


def _grown(texts: Sequence[str], places: Sequence[int]) -> tuple[list[str], list[list[dict[str, Any]]]]:
    """Texts with as many `<image>` as each image has places, and where each stood and stands."""
    counts = iter(places)
    grown, told = [], []
    for text in texts:
        out, end, spans = "", 0, []
        for match in re.finditer(re.escape(PLACE), text):
            out += text[end : match.start()]
            new = PLACE * next(counts)
            spans.append({"span": match.span(), "new_span": (len(out), len(out) + len(new))})
            out, end = out + new, match.end()
        grown.append(out + text[end:])
        told.append(spans)
    return grown, told


def _flat(message: Mapping[str, Any], place: str) -> dict[str, Any]:
    """A message whose content is a text. Rows write a line break behind `<image>`: of models that end images with one
    of their own it goes, as in VILA's data; VILA 1.5 has it in the text, once."""
    content = message.get("content")
    if not isinstance(content, list):
        return dict(message)
    text, behind = "", False
    for part in content:
        image = part.get("type") == "image"
        text += place if image else part["text"].removeprefix("\n") if behind else part["text"]
        behind = image
    return {**message, "content": text}


def _check(config: NvilaLiteConfig, tokenizer: Any) -> None:
    stated = [("image_token_id", config.image_token_id, tokenizer.convert_tokens_to_ids(PLACE))]
    if config.newlines:
        found = tokenizer("\n", add_special_tokens=False)["input_ids"]
        stated.append(("newline_token_id", config.newline_token_id, found[0] if len(found) == 1 else found))
    for key, theirs, ours in stated:
        if theirs != ours:
            raise ModelError(
                f"{config.name_or_path or 'the model'}: config.json gives {key} {theirs!r:.80}, and its tokenizer "
                f"{ours!r:.80}: the model could not take its images. Copy all files from one model."
            )
