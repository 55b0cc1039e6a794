"""Processors of models that see images, without torchvision: text and PIL images in, the model's tensors out.

The stock processors want a video processor, which wants torchvision; without it AutoProcessor fails, or quietly
returns only the tokenizer. Here the same classes are used through thin subclasses whose `__init__` has no
`video_processor`, with the image processors in their PIL form. Imported when such a processor is loaded: a machine
that only measures models needs no Pillow.
"""

from __future__ import annotations

from typing import Any

from transformers import ProcessorMixin
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.internvl.processing_internvl import InternVLProcessor
from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

from octavo.models.chat import WithDeadline
from octavo.models.errors import ModelError


class _WithoutVideo(WithDeadline):
    def __init__(self, image_processor: Any = None, tokenizer: Any = None, chat_template: str | None = None, **_: Any):
        super().__init__(image_processor, tokenizer, None, chat_template=chat_template)  # type: ignore[call-arg]


class Qwen3VLImageTextProcessor(_WithoutVideo, Qwen3VLProcessor):
    """Qwen3VLProcessor for images and text (dense and MoE)."""


class Qwen25VLImageTextProcessor(_WithoutVideo, Qwen2_5_VLProcessor):
    """Qwen2_5_VLProcessor for images and text."""


class InternVLImageTextProcessor(WithDeadline, InternVLProcessor):
    """InternVLProcessor for images and text."""

    def __init__(
        self,
        image_processor: Any = None,
        tokenizer: Any = None,
        image_seq_length: int = 256,
        chat_template: str | None = None,
        **_: Any,
    ):
        super().__init__(image_processor, tokenizer, None, image_seq_length, chat_template=chat_template)


# model_type -> (processor, image processor)
PROCESSORS: dict[str, tuple[type[ProcessorMixin], type]] = {
    "qwen3_vl": (Qwen3VLImageTextProcessor, Qwen2VLImageProcessorPil),
    "qwen3_vl_moe": (Qwen3VLImageTextProcessor, Qwen2VLImageProcessorPil),
    "qwen2_5_vl": (Qwen25VLImageTextProcessor, Qwen2VLImageProcessorPil),
    "internvl": (InternVLImageTextProcessor, GotOcr2ImageProcessorPil),
}


def limit(image_processor: Any, given: dict[str, int]) -> None:
    """Bound the size of one image, as `load_processor` says. Raises ModelError for limits that cannot be."""
    if not given:
        return
    low, high = given.get("min_pixels"), given.get("max_pixels")
    if low is not None and high is not None and low > high:
        raise ModelError(f"min_pixels {low} is above max_pixels {high}. Swap them or remove one.")
    if isinstance(image_processor, Qwen2VLImageProcessorPil):
        unit, what = (image_processor.patch_size * image_processor.merge_size) ** 2, "token"
    else:
        unit, what = image_processor.size["height"] * image_processor.size["width"], "tile"
    for key, value in given.items():
        if value < unit:
            raise ModelError(f"{key} {value} is less than one {what} of this model. Give at least {unit}.")
    if isinstance(image_processor, Qwen2VLImageProcessorPil):
        size = dict(image_processor.size)
        if high is not None:
            size |= {"longest_edge": high, "shortest_edge": min(size["shortest_edge"], high)}
        if low is not None:
            size |= {"shortest_edge": low, "longest_edge": max(size["longest_edge"], low)}
        image_processor.size = type(image_processor.size)(**size)
    else:
        if high is not None:
            image_processor.max_patches = high // unit
            image_processor.min_patches = min(image_processor.min_patches, image_processor.max_patches)
        if low is not None:
            image_processor.min_patches = -(-low // unit)
            image_processor.max_patches = max(image_processor.max_patches, image_processor.min_patches)
