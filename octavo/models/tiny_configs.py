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
    MptConfig,
    PreTrainedConfig,
    Qwen2_5_VLConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3VLConfig,
    Qwen3VLMoeConfig,
)

from octavo.models.nvila import NvilaLiteConfig

SIZES = ("small", "mini")
PATCH = 4  # pixels; two by two patches merge into one token of 8x8 pixels
MAX_POSITIONS = 4096
Ids = Mapping[str, int]


def _text(size: str, vocab: int, **more: Any) -> dict[str, Any]:
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
        **more,
    }


def _rope(head_dim: int) -> dict[str, Any]:
    half = head_dim // 2
    section = [half - 2 * (half // 3), half // 3, half // 3]  # time, height, width
    return {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": section}


def _qwen_vision(out: int, **more: Any) -> dict[str, Any]:
    return {
        "hidden_size": 64,
        "num_heads": 4,
        "patch_size": PATCH,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": out,
        "initializer_range": 0.06,
        **more,
    }


def _vision_ids(ids: Ids) -> dict[str, int]:
    return {
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
    }


def _qwen3_parts(size: str, text: dict[str, Any], tied: bool, ids: Ids) -> dict[str, Any]:
    """What a Qwen3-VL configuration is made of, dense or MoE."""
    depth, mlp, deepstack = (4, 256, [1, 2]) if size == "small" else (2, 128, [0])
    more = {"num_position_embeddings": 64, "deepstack_visual_indexes": deepstack}
    return {
        "text_config": {**text, "rope_parameters": {**_rope(32), "mrope_interleaved": True}},
        "vision_config": _qwen_vision(text["hidden_size"], depth=depth, intermediate_size=mlp, **more),
        "tie_word_embeddings": tied,
        **_vision_ids(ids),
    }


def _qwen3_vl(size: str, vocab: int, ids: Ids) -> PreTrainedConfig:
    return Qwen3VLConfig(**_qwen3_parts(size, _text(size, vocab, head_dim=32), True, ids))


def _moe_text(size: str, vocab: int) -> dict[str, Any]:
    text = _text(size, vocab, head_dim=32, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=64)
    return {**text, "num_hidden_layers": 2}


def _qwen3_vl_moe(size: str, vocab: int, ids: Ids) -> PreTrainedConfig:
    text = {**_moe_text(size, vocab), "tie_word_embeddings": False}
    return Qwen3VLMoeConfig(**_qwen3_parts(size, text, False, ids))


def _qwen2_5_vl(size: str, vocab: int, ids: Ids) -> PreTrainedConfig:
    text = _text(size, vocab)
    text["rope_parameters"] = _rope(text["hidden_size"] // text["num_attention_heads"])
    text["bos_token_id"], text["eos_token_id"] = ids["<|endoftext|>"], ids["<|im_end|>"]
    more = {"depth": 3 if size == "small" else 2, "window_size": 16, "fullatt_block_indexes": [1]}
    vision = _qwen_vision(text["hidden_size"], intermediate_size=172, **more)  # ragged, as the published 3420 is
    return Qwen2_5_VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=True, **_vision_ids(ids))


INTERNVL_IMAGE = 16  # pixels a tile: 4x4 patches, pixel shuffle to 4 tokens


def _internvl(size: str, vocab: int, ids: Ids) -> PreTrainedConfig:
    text = _text(size, vocab, model_type="qwen3", head_dim=32, tie_word_embeddings=True)
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
        text_config=text,
        vision_config=vision,
        image_token_id=ids["<IMG_CONTEXT>"],
        image_seq_length=4,
        downsample_ratio=0.5,
        tie_word_embeddings=True,
    )


NVILA_IMAGE = 16  # pixels a tile: 4x4 patches, 3x3 of which (padded) become one of 4 tokens


def _nvila_lite(size: str, vocab: int, ids: Ids) -> PreTrainedConfig:
    """The table ends before the tokens of media, as the published one does; the MLP of the tower is as ragged."""
    text = _text(size, ids["<vila/sentinel>"], model_type="qwen2", tie_word_embeddings=False)
    vision = {
        "hidden_size": 64,
        "num_hidden_layers": 4 if size == "small" else 3,
        "num_attention_heads": 4,
        "intermediate_size": 272 if size == "small" else 144,  # 16 * 17, 16 * 9
        "image_size": NVILA_IMAGE,
        "patch_size": PATCH,
    }
    return NvilaLiteConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=ids["<image>"],
        video_token_id=ids["<vila/video>"],
        newline_token_id=ids["Ċ"],
        max_tiles=4,
    )


def _llama(size: str, vocab: int, ids: Ids) -> PreTrainedConfig:
    text = _text(size, vocab, bos_token_id=ids["<s>"], eos_token_id=ids["</s>"], tie_word_embeddings=False)
    return LlamaConfig(**text)


def _mpt(size: str, vocab: int, ids: Ids) -> PreTrainedConfig:
    return MptConfig(
        d_model=128 if size == "small" else 64,
        n_heads=4,
        n_layers=4 if size == "small" else 2,
        max_seq_len=MAX_POSITIONS,
        vocab_size=vocab,
        initializer_range=0.06,
    )


CONFIGS: Mapping[str, Callable[[str, int, Ids], PreTrainedConfig]] = {
    "qwen3_vl": _qwen3_vl,
    "qwen3_vl_moe": _qwen3_vl_moe,
    "qwen2_5_vl": _qwen2_5_vl,
    "internvl": _internvl,
    "nvila_lite": _nvila_lite,
    "qwen3": lambda size, vocab, ids: Qwen3Config(**_text(size, vocab, head_dim=32, tie_word_embeddings=True)),
    "qwen3_moe": lambda size, vocab, ids: Qwen3MoeConfig(**_moe_text(size, vocab), tie_word_embeddings=True),
    "llama": _llama,
    "mpt": _mpt,
}


def tiny_config(family: str, size: str = "mini", vocab: int = 512) -> PreTrainedConfig:
    """The configuration alone, for measuring: special tokens take the last ids of the vocabulary."""
    ids: dict[str, int] = defaultdict(lambda: vocab - 1 - len(ids))
    return CONFIGS[family](size, vocab, ids)
