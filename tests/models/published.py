"""Folders of the families that Octavo implements, in the format in which their authors publish them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def as_published(tiny: Path, folder: Path) -> Path:
    """A copy of a small LLaVA-OneVision-1.5 as the published ones are: code of its authors that is named and must not
    run, fields that are missing, wrong or by another name; and values for what begins as zero or one."""
    shutil.copytree(tiny, folder)
    config = json.loads((folder / "config.json").read_text())
    for name in ("configuration", "modeling"):
        (folder / f"{name}_llavaonevision1_5.py").write_text("raise SystemExit('code of the folder ran')\n")
    config["auto_map"] = {
        "AutoConfig": "configuration_llavaonevision1_5.Llavaonevision1_5Config",
        "AutoModelForCausalLM": "modeling_llavaonevision1_5.LLaVAOneVision1_5_ForConditionalGeneration",
        "AutoModelForImageTextToText": "modeling_llavaonevision1_5.LLaVAOneVision1_5_ForConditionalGeneration",
    }
    text = config["text_config"]
    text |= {"rope_theta": 5e6, "rope_scaling": None, "image_token_id": None, "video_token_id": None}
    text["tie_word_embeddings"] = config["tie_word_embeddings"] = True  # Qwen3-4B's, whose head this is not
    del text["rope_parameters"], config["vision_start_token_id"]
    config |= {"vocab_size": 152064, "torch_dtype": config.pop("dtype")}
    (folder / "config.json").write_text(json.dumps(config))
    file = folder / "preprocessor_config.json"
    image = json.loads(file.read_text())
    del image["temporal_patch_size"]
    file.write_text(json.dumps(image))
    weights, generator = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(3)
    for name, value in weights.items():
        if name.startswith("visual."):
            more = torch.randn(value.shape, generator=generator)
            weights[name] = more if "class" in name else value + 0.1 * more
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
