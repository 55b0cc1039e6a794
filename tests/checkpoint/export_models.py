"""Small models of real families whose layers have whole blocks, ragged ones and zero ones, and spread magnitudes."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForMultimodalLM

from octavo.models.folder.folder import silence_transformers
from octavo.models.tiny import tiny

TEXT = {
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
VISION = {"hidden_size": 128, "embed_dim": 128, "intermediate_size": 320, "num_heads": 4}
SOUND = {"d_model": 128, "encoder_ffn_dim": 320}
MOE = {"moe_intermediate_size": 128, "num_local_experts": 4, "num_experts_per_tok": 2}


def write(family: str, directory: Path, **more: int) -> Path:
    """A folder of `family`, in fp32: config, tokenizer, processor and weights whose rows and columns differ in size.

    q, k, v: 256, 128, 128 x 256; o: 256 x 256; gate, up: 384 x 256; down: 256 x 384, or experts of 128. The tower of
    images or sound has layers of 128 inputs, and of 320 or 172, which no block of 128 divides. more: changes of the
    language model's sizes.
    """
    tiny.write(family, directory, size="mini")
    config = json.loads((directory / "config.json").read_text())
    text = config.get("text_config", config)
    text.update({k: v for k, v in TEXT.items() if k != "head_dim" or "head_dim" in text})
    if "num_local_experts" in text:
        text.update(MOE)
    text.update(more)
    if (section := text.get("rope_parameters", {}).get("mrope_section")) is not None:
        half = text.get("head_dim", text["hidden_size"] // text["num_attention_heads"]) // 2
        text["rope_parameters"]["mrope_section"] = [half - 2 * (half // 3), half // 3, half // 3]
        assert len(section) == 3
    if "layer_types" in text:
        text["layer_types"] = text["layer_types"][: text["num_hidden_layers"]]
    if "vision_config" in config:
        vision = config["vision_config"]
        vision.update(
            {k: v for k, v in VISION.items() if k in vision and (family != "qwen2_5_vl" or k == "hidden_size")}
        )
        for into in {"out_hidden_size", "text_hidden_size"} & set(vision):
            vision[into] = text["hidden_size"]
    config.get("audio_config", {}).update(SOUND)
    (directory / "config.json").write_text(json.dumps(config))
    config = AutoConfig.from_pretrained(directory)
    torch.manual_seed(0)
    with silence_transformers():
        model = auto(config).from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for p in model.parameters():
                if p.dim() > 1:
                    spread(p)
        model.save_pretrained(directory)
    return directory


def spread(p: torch.Tensor) -> None:
    """Rows of a weight, and columns by 64, get magnitudes of their own, so that no two blocks have one scale."""
    rows = torch.exp2(torch.randint(-2, 2, (p.shape[-2], 1)).float())
    columns = torch.exp2((torch.arange(p.shape[-1]) // 64 % 3 - 1).float())
    p.mul_(rows * columns if p.dim() < 4 else 1)


def auto(config):
    if hasattr(config, "audio_config"):
        return AutoModelForMultimodalLM
    return AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM


def stock(path: Path, dtype: torch.dtype = torch.float32, **more):
    """The model of a folder in stock transformers, with nothing missing and nothing unexpected."""
    config = AutoConfig.from_pretrained(path)
    with silence_transformers():
        model, info = auto(config).from_pretrained(path, dtype=dtype, output_loading_info=True, **more)
    wrong = {key: found for key, found in info.items() if found}
    assert not wrong, wrong
    return model.eval()
