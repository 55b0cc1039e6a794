"""What a processor says of itself to the data side, in front of a stock class:

inputs         further tensors for the model, and what the first dimension of each counts (octavo.data.encoding.sample)
tells_places   calls may ask which characters stand for each image: marks and line breaks around it are its own
images_by_row  images are given row by row: how many a row has decides what becomes of them
image_tokens   how many tokens an image becomes, by its size and whether it is the only one of its row
trimmed        the pixels of one row without padding to the larger images of its neighbours
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from transformers import PreTrainedConfig

from octavo.models.folder.chat import WithDeadline


class Telling(WithDeadline):
    """What a processor says of itself to the data side; here: it tells places, and nothing else is special."""

    tells_places = True
    images_by_row = False
    inputs: ClassVar[Mapping[str, str]] = {}

    @staticmethod
    def options(config: PreTrainedConfig) -> dict[str, Any]:
        """What processor_config.json says, by the model's configuration."""
        return {}

    @staticmethod
    def image_options(config: PreTrainedConfig) -> dict[str, Any]:
        """What preprocessor_config.json says, by the model's configuration."""
        return {}

    def image_tokens(self, size: tuple[int, int], alone: bool) -> int:
        """Tokens that an image of (height, width) becomes, of its own marks too."""
        found: int = self._get_num_multimodal_tokens(image_sizes=[size])["num_image_tokens"][0]  # type: ignore[attr-defined]
        return found

    def _counted(self, text: str) -> int:
        return len(self.tokenizer(text, add_special_tokens=False)["input_ids"])  # type: ignore[attr-defined]


class TellingWithoutVideo(Telling):
    """Of a stock class that also takes a video processor."""

    def __init__(
        self, image_processor: Any = None, tokenizer: Any = None, chat_template: str | None = None, **own: Any
    ):
        super().__init__(image_processor, tokenizer, None, chat_template=chat_template, **own)  # type: ignore[call-arg]
