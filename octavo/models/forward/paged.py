"""The interface between a Hugging Face decoder and a generation engine: its attention, its positions, its sizes.

transformers selects an attention function by the name in the decoder's configuration. Inside :func:`replace_attention`
that name refers to a function of the caller, which receives the queries, keys and values of the new tokens of a layer
and maintains the cache; transformers builds no mask and no cache. The attention of the vision tower is not changed.

The tokens of all sequences are concatenated to one row without padding: position ids are those in each sequence, and
the attention function decides which tokens see each other.
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

NAME = "octavo_paged"
Attend = Callable[[int, Tensor, Tensor, Tensor, float], Tensor]
"""``(layer, q, k, v, scale)`` -> [T, H, D]: q [T, H, D], k and v [T, H_kv, D] of T new tokens, after rotary."""


@dataclass(frozen=True)
class CacheShape:
    """The cache of a token: `layers` times `heads` keys and values of `dim` numbers. `queries`: heads of queries;
    `context`: the maximum of tokens in a sequence; `vocabulary`: logits of a token."""

    layers: int
    heads: int
    dim: int
    queries: int
    context: int
    vocabulary: int


def cache_shape(config: PreTrainedConfig) -> CacheShape:
    """The cache of a model's decoder, by its configuration. Raises ModelError for a decoder that the paged cache does
    not support: layers other than plain attention over all earlier tokens, and positions that depend on the longest
    sequence of the batch."""
    # The engine computes a causal softmax over all cached keys and nothing else; each refusal is another computation.
    if attends_both_ways(config.model_type):
        raise ModelError(
            f"tokens of an image see later ones in model_type {config.model_type!r}, and the generation engine "
            "is causal. Use transformers' own generate."
        )
    text = config.get_text_config()
    if getattr(text, "alibi", False):
        raise ModelError(
            f"model_type {config.model_type!r} adds ALiBi's bias to its scores, which the generation engine does not "
            "compute. Use transformers' own generate."
        )
    kinds = set(getattr(text, "layer_types", None) or ())
    if odd := sorted(kinds - {"full_attention"}):
        raise ModelError(
            f"model_type {config.model_type!r} has layers of {', '.join(odd)}, and the generation engine caches only "
            "keys and values of full attention. Use transformers' own generate."
        )
    rope = getattr(text, "rope_parameters", None) or {}
    short = rope.get("original_max_position_embeddings", 0)
    if rope.get("rope_type") == "longrope" and short < text.max_position_embeddings:
        raise ModelError(
            f"model_type {config.model_type!r} uses longrope, which changes the rotary angles of all sequences of a "
            f"call as soon as one of them is longer than {short} tokens (original_max_position_embeddings), so the "
            "output would depend on the batch. Use transformers' own generate."
        )
    heads = text.num_attention_heads
    dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    return CacheShape(text.num_hidden_layers, kv_heads, dim, heads, text.max_position_embeddings, text.vocab_size)


def why_not_paged(model: PreTrainedModel) -> str | None:
    """Why a model's attention cannot be replaced by an engine's, as the end of a sentence; None if it can."""
    if getattr(model.config, "audio_config", None) is not None:
        return f"{type(model).__name__} takes sound, which prompts do not contain in this version"
    if not getattr(type(model), "_supports_attention_backend", False):
        return f"{type(model).__name__} computes attention in its own way, not through transformers' registry"
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return f"{type(model).__name__} takes no position_ids"
    try:
        cache_shape(model.config)
    except ModelError as error:
        return str(error).removesuffix(".")
    return None


@contextmanager
def replace_attention(model: PreTrainedModel, family: Family, attend: Attend) -> Iterator[None]:
    """A context in which every layer of the decoder computes attention by ``attend``. Raises ModelError for a layer
    that needs more than a scaled softmax over earlier tokens."""
    config = cast(PreTrainedConfig, model.get_submodule(family.language_model).config)

    def forward(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: object, scaling: float | None = None,
        **options: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        if odd := [name for name in ("softcap", "position_bias", "s_aux", "sliding_window") if options.get(name)]:
            raise ModelError(
                f"{type(module).__name__} asks its attention for {odd[0]}, which the generation engine does not "
                "compute. Use transformers' own generate for this model."
            )
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        return attend(cast(int, module.layer_idx), q, k, v, scale)[None], None

    # Contexts may be nested, for one engine inside another: the inner one restores the outer one's function.
    before, outer = config._attn_implementation, ALL_ATTENTION_FUNCTIONS.get(NAME)
    ALL_ATTENTION_FUNCTIONS[NAME] = forward
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = before
        del ALL_ATTENTION_FUNCTIONS[NAME]  # or it would keep the caller alive, and with it the model
        if outer is not None:
            ALL_ATTENTION_FUNCTIONS[NAME] = outer


def prompt_positions(
    model: PreTrainedModel, family: Family, ids: Tensor, kinds: Tensor | None = None, grid: Tensor | None = None,
    videos: Mapping[str, Tensor] | None = None,
) -> tuple[Tensor, int]:  # fmt: skip
    """(positions of the tokens of a prompt, position of the next token): int64 [3, P] for families whose rotary has
    three axes (from the model's ``get_rope_index``), else [1, P].

    ids [P] int64 · kinds [P] int64: 1 for placeholders of images, 2 of videos (None: from the ids) · grid [images, 3]
    · videos: the inputs of :data:`octavo.models.processors.frames.VIDEO_INPUTS`
    """
    plain = torch.arange(len(ids), device=ids.device)[None]
    index = _rope_index(model, family)
    if index is None:
        return plain, len(ids)
    if grid is None and not videos:
        return plain.expand(3, -1), len(ids)
    if kinds is None:
        assert family.image_token_id is not None  # of a family that takes images
        kinds = (ids == family.image_token_id).long()
    of_row, _ = index(input_ids=ids[None], mm_token_type_ids=kinds[None], image_grid_thw=grid, **(videos or {}))
    if videos:
        of_row = set_times(model, of_row, kinds[None], videos)
    return of_row[:, 0], int(of_row.max()) + 1


def position_axes(model: PreTrainedModel, family: Family) -> int:
    """The number of axes of a token's position: 3 or 1."""
    return 1 if _rope_index(model, family) is None else 3


def _rope_index(model: PreTrainedModel, family: Family) -> Callable[..., tuple[Tensor, Tensor]] | None:
    owner = model.get_submodule(family.language_model.rpartition(".")[0])
    return getattr(owner, "get_rope_index", None)
