"""Text and images to NVILA's inputs: each image's `<image>` becomes as many as the model has features for it.

The line breaks that end a tile are places too, filled by the model with their embedding. Written as text they would be
joined with what follows them into other tokens.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import BatchFeature, PreTrainedTokenizerBase, ProcessorMixin

from octavo.models.chat import WithDeadline
from octavo.models.errors import ModelError
from octavo.models.nvila.configuration import NvilaLiteConfig
from octavo.models.nvila.images import NvilaLiteImages

PLACE = "<image>"


class NvilaProcessor(WithDeadline, ProcessorMixin):
    """`processor(text=, images=)` and `processor.apply_chat_template(messages)` of a model of `config`.

    Chat templates of NVILA take contents as texts, so parts are written as one, images as `<image>`.
    """

    image_token = PLACE

    def __init__(
        self,
        image_processor: Any = None,
        tokenizer: Any = None,
        chat_template: str | None = None,
        config: NvilaLiteConfig | None = None,
    ) -> None:
        assert config is not None
        super().__init__(image_processor, tokenizer, chat_template=chat_template)  # type: ignore[call-arg]
        self.image_token_id = tokenizer.convert_tokens_to_ids(PLACE)
        cells = config.vision_config.image_size // config.vision_config.patch_size
        self.tile_places = config.tile_tokens(cells, cells) + config.newlines

    @classmethod
    def of(
        cls, folder: Path, image_processor: NvilaLiteImages, tokenizer: PreTrainedTokenizerBase, template: str | None,
        config: NvilaLiteConfig,
    ) -> NvilaProcessor:  # fmt: skip
        """The processor of a folder whose parts agree. Raises ModelError where tokens or sizes are not those that
        config.json speaks of."""
        side = config.vision_config.image_size
        stated = [("image_token_id", config.image_token_id, tokenizer.convert_tokens_to_ids(PLACE))]
        if config.newlines:
            found = tokenizer("\n", add_special_tokens=False)["input_ids"]
            stated.append(("newline_token_id", config.newline_token_id, found[0] if len(found) == 1 else found))
        size = image_processor.size
        stated += [("image_size", side, size["height"]), ("image_size", side, size["width"])]
        for key, theirs, ours in stated:
            if theirs != ours:
                raise ModelError(
                    f"{folder}: config.json gives {key} {theirs!r:.80}, and its tokenizer or image processor "
                    f"{ours!r:.80}: the model could not take its images. Copy all files from one model."
                )
        return cls(image_processor, tokenizer, chat_template=template, config=config)

    def __call__(  # type: ignore[override]
        self,
        text: str | Sequence[str] | None = None,
        images: Any = None,
        return_tensors: str | None = None,
        **more: Any,
    ) -> BatchFeature:
        """`input_ids` and what the tokenizer adds, of images `pixel_values` [tiles, 3, side, side]. Raises ValueError
        where texts have not one place for each image."""
        texts = [text] if isinstance(text, str) else list(text or ())
        images = [] if images is None else list(images) if isinstance(images, list | tuple) else [images]
        if (places := sum(one.count(PLACE) for one in texts)) != len(images):
            raise ValueError(f"the text has {places} places for {len(images)} images")
        made: dict[str, Any] = {}
        if images:
            found = self.image_processor(images=images)
            made["pixel_values"] = np.stack([np.asarray(tile, dtype=np.float32) for tile in found["pixel_values"]])
            counts = iter(self.places(found))
            texts = [re.sub(re.escape(PLACE), lambda _: PLACE * next(counts), one) for one in texts]
            made |= self.beside(found)
        more.pop("return_mm_token_type_ids", None)
        encoded = dict(self.tokenizer(texts, return_tensors=return_tensors, **more))
        encoded.pop("token_type_ids", None)
        if return_tensors == "pt":
            made = {name: torch.from_numpy(value) for name, value in made.items()}
        return BatchFeature({**encoded, **made})

    def places(self, found: Mapping[str, Any]) -> list[int]:
        """How many features each image has."""
        return [int(tiles) * self.tile_places for tiles in found["num_patches"]]

    def beside(self, found: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """What the model wants of images beside their pixels."""
        return {}

    def apply_chat_template(self, conversation: Any, *args: Any, **kwargs: Any) -> Any:
        """The chat template over contents that are texts."""
        return super().apply_chat_template([_flat(message) for message in conversation], *args, **kwargs)

    def _get_num_multimodal_tokens(self, image_sizes: Any = None, **_: Any) -> dict[str, list[int]]:
        """Of images (height, width), as transformers' processors say it."""
        sizes = [self.image_processor.tiles(*size) for size in image_sizes or ()]
        return {"num_image_tokens": [tiles * self.tile_places for tiles in sizes], "num_image_patches": sizes}


def _flat(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if not isinstance(content, list):
        return dict(message)
    return {**message, "content": "".join(PLACE if part.get("type") == "image" else part["text"] for part in content)}
