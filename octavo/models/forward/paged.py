"""What generation by an engine needs of a Hugging Face decoder: its attention handed over, its positions, its sizes.

transformers calls an attention by the name in the decoder's configuration. Inside :func:`attention_by` that name leads
to a function of the caller's, which gets the queries, keys and values of the new tokens of a layer and keeps a cache of
its own; transformers makes no mask and no cache. The vision tower keeps the attention that it has.

The tokens of all sequences stand behind each other in one row, so that no token is padding: position ids say where each
stands in its own sequence, the attention function which tokens see each other.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

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
    """What a token leaves in the cache: `layers` times `heads` keys and values of `dim` numbers. `queries`: heads that
    look at them; `context`: the most tokens of a sequence; `vocabulary`: logits of a token."""

    layers: int
    heads: int
    dim: int
    queries: int
    context: int
    vocabulary: int


def cache_shape(config: PreTrainedConfig) -> CacheShape:
    """The cache of a model's decoder, by its configuration. Raises ModelError for a decoder that the paged cache is
    not for: layers that are no plain attention over all earlier tokens, and positions of a sequence that depend on the
    longest one beside it."""
    if attends_both_ways(config.model_type):
        raise ModelError(
            f"tokens of an image see those behind them in model_type {config.model_type!r}, and the generation engine "
            "is causal. Ask it with transformers' own generate."
        )
    text = config.get_text_config()
    if getattr(text, "alibi", False):
        raise ModelError(
            f"model_type {config.model_type!r} adds ALiBi's bias to its scores, which the generation engine does not "
            "compute. Ask it with transformers' own generate."
        )
    kinds = set(getattr(text, "layer_types", None) or ())
    if odd := sorted(kinds - {"full_attention"}):
        raise ModelError(
            f"model_type {config.model_type!r} has layers of {', '.join(odd)}, and the generation engine keeps keys "
            "and values of full attention alone. Ask it with transformers' own generate."
        )
    rope = getattr(text, "rope_parameters", None) or {}
    short = rope.get("original_max_position_embeddings", 0)
    if rope.get("rope_type") == "longrope" and short < text.max_position_embeddings:
        raise ModelError(
            f"model_type {config.model_type!r} turns queries and keys by longrope: all sequences of a call by other "
            f"angles, as soon as one of them is longer than {short} tokens (original_max_position_embeddings), so "
            "that what is written would depend on the batch. Ask it with transformers' own generate."
        )
    heads = text.num_attention_heads
    dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    held = getattr(text, "num_key_value_heads", None) or heads
    return CacheShape(text.num_hidden_layers, held, dim, heads, text.max_position_embeddings, text.vocab_size)


def why_not_paged(model: PreTrainedModel) -> str | None:
    """Why a model's attention cannot be handed over, as the end of a sentence; None where it can."""
    if getattr(model.config, "audio_config", None) is not None:
        return f"{type(model).__name__} takes sound, which prompts do not hold in this version"
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
def attention_by(model: PreTrainedModel, family: Family, attend: Attend) -> Iterator[None]:
    """Inside, every layer of the decoder computes attention by ``attend``. Raises ModelError for a layer that asks for
    more than a scaled softmax over earlier tokens."""
    config = model.get_submodule(family.language_model).config

    def forward(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float | None = None, **kw: Any
    ) -> tuple[Tensor, None]:
        if odd := [name for name in ("softcap", "position_bias", "s_aux", "sliding_window") if kw.get(name)]:
            raise ModelError(
                f"{type(module).__name__} asks its attention for {odd[0]}, which the generation engine does not "
                "compute. Ask this model with transformers' own generate."
            )
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        return attend(module.layer_idx, q, k, v, scale)[None], None  # type: ignore[arg-type]

    before, outer = config._attn_implementation, ALL_ATTENTION_FUNCTIONS.get(NAME)
    ALL_ATTENTION_FUNCTIONS[NAME] = forward
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = before
        del ALL_ATTENTION_FUNCTIONS[NAME]  # it holds the caller, who holds the model
        if outer is not None:
            ALL_ATTENTION_FUNCTIONS[NAME] = outer


def positions(
    model: PreTrainedModel, family: Family, ids: Tensor, kinds: Tensor | None = None, grid: Tensor | None = None,
    videos: Mapping[str, Tensor] | None = None,
) -> tuple[Tensor, int]:  # fmt: skip
    """(where each token of a prompt stands, where the next one will): int64 [3, P] for families whose rotary has three
    axes (by the model's own ``get_rope_index``), else [1, P].

    ids [P] int64 · kinds [P] int64: 1 where a token stands for an image, 2 for a video (None: by its id) · grid
    [images, 3] · videos: those of :data:`octavo.models.processors.frames.OF_VIDEOS`
    """
    plain = torch.arange(len(ids), device=ids.device)[None]
    index = _rope_index(model, family)
    if index is None:
        return plain, len(ids)
    if grid is None and not videos:
        return plain.expand(3, -1), len(ids)
    kinds = (ids == family.image_token_id).long() if kinds is None else kinds
    of_rows, _ = index(input_ids=ids[None], mm_token_type_ids=kinds[None], image_grid_thw=grid, **(videos or {}))
    if videos:
        of_rows = set_times(model, of_rows, kinds[None], videos)
    return of_rows[:, 0], int(of_rows.max()) + 1


def axes(model: PreTrainedModel, family: Family) -> int:
    """How many numbers say where a token stands: 3 or 1."""
    return 1 if _rope_index(model, family) is None else 3


def _rope_index(model: PreTrainedModel, family: Family) -> Callable[..., Any] | None:
    owner = model.get_submodule(family.language_model.rpartition(".")[0])
    return getattr(owner, "get_rope_index", None)
