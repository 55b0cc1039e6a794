"""What Octavo must know of a family of models beyond its structure: one record a family, without torch.

A description (:mod:`octavo.models.structure.describe`) is found in the model itself and suffices to plan and to measure
it. To train a family, the data side must make what its forward takes: its image processor wrapped, its inputs joined to
batches, its masks and positions known to the collation. A family that transformers ships is added in three files:

    1. here                                :data:`RECORDS` gets its record
    2. octavo/models/processors/stock.py   the thin subclass of its stock processor, where no other family's will do
    3. octavo/models/tiny/vision.py        its small checkpoint: dimensions, special tokens, processor files

Everything else follows from the record: what `octavo train` takes, how large images may be, packing, `octavo tiny`, the
tables of docs/families.md, what `octavo import` says of videos, and most tests, which run over all records.
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
    """What a family does with videos where neither a run nor the folder says it; not the values of the installed
    transformers, so that another version of it changes no run.

    budget      what `min_pixels` to `max_pixels` bound: all frames of a video together ("video"), each by itself
                ("frame"), or nothing, since each frame is one tile of the tower's size ("tile")
    hub_name    a regular expression of what released models are called; only importers ask for it, where a model is
                not on this machine
    fps         frames of a second that are taken, as many as `min_frames` to `max_frames`
    max_video_tokens   with `cap_pixels_per_frame`: the bound from which each frame's share of pixels is taken
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
        """The values from `fps` on, by their names."""
        return {name: value for name, value in asdict(self).items() if name not in ("budget", "hub_name")}


@dataclass(frozen=True)
class FamilyRecord:
    """One family.

    model_type   of config.json
    processor    the class that makes its inputs, a name of `stock.PROCESSORS`; "" for text and sound
    image_cut    how images come to its tower (`octavo.models.structure.vision_shapes`) and which limits they can have:
                 patches            of whole images; the area is bounded
                 paired_patches     of an image that is two equal frames; the area of both is bounded
                 whole              whole images, padded to the largest; the longest edge is bounded
                 shuffled_tiles     tiles of one size (pixel shuffle); their number is bounded
                 stacked_tiles      tiles of one size, each like an image of its own; the longest edge is bounded
                 anyres_tiles       tiles of the best of several grids; not bounded
                 one_tile           the whole image as one tile; not bounded
                 scaled_tiles       tiles of several scales; their number is bounded
    media        what it takes besides text
    why_not      why it does not train here, as the end of a sentence, where the inputs of its forward do not say it
    images_attend_both_ways   tokens of an image see those behind them: no packs, and no generation by the engine
    video        how its videos train; None: they do not
    tiny         whether `octavo tiny` writes one (a function of this name among the small checkpoints)
    unsourced    what no primary source says of it, for docs/families.md
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
# A token is 32 x 32 pixels of Qwen3-VL, 28 x 28 of Qwen2.5-VL.
_QWEN3_VIDEO = VideoRecord("video", r"qwen-?3[-_]?vl", min_pixels=128 * 32 * 32, max_pixels=768 * 32 * 32)
# The stock classes of the next two take every frame unless they are told a rate (`do_sample_frames`); a rate is taken
# here. InternVL's has no limits of its own.
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
_LAYOUT = "the processor of the layout of one folder"


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
        FamilyRecord("glm4v", "Glm4vImageTextProcessor", "paired_patches"),
        FamilyRecord("glm46v", "Glm4vImageTextProcessor", "paired_patches"),
        FamilyRecord("glm4v_moe", "Glm4vImageTextProcessor", "paired_patches"),
        FamilyRecord("glm_ocr", "Glm4vImageTextProcessor", "paired_patches"),
        FamilyRecord(
            "nvila",
            "NvilaProcessor",
            "scaled_tiles",
            unsourced=f"{_LAYOUT}; whether VILA 1.5 wants a line break behind each image",
        ),
        FamilyRecord("nvila_lite", "NvilaProcessor", "scaled_tiles", unsourced=_LAYOUT),
        FamilyRecord("qwen2_vl", "Qwen2VLImageTextProcessor", "patches"),
        FamilyRecord("qwen2_audio", media="sound"),
        FamilyRecord("qwen3", media="text"),
        FamilyRecord("qwen3_moe", media="text"),
        FamilyRecord("llama", media="text"),
        FamilyRecord("mpt", media="text"),
        FamilyRecord(
            "paligemma",
            tiny=False,
            why_not="its prompt attends both ways, images and words, and no family that trains here asks for that",
        ),
    )
)
"""`model_type` -> its record. A text-only decoder needs none, unless `octavo tiny` writes it."""


def trained_families(media: Media) -> tuple[str, ...]:
    """`model_type` of the families of these media that train here, in the order of the table."""
    return tuple(one.model_type for one in RECORDS.values() if one.media == media and one.trains)


def tiny_families() -> tuple[str, ...]:
    """`model_type` of the families of which `octavo tiny` writes a small checkpoint."""
    return tuple(one.model_type for one in RECORDS.values() if one.tiny)


def video_families() -> dict[str, VideoRecord]:
    """`model_type` -> how its videos train, of the families whose videos do."""
    return {one.model_type: one.video for one in RECORDS.values() if one.video is not None and one.trains}


def trains_on(model_type: object, *media: Media) -> bool:
    """Whether models of a `model_type` of config.json train on one of these media."""
    record = RECORDS.get(model_type) if isinstance(model_type, str) else None
    return record is not None and record.trains and record.media in media


def attends_both_ways(model_type: str) -> bool:
    """Whether tokens of an image see those behind them in models of this `model_type`."""
    return model_type in RECORDS and RECORDS[model_type].images_attend_both_ways
