"""Small image encoders with random weights, and what tests of composed models share."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from PIL import Image
from transformers import (
    CLIPVisionConfig,
    CLIPVisionModel,
    Dinov2Config,
    Dinov2Model,
    Dinov2WithRegistersConfig,
    Dinov2WithRegistersModel,
    DINOv3ViTConfig,
    DINOv3ViTModel,
    PreTrainedModel,
    SiglipVisionConfig,
    SiglipVisionModel,
)

SIDE, PATCH = 16, 4
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "patch_size": PATCH,
}
SQUARE = {"height": SIDE, "width": SIDE}
CROP = {"size": {"shortest_edge": SIDE}, "crop_size": SQUARE}
TOWERS: dict[str, tuple[type[PreTrainedModel], object, dict[str, object]]] = {
    "clip": (
        CLIPVisionModel,
        CLIPVisionConfig(**SMALL, image_size=SIDE),
        {**CROP, "image_processor_type": "CLIPImageProcessor"},
    ),
    "siglip": (
        SiglipVisionModel,
        SiglipVisionConfig(**SMALL, image_size=SIDE),
        {"size": SQUARE, "image_processor_type": "SiglipImageProcessorFast"},
    ),
    # as published: positions for larger images than its processor makes
    "dinov2": (
        Dinov2Model,
        Dinov2Config(**SMALL, image_size=24),
        {**CROP, "image_processor_type": "BitImageProcessor"},
    ),
    "dinov2_with_registers": (
        Dinov2WithRegistersModel,
        Dinov2WithRegistersConfig(**SMALL, image_size=24, num_register_tokens=3),
        {**CROP, "image_processor_type": "BitImageProcessor"},
    ),
    "dinov3": (
        DINOv3ViTModel,
        DINOv3ViTConfig(**SMALL, image_size=24, num_register_tokens=4),
        {"size": SQUARE, "image_processor_type": "DINOv3ViTImageProcessorFast"},
    ),
}
LEADING = {"clip": 1, "siglip": 0, "dinov2": 1, "dinov2_with_registers": 4, "dinov3": 5}
"""Tokens before the patches."""


def write_settings(folder: Path, settings: dict[str, object]) -> None:
    content = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, **settings}
    (folder / "preprocessor_config.json").write_text(json.dumps(content))


def encode(processor, image: Image.Image):
    """A question about an image as tensors."""
    parts = [{"type": "image"}, {"type": "text", "text": "What is this?"}]
    text = processor.apply_chat_template(
        [{"role": "user", "content": parts}], tokenize=False, add_generation_prompt=True
    )
    return processor(text=[text], images=[image], return_tensors="pt", add_special_tokens=False)


def copy(folder: Path, target: Path, **changes: object) -> Path:
    """Copy a folder, and change fields of its config.json; None removes one."""
    shutil.copytree(folder, target)
    config = {**json.loads((target / "config.json").read_text()), **changes}
    (target / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return target
