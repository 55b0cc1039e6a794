"""Processors of models that see images: text and PIL images in, the model's tensors out.

What a stock AutoProcessor is, but for its video processor, which wants torchvision; without that AutoProcessor fails or
quietly returns only the tokenizer. Here the same classes are used through thin subclasses whose `__init__` has no
`video_processor`; where videos of a family train, :mod:`octavo.models.processors.video` stands in its place. Image
processors are those that AutoProcessor takes, which compute with torchvision; where that is not installed their PIL
forms, which resize a little differently (`processors.pixels_by` says which). Imported when such a processor is loaded:
a machine that only measures models needs no Pillow.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from transformers import BatchFeature, ProcessorMixin
from transformers.models.internvl.processing_internvl import InternVLProcessor
from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
from transformers.models.qwen2_vl.processing_qwen2_vl import Qwen2VLProcessor
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.utils import is_torchvision_available

from octavo.models.custom.nvila.images import NvilaImages
from octavo.models.custom.nvila.processor import NvilaProcessor
from octavo.models.errors import ForeignTokenizerError, ModelError
from octavo.models.folder.chat import WithDeadline
from octavo.models.folder.folder import read_json, stock
from octavo.models.processors import stock as stocked
from octavo.models.processors.frames import as_images
from octavo.models.processors.video import Videos, metadata
from octavo.models.structure.skeleton import stock_config

if is_torchvision_available():
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


class _Filming:
    """What a processor says of videos to the data side: `videos` (None: it takes none here), the tensors of theirs in
    `inputs`, whether `frames_are_images`, and `why_not_images`: why prompts of the generation engine cannot hold them
    as images (None: they can)."""

    videos: Videos | None = None
    frames_are_images = False
    why_not_images: ClassVar[str | None] = None

    @property
    def video_processor(self) -> Videos | None:
        """Where stock code looks for it."""
        return self.videos

    def to_dict(self) -> dict[str, Any]:
        return {key: value for key, value in super().to_dict().items() if key != "videos"}  # type: ignore[misc]

    def video_text(self, film: Any) -> str:
        """What stands in the text for a video: `film` has `total`, `fps`, `indices` and the `size` of its frames."""
        assert self.videos is not None
        about: dict[str, Any] = {"video_metadata": [metadata(film.total, film.fps, film.indices)]}
        if self.videos.tile is None:
            about["video_grid_thw"] = np.array([self.videos.grid(len(film.indices), *film.size)])
        else:
            about["pixel_values_videos"] = [np.empty((len(film.indices), 0))]
        return self.replace_video_token(about, 0)  # type: ignore[attr-defined,no-any-return]

    def as_images(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """A batch as tensors in host memory, whose videos have become images
        (:mod:`octavo.models.processors.frames`)."""
        assert self.videos is not None
        return as_images(batch, self.videos.merge, self.image_token_id)  # type: ignore[attr-defined]

    def video_inputs(self, films: Sequence[Any]) -> dict[str, Any]:
        """How a call is given videos, decoded; `film.frames` are those of its `indices`."""
        told = [metadata(film.total, film.fps, film.indices) for film in films]
        return {"videos": [film.frames for film in films], "video_metadata": told} if films else {}


class Qwen3VLImageTextProcessor(_Filming, _WithoutVideo, Qwen3VLProcessor):
    """Qwen3VLProcessor for images and text (dense and MoE), and videos where `videos` are given."""

    inputs: ClassVar[dict[str, str]] = {"pixel_values_videos": "patch", "video_grid_thw": "video"}


class Qwen2VLImageTextProcessor(_WithoutVideo, Qwen2VLProcessor):
    """Qwen2VLProcessor for images and text."""


class Qwen25VLImageTextProcessor(_Filming, _WithoutVideo, Qwen2_5_VLProcessor):
    """Qwen2_5_VLProcessor for images and text, and videos where `videos` are given."""

    why_not_images = "videos of qwen2_5_vl stand in seconds, and prompts of the engine in images"
    inputs: ClassVar[dict[str, str]] = {**Qwen3VLImageTextProcessor.inputs, "second_per_grid_ts": "video"}


class InternVLImageTextProcessor(_Filming, WithDeadline, InternVLProcessor):
    """InternVLProcessor for images and text, and videos, whose frames are images of one tile."""

    frames_are_images = True

    def __call__(  # type: ignore[override]
        self, images: Any = None, text: Any = None, videos: Any = None, **options: Any
    ) -> BatchFeature:
        """The stock class where there are no videos; it takes videos of one length alone."""
        if videos is None:
            return super().__call__(images=images, text=text, **options)
        texts = [text] if isinstance(text, str) else text
        order = re.findall(f"{re.escape(self.image_token)}|{re.escape(self.video_token)}", "".join(texts))
        # videos of several lengths are no tensor before they are one row of tiles
        made = ProcessorMixin.__call__(self, images, texts, videos, **{**options, "return_tensors": None})
        clips = iter(made.pop("pixel_values_videos"))
        counts = iter([] if images is None else np.asarray(made.pop("num_patches")).tolist())
        tiles = np.empty(0) if images is None else np.asarray(made["pixel_values"])
        found, at = [], 0
        for token in order:
            if token == self.image_token:
                found.append(tiles[at : (at := at + next(counts))])
            else:
                found.append(next(clips))
        made["pixel_values"] = np.concatenate(found)
        return BatchFeature(dict(made), tensor_type=options.get("return_tensors"))

    def __init__(
        self,
        image_processor: Any = None,
        tokenizer: Any = None,
        image_seq_length: int = 256,
        chat_template: str | None = None,
        **_: Any,
    ):
        super().__init__(image_processor, tokenizer, None, image_seq_length, chat_template=chat_template)


class FrameImages(Qwen2VLImages):
    """Qwen2VLImageProcessor for towers that take frames one by one: patches of one frame where a folder leaves
    `temporal_patch_size` out, not of two."""

    temporal_patch_size = 1


# model_type -> (processor, image processor)
PROCESSORS: dict[str, tuple[type[ProcessorMixin], type]] = {
    "qwen3_vl": (Qwen3VLImageTextProcessor, Qwen2VLImages),
    "qwen3_vl_moe": (Qwen3VLImageTextProcessor, Qwen2VLImages),
    "qwen2_vl": (Qwen2VLImageTextProcessor, Qwen2VLImages),
    "qwen2_5_vl": (Qwen25VLImageTextProcessor, Qwen2VLImages),
    "internvl": (InternVLImageTextProcessor, GotOcr2Images),
    "qwen3_5": (Qwen3VLImageTextProcessor, Qwen2VLImages),
    "qwen3_5_moe": (Qwen3VLImageTextProcessor, Qwen2VLImages),
    "mistral3": (stocked.PixtralImageTextProcessor, PixtralImages),
    "llava_onevision": (stocked.LlavaOnevisionImageTextProcessor, LlavaOnevisionImages),
    "smolvlm": (stocked.SmolVLMImageTextProcessor, SmolVLMImages),
    "gemma3": (stocked.Gemma3ImageTextProcessor, Gemma3Images),
    **dict.fromkeys(("glm4v", "glm46v", "glm4v_moe", "glm_ocr"), (stocked.Glm4vImageTextProcessor, Glm4vImages)),
    "ernie4_5_vl_moe": (stocked.Ernie45VLImageTextProcessor, ErnieImages),
    "nvila": (NvilaProcessor, NvilaImages),
    "nvila_lite": (NvilaProcessor, NvilaImages),
    "llavaonevision1_5": (Qwen25VLImageTextProcessor, FrameImages),
}
_BY_AREA = (Qwen2VLImages, Glm4vImages, ErnieImages)
"""Whose sizes are areas, kept to whole tokens."""
_BY_EDGE = (PixtralImages, SmolVLMImages)
"""Whose size is the longest edge."""


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
    check_media_ids(folder, raw, processor)
    stated: list[tuple[str, Any, str, Any]] = []
    if isinstance(image, _BY_AREA):
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


#: keys of config.json for the tokens that features of images and videos replace; models look for no other
_PLACES = ("image_token_id", "image_token_index", "video_token_id", "video_token_index")


def check_media_ids(folder: Path, raw: Mapping[str, Any], processor: Any) -> None:
    """That config.json numbers the tokens for media as the tokenizer does: those that it states, and those that it
    leaves to the defaults of the model's class, which are the numbers of one published vocabulary. By another number a
    model passes over its images without an error.

    Raises ModelError, naming the key and both numbers.
    """
    config = stock_config(folder).to_dict()
    for key in _PLACES:
        theirs, ours = config.get(key), _number_of(processor, key)
        if theirs is None or ours in (None, theirs):
            continue
        if raw.get(key) is None:
            raise ForeignTokenizerError(
                f"{folder}: config.json lacks {key}, for which the model's class takes {theirs}, and the tokenizer has "
                f"{ours}: the model could not find its images. Add the key to config.json."
            )
        raise ForeignTokenizerError(
            f"{folder}: config.json gives {key} {theirs!r:.80}, and tokenizer_config.json {ours!r:.80}: the model "
            "could not take its images. Copy both files from one model."
        )


def _number_of(processor: Any, key: str) -> int | None:
    """The number that the tokenizer has for the token of a key of config.json; None where it is not known."""
    if key.startswith("image"):
        return getattr(processor, "feature_id", processor.image_token_id)
    text = getattr(processor, "video_token", None)
    return processor.tokenizer.get_vocab().get(text) if isinstance(text, str) else None


def stated_options(folder: Path, processor_class: type) -> dict[str, Any]:
    """What `processor_class` is told beside image processor and tokenizer: as config.json has it, which
    processor_config.json must not contradict. Raises ModelError."""
    if not issubclass(processor_class, stocked.Telling):
        return {}
    config = stock_config(folder)
    with stock(f"{folder}/config.json: the options of its processor cannot be told"):
        wanted = processor_class.options(config)
    file = folder / "processor_config.json"
    _require(folder, file.name, wanted, read_json(file) if file.exists() else {})
    return wanted


def check_image_options(folder: Path, processor_class: type, image_processor: Any) -> None:
    """That images are cut as config.json says, where the model's own arithmetic repeats it. Raises ModelError."""
    if issubclass(processor_class, stocked.Telling):
        wanted = processor_class.image_options(stock_config(folder))
        found = {key: getattr(image_processor, key, None) for key in wanted}
        found = {key: dict(value) if isinstance(value, Mapping) else value for key, value in found.items()}
        _require(folder, "preprocessor_config.json", wanted, found)


def _require(folder: Path, name: str, wanted: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    for key, value in wanted.items():
        if found.get(key, value) != value:
            raise ModelError(
                f"{folder}/{name} gives {key} {found[key]!r:.80}, and by config.json it is {value!r:.80}: the model "
                "could not take its images. Copy both files from one model."
            )


def limit(image_processor: Any, given: dict[str, int]) -> None:
    """Bound the size of one image, as `load_processor` says. Raises ModelError for limits that cannot be."""
    if not given:
        return
    low, high = given.get("min_pixels"), given.get("max_pixels")
    if low is not None and high is not None and low > high:
        raise ModelError(f"min_pixels {low} is above max_pixels {high}. Swap them or remove one.")
    if isinstance(image_processor, _BY_AREA):
        unit, what, apply = (image_processor.patch_size * image_processor.merge_size) ** 2, "token", _limit_area
    elif isinstance(image_processor, GotOcr2Images | NvilaImages):
        unit, what, apply = image_processor.size["height"] * image_processor.size["width"], "tile", _limit_tiles
    elif isinstance(image_processor, _BY_EDGE) and low is None:
        unit, what, apply = _edge(image_processor) ** 2, "token or tile", _limit_edge
    else:
        raise ModelError(
            f"{' and '.join(given)} cannot be kept by {type(image_processor).__name__}: this family makes its images "
            f"{'larger by itself alone' if isinstance(image_processor, _BY_EDGE) else 'one of fixed sizes'}. Remove it."
        )
    for key, value in given.items():
        if value < unit:
            raise ModelError(f"{key} {value} is less than one {what} of this model. Give at least {unit}.")
    apply(image_processor, low, high, unit)


def _limit_area(image_processor: Any, low: int | None, high: int | None, unit: int) -> None:
    # An image of GLM is two equal frames, and its area that of both.
    frames = image_processor.temporal_patch_size if isinstance(image_processor, Glm4vImages) else 1
    size = dict(image_processor.size)
    if high is not None:
        high *= frames
        size |= {"longest_edge": high, "shortest_edge": min(size["shortest_edge"], high)}
    if low is not None:
        low *= frames
        size |= {"shortest_edge": low, "longest_edge": max(size["longest_edge"], low)}
    image_processor.size = type(image_processor.size)(**size)


def _limit_tiles(image_processor: Any, low: int | None, high: int | None, unit: int) -> None:
    if high is not None:
        image_processor.max_patches = high // unit
        image_processor.min_patches = min(image_processor.min_patches, image_processor.max_patches)
    if low is not None:
        image_processor.min_patches = -(-low // unit)
        image_processor.max_patches = max(image_processor.max_patches, image_processor.min_patches)


def _edge(image_processor: Any) -> int:
    """Pixels of a tile or patch, in each direction."""
    if isinstance(image_processor, SmolVLMImages):
        return image_processor.max_image_size["longest_edge"]
    patch = image_processor.patch_size
    return patch if isinstance(patch, int) else patch["height"]


def _limit_edge(image_processor: Any, low: int | None, high: int | None, unit: int) -> None:
    assert high is not None
    side = _edge(image_processor)
    longest = min(math.isqrt(high) // side * side, image_processor.size["longest_edge"])
    image_processor.size = type(image_processor.size)(longest_edge=longest)
