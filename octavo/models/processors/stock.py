"""Processors of models that take images: they convert text and PIL images to the model's tensors.

They are the stock classes of AutoProcessor without the video processor, which needs torchvision: without torchvision,
AutoProcessor fails or silently returns only the tokenizer. The classes here are thin subclasses whose `__init__` has no
`video_processor`; for families that train on videos, :mod:`octavo.models.processors.video` replaces it. The other
properties of a family are defined in :mod:`octavo.models.folder.processor_base`. Two stock classes cannot be created
without packages that only videos need; this module has the missing parts.

`image_class` of each is the image processor that AutoProcessor uses, which computes with torchvision, or its PIL form
if torchvision is not installed, which resizes slightly differently (`processors.image_backend` returns which). This
module is imported when a processor is loaded, so benchmarks of models need no Pillow.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, cast

import numpy as np
from transformers import BatchFeature, PreTrainedConfig, PreTrainedTokenizerBase, ProcessorMixin
from transformers.image_processing_utils import select_best_resolution
from transformers.models.ernie4_5_vl_moe.processing_ernie4_5_vl_moe import Ernie4_5_VLMoeProcessor
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
from transformers.models.glm4v.processing_glm4v import Glm4vProcessor
from transformers.models.internvl.processing_internvl import InternVLProcessor
from transformers.models.llava_onevision.processing_llava_onevision import LlavaOnevisionProcessor
from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
from transformers.models.qwen2_vl.processing_qwen2_vl import Qwen2VLProcessor
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.models.smolvlm.processing_smolvlm import SmolVLMProcessor
from transformers.utils import is_torchvision_available

from octavo.models.custom.composed import IMAGE_TOKEN
from octavo.models.custom.nvila.processor import NvilaProcessor
from octavo.models.folder.chat import WithDeadline
from octavo.models.folder.processor_base import ProcessorTraits, TraitsWithoutVideo
from octavo.models.processors.frames import as_images
from octavo.models.processors.llava import ComposedTileProcessor, LlavaImageTextProcessor
from octavo.models.processors.video import VideoProcessor, metadata

# The type checker sees only the first branch: the classes of both have the same interface, but no common type.
if TYPE_CHECKING or is_torchvision_available():
    from transformers.models.ernie4_5_vl_moe.image_processing_ernie4_5_vl_moe import (
        Ernie4_5_VLMoeImageProcessor as ErnieImages,
    )
    from transformers.models.gemma3.image_processing_gemma3 import Gemma3ImageProcessor as Gemma3Images
    from transformers.models.glm4v.image_processing_glm4v import Glm4vImageProcessor as Glm4vImages
    from transformers.models.got_ocr2.image_processing_got_ocr2 import GotOcr2ImageProcessor as GotOcr2Images
    from transformers.models.llava_onevision.image_processing_llava_onevision import (
        LlavaOnevisionImageProcessor as LlavaOnevisionImages,
    )
    from transformers.models.pixtral.image_processing_pixtral import PixtralImageProcessor as PixtralImages
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor as Qwen2VLImages
    from transformers.models.smolvlm.image_processing_smolvlm import SmolVLMImageProcessor as SmolVLMImages
else:
    from transformers.models.ernie4_5_vl_moe.image_processing_pil_ernie4_5_vl_moe import (
        Ernie4_5_VLMoeImageProcessorPil as ErnieImages,
    )
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil as Gemma3Images
    from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil as Glm4vImages
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil as GotOcr2Images
    from transformers.models.llava_onevision.image_processing_pil_llava_onevision import (
        LlavaOnevisionImageProcessorPil as LlavaOnevisionImages,
    )
    from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil as PixtralImages
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil as Qwen2VLImages
    from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil as SmolVLMImages


class _WithoutVideo(WithDeadline):
    def __init__(
        self, image_processor: Any = None, tokenizer: Any = None, chat_template: str | None = None, **_: object
    ):
        super().__init__(image_processor, tokenizer, None, chat_template=chat_template)  # type: ignore[call-arg]


class _Shot(Protocol):
    """A chosen part of a video: its total number of frames, frames per second, the chosen frames and their size."""

    total: int
    fps: float
    indices: Sequence[int]
    size: tuple[int, int]
    frames: np.ndarray


class _VideoTraits:
    """The properties of a processor for videos that the data package needs: `videos`, or None if it does not support
    them; their tensors in `inputs`; whether `frames_are_images`; and `why_not_images`, the reason why prompts of the
    generation engine cannot contain videos as images, or None if they can."""

    videos: VideoProcessor | None = None
    video_processor: VideoProcessor | None = None  # the name that stock code uses
    frames_are_images = False
    why_not_images: ClassVar[str | None] = None

    def to_dict(self) -> dict[str, Any]:
        """Return the fields of processor_config.json, without the two that cannot be written as JSON."""
        left_out = {"videos", "video_processor"}
        return {key: value for key, value in super().to_dict().items() if key not in left_out}  # type: ignore[misc]

    def video_text(self, shot: _Shot) -> str:
        """Return the text of a video, with its placeholders."""
        assert self.videos is not None
        video_info: dict[str, Any] = {"video_metadata": [metadata(shot.total, shot.fps, shot.indices)]}
        if self.videos.tile is None:
            video_info["video_grid_thw"] = np.array([self.videos.grid(len(shot.indices), *shot.size)])
        else:
            video_info["pixel_values_videos"] = [np.empty((len(shot.indices), 0))]
        return self.replace_video_token(video_info, 0)  # type: ignore[attr-defined]

    def as_images(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return a batch of tensors in host memory, with its videos as images
        (:mod:`octavo.models.processors.frames`)."""
        assert self.videos is not None
        return as_images(batch, self.videos.merge, self.image_token_id)  # type: ignore[attr-defined]

    def video_inputs(self, shots: Sequence[_Shot]) -> dict[str, Any]:
        """Return the arguments of a call for decoded videos; `frames` of each belong to its `indices`."""
        metadata_list = [metadata(shot.total, shot.fps, shot.indices) for shot in shots]
        return {"videos": [shot.frames for shot in shots], "video_metadata": metadata_list} if shots else {}


class Qwen3VLImageTextProcessor(_VideoTraits, _WithoutVideo, Qwen3VLProcessor):
    """Qwen3VLProcessor for images and text (dense and MoE), and videos where `videos` are given."""

    image_class = Qwen2VLImages
    inputs: ClassVar[dict[str, str]] = {"pixel_values_videos": "patch", "video_grid_thw": "video"}


class Qwen2VLImageTextProcessor(_WithoutVideo, Qwen2VLProcessor):
    """Qwen2VLProcessor for images and text."""

    image_class = Qwen2VLImages


class ComposedImageTextProcessor(_WithoutVideo, Qwen2VLProcessor):
    """Qwen2VLProcessor for images and text, whose token of images is composed models' `<image>`."""

    image_class = Qwen2VLImages

    def __init__(
        self, image_processor: object, tokenizer: PreTrainedTokenizerBase, chat_template: str | None = None, **_: object
    ):
        super().__init__(image_processor, tokenizer, chat_template)
        self.image_token, self.image_token_id = IMAGE_TOKEN, tokenizer.convert_tokens_to_ids(IMAGE_TOKEN)


class Qwen25VLImageTextProcessor(_VideoTraits, _WithoutVideo, Qwen2_5_VLProcessor):
    """Qwen2_5_VLProcessor for images and text, and videos where `videos` are given."""

    image_class = Qwen2VLImages
    why_not_images = "videos of qwen2_5_vl have positions in seconds, and prompts of the engine contain only images"
    inputs: ClassVar[dict[str, str]] = {**Qwen3VLImageTextProcessor.inputs, "second_per_grid_ts": "video"}


class InternVLImageTextProcessor(_VideoTraits, WithDeadline, InternVLProcessor):
    """InternVLProcessor for images and text, and videos, whose frames are images of one tile."""

    image_class = GotOcr2Images
    frames_are_images = True

    def __call__(self, images: Any = None, text: Any = None, videos: Any = None, **options: Any) -> BatchFeature:
        """Call the stock class if there are no videos, else return the tiles of images and frames in the order of the
        text. The stock class supports only videos of equal length."""
        if videos is None:
            return super().__call__(images=images, text=text, **options)
        texts = [text] if isinstance(text, str) else text
        order = re.findall(f"{re.escape(self.image_token)}|{re.escape(self.video_token)}", "".join(texts))
        # videos of different lengths cannot be stacked to a tensor until they are one row of tiles
        batch = ProcessorMixin.__call__(self, images, texts, videos, **{**options, "return_tensors": None})
        clips = iter(batch.pop("pixel_values_videos"))
        counts = iter([] if images is None else np.asarray(batch.pop("num_patches")).tolist())
        tiles = np.empty(0) if images is None else np.asarray(batch["pixel_values"])
        ordered_tiles, at = [], 0
        for token in order:
            if token == self.image_token:
                ordered_tiles.append(tiles[at : (at := at + next(counts))])
            else:
                ordered_tiles.append(next(clips))
        batch["pixel_values"] = np.concatenate(ordered_tiles)
        return BatchFeature(dict(batch), tensor_type=options.get("return_tensors"))

    def __init__(
        self,
        image_processor: Any = None,
        tokenizer: Any = None,
        image_seq_length: int = 256,
        chat_template: str | None = None,
        **_: object,
    ):
        super().__init__(image_processor, tokenizer, None, image_seq_length, chat_template=chat_template)


class FrameImages(Qwen2VLImages):
    """Qwen2VLImageProcessor for towers that take frames one by one: without `temporal_patch_size` in the folder, a
    patch has one frame instead of two."""

    temporal_patch_size = 1


class OneVision15ImageTextProcessor(Qwen25VLImageTextProcessor):
    """The processor of LLaVA-OneVision-1.5, whose folders name Qwen2_5_VLProcessor."""

    image_class = FrameImages


class PixtralImageTextProcessor(ProcessorTraits, ProcessorMixin):
    """Equivalent to PixtralProcessor, which cannot be imported without torchvision: rows of image tokens, a break token
    after each row and the end token after the last."""

    image_class = PixtralImages
    inputs = {"image_sizes": "image"}

    def __init__(
        self,
        image_processor: Any = None,
        tokenizer: Any = None,
        patch_size: int = 16,
        spatial_merge_size: int = 1,
        chat_template: str | None = None,
        **_: object,
    ):
        super().__init__(image_processor, tokenizer, chat_template=chat_template)
        self.patch_size, self.spatial_merge_size = patch_size, spatial_merge_size
        self.image_token, self.image_break_token, self.image_end_token = "[IMG]", "[IMG_BREAK]", "[IMG_END]"
        ids = tokenizer.convert_tokens_to_ids([self.image_token, self.image_break_token, self.image_end_token])
        self.image_token_id, self.image_break_token_id, self.image_end_token_id = ids
        self.image_token_ids = list(ids)  # all tokens that a placeholder is replaced with

    @staticmethod
    def options(config: PreTrainedConfig) -> dict[str, Any]:
        return {"patch_size": config.vision_config.patch_size, "spatial_merge_size": config.spatial_merge_size}

    @property
    def cell(self) -> int:
        """Pixels of a token, in each direction."""
        return self.patch_size * self.spatial_merge_size

    def _process_images(self, images: Any, **options: Any) -> Any:
        return super()._process_images(images, **{**options, "patch_size": self.cell})

    def replace_image_token(self, image_inputs: dict, image_idx: int, **_: object) -> str:
        """Return the text of one image."""
        height, width = (int(side) // self.cell for side in image_inputs["image_sizes"][image_idx])
        row = self.image_token * width + self.image_break_token
        return (row * height).removesuffix(self.image_break_token) + self.image_end_token

    def image_tokens(self, size: tuple[int, int], only_image: bool) -> int:
        """Return the number of tokens of an image, which is shrunk to the longest edge and cut into whole cells, with a
        break token after each row."""
        ratio = max(1.0, max(size) / self.image_processor.size["longest_edge"])
        tall, wide = (-(-int(side / ratio) // self.cell) for side in size)
        return tall * (wide + 1)

    def trimmed(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return the pixels, cropped to the largest image of the row."""
        height, width = np.asarray(row["image_sizes"]).max(axis=0)
        return {"pixel_values": row["pixel_values"][..., :height, :width]}

    @property
    def model_input_names(self) -> list[str]:
        """The names of the model's inputs."""
        return [*self.tokenizer.model_input_names, *self.image_processor.model_input_names]


class LlavaOnevisionImageTextProcessor(TraitsWithoutVideo, LlavaOnevisionProcessor):
    """LlavaOnevisionProcessor for images and text: the only image of a row is cut into tiles, several are not."""

    image_class = LlavaOnevisionImages
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

    def tiles(self, size: Sequence[int], only_image: bool) -> int:
        """Return the number of tiles of an image of (height, width), including the tile of the full image.
        `only_image`: whether it is the only image of its row."""
        if not only_image:
            return 1
        tall, wide = select_best_resolution(tuple(map(int, size)), self.image_processor.image_grid_pinpoints)
        side = self.image_processor.size["height"]
        return 1 + (tall // side) * (wide // side)

    def image_tokens(self, size: tuple[int, int], only_image: bool) -> int:
        """Return the number of tokens of an image; if a row has several, each has the tokens of its tile and a line
        break."""
        return super().image_tokens(size, only_image) if only_image else self.num_image_tokens + 1

    def trimmed(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return the pixels, cropped to the largest number of tiles of an image in the row."""
        sizes = np.asarray(row["image_sizes"])
        max_tiles = max(self.tiles(size, len(sizes) == 1) for size in sizes)
        return {"pixel_values": row["pixel_values"][:, :max_tiles]}


class _PlainTemplates(ProcessorMixin):
    """A base class that bypasses a stock class which needs its video processor to render a conversation."""

    def apply_chat_template(self, *args: Any, **kwargs: Any) -> Any:
        return ProcessorMixin.apply_chat_template(self, *args, **kwargs)


class SmolVLMImageTextProcessor(ProcessorTraits, _PlainTemplates, SmolVLMProcessor):
    """SmolVLMProcessor for images and text, without num2words, which is needed for the lengths of videos.

    Tiles are concatenated, [tiles, 1, channels, height, width], as if each were a row of the batch. The stock class
    pads each row with empty tiles, which the model discards.
    """

    image_class = SmolVLMImages
    images_by_row = True
    inputs = {"pixel_attention_mask": "pixels"}

    def __init__(
        self,
        image_processor: Any = None,
        tokenizer: Any = None,
        image_seq_len: int = 169,
        chat_template: str | None = None,
        **_: object,
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
        batch, texts = super()._process_images(images, **{**options, "return_tensors": None})
        counts = [
            sum(r * c + 1 for r, c in zip(rows, columns, strict=True))
            for rows, columns in zip(batch["rows"], batch["cols"], strict=True)
        ]
        for name in ("pixel_values", "pixel_attention_mask"):
            tiles = [np.asarray(row)[:count] for row, count in zip(batch[name], counts, strict=True)]
            batch[name] = np.concatenate(tiles)[:, None]
        return batch, texts

    def image_tokens(self, size: tuple[int, int], only_image: bool) -> int:
        """Return the number of tokens of the text that replaces the image's placeholder."""
        _, rows, columns = self.image_processor.get_number_of_image_patches(*size)
        return self._count_tokens(self.replace_image_token({"rows": [[rows]], "cols": [[columns]]}, 0))


class Gemma3ImageTextProcessor(ProcessorTraits, Gemma3Processor):
    """Gemma3Processor for images and text. `token_type_ids` mark the tokens of an image, whose attention is
    bidirectional."""

    image_class = Gemma3Images
    images_by_row = True
    inputs = {"token_type_ids": "token"}

    @property
    def feature_id(self) -> int:
        """The token that features of an image replace; `image_token_id` begins an image."""
        return cast(int, self.tokenizer.image_token_id)

    @staticmethod
    def options(config: PreTrainedConfig) -> dict[str, Any]:
        return {"image_seq_length": config.mm_tokens_per_image}

    def image_tokens(self, size: tuple[int, int], only_image: bool) -> int:
        """Return the number of tokens of the text that replaces the image's placeholder. An image with crops (pan and
        scan) has more."""
        return self._count_tokens(self.full_image_sequence)

    @staticmethod
    def image_options(config: PreTrainedConfig) -> dict[str, Any]:
        return {"size": _square(config.vision_config.image_size)}


class Glm4vImageTextProcessor(TraitsWithoutVideo, Glm4vProcessor):
    """Glm4vProcessor for images and text."""

    image_class = Glm4vImages


class Ernie45VLImageTextProcessor(TraitsWithoutVideo, Ernie4_5_VLMoeProcessor):
    """Ernie4_5_VLMoeProcessor for images and text. `moe_mm_token_type_ids` select experts of text or of images; the
    tokens around an image count as part of it."""

    image_class = ErnieImages
    inputs = {"moe_mm_token_type_ids": "token"}

    def create_moe_mm_token_type_ids(self, input_ids: Any) -> Any:
        """Return the stock result row by row, because the stock class supports only rows of equal length."""
        if isinstance(input_ids, list) and input_ids and isinstance(input_ids[0], list):
            return [super(Ernie45VLImageTextProcessor, self).create_moe_mm_token_type_ids(row) for row in input_ids]
        return super().create_moe_mm_token_type_ids(input_ids)


def _square(side: int) -> dict[str, int]:
    return {"height": side, "width": side}


PROCESSORS: Mapping[str, type[ProcessorMixin]] = {
    processor.__name__: processor
    for processor in (
        Qwen3VLImageTextProcessor,
        Qwen2VLImageTextProcessor,
        ComposedImageTextProcessor,
        Qwen25VLImageTextProcessor,
        InternVLImageTextProcessor,
        OneVision15ImageTextProcessor,
        PixtralImageTextProcessor,
        LlavaImageTextProcessor,
        ComposedTileProcessor,
        LlavaOnevisionImageTextProcessor,
        SmolVLMImageTextProcessor,
        Gemma3ImageTextProcessor,
        Glm4vImageTextProcessor,
        Ernie45VLImageTextProcessor,
        NvilaProcessor,
    )
}
"""Processors by the names that records of families (:mod:`octavo.base.model_families`) use."""
