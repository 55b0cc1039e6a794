"""Let attention's output layer save a reference to its input instead of codes.

The input of o_proj is the output of attention, which the backward of attention reads: it stays in memory in 16 bits in
any case. The output layer (:func:`find_attention_modules`) therefore saves a reference to its input, and casts it for
wgrad in the backward, to the same codes that it would have saved.

Each call checks whether attention keeps that memory: the input must come from an attention function only through views
(:func:`is_saved_by_attention`). Attention written as matrix products saves its probabilities instead, and no other
function saves a copy (``contiguous``, ``cat`` over images). In these cases the layer saves codes, half the size of the
input.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from octavo.fp8.blocks.probe import unwrap_adapter
from octavo.fp8.dense.inputs import Recomputable
from octavo.fp8.dense.linear import RECOMPUTE_KEY
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
"""Overrides, in the ``metadata`` of a node, the rule that attention functions keep their output. A recomputed function
does not: ``out.grad_fn.metadata[KEEPS_OUTPUT_KEY] = False``."""


class AttentionModule(NamedTuple):
    """The name of an attention module and its output layer, without an adapter around it."""

    name: str
    output: nn.Linear
    output_name: str


def find_attention_modules(model: nn.Module) -> Iterator[AttentionModule]:
    """Yield the attention modules of a model, which are recognized by the names of their children."""
    for path, parent in model.named_modules():
        children = parent._modules
        if not any(all(children.get(name) is not None for name in names) for names in _INPUTS):
            continue
        for name in _OUTPUTS:
            layer = unwrap_adapter(children.get(name))
            if isinstance(layer, nn.Linear):
                suffix = "" if layer is children[name] else ".base_layer"
                yield AttentionModule(path, layer, f"{path}.{name}{suffix}" if path else f"{name}{suffix}")
                break


def recompute_input(attention: AttentionModule) -> None:
    """Let the output layer cast its input in the backward instead of saving codes."""
    add_attribute(attention.output, RECOMPUTE_KEY, attention_recomputable)


def attention_recomputable(x: Tensor, dtype: torch.dtype) -> Recomputable | None:
    """Return x itself as the source for the backward of attention's output layer, if attention keeps x and the GEMMs
    need no conversion; otherwise None, and the layer saves codes."""
    if x.dtype != dtype or not is_saved_by_attention(x):
        return None
    return Recomputable((x.detach(),), _identity)


def _identity(x: Tensor) -> Tensor:
    return x


def is_saved_by_attention(x: Tensor) -> bool:
    """True if x is a view of the output of an attention function that keeps this output for its backward.

    Only names of nodes are inspected: unpacking the saved tensors of a node would recompute a checkpointed region.
    """
    node = x.grad_fn
    while node is not None:
        metadata: Any = node.metadata  # annotated otherwise, but a dict
        if KEEPS_OUTPUT_KEY in metadata:
            return bool(metadata[KEEPS_OUTPUT_KEY])
        if node.name() not in _VIEWS:
            return node.name().startswith(_FUNCTIONS)
        node = node.next_functions[0][0]
    return False
