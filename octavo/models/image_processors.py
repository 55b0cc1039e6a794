"""Processors of models that see images: text and PIL images in, the model's tensors out.

What a stock AutoProcessor is, but for videos: its video processor wants torchvision, without which AutoProcessor fails
or quietly returns only the tokenizer. Here the same classes are used through thin subclasses whose `__init__` has no
`video_processor`. Image processors are those that AutoProcessor takes, which compute with torchvision; where that is
not installed their PIL forms, which resize a little differently (`processors.pixels_by` says which). Imported when such
a processor is loaded: a machine that only measures models needs no Pillow.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import ProcessorMixin
from transformers.models.internvl.processing_internvl import InternVLProcessor
from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.utils import is_torchvision_available

from octavo.models.chat import WithDeadline
from octavo.models.errors import ModelError
from octavo.models.folder import read_json, stock
from octavo.models.nvila.images import NvilaLiteImages
from octavo.models.nvila.processor import NvilaProcessor

if is_torchvision_available():
    from transformers.models.got_ocr2.image_processing_got_ocr2 import GotOcr2ImageProcessor as GotOcr2Images
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor as Qwen2VLImages
else:
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil as GotOcr2Images
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil as Qwen2VLImages

_MOST = 1 << 16  # tokens of a small image
#: what the vision encoder of Qwen calls a size -> what its image processor does
_SAME = {
    "patch_size": "patch_size",
    "spatial_merge_size": "merge_size",
    "temporal_patch_size": "temporal_patch_size",
}


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
    "qwen3_vl": (Qwen3VLImageTextProcessor, Qwen2VLImages),
    "qwen3_vl_moe": (Qwen3VLImageTextProcessor, Qwen2VLImages),
    "qwen2_5_vl": (Qwen25VLImageTextProcessor, Qwen2VLImages),
    "internvl": (InternVLImageTextProcessor, GotOcr2Images),
    "nvila_lite": (NvilaProcessor, NvilaLiteImages),
}


def check_made(folder: Path, raw: Mapping[str, Any], image_processor: Any, made: Mapping[str, Any]) -> None:
    """What became of a small image: no more tokens than the model has places. Raises ModelError."""
    file = folder / "preprocessor_config.json"
    if "image_grid_thw" in made:
        tokens = int(torch.as_tensor(made["image_grid_thw"][0]).prod()) // image_processor.merge_size**2
        text = raw.get("text_config")
        places = text.get("max_position_embeddings", _MOST) if isinstance(text, dict) else _MOST
        if tokens > min(places, _MOST):
            raise ModelError(
                f"{file} makes {tokens} tokens of an image of 64 x 64 pixels, and {min(places, _MOST)} are the most "
                "here. Mend its sizes (min_pixels, size)."
            )


def check_agreement(folder: Path, raw: Mapping[str, Any], processor: Any) -> None:
    """That images are cut as the vision encoder of config.json takes them, and stand where it looks for them; of what
    both sides state. Raises ModelError, naming both files."""
    image, file, vision = processor.image_processor, "preprocessor_config.json", raw.get("vision_config") or {}
    stated: list[tuple[str, Any, str, Any]] = [
        ("image_token_id", raw.get("image_token_id"), "tokenizer_config.json", processor.image_token_id)
    ]
    if isinstance(image, Qwen2VLImages):
        video = folder / "video_preprocessor_config.json"
        more = read_json(video) if video.exists() else {}
        for theirs, ours in _SAME.items():
            stated += [
                (theirs, vision.get(theirs), file, getattr(image, ours)),
                (theirs, vision.get(theirs), video.name, more.get(ours)),
            ]
    elif all(key in vision for key in ("patch_size", "image_size")) and "downsample_ratio" in raw:
        with stock(f"{folder}/config.json: the tokens of a tile cannot be counted"):
            tall, wide = vision["patch_size"] if isinstance(vision["patch_size"], list) else [vision["patch_size"]] * 2
            ratio = raw["downsample_ratio"]
            made = int(image.size["height"] // tall * ratio) * int(image.size["width"] // wide * ratio)
        stated.append(("image_seq_length by its sizes", made, "processor_config.json", processor.image_seq_length))
    for key, theirs, name, ours in stated:
        if None not in (theirs, ours) and theirs != ours:
            raise ModelError(
                f"{folder}: config.json gives {key} {theirs!r:.80}, and {name} {ours!r:.80}: the model could not take "
                "its images. Copy both files from one model."
            )


def limit(image_processor: Any, given: dict[str, int]) -> None:
    """Bound the size of one image, as `load_processor` says. Raises ModelError for limits that cannot be."""
    if not given:
        return
    low, high = given.get("min_pixels"), given.get("max_pixels")
    if low is not None and high is not None and low > high:
        raise ModelError(f"min_pixels {low} is above max_pixels {high}. Swap them or remove one.")
    if isinstance(image_processor, Qwen2VLImages):
        unit, what = (image_processor.patch_size * image_processor.merge_size) ** 2, "token"
    else:
        unit, what = image_processor.size["height"] * image_processor.size["width"], "tile"
    for key, value in given.items():
        if value < unit:
            raise ModelError(f"{key} {value} is less than one {what} of this model. Give at least {unit}.")
    if isinstance(image_processor, Qwen2VLImages):
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
