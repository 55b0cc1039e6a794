"""Writes a small NVILA in the original layout from a one-folder checkpoint, by the published names."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from octavo.models.custom.nvila.three_folders import MEDIA

ELSEWHERE = "/not/here"


def split(source: Path, target: Path, more: dict[str, Any] | None = None) -> Path:
    """Write `source` as three folders in `target`, with BF16 weights; `more` is added to config.json."""
    raw = json.loads((source / "config.json").read_text())
    parts = {
        "llm": {**raw["text_config"], "architectures": ["Qwen2ForCausalLM"]},
        "vision_tower": {**raw["vision_config"], "architectures": ["SiglipVisionModel"]},
        "mm_projector": {
            "architectures": ["MultimodalProjector"], "mm_projector_type": raw["projector_type"],
            "model_type": "v2l_projector",
        },
    }  # fmt: skip
    weights = load_file(source / "model.safetensors")
    for part, config in parts.items():
        (target / part).mkdir(parents=True)
        (target / part / "config.json").write_text(json.dumps({**config, "torch_dtype": "bfloat16"}, indent=2))
        inside = {n.removeprefix(f"{part}."): w for n, w in weights.items() if n.startswith(f"{part}.")}
        half = {name: weight.to(torch.bfloat16) for name, weight in inside.items()}
        save_file(half, target / part / "model.safetensors", {"format": "pt"})
    for name in ("tokenizer*", "chat_template*", "generation*", "preprocessor*"):
        for file in source.glob(name):
            shutil.copy(file, target / ("vision_tower" if name == "preprocessor*" else "llm"))
    top = {
        "model_type": "llava_llama", "architectures": ["LlavaLlamaModel"], "image_aspect_ratio": "dynamic",
        "mm_vision_select_layer": -2, "mm_vision_select_feature": "cls_patch", "max_tiles": raw["max_tiles"],
        "image_encoder": {"_target_": "llava.model.encoders.BasicImageEncoder"}, "torch_dtype": "bfloat16",
        "s2_resize_output_to_scale_idx": -1,
        **{f"{part}_cfg": {"_name_or_path": f"{ELSEWHERE}/{part}"} for part in parts}, **(more or {}),
    }  # fmt: skip
    (target / "config.json").write_text(json.dumps(top, indent=2))
    return target


def without_media(folder: Path) -> Path:
    """The folder, its tokenizer one that ends with the table of embeddings, as published ones do: VILA adds tokens of
    media when it loads one."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        raw = json.loads((folder / "llm" / name).read_text())
        if name == "tokenizer.json":
            raw["added_tokens"] = [token for token in raw["added_tokens"] if token["content"] not in MEDIA]
        else:
            raw.pop("added_tokens_decoder", None)
        (folder / "llm" / name).write_text(json.dumps(raw))
    return folder


def edit(file: Path, *gone: str, **fields: Any) -> None:
    """Change a JSON file: remove some fields and set others."""
    raw = {**json.loads(file.read_text()), **fields}
    file.write_text(json.dumps({key: value for key, value in raw.items() if key not in gone}))
