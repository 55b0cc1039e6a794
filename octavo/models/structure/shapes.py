"""Shapes of published models, for planning without weights or network, and for benchmarks with random weights.

Sources: the `config.json` of each checkpoint (Qwen/Qwen3-VL-*-Instruct, Qwen/Qwen3-*, Qwen/Qwen2.5-VL-7B-Instruct,
OpenGVLab/InternVL3_5-8B-HF, meta-llama/Llama-2-7b-hf, Qwen/Qwen2.5-0.5B), LLM-Foundry's `mpt-1b.yaml`, and for
LLaVA-OneVision-1.5 the sizes its training code lists (`tools/convert_checkpoint/config/llava-ov-1.5-{4b,8b}`).
`nvila_8b` is NVILA-8B by Octavo's own model code: SigLIP-so400m at 448 pixels, features of three scales concatenated,
2 x 2 patches to a token, Qwen2-7B with 151648 rows of embeddings. The tower's last layer never runs and is not counted.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import (
    InternVLConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3VLConfig,
    Qwen3VLMoeConfig,
)
from transformers.backbone_utils import BackboneConfigMixin

from octavo.fp8.policy import nearest
from octavo.models.custom.mpt import MPTConfig
from octavo.models.custom.nvila import NvilaConfig
from octavo.models.custom.onevision import LLaVAOneVision1_5_Config
from octavo.models.errors import ModelError
from octavo.models.folder.folder import silence_transformers
from octavo.models.structure.describe import Family, describe
from octavo.models.structure.skeleton import auto_class, empty

Sizes = tuple[int, int, int, int, int]
"""Hidden size, intermediate size, layers, heads, key-value heads."""


def _qwen3_text(sizes: Sizes, **fields: object) -> dict[str, Any]:
    sections = {"mrope_section": [24, 20, 20], "mrope_interleaved": True}
    rope = {"rope_type": "default", "rope_theta": 5000000.0, **sections}
    return _decoder(151936, sizes, 262144, **{**fields, "head_dim": 128, "rope_parameters": rope})


def _qwen3_vision(out: int, large: bool) -> dict[str, Any]:
    return {
        "depth": 27 if large else 24,
        "hidden_size": 1152 if large else 1024,
        "intermediate_size": 4304 if large else 4096,
        "num_heads": 16,
        "out_hidden_size": out,
        "deepstack_visual_indexes": [8, 16, 24] if large else [5, 11, 17],
    }


def _qwen3_vl(text: dict[str, Any], large: bool, tied: bool) -> PreTrainedConfig:
    vision = _qwen3_vision(text["hidden_size"], large)
    return Qwen3VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=tied)


def _qwen3_vl_moe(expert: int, sizes: Sizes) -> PreTrainedConfig:
    """expert: the intermediate size of each expert."""
    moe = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": expert, "decoder_sparse_step": 1}
    text = _qwen3_text(sizes, tie_word_embeddings=False, **moe)
    return Qwen3VLMoeConfig(text_config=text, vision_config=_qwen3_vision(sizes[0], True), tie_word_embeddings=False)


def _decoder(vocab: int, sizes: Sizes, positions: int, **fields: object) -> dict[str, Any]:
    """Return the fields of a decoder's configuration; `fields` are added and take precedence."""
    hidden, intermediate, layers, heads, kv_heads = sizes
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": positions,
        "rms_norm_eps": 1e-6,
        **fields,
    }


_ROPE = {"rope_type": "default", "rope_theta": 1000000.0}


def _qwen2_5_vl_7b() -> PreTrainedConfig:
    rope = {**_ROPE, "mrope_section": [16, 24, 24]}
    text = _decoder(152064, (3584, 18944, 28, 28, 4), 128000, rope_parameters=rope)
    vision = {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": 3584}
    return Qwen2_5_VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=False)


def _internvl3_5_8b() -> PreTrainedConfig:
    text = _qwen3_text((4096, 12288, 36, 32, 8), model_type="qwen3", tie_word_embeddings=False)
    text["max_position_embeddings"] = 40960
    text["rope_parameters"] = dict(_ROPE)
    vision = {"hidden_size": 1024, "num_hidden_layers": 24, "intermediate_size": 4096, "attention_bias": True}
    return InternVLConfig(text_config=text, vision_config=vision, image_token_id=151671, tie_word_embeddings=False)


def _llava_onevision_1_5(theta: float, sizes: Sizes) -> PreTrainedConfig:
    """theta: base of the rotary frequencies. RICE-ViT has the default sizes of RiceConfig."""
    rope = {"rope_type": "default", "rope_theta": theta}
    text = _decoder(151936, sizes, 40960, head_dim=128, rope_parameters=rope)
    return LLaVAOneVision1_5_Config(text_config=text, vision_config={"text_hidden_size": sizes[0]})


def _nvila_8b() -> PreTrainedConfig:
    qwen2 = {"model_type": "qwen2", "rope_parameters": dict(_ROPE), "tie_word_embeddings": False}
    text = _decoder(151648, (3584, 18944, 28, 28, 4), 32768, **qwen2)
    vision = {
        "hidden_size": 1152,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "intermediate_size": 4304,
        "image_size": 448,
        "patch_size": 14,
    }
    return NvilaConfig(text_config=text, vision_config=vision, projector_type="mlp_downsample")


def _qwen2_5_0_5b() -> PreTrainedConfig:
    sizes = (896, 4864, 24, 14, 2)
    return Qwen2Config(**_decoder(151936, sizes, 32768, rope_parameters=dict(_ROPE), tie_word_embeddings=True))


def _qwen3(sizes: Sizes, tied: bool) -> PreTrainedConfig:
    rope = dict(_ROPE)
    return Qwen3Config(**_decoder(151936, sizes, 40960, head_dim=128, rope_parameters=rope, tie_word_embeddings=tied))


def _llama2_7b() -> PreTrainedConfig:
    sizes = (4096, 11008, 32, 32, 32)
    return LlamaConfig(**_decoder(32000, sizes, 4096, rms_norm_eps=1e-5, tie_word_embeddings=False))


def _mpt_1b() -> PreTrainedConfig:
    return MPTConfig(d_model=2048, n_heads=16, n_layers=24, expansion_ratio=4, max_seq_len=2048, vocab_size=50368)


SHAPES: Mapping[str, Callable[[], PreTrainedConfig]] = {
    "qwen3_vl_2b": lambda: _qwen3_vl(_qwen3_text((2048, 6144, 28, 16, 8)), large=False, tied=True),
    "qwen3_vl_4b": lambda: _qwen3_vl(_qwen3_text((2560, 9728, 36, 32, 8)), large=False, tied=True),
    "qwen3_vl_8b": lambda: _qwen3_vl(_qwen3_text((4096, 12288, 36, 32, 8)), large=True, tied=False),
    "qwen3_vl_30b_a3b": lambda: _qwen3_vl_moe(768, (2048, 6144, 48, 32, 4)),
    "qwen3_vl_235b_a22b": lambda: _qwen3_vl_moe(1536, (4096, 12288, 94, 64, 4)),
    "qwen2_5_vl_7b": _qwen2_5_vl_7b,
    "internvl3_5_8b": _internvl3_5_8b,
    "llava_onevision_1_5_4b": lambda: _llava_onevision_1_5(5e6, (2560, 9728, 36, 32, 8)),
    "llava_onevision_1_5_8b": lambda: _llava_onevision_1_5(1e6, (4096, 12288, 36, 32, 8)),
    "nvila_8b": _nvila_8b,
    "qwen3_1_7b": lambda: _qwen3((2048, 6144, 28, 16, 8), tied=True),
    "qwen3_8b": lambda: _qwen3((4096, 12288, 36, 32, 8), tied=False),
    "qwen3_14b": lambda: _qwen3((5120, 17408, 40, 40, 8), tied=False),
    "llama2_7b": _llama2_7b,
    "qwen2_5_0_5b": _qwen2_5_0_5b,
    "mpt_1b": _mpt_1b,
}


def shape_model(name: str) -> tuple[PreTrainedModel, Family]:
    """Return a published model on the meta device (BF16 shapes, no memory), and its description.

    Raises ModelError for an unknown name, listing the known ones.
    """
    model = empty(shape_config(name))
    return model, describe(model)


def shape_config(name: str) -> PreTrainedConfig:
    """Return the configuration of a published model. Raises ModelError for an unknown name, listing the known ones."""
    if name not in SHAPES:
        close = nearest(name, SHAPES, 1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise ModelError(f"unknown shape {name!r}{hint}; known shapes: {', '.join(SHAPES)}.")
    return SHAPES[name]()


def random_model(
    shape: str | PreTrainedConfig,
    device: str | torch.device,
    dtype: torch.dtype,
    layers: int | None = None,
    vision_layers: int | None = None,
) -> PreTrainedModel:
    """Return a model of a published shape (or a configuration) with random weights, in training mode.

    Args:
        layers: keep only the first `layers` decoder blocks, or all if None. vision_layers: like `layers`, for the
        vision tower.

    Raises ModelError for an unknown shape.
    """
    config = shorten_config(
        shape_config(shape) if isinstance(shape, str) else copy.deepcopy(shape), layers, vision_layers
    )
    with silence_transformers(), torch.device(device):
        return auto_class(config).from_config(config, dtype=dtype).train()


def shorten_config(config: PreTrainedConfig, layers: int | None, vision_layers: int | None = None) -> PreTrainedConfig:
    """Change the configuration in place to the first `layers` blocks of the decoder and the first `vision_layers`
    blocks of the vision tower; None keeps all."""
    if layers is not None:
        _shorten(config.get_text_config(), layers)
    vision = getattr(config, "vision_config", None)
    if vision_layers is not None and vision is not None:
        _shorten(vision, vision_layers)
    return config


def _shorten(config: PreTrainedConfig, layers: int) -> None:
    """Cut a stack to its first blocks, including lists with one entry for each block."""
    depth = next(name for name in ("num_hidden_layers", "depth", "n_layers") if hasattr(config, name))
    setattr(config, depth, min(layers, getattr(config, depth)))
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = config.layer_types[:layers]
    if getattr(config, "deepstack_visual_indexes", None) is not None:
        config.deepstack_visual_indexes = [i for i in config.deepstack_visual_indexes if i < layers]
    if isinstance(config, BackboneConfigMixin):  # a DINO, whose outputs as a backbone are named after its blocks
        config.stage_names = config.stage_names[: 1 + layers]
        config.set_output_features_output_indices(out_features=None, out_indices=None)
