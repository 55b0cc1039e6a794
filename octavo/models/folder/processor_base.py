"""The properties of a processor that the data package needs, as base classes to mix into a stock class:

inputs         additional tensors for the model, and what the first dimension of each counts
               (octavo.data.encoding.sample)
tells_places   calls can return which characters belong to each image, with the tokens and line breaks around it
images_by_row  images are passed row by row, because the number of images in a row affects their processing
image_tokens   the number of tokens of an image, from its size and whether it is the only one of its row
trimmed        the pixels of one row without the padding to larger images of other rows
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from transformers import PreTrainedConfig

from octavo.models.folder.chat import WithDeadline


class ProcessorTraits(WithDeadline):
    """The default properties of a processor: calls can return the positions of images, and images are independent."""

    tells_places = True
    images_by_row = False
    inputs: ClassVar[Mapping[str, str]] = {}

    @staticmethod
    def options(config: PreTrainedConfig) -> dict[str, Any]:
        """Return the fields of processor_config.json that follow from the model's configuration."""
        return {}

    @staticmethod
    def image_options(config: PreTrainedConfig) -> dict[str, Any]:
        """Return the fields of preprocessor_config.json that follow from the model's configuration."""
        return {}

    def image_tokens(self, size: tuple[int, int], only_image: bool) -> int:
        """Return the number of tokens of an image of (height, width), including the tokens around it."""
        counts: dict[str, list[int]] = self._get_num_multimodal_tokens(image_sizes=[size])  # type: ignore[attr-defined]
        return counts["num_image_tokens"][0]

    def _count_tokens(self, text: str) -> int:
        return len(self.tokenizer(text, add_special_tokens=False)["input_ids"])


class TraitsWithoutVideo(ProcessorTraits):
    """The properties of a stock class that also takes a video processor, which is omitted."""

    def __init__(
        self, image_processor: Any = None, tokenizer: Any = None, chat_template: str | None = None, **options: Any
    ):
        super().__init__(image_processor, tokenizer, None, chat_template=chat_template, **options)  # type: ignore[call-arg]
