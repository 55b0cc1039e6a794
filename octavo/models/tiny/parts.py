"""Shared parts of small checkpoints: their table, decoders and towers of a few hundred thousand parameters, and files
of processors.

Widths are multiples of 16, 32 and 64 if the published models' are, and ragged otherwise. "small" trains well
from scratch within minutes on a CPU; "mini" is for tests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypedDict

from transformers import PreTrainedConfig

from octavo.models.tiny.special_tokens import SpecialTokens

SIZES = ("small", "mini")
PATCH = 4  # pixels; two by two patches merge into one token of 8x8 pixels
MAX_POSITIONS = 4096
Ids = Mapping[str, int]
Dimensions = Callable[[str, int, Ids], PreTrainedConfig]
"""(size, rows of the embedding, special token -> its number) -> the configuration."""

_HALF = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5], "do_convert_rgb": True}
_CELL = (2 * PATCH) ** 2  # pixels of a token
AREAS = {"shortest_edge": _CELL, "longest_edge": 256 * _CELL}
"""Limits of an image's area in pixels."""
PATCHES: Mapping[str, object] = {"patch_size": PATCH, "merge_size": 2, "size": AREAS}
"""Entries of an image processor that cuts whole images into patches of one frame."""
PAIRS: Mapping[str, object] = {**PATCHES, "temporal_patch_size": 2}
"""Entries of an image processor with patches of two frames; an image is a pair of equal frames."""


@dataclass(frozen=True)
class TinyCheckpoint:
    """A small checkpoint: its configuration, its special tokens with its chat template, and the files of its processor
    (name -> content)."""

    config: Dimensions
    special: SpecialTokens
    files: Mapping[str, Mapping[str, object]]


class Checkpoints(dict[str, TinyCheckpoint]):
    """`model_type` -> its small checkpoint."""

    def add(
        self, special: SpecialTokens, files: Mapping[str, Mapping[str, object]] | None = None
    ) -> Callable[[Dimensions], Dimensions]:
        """Decorate the function that builds the configuration; its name is the `model_type`."""

        def register(config: Dimensions) -> Dimensions:
            self[config.__name__] = TinyCheckpoint(config, special, files or {})
            return config

        return register


def processor_files(
    processor: str,
    image_processor: str,
    image: Mapping[str, object],
    video_processor: str | None = None,
    video: Mapping[str, object] | None = None,
    **entries: object,
) -> dict[str, dict[str, object]]:
    """Return the files that a stock AutoProcessor reads, with the names of stock classes (it needs torchvision and the
    video file; Octavo reads the rest).

    image, entries   the fields of preprocessor_config.json and of processor_config.json other than the classes
    video            the fields in which frames of videos differ from images
    """
    # Every file has the processor class, because AutoProcessor may read it from any of them.
    common = {**_HALF, "processor_class": processor}
    files = {
        "preprocessor_config.json": {**image, **common, "image_processor_type": image_processor},
        "processor_config.json": {"processor_class": processor, **entries},
    }
    if video_processor is not None:
        tiles = "crop_to_patches" in image or "patch_size" not in image
        frames = {**({"size": image["size"]} if tiles else image), **(video or {})}
        files["video_preprocessor_config.json"] = {**frames, **common, "video_processor_type": video_processor}
    return files


def image_file(**entries: object) -> dict[str, dict[str, object]]:
    """Return the only file of a family that has an image processor file but no processor file."""
    return {"preprocessor_config.json": {**_HALF, **entries}}


QWEN3_FILES = processor_files("Qwen3VLProcessor", "Qwen2VLImageProcessor", PAIRS, "Qwen3VLVideoProcessor")
"""The files of Qwen3-VL and of its successors."""


class VisionIds(TypedDict):
    """Qwen's placeholders of images and videos, and the tokens around them."""

    image_token_id: int
    video_token_id: int
    vision_start_token_id: int
    vision_end_token_id: int


def decoder_fields(size: str, vocab: int, **fields: object) -> dict[str, Any]:
    """Return the fields of a decoder; `fields` are added and take precedence."""
    dims = {
        "small": {"hidden_size": 128, "intermediate_size": 320, "num_hidden_layers": 4},
        "mini": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2},
    }[size]
    return {
        "vocab_size": vocab,
        **dims,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": MAX_POSITIONS,
        "initializer_range": 0.06,
        **fields,
    }


def moe_decoder_fields(size: str, vocab: int, **fields: object) -> dict[str, Any]:
    """Return the fields of a decoder of two layers with MLPs of eight experts, two of them for each token."""
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    return {**decoder_fields(size, vocab, head_dim=32, **experts, **fields), "num_hidden_layers": 2}


def qwen_vision_fields(out: int, **fields: object) -> dict[str, Any]:
    """Return the fields of a tower for images of any size, whose 2 x 2 patches become one token."""
    return {
        "hidden_size": 64,
        "num_heads": 4,
        "patch_size": PATCH,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": out,
        "initializer_range": 0.06,
        **fields,
    }


def vision_ids(ids: Ids) -> VisionIds:
    """Return the ids of Qwen's tokens for images and videos."""
    return {
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
    }


def rope_fields(rotated: int, **fields: object) -> dict[str, Any]:
    """Return the settings of a rotary embedding with three axes over `rotated` features of a head; most angles are for
    time."""
    half = rotated // 2
    section = [half - 2 * (half // 3), half // 3, half // 3]  # time, height, width
    return {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": section, **fields}
