"""The dimensions of the small checkpoints: real architectures, a few hundred thousand parameters.

Widths are multiples of 16, 32 and 64 where the published models' are, and ragged where theirs are (Qwen2.5-VL's
vision MLP). "small" trains well from scratch within minutes on a CPU; "mini" is for tests.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from transformers import (
    InternVLConfig,
    LlamaConfig,
    PreTrainedConfig,
    Qwen2_5_VLConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3VLConfig,
    Qwen3VLMoeConfig,
)

from octavo.models.custom.mpt import MPTConfig
from octavo.models.custom.onevision import LLaVAOneVision1_5_Config
from octavo.models.tiny import audio as hearing
from octavo.models.tiny import vision as seeing
from octavo.models.tiny.parts import PATCH, Ids, moe, qwen_vision, rope, text, vision_ids


def _qwen3_parts(size: str, decoder: dict[str, Any], tied: bool, ids: Ids) -> dict[str, Any]:
    """What a Qwen3-VL configuration is made of, dense or MoE."""
    depth, mlp, deepstack = (4, 256, [1, 2]) if size == "small" else (2, 128, [0])
    more = {"num_position_embeddings": 64, "deepstack_visual_indexes": deepstack}
    return {
        "text_config": {**decoder, "rope_parameters": {**rope(32), "mrope_interleaved": True}},
        "vision_config": qwen_vision(decoder["hidden_size"], depth=depth, intermediate_size=mlp, **more),
        "tie_word_embeddings": tied,
        **vision_ids(ids),
    }


def _qwen3_vl(size: str, vocab: int, ids: Ids) -> PreTrainedConfig:
    return Qwen3VLConfig(**_qwen3_parts(size, text(size, vocab, head_dim=32), True, ids))


def _qwen3_vl_moe(size: str, vocab: int, ids: Ids) -> PreTrainedConfig:
    decoder = {**moe(size, vocab), "tie_word_embeddings": False}
    return Qwen3VLMoeConfig(**_qwen3_parts(size, decoder, False, ids))


def _qwen2_5_vl(size: str, vocab: int, ids: Ids) -> PreTrainedConfig:
    decoder = text(size, vocab)
    decoder["rope_parameters"] = rope(decoder["hidden_size"] // decoder["num_attention_heads"])
    decoder["bos_token_id"], decoder["eos_token_id"] = ids["<|endoftext|>"], ids["<|im_end|>"]
    more = {"depth": 3 if size == "small" else 2, "window_size": 16, "fullatt_block_indexes": [1]}
    vision = qwen_vision(decoder["hidden_size"], intermediate_size=172, **more)  # ragged, as the published 3420 is
    return Qwen2_5_VLConfig(text_config=decoder, vision_config=vision, tie_word_embeddings=True, **vision_ids(ids))


INTERNVL_IMAGE = 16  # pixels a tile: 4x4 patches, pixel shuffle to 4 tokens


def _internvl(size: str, vocab: int, ids: Ids) -> PreTrainedConfig:
    decoder = text(size, vocab, model_type="qwen3", head_dim=32, tie_word_embeddings=True)
    vision = {
        "hidden_size": 64,
        "num_hidden_layers": 3 if size == "small" else 2,
        "num_attention_heads": 4,
        "attention_bias": True,
        "intermediate_size": 256 if size == "small" else 128,
        "image_size": [INTERNVL_IMAGE, INTERNVL_IMAGE],
        "patch_size": [PATCH, PATCH],
        "initializer_range": 0.06,
    }
    return InternVLConfig(
        text_config=decoder,
        vision_config=vision,
        image_token_id=ids["<IMG_CONTEXT>"],
        image_seq_length=4,
        downsample_ratio=0.5,
        tie_word_embeddings=True,
    )


def _llavaonevision1_5(size: str, vocab: int, ids: Ids) -> PreTrainedConfig:
    decoder = text(size, vocab, head_dim=32)
    depth, mlp = (4, 256) if size == "small" else (2, 128)
    vision = qwen_vision(decoder["hidden_size"], depth=depth, intermediate_size=mlp, embed_dim=64)
    vision |= {"text_hidden_size": vision.pop("out_hidden_size"), "temporal_patch_size": 1}
    return LLaVAOneVision1_5_Config(text_config=decoder, vision_config=vision, **vision_ids(ids))


def _llama(size: str, vocab: int, ids: Ids) -> PreTrainedConfig:
    decoder = text(size, vocab, bos_token_id=ids["<s>"], eos_token_id=ids["</s>"], tie_word_embeddings=False)
    return LlamaConfig(**decoder)


def _mpt(size: str, vocab: int, ids: Ids) -> PreTrainedConfig:
    """As LLM-Foundry's mpt-1b: learned positions, biases, its own scheme of random weights."""
    return MPTConfig(
        d_model=128 if size == "small" else 64,
        n_heads=4,
        n_layers=4 if size == "small" else 2,
        max_seq_len=1024,
        vocab_size=vocab,
    )


CONFIGS: Mapping[str, Callable[[str, int, Ids], PreTrainedConfig]] = {
    "qwen3_vl": _qwen3_vl,
    "qwen3_vl_moe": _qwen3_vl_moe,
    "qwen2_5_vl": _qwen2_5_vl,
    "internvl": _internvl,
    "mistral3": seeing.mistral3,
    "llava_onevision": seeing.llava_onevision,
    "smolvlm": seeing.smolvlm,
    "gemma3": seeing.gemma3,
    "glm4v": seeing.glm4v,
    "glm46v": seeing.glm46v,
    "glm4v_moe": seeing.glm4v_moe,
    "glm_ocr": seeing.glm_ocr,
    "qwen2_vl": seeing.qwen2_vl,
    "qwen3_5": seeing.qwen3_5,
    "qwen3_5_moe": seeing.qwen3_5_moe,
    "ernie4_5_vl_moe": seeing.ernie4_5_vl_moe,
    "qwen2_audio": hearing.qwen2_audio,
    "nvila": seeing.nvila,
    "nvila_lite": seeing.nvila_lite,
    "qwen3": lambda size, vocab, ids: Qwen3Config(**text(size, vocab, head_dim=32, tie_word_embeddings=True)),
    "qwen3_moe": lambda size, vocab, ids: Qwen3MoeConfig(**moe(size, vocab), tie_word_embeddings=True),
    "llama": _llama,
    "mpt": _mpt,
    "llavaonevision1_5": _llavaonevision1_5,
}


def tiny_config(family: str, size: str = "mini", vocab: int = 512) -> PreTrainedConfig:
    """The configuration alone, for measuring: special tokens take the last ids of the vocabulary."""
    ids: dict[str, int] = defaultdict(lambda: vocab - 1 - len(ids))
    return CONFIGS[family](size, vocab, ids)
