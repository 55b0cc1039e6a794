"""Activations saved for the backward in FP8: the codes that elementwise layers are recomputed from.

``Policy(activations="fp8")`` enables it, for the whole model or a component. Linear layers in FP8 save the codes of
their input anyway; this concerns the rest of a transformer block:

===================  ===========================================  ====================================================
module               saves                                        instead of
===================  ===========================================  ====================================================
norm                 E4M3 codes of its input, fp32 statistics     the input, and the normalized copy of most RMSNorms
gated MLP            E4M3 codes of gate and of up                 gate, silu(gate), up and their product
MLP                  E4M3 codes of the activation's input         that input, and the activation
experts              E4M3 codes of gate and up, of each output    gate, up, silu(gate), their product, each output
attention's output   a reference to attention's saved output      additional codes
===================  ===========================================  ====================================================

Codes are E4M3 in blocks of 1 x 128 with powers of two as scales, 1.03 bytes per element. **Norms**
(:mod:`octavo.fp8.blocks.rmsnorm`, :mod:`octavo.fp8.blocks.layernorm`) compute their output from the exact input and
their gradient from its codes. **MLPs** (:mod:`octavo.fp8.blocks.mlp`) and experts (:mod:`octavo.fp8.moe.experts`) use
the *decoded* codes in the forward too, so that the backward can recompute the product, bit for bit, and cast it for
wgrad: the gradient is the exact gradient of the forward, except that the rounding itself passes gradients through. The
rounding happens also without a graph (evaluation, the first run of a reentrant checkpoint), so that a model has one
forward. **Attention's output layer** (:mod:`octavo.fp8.blocks.attention_output`) casts its input again in the backward.

A decoder layer still saves q, k, v and the output of attention in 16 bits: 20 of 66.4 KiB per token with a
hidden size of 4096, an intermediate size of 12288, 32 heads of 128, 8 key-value heads and QK-norm. Operations in a
block's own forward are not replaced: a layer scale that is a bare parameter (InternVL's ``lambda_1 * x``) saves x, and
q, k and v from one fused projection (Qwen-VL's vision towers) keep each other's memory alive unless attention copies v,
as :mod:`octavo.fp8.blocks.attention` does. Residual additions and rotary embeddings save nothing. A stock linear layer
in high precision saves its input, and so does a router. Compiled blocks (``torch.compile``) behave like the stock
model.

This module has the common parts: encoding and decoding activations, and saving tensors by name.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from octavo.fp8.arithmetic.cast import CastSpec, Quantized
from octavo.fp8.arithmetic.recipe import Recipe
from octavo.fp8.dense.gemms import LayerGemms
from octavo.fp8.kernels import registry
from octavo.fp8.kernels.registry import Backend, select

SPEC = CastSpec("e4m3", (1, 128), "pow2")
_NARROW = CastSpec("e4m3", (1, -1), "pow2")  # the same codes for rows up to 128, without padding to 128 in memory
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes of activations that are saved as codes; modules that are called with another dtype run unchanged."""


def encode_activation(x: Tensor) -> Quantized:
    """Return the codes of x as a matrix [product of leading dimensions, last], detached. NaN and infinity become
    NaN."""
    x_MK = x.detach().reshape(x.shape[:-1].numel(), x.shape[-1])
    spec = _NARROW if x.shape[-1] < SPEC.block[1] else SPEC
    return select_backend("quantize", spec, x.device).quantize(x_MK, spec, 1)


def decode_activation(q: Quantized, dtype: torch.dtype) -> Tensor:
    """Return the decoded codes [rows, features], exact in fp32 and bf16. In fp16, values above the largest finite
    number, which rounding to FP8 can produce, are clamped to it; NaN stays NaN."""
    backend = select_backend("dequantize", q.spec, q.data.device)
    if dtype is torch.float16:
        largest = torch.finfo(dtype).max
        return backend.dequantize(q, torch.float32).clamp_(-largest, largest).to(dtype)
    return backend.dequantize(q, dtype)


def save_named(ctx: Any, **named: Quantized | Tensor | None) -> None:
    """Save tensors and codes for a backward, which gets them by name from :func:`load_saved`."""
    tensors: list[Tensor | None] = []
    ctx.saved_specs = {name: value.spec if isinstance(value, Quantized) else None for name, value in named.items()}
    for value in named.values():
        tensors += (value.data, value.scale) if isinstance(value, Quantized) else (value,)
    ctx.save_for_backward(*tensors)


def load_saved(ctx: Any) -> dict[str, Any]:
    """Return the arguments of :func:`save_named`, by name."""
    tensors = iter(ctx.saved_tensors)
    return {
        name: next(tensors) if spec is None else Quantized(next(tensors), next(tensors), spec)
        for name, spec in ctx.saved_specs.items()
    }


def decode_if_quantized(saved: Quantized | Tensor, dtype: torch.dtype) -> Tensor:
    """Decode codes to ``dtype``; return a tensor unchanged."""
    return decode_activation(saved, dtype) if isinstance(saved, Quantized) else saved


def select_fused_backend(op: str, site: LayerGemms, device: torch.device) -> Backend:
    """Select the backend of a fused operation of a layer: the backend of its GEMMs if it supports the operation,
    otherwise as :func:`select_backend` does. All backends give the same codes."""
    return _select_cached(registry.names(), op, site.recipe, device, site.backend.backend.name)


def select_backend(op: str, spec: CastSpec, device: torch.device, first: str | None = None) -> Backend:
    """Select the backend of an operation: ``first`` if it supports the operation, otherwise the choice of
    :func:`~octavo.fp8.kernels.registry.select`."""
    return _select_cached(registry.names(), op, spec, device, first)


@lru_cache(maxsize=512)
def _select_cached(
    registered: tuple[str, ...], op: str, what: CastSpec | Recipe, device: torch.device, first: str | None
) -> Backend:
    """Select a backend. Cached, because every layer needs it in every step; ``registered`` is part of the cache key, so
    that new backends are considered."""
    if first is not None and registry.get(first).supports(op, what, device, None) is None:
        return registry.get(first)
    return select(op, recipe_or_spec=what, device=device).backend
