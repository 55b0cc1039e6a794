"""Processors of Mistral 3, LLaVA-OneVision (2024), SmolVLM, Gemma 3, GLM-4V and Ernie 4.5 VL, for images and text.

Stock classes through thin subclasses, which say what the data side must know of a family:

    inputs         further tensors for the model, and what the first dimension of each counts
    (octavo.data.encoding.inputs) tells_places   calls may ask which characters stand for each image: marks and line
    breaks around it are its own images_by_row  images are given row by row: how many a row has decides what becomes of
    them image_tokens   how many tokens an image becomes, by its size and whether it is the only one of its row trimmed
    the pixels of one row without padding to the larger images of its neighbours

Two stock classes cannot be made without packages that only videos need; what is missing of them stands here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from transformers import PreTrainedConfig, ProcessorMixin
from transformers.image_processing_utils import select_best_resolution
from transformers.models.ernie4_5_vl_moe.processing_ernie4_5_vl_moe import Ernie4_5_VLMoeProcessor
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
from transformers.models.glm4v.processing_glm4v import Glm4vProcessor
from transformers.models.llava_onevision.processing_llava_onevision import LlavaOnevisionProcessor
from transformers.models.smolvlm.processing_smolvlm import SmolVLMProcessor

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


class PixtralImageTextProcessor(Telling, ProcessorMixin):
    """What PixtralProcessor is, which cannot be imported without torchvision: rows of image tokens, a break token
    behind each row and the end token behind the last."""

    inputs = {"image_sizes": "image"}

    def __init__(
        self,
        image_processor: Any = None,
        tokenizer: Any = None,
        patch_size: int = 16,
        spatial_merge_size: int = 1,
        chat_template: str | None = None,
        **_: Any,
    ):
        super().__init__(image_processor, tokenizer, chat_template=chat_template)  # type: ignore[call-arg]
        self.patch_size, self.spatial_merge_size = patch_size, spatial_merge_size
        self.image_token, self.image_break_token, self.image_end_token = "[IMG]", "[IMG_BREAK]", "[IMG_END]"
        ids = tokenizer.convert_tokens_to_ids([self.image_token, self.image_break_token, self.image_end_token])
        self.image_token_id, self.image_break_token_id, self.image_end_token_id = ids

    @staticmethod
    def options(config: PreTrainedConfig) -> dict[str, Any]:
        return {"patch_size": config.vision_config.patch_size, "spatial_merge_size": config.spatial_merge_size}

    @property
    def image_token_ids(self) -> list[int]:
        """All that a placeholder grows into."""
        return [self.image_token_id, self.image_break_token_id, self.image_end_token_id]

    @property
    def cell(self) -> int:
        """Pixels a token, in each direction."""
        return self.patch_size * self.spatial_merge_size

    def _process_images(self, images: Any, **options: Any) -> Any:
        return super()._process_images(images, **{**options, "patch_size": self.cell})

    def replace_image_token(self, image_inputs: dict, image_idx: int, **_: Any) -> str:
        """The text of one image."""
        height, width = (int(side) // self.cell for side in image_inputs["image_sizes"][image_idx])
        row = self.image_token * width + self.image_break_token
        return (row * height).removesuffix(self.image_break_token) + self.image_end_token

    def image_tokens(self, size: tuple[int, int], alone: bool) -> int:
        """Shrunk to the longest edge, then whole cells, and a mark behind each row."""
        ratio = max(1.0, max(size) / self.image_processor.size["longest_edge"])
        tall, wide = (-(-int(side / ratio) // self.cell) for side in size)
        return tall * (wide + 1)

    def trimmed(self, made: Mapping[str, Any]) -> dict[str, Any]:
        """Pixels as large as the largest image of the row."""
        height, width = np.asarray(made["image_sizes"]).max(axis=0)
        return {"pixel_values": made["pixel_values"][..., :height, :width]}

    @property
    def model_input_names(self) -> list[str]:
        """What the model takes."""
        return [*self.tokenizer.model_input_names, *self.image_processor.model_input_names]


class LlavaOnevisionImageTextProcessor(TellingWithoutVideo, LlavaOnevisionProcessor):
    """LlavaOnevisionProcessor for images and text: the only image of a row is cut into tiles, of several none is."""

    images_by_row = True
    inputs = {"image_sizes": "image", "batch_num_images": "row"}

    @staticmethod
    def options(config: PreTrainedConfig) -> dict[str, Any]:
        vision = config.vision_config
        return {
            "num_image_tokens": (vision.image_size // vision.patch_size) ** 2,
            "vision_feature_select_strategy": config.vision_feature_select_strategy,
            "vision_aspect_ratio": config.vision_aspect_ratio,
        }

    @staticmethod
    def image_options(config: PreTrainedConfig) -> dict[str, Any]:
        return {"image_grid_pinpoints": config.image_grid_pinpoints, "size": _square(config.vision_config.image_size)}

    def tiles(self, size: Sequence[int], alone: bool) -> int:
        """Tiles of an image of (height, width), the whole of it among them; `alone`: the only one of its row."""
        if not alone:
            return 1
        tall, wide = select_best_resolution(list(map(int, size)), self.image_processor.image_grid_pinpoints)
        side = self.image_processor.size["height"]
        return 1 + (tall // side) * (wide // side)

    def image_tokens(self, size: tuple[int, int], alone: bool) -> int:
        """Of one among several: those of the tower, and a line break."""
        return super().image_tokens(size, alone) if alone else self.num_image_tokens + 1

    def trimmed(self, made: Mapping[str, Any]) -> dict[str, Any]:
        """As many tiles as the image of most tiles has."""
        sizes = np.asarray(made["image_sizes"])
        most = max(self.tiles(size, len(sizes) == 1) for size in sizes)
        return {"pixel_values": made["pixel_values"][:, :most]}


class _PlainTemplates(ProcessorMixin):
    """In front of a stock class that asks its video processor for frames before it writes a conversation."""

    def apply_chat_template(self, *args: Any, **kwargs: Any) -> Any:
        return ProcessorMixin.apply_chat_template(self, *args, **kwargs)


class SmolVLMImageTextProcessor(Telling, _PlainTemplates, SmolVLMProcessor):
    """SmolVLMProcessor for images and text, without num2words, which writes the lengths of videos.

    Tiles come one behind the other, [tiles, 1, channels, height, width], as if each were a row of the batch; the stock
    class fills each row up with empty tiles, which the model throws away.
    """

    images_by_row = True
    inputs = {"pixel_attention_mask": "pixels"}

    def __init__(
        self,
        image_processor: Any = None,
        tokenizer: Any = None,
        image_seq_len: int = 169,
        chat_template: str | None = None,
        **_: Any,
    ):
        def token(name: str, default: str) -> str:
            return getattr(tokenizer, name, None) or default

        self.fake_image_token = token("fake_image_token", "<fake_token_around_image>")
        self.image_token, self.video_token = token("image_token", "<image>"), token("video_token", "<video>")
        self.image_token_id = tokenizer.convert_tokens_to_ids(self.image_token)
        self.end_of_utterance_token = token("end_of_utterance_token", "<end_of_utterance>")
        self.global_image_token = token("global_image_token", "<global-img>")
        self.image_seq_len = image_seq_len
        ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)

    @staticmethod
    def options(config: PreTrainedConfig) -> dict[str, Any]:
        vision = config.vision_config
        return {"image_seq_len": (vision.image_size // vision.patch_size // config.scale_factor) ** 2}

    @staticmethod
    def image_options(config: PreTrainedConfig) -> dict[str, Any]:
        return {"max_image_size": {"longest_edge": config.vision_config.image_size}}

    def _process_images(self, images: Any, **options: Any) -> Any:
        made, texts = super()._process_images(images, **{**options, "return_tensors": None})
        counts = [
            sum(r * c + 1 for r, c in zip(rows, columns, strict=True))
            for rows, columns in zip(made["rows"], made["cols"], strict=True)
        ]
        for name in ("pixel_values", "pixel_attention_mask"):
            tiles = [np.asarray(row)[:count] for row, count in zip(made[name], counts, strict=True)]
            made[name] = np.concatenate(tiles)[:, None]
        return made, texts

    def image_tokens(self, size: tuple[int, int], alone: bool) -> int:
        """Those of the text that stands for its tiles."""
        _, rows, columns = self.image_processor.get_number_of_image_patches(*size)
        return self._counted(self.replace_image_token({"rows": [[rows]], "cols": [[columns]]}, 0))


class Gemma3ImageTextProcessor(Telling, Gemma3Processor):
    """Gemma3Processor for images and text. `token_type_ids` say which tokens see each other both ways: those of one
    image."""

    images_by_row = True
    inputs = {"token_type_ids": "token"}

    @property
    def feature_id(self) -> int:
        """The token that features of an image replace; `image_token_id` opens an image."""
        found: int = self.tokenizer.image_token_id
        return found

    @staticmethod
    def options(config: PreTrainedConfig) -> dict[str, Any]:
        return {"image_seq_length": config.mm_tokens_per_image}

    def image_tokens(self, size: tuple[int, int], alone: bool) -> int:
        """Those of the text that stands for it; of one in pieces (pan and scan), which are counted with it, more."""
        return self._counted(self.full_image_sequence)

    @staticmethod
    def image_options(config: PreTrainedConfig) -> dict[str, Any]:
        return {"size": _square(config.vision_config.image_size)}


class Glm4vImageTextProcessor(TellingWithoutVideo, Glm4vProcessor):
    """Glm4vProcessor for images and text."""


class Ernie45VLImageTextProcessor(TellingWithoutVideo, Ernie4_5_VLMoeProcessor):
    """Ernie4_5_VLMoeProcessor for images and text. `moe_mm_token_type_ids` choose experts of text or of images, and
    count the marks around an image with it."""

    inputs = {"moe_mm_token_type_ids": "token"}

    def create_moe_mm_token_type_ids(self, input_ids: Any) -> Any:
        """Row by row: the stock class takes rows of one length alone."""
        if isinstance(input_ids, list) and input_ids and isinstance(input_ids[0], list):
            return [super(Ernie45VLImageTextProcessor, self).create_moe_mm_token_type_ids(row) for row in input_ids]
        return super().create_moe_mm_token_type_ids(input_ids)


def _square(side: int) -> dict[str, int]:
    return {"height": side, "width": side}
