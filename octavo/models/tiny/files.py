"""The processor entries of small checkpoints: those that a stock AutoProcessor reads, which names stock classes (it
needs torchvision and the video entry; Octavo reads the rest)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octavo.models.tiny import audio
from octavo.models.tiny.parts import PATCH
from octavo.models.tiny.vision import TILE, TILES, TOKENS

_HALF = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5], "do_convert_rgb": True}
_SQUARE = {"height": TILE, "width": TILE}
_CELL = (2 * PATCH) ** 2  # pixels a token
_PATCHES = {"patch_size": PATCH, "merge_size": 2, "size": {"shortest_edge": _CELL, "longest_edge": 256 * _CELL}}
_PAIRS = {**_PATCHES, "temporal_patch_size": 2}  # of frames; an image is one of two equal ones
_GLM = {**_PAIRS, "size": {"shortest_edge": 2 * _CELL, "longest_edge": 2 * 256 * _CELL}}  # of both frames

#: family -> (processor, its own entries, image processor, its entries, video processor or None)
_CLASSES: Mapping[str, tuple[str, dict[str, Any], str, dict[str, Any], str | None]] = {
    "qwen3_vl": ("Qwen3VLProcessor", {}, "Qwen2VLImageProcessor", _PAIRS, "Qwen3VLVideoProcessor"),
    "qwen2_vl": ("Qwen2VLProcessor", {}, "Qwen2VLImageProcessor", _PAIRS, "Qwen2VLVideoProcessor"),
    "qwen2_5_vl": ("Qwen2_5_VLProcessor", {}, "Qwen2VLImageProcessor", _PAIRS, "Qwen2VLVideoProcessor"),
    "llavaonevision1_5": (
        "Qwen2_5_VLProcessor", {}, "Qwen2VLImageProcessor", {**_PATCHES, "temporal_patch_size": 1},
        "Qwen2VLVideoProcessor",
    ),
    "internvl": (
        "InternVLProcessor", {"image_seq_length": TOKENS},
        "GotOcr2ImageProcessor", {"size": _SQUARE, "crop_to_patches": True, "min_patches": 1, "max_patches": 4},
        "InternVLVideoProcessor",
    ),
    "mistral3": (
        "PixtralProcessor", {"patch_size": PATCH, "spatial_merge_size": 2},
        "PixtralImageProcessor", {"size": {"longest_edge": 8 * TILE}, "patch_size": PATCH}, None,
    ),
    "llava_onevision": (
        "LlavaOnevisionProcessor",
        {"num_image_tokens": 4 * TOKENS, "vision_feature_select_strategy": "full",
         "vision_aspect_ratio": "anyres_max_9"},
        "LlavaOnevisionImageProcessor", {"size": _SQUARE, "image_grid_pinpoints": TILES},
        "LlavaOnevisionVideoProcessor",
    ),
    "smolvlm": (
        "SmolVLMProcessor", {"image_seq_len": TOKENS},
        "SmolVLMImageProcessor",
        {"size": {"longest_edge": 2 * TILE}, "max_image_size": {"longest_edge": TILE}, "do_image_splitting": True},
        "SmolVLMVideoProcessor",
    ),
    "gemma3": (
        "Gemma3Processor", {"image_seq_length": TOKENS},
        "Gemma3ImageProcessor", {"size": _SQUARE, "do_pan_and_scan": False}, None,
    ),
    "glm4v": ("Glm4vProcessor", {}, "Glm4vImageProcessor", _GLM, "Glm4vVideoProcessor"),
    "glm46v": ("Glm46VProcessor", {}, "Glm46VImageProcessor", _GLM, "Glm46VVideoProcessor"),
    "ernie4_5_vl_moe": (
        "Ernie4_5_VLMoeProcessor", {}, "Ernie4_5_VLMoeImageProcessor", {**_PATCHES, "temporal_patch_size": 1},
        "Ernie4_5_VLMoeVideoProcessor",
    ),
}  # fmt: skip
#: what videos have otherwise than images: pairs of frames, and no times drawn on them, which wants a font
_OF_VIDEOS = {"ernie4_5_vl_moe": {"temporal_patch_size": 2, "draw_on_frames": False}}
_LIKE = {
    **dict.fromkeys(("qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), "qwen3_vl"),
    "glm4v_moe": "glm4v",
    "glm_ocr": "glm46v",
}


def write_processor(family: str, directory: Path) -> None:
    """Write them beside a tokenizer, which gets the processor's name; nothing for a family that neither sees nor
    hears."""
    if family == "qwen2_audio":
        _dump(directory / "preprocessor_config.json", audio.EXTRACTOR)
        _dump(directory / "processor_config.json", audio.PROCESSOR)
        _name(directory, audio.PROCESSOR["processor_class"])
        return
    if family in ("nvila", "nvila_lite"):  # as published: the tower's own processor, and no other
        more = {"image_processor_type": "SiglipImageProcessor", "size": _SQUARE, "rescale_factor": 1 / 255}
        _dump(directory / "preprocessor_config.json", {**_HALF, **more, "resample": 3})
        return
    found = _CLASSES.get(_LIKE.get(family, family))
    if found is None:
        return
    name, own, image_class, image, video_class = found
    common = {**_HALF, "processor_class": name}
    _dump(directory / "preprocessor_config.json", {**image, **common, "image_processor_type": image_class})
    if video_class is not None:
        frames = {"size": image["size"]} if "crop_to_patches" in image or "patch_size" not in image else image
        video = {**frames, **_OF_VIDEOS.get(family, {}), **common, "video_processor_type": video_class}
        _dump(directory / "video_preprocessor_config.json", video)
    _dump(directory / "processor_config.json", {"processor_class": name, **own})
    _name(directory, name)


def _name(directory: Path, processor: str) -> None:
    file = directory / "tokenizer_config.json"
    _dump(file, {**json.loads(file.read_text()), "processor_class": processor})


def _dump(file: Path, content: dict) -> None:
    file.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
