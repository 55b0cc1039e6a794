"""Attention's output layer keeps no codes of an input that attention keeps anyway.

The input of o_proj is the output of attention, which attention's own backward reads: it stays in memory in 16 bits
whatever the layer does. A layer that is known for attention's output (:func:`find_attention_modules`) therefore saves a
reference to its input, and casts it for wgrad in backward, to the very codes that it would have saved.

Whether attention keeps that memory is seen at each call: the input must come from an attention function only through
views (:func:`is_saved_by_attention`). Attention written out in products of matrices keeps its probabilities instead,
and a copy (``contiguous``, ``cat`` over images) is kept by nothing else: then the layer keeps codes, half of the input.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from octavo.fp8.blocks.probe import unwrap_adapter
from octavo.fp8.dense.inputs import Source
from octavo.fp8.dense.linear import SOURCE_KEY
from octavo.fp8.dense.swap import add_attribute

_INPUTS = (("q_proj", "k_proj", "v_proj"), ("qkv",), ("query", "key", "value"))
_OUTPUTS = ("o_proj", "out_proj", "proj", "projection_layer", "dense")


_VIEWS = {
    f"{op}Backward{i}"
    for op in ("View", "UnsafeView", "ReshapeAlias", "Transpose", "Permute", "Alias", "Squeeze", "Unsqueeze")
    for i in range(4)
}
_FUNCTIONS = ("ScaledDotProduct", "_CpuFlash", "_Attention", "FlashAttn", "FlashAttention")
KEEPS_OUTPUT_KEY = "keeps_output"
"""Whoever knows better whether an attention function keeps its output (one that is recomputed does not) says so in the
``metadata`` of its node: ``out.grad_fn.metadata[KEEPS_OUTPUT] = False``."""


class AttentionModule(NamedTuple):
    """An attention module: its name and its output layer, adapters taken off."""

    name: str
    output: nn.Linear
    output_name: str


def find_attention_modules(model: nn.Module) -> Iterator[AttentionModule]:
    """The attention modules of a model, known by the names of their children."""
    for path, parent in model.named_modules():
        held = parent._modules
        if not any(all(held.get(name) is not None for name in names) for names in _INPUTS):
            continue
        for name in _OUTPUTS:
            layer = unwrap_adapter(held.get(name))
            if isinstance(layer, nn.Linear):
                inner = "" if layer is held[name] else ".base_layer"
                yield AttentionModule(path, layer, f"{path}.{name}{inner}" if path else f"{name}{inner}")
                break


def recompute_input(attention: AttentionModule) -> None:
    """Let the output layer cast its input again in backward."""
    add_attribute(attention.output, SOURCE_KEY, attention_source)


def attention_source(x: Tensor, dtype: torch.dtype) -> Source | None:
    """How the backward of attention's output layer gets x again: x itself, where attention keeps it and the GEMMs take
    it as it is; None where codes are to be saved."""
    if x.dtype != dtype or not is_saved_by_attention(x):
        return None
    return Source((x.detach(),), _identity)


def _identity(x: Tensor) -> Tensor:
    return x


def is_saved_by_attention(x: Tensor) -> bool:
    """Whether x is the memory of an attention function's output, which that function keeps for its backward.

    Only names are looked at: unpacking what a node saved would recompute a checkpointed region.
    """
    node = x.grad_fn
    while node is not None:
        metadata: Any = node.metadata  # a dictionary, whatever its annotation says
        if KEEPS_OUTPUT_KEY in metadata:
            return bool(metadata[KEEPS_OUTPUT_KEY])
        if node.name() not in _VIEWS:
            return node.name().startswith(_FUNCTIONS)
        node = node.next_functions[0][0]
    return False
