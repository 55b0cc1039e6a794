"""What the configurations of small checkpoints share: decoders and towers of a few hundred thousand parameters.

Widths are multiples of 16, 32 and 64 where the published models' are, and ragged where theirs are. "small" trains well
from scratch within minutes on a CPU; "mini" is for tests.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SIZES = ("small", "mini")
PATCH = 4  # pixels; two by two patches merge into one token of 8x8 pixels
MAX_POSITIONS = 4096
Ids = Mapping[str, int]


def text(size: str, vocab: int, **more: Any) -> dict[str, Any]:
    """A decoder."""
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


def moe(size: str, vocab: int, **more: Any) -> dict[str, Any]:
    """A decoder of two layers whose MLPs are eight experts, two of them for each token."""
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    return {**text(size, vocab, head_dim=32, **experts, **more), "num_hidden_layers": 2}


def qwen_vision(out: int, **more: Any) -> dict[str, Any]:
    """A tower over images of any size, whose 2 x 2 patches become one token."""
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


def vision_ids(ids: Ids) -> dict[str, int]:
    """Qwen's tokens around and in the place of an image or video."""
    return {
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
    }


def rope(rotated: int, **more: Any) -> dict[str, Any]:
    """Rotary of three axes over `rotated` numbers of a head: most of its angles count time."""
    half = rotated // 2
    section = [half - 2 * (half // 3), half // 3, half // 3]  # time, height, width
    return {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": section, **more}
