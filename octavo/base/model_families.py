"""Properties of model families that their structure does not show: one record per family, without torch.

A description (:mod:`octavo.models.structure.describe`) is read from the model itself and is enough to plan and to
measure it. To train a family, the data package must produce the inputs of its forward: it wraps the image processor,
joins the inputs into batches and collates masks and positions. A family that transformers ships takes three files:

    1. here                                :data:`RECORDS` gets its record
    2. octavo/models/processors/stock.py   a thin subclass of its stock processor, if no other family's subclass fits
    3. octavo/models/tiny/vision.py        its small checkpoint: dimensions, special tokens, processor files

Everything else follows from the record: the models that `octavo train` accepts, limits of image sizes, packing,
`octavo tiny`, the tables of docs/families.md, how `octavo import` translates videos, and most tests, which run over all
records.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

Media = Literal["images", "sound", "text"]
ImageCut = Literal[
    "patches", "paired_patches", "whole", "shuffled_tiles", "stacked_tiles", "anyres_tiles", "one_tile", "scaled_tiles"
]


@dataclass(frozen=True)
class VideoRecord:
    """How a family samples videos if neither the run nor the model folder sets it. The values do not come from the
    installed transformers, so that upgrading transformers does not change results.

    budget      what `min_pixels` and `max_pixels` limit: all frames of a video together ("video"), each frame
                ("frame"), or nothing, because each frame is one tile of the tower's size ("tile")
    hub_name    a regular expression for the names of released models; only importers use it, for a model that is not on
                this machine
    fps         sampled frames per second, from `min_frames` to `max_frames` in all
    max_video_tokens   with `cap_pixels_per_frame`: the limit from which each frame's share of pixels is computed
    mean, std   of the pixels, by channel
    """

    budget: Literal["video", "frame", "tile"]
    hub_name: str
    fps: float = 2.0
    min_frames: int = 4
    max_frames: int = 768
    min_pixels: int | None = None
    max_pixels: int | None = None
    cap_pixels_per_frame: bool | None = False
    max_video_tokens: int = 768
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)

    @property
    def settings(self) -> dict[str, Any]:
        """The values from `fps` on, by name."""
        return {name: value for name, value in asdict(self).items() if name not in ("budget", "hub_name")}


@dataclass(frozen=True)
class FamilyRecord:
    """The record of one family.

    model_type   as in config.json
    processor    the class that produces its inputs, a name in `stock.PROCESSORS`; "" for text and sound
    image_cut    how images are cut for the vision tower (`octavo.models.structure.vision_shapes`), and what is limited:
                 patches            patches of whole images; the area is limited
                 paired_patches     patches of an image as two equal frames; the area of both is limited
                 whole              whole images, padded to the largest; the longest edge is limited
                 shuffled_tiles     tiles of one size (pixel shuffle); their number is limited
                 stacked_tiles      tiles of one size, each a separate image; the longest edge is limited
                 anyres_tiles       tiles of the best of several grids; no limit
                 one_tile           the whole image as one tile; no limit
                 scaled_tiles       tiles of several scales; their number is limited
    media        its inputs other than text
    why_not      why it does not train here, as the end of a sentence; "" if it trains or its forward shows the reason
    images_attend_both_ways   tokens of an image attend to later ones: no packs, and the engine cannot generate
    video        how it samples videos in training, or None if it does not train on videos
    tiny         whether `octavo tiny` writes one (a function of this name among the small checkpoints)
    unsourced    facts without a primary source, for docs/families.md
    """

    model_type: str
    processor: str = ""
    image_cut: ImageCut | Literal[""] = ""
    media: Media = "images"
    why_not: str = ""
    images_attend_both_ways: bool = False
    video: VideoRecord | None = None
    tiny: bool = True
    unsourced: str = ""

    @property
    def trains(self) -> bool:
        return not self.why_not


_CLIP_MEAN, _CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
# A token covers 32 x 32 pixels in Qwen3-VL, 28 x 28 in Qwen2.5-VL.
_QWEN3_VIDEO = VideoRecord("video", r"qwen-?3[-_]?vl", min_pixels=128 * 32 * 32, max_pixels=768 * 32 * 32)
# The stock classes of the next two take every frame unless they get a rate (`do_sample_frames`), so a rate is set here.
# InternVL's class has no limits.
_QWEN2_5_VIDEO = VideoRecord(
    "frame",
    r"qwen-?2\.?5[-_]?vl",
    min_pixels=128 * 28 * 28,
    max_pixels=768 * 28 * 28,
    max_video_tokens=128000,
    mean=_CLIP_MEAN,
    std=_CLIP_STD,
)
_INTERNVL_VIDEO = VideoRecord(
    "tile", "internvl", fps=1.0, min_frames=1, cap_pixels_per_frame=None, mean=_CLIP_MEAN, std=_CLIP_STD
)
_ONE_FOLDER = "the processor of the single-folder layout"


def _table(records: Iterable[FamilyRecord]) -> dict[str, FamilyRecord]:
    return {record.model_type: record for record in records}


RECORDS: dict[str, FamilyRecord] = _table(
    (
        FamilyRecord("qwen3_vl", "Qwen3VLImageTextProcessor", "patches", video=_QWEN3_VIDEO),
        FamilyRecord("qwen3_vl_moe", "Qwen3VLImageTextProcessor", "patches", video=_QWEN3_VIDEO),
        FamilyRecord("qwen2_5_vl", "Qwen25VLImageTextProcessor", "patches", video=_QWEN2_5_VIDEO),
        FamilyRecord("internvl", "InternVLImageTextProcessor", "shuffled_tiles", video=_INTERNVL_VIDEO),
        FamilyRecord("qwen3_5", "Qwen3VLImageTextProcessor", "patches"),
        FamilyRecord("qwen3_5_moe", "Qwen3VLImageTextProcessor", "patches"),
        FamilyRecord("mistral3", "PixtralImageTextProcessor", "whole"),
        FamilyRecord("llava", "LlavaImageTextProcessor", "one_tile"),
        FamilyRecord("llava_onevision", "LlavaOnevisionImageTextProcessor", "anyres_tiles"),
        FamilyRecord("smolvlm", "SmolVLMImageTextProcessor", "stacked_tiles"),
        FamilyRecord("gemma3", "Gemma3ImageTextProcessor", "one_tile", images_attend_both_ways=True),
        FamilyRecord("ernie4_5_vl_moe", "Ernie45VLImageTextProcessor", "patches"),
        FamilyRecord(
            "llavaonevision1_5",
            "OneVision15ImageTextProcessor",
            "patches",
            unsourced="the 4B's `rope_theta` and the chat template (both are read from the folder)",
        ),
        FamilyRecord("octavo_vlm", "ComposedImageTextProcessor", "patches"),
        FamilyRecord("octavo_llava", "ComposedTileProcessor", "one_tile"),
        FamilyRecord("glm4v", "Glm4vImageTextProcessor", "paired_patches"),
        FamilyRecord("glm46v", "Glm4vImageTextProcessor", "paired_patches"),
        FamilyRecord("glm4v_moe", "Glm4vImageTextProcessor", "paired_patches"),
        FamilyRecord("glm_ocr", "Glm4vImageTextProcessor", "paired_patches"),
        FamilyRecord(
            "nvila",
            "NvilaProcessor",
            "scaled_tiles",
            unsourced=f"{_ONE_FOLDER}; whether VILA 1.5 expects a line break after each image",
        ),
        FamilyRecord("nvila_lite", "NvilaProcessor", "scaled_tiles", unsourced=_ONE_FOLDER),
        FamilyRecord("qwen2_vl", "Qwen2VLImageTextProcessor", "patches"),
        FamilyRecord("qwen2_audio", media="sound"),
        FamilyRecord("qwen3", media="text"),
        FamilyRecord("qwen3_moe", media="text"),
        FamilyRecord("llama", media="text"),
        FamilyRecord("mpt", media="text"),
        FamilyRecord(
            "paligemma",
            tiny=False,
            why_not="its prompt attends both ways, images and words, and no family that trains here has such a prompt",
        ),
    )
)
"""`model_type` -> record. A text-only decoder needs none, unless `octavo tiny` writes it."""


def trained_families(media: Media) -> tuple[str, ...]:
    """Return the `model_type` of each family with these media that trains here, in the order of the table."""
    return tuple(record.model_type for record in RECORDS.values() if record.media == media and record.trains)


def tiny_families() -> tuple[str, ...]:
    """Return the `model_type` of each family for which `octavo tiny` writes a small checkpoint."""
    return tuple(record.model_type for record in RECORDS.values() if record.tiny)


def video_families() -> dict[str, VideoRecord]:
    """Return `model_type` -> video record of the families that train on videos."""
    return {
        record.model_type: record.video for record in RECORDS.values() if record.video is not None and record.trains
    }


def trains_on(model_type: object, *media: Media) -> bool:
    """Return whether models with this `model_type` in config.json train on one of these media."""
    record = RECORDS.get(model_type) if isinstance(model_type, str) else None
    return record is not None and record.trains and record.media in media


def attends_both_ways(model_type: str) -> bool:
    """Return whether tokens of an image attend to later ones in models of this `model_type`."""
    return model_type in RECORDS and RECORDS[model_type].images_attend_both_ways


def leading_tokens(vision: object) -> int:
    """Return the number of tokens (a class token, registers) that a tower for images of one size prepends to its
    patches. `vision`: its configuration."""
    if str(getattr(vision, "model_type", "")).startswith("siglip"):
        return 0
    return 1 + (getattr(vision, "num_register_tokens", None) or 0)
