"""The input and output of a decoder within a generating model: its cache, and logits and loss."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

if TYPE_CHECKING:
    from transformers.cache_utils import Cache


def cache_argument(decoder: PreTrainedModel, cache: Cache | None) -> Mapping[str, Cache]:
    """Return the cache under the name that a decoder's forward has for it: transformers 5.24 renamed `past_key_values`
    to `cache` in its own decoders."""
    return {} if cache is None else {_cache_name(type(decoder).forward): cache}


@functools.cache
def _cache_name(forward: Callable[..., object]) -> str:
    return "cache" if "cache" in inspect.signature(forward).parameters else "past_key_values"


def causal_output(
    model: PreTrainedModel,
    output: BaseModelOutputWithPast,
    labels: Tensor | None,
    logits_to_keep: int | Tensor,
    **options: object,
) -> CausalLMOutputWithPast:
    """Return logits [B, T, V] of all tokens or of `logits_to_keep` (a number of last tokens, or indices), and with
    `labels` the model's loss, which gets the `options`."""
    keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
    assert output.last_hidden_state is not None
    logits = model.lm_head(output.last_hidden_state[:, keep])
    loss = None
    if labels is not None:
        loss = model.loss_function(logits, labels, vocab_size=logits.shape[-1], **options)
    # by position: transformers 5.24 renamed `past_key_values` to `cache`
    return CausalLMOutputWithPast(loss, logits, output.past_key_values, output.hidden_states, output.attentions)
