"""The interface between a Hugging Face decoder and a generation engine: attention, positions and sizes.

transformers selects an attention function by the name in the decoder's configuration. Inside :func:`replace_attention`
that name refers to a function of the caller, which receives the queries, keys and values of the new tokens of a layer
and maintains the cache; transformers builds no mask and no cache. The attention of the vision tower is not changed.

The tokens of all sequences are concatenated in one row without padding: position ids count within each sequence, and
the attention function decides which tokens attend to each other.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from octavo.base.model_families import attends_both_ways
from octavo.models.errors import ModelError
from octavo.models.processors.frames import set_times
from octavo.models.structure.describe import Family

ATTENTION_NAME = "octavo_paged"
Attend = Callable[[int, Tensor, Tensor, Tensor, float], Tensor]
"""``(layer, q, k, v, scale)`` -> [T, H, D]: q [T, H, D], k and v [T, H_kv, D] of T new tokens, after rotary."""


@dataclass(frozen=True)
class CacheShape:
    """The cache of a token: `layers` times `heads` keys and values of `dim` numbers. `queries`: query heads; `context`:
    maximum number of tokens in a sequence; `vocabulary`: logits per token."""

    layers: int
    heads: int
    dim: int
    queries: int
    context: int
    vocabulary: int


def cache_shape(config: PreTrainedConfig) -> CacheShape:
    """Return the cache shape of a model's decoder. Raises ModelError for a decoder that the paged cache does not
    support: layers other than plain attention over all earlier tokens, and positions that depend on the longest
    sequence of the batch."""
    # The engine computes only a causal softmax over all cached keys; each check below is for a different computation.
    if attends_both_ways(config.model_type):
        raise ModelError(
            f"tokens of an image attend to later ones in model_type {config.model_type!r}, but the generation engine "
            "is causal. Use transformers' generate."
        )
    text = config.get_text_config()
    if getattr(text, "alibi", False):
        raise ModelError(
            f"model_type {config.model_type!r} adds ALiBi's bias to its scores, which the generation engine does not "
            "compute. Use transformers' generate."
        )
    kinds = set(getattr(text, "layer_types", None) or ())
    if unsupported := sorted(kinds - {"full_attention"}):
        raise ModelError(
            f"model_type {config.model_type!r} has layers of type {', '.join(unsupported)}, but the generation engine "
            "caches only keys and values of full attention. Use transformers' generate."
        )
    rope = getattr(text, "rope_parameters", None) or {}
    original_length = rope.get("original_max_position_embeddings", 0)
    if rope.get("rope_type") == "longrope" and original_length < text.max_position_embeddings:
        raise ModelError(
            f"model_type {config.model_type!r} uses longrope, which changes the rotary angles of all sequences of a "
            f"call as soon as one of them is longer than {original_length} tokens (original_max_position_embeddings), "
            "so the output would depend on the batch. Use transformers' generate."
        )
    heads = text.num_attention_heads
    dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    return CacheShape(text.num_hidden_layers, kv_heads, dim, heads, text.max_position_embeddings, text.vocab_size)


def why_not_paged(model: PreTrainedModel) -> str | None:
    """Return why a model's attention cannot be replaced by an engine's, as the end of a sentence, or None if it can."""
    if getattr(model.config, "audio_config", None) is not None:
        return f"{type(model).__name__} takes audio, which prompts do not support in this version"
    if not getattr(type(model), "_supports_attention_backend", False):
        return f"{type(model).__name__} computes attention in its own way, not through transformers' registry"
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return f"{type(model).__name__} has no position_ids argument"
    try:
        cache_shape(model.config)
    except ModelError as error:
        return str(error).removesuffix(".")
    return None


@contextmanager
def replace_attention(model: PreTrainedModel, family: Family, attend: Attend) -> Iterator[None]:
    """Context in which every layer of the decoder computes attention with ``attend``. Raises ModelError for a layer
    that needs more than a scaled softmax over earlier tokens."""
    config = cast(PreTrainedConfig, model.get_submodule(family.language_model).config)

    def forward(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: object, scaling: float | None = None,
        **options: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        if unsupported := [
            name for name in ("softcap", "position_bias", "s_aux", "sliding_window") if options.get(name)
        ]:
            raise ModelError(
                f"{type(module).__name__} uses {unsupported[0]} in its attention, which the generation engine does not "
                "compute. Use transformers' generate for this model."
            )
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        return attend(cast(int, module.layer_idx), q, k, v, scale)[None], None

    # Contexts may be nested, for one engine inside another: the inner one restores the outer one's function.
    original, outer = config._attn_implementation, ALL_ATTENTION_FUNCTIONS.get(ATTENTION_NAME)
    ALL_ATTENTION_FUNCTIONS[ATTENTION_NAME] = forward
    config._attn_implementation = ATTENTION_NAME
    try:
        yield
    finally:
        config._attn_implementation = original
        del ALL_ATTENTION_FUNCTIONS[ATTENTION_NAME]  # it would keep the caller and the model alive
        if outer is not None:
            ALL_ATTENTION_FUNCTIONS[ATTENTION_NAME] = outer


def prompt_positions(
    model: PreTrainedModel, family: Family, ids: Tensor, kinds: Tensor | None = None, grid: Tensor | None = None,
    videos: Mapping[str, Tensor] | None = None,
) -> tuple[Tensor, int]:  # fmt: skip
    """Return (positions of the tokens of a prompt, position of the next token): int64 [3, P] for families whose rotary
    embedding has three axes (from the model's ``get_rope_index``), else [1, P].

    ids [P] int64 · kinds [P] int64: 1 for placeholders of images, 2 for videos, or None to derive them from the ids ·
    grid [images, 3] · videos: the inputs of :data:`octavo.models.processors.frames.VIDEO_INPUTS`
    """
    token_positions = torch.arange(len(ids), device=ids.device)[None]
    index = _rope_index(model, family)
    if index is None:
        return token_positions, len(ids)
    if grid is None and not videos and not getattr(_owner(model, family), "images_have_one_size", False):
        return token_positions.expand(3, -1), len(ids)
    if kinds is None:
        assert family.image_token_id is not None  # set for families that take images
        kinds = (ids == family.image_token_id).long()
    row_positions, _ = index(input_ids=ids[None], mm_token_type_ids=kinds[None], image_grid_thw=grid, **(videos or {}))
    if videos:
        row_positions = set_times(model, row_positions, kinds[None], videos)
    return row_positions[:, 0], int(row_positions.max()) + 1


def position_axes(model: PreTrainedModel, family: Family) -> int:
    """Return the number of axes of a token's position: 3 or 1."""
    return 1 if _rope_index(model, family) is None else 3


def _rope_index(model: PreTrainedModel, family: Family) -> Callable[..., tuple[Tensor, Tensor]] | None:
    return getattr(_owner(model, family), "get_rope_index", None)


def _owner(model: PreTrainedModel, family: Family) -> nn.Module:
    return model.get_submodule(family.language_model.rpartition(".")[0])
