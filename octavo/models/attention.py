"""An attention of one's own in a Hugging Face model, through the registry that transformers has for that.

    models.use_attention(model, fp8.grouped_attention)

The function is called where ``sdpa`` was, with the masks that ``sdpa`` gets (sliding windows and packed sequences are
in them), in the text and the vision part alike. Vision towers of the Qwen-VL families call their attention once for
each image, without a mask. What the function is not for stays stock: forwards without gradient, paged caches, position
biases, and queries of another length than their keys (decoding).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, is_grad_enabled, nn
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from octavo.models.errors import ModelError

STOCK = "sdpa"
Attention = Callable[..., Tensor]
"""``(q, k, v, mask, *, scale, is_causal, dropout)`` -> [B, H, T, D]: q [B, H, T, D], k and v with fewer heads."""


def use_attention(model: PreTrainedModel, attention: Attention) -> str:
    """Let every part of a model compute attention by ``attention``; returns the name it is registered under.

    Nothing of it goes into a saved ``config.json``. ``model.set_attn_implementation("sdpa")`` takes it back.

    Raises:
        ModelError: a part of the model computes attention otherwise than by sdpa (its own kernels, or eager).
    """
    name = f"octavo_{attention.__name__}"
    parts = [(path, m) for path, m in model.named_modules() if isinstance(m, PreTrainedModel)]
    for path, part in parts:
        found = part.config._attn_implementation
        if found not in (STOCK, name):
            raise ModelError(
                f"{path or type(model).__name__} computes attention by {found!r}, and only {STOCK!r} can be replaced "
                f"by {attention.__name__}. Load the model with attn_implementation={STOCK!r}, or leave its attention "
                "as it is"
            )
    ALL_ATTENTION_FUNCTIONS.register(name, _called_as_transformers_does(attention))
    ALL_MASK_ATTENTION_FUNCTIONS.register(name, ALL_MASK_ATTENTION_FUNCTIONS[STOCK])
    model.set_attn_implementation(name)
    if left := [path or type(model).__name__ for path, part in parts if part.config._attn_implementation != name]:
        raise ModelError(
            f"{', '.join(left)} of {type(model).__name__} would not take another attention function in this version of "
            "transformers. Leave its attention as it is"
        )
    return name


def _called_as_transformers_does(attention: Attention) -> Callable[..., tuple[Tensor, None]]:
    def forward(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        special = any(kwargs.get(name) is not None for name in ("softcap", "position_bias", "cache", "s_aux"))
        if special or not is_grad_enabled() or query.shape[2] != key.shape[2] or query.shape[2] == 1:
            out: tuple[Tensor, None] = ALL_ATTENTION_FUNCTIONS[STOCK](
                module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal,
                **kwargs,
            )  # fmt: skip
            return out
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        heads = attention(
            query, key, value, attention_mask,
            scale=scaling, is_causal=bool(causal) and attention_mask is None, dropout=dropout,
        )  # fmt: skip
        return heads.transpose(1, 2).contiguous(), None

    return forward
