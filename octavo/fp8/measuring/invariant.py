"""A model whose results for a token depend on neither batch nor length: rollouts get the trainer's log-probabilities.

The result for a token is a function of its sequence up to that token, but in floating point it also depends on how a
library processes the other rows of the batch. Inside :func:`batch_invariant` it does not: generation from a cache, in
any batch, gives bit for bit the log-probabilities of a forward over whole padded sequences.

This has a cost: rows are padded to multiples of 16, attention runs in fixed tiles, and fused MLPs run layer by layer
(the fused kernel rounds once and separate layers round twice, and health decides which of them runs). On a GPU Triton
kernels with fixed tiles replace library calls, for FP8 products by ``fp8.backend: triton``, and norms do not produce
codes.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch import nn

from octavo.base.recipe_specs import PER_TOKEN, join_words
from octavo.fp8.arithmetic.recipe import Recipe
from octavo.fp8.dense.gemms import LayerGemms
from octavo.fp8.dense.linear import Linear
from octavo.fp8.invariance import KERNELS, BatchInvariantMode, InvarianceError, is_active
from octavo.fp8.kernels import why_not_rows
from octavo.fp8.moe.experts import Experts

_OTHER_ATTENTION = ("flash_attention", "flex_attention", "paged", "eager", "kernels-community")
"""Prefixes of the names of transformers' attention implementations that are not torch's ``sdpa``."""

_BY_ROW = join_words(PER_TOKEN, "or")


def batch_invariant(model: nn.Module) -> AbstractContextManager[object]:
    """Make the results for a row independent of batch and length, for all products and attention of ``model``.

    Use it around rollouts and around the forwards of a step, with the same number of threads.

    Raises InvarianceError for models that do not support it: FP8 layers whose activations share a scale between rows
    (tensorwise, delayed), or whose products run in a library; compiled code; attention other than sdpa; parameters on a
    device without suitable kernels. Unsupported functions are rejected by name when the model calls them, and kernels
    are rejected if their rows differ in a test on the device.
    """
    if (reason := why_not_batch_invariant(model)) is not None:
        raise InvarianceError(f"invariant: {reason}")
    return nullcontext() if is_active() else BatchInvariantMode()


def why_not_batch_invariant(model: nn.Module) -> str | None:
    """Return why this model cannot be batch-invariant, with a fix, or None if no reason is known."""
    # Checks only properties that are known before a forward; the mode rejects other calls when the model makes them.
    for device in {p.device: None for p in model.parameters() if p.device.type != "meta"}:
        if (reason := why_not_rows(device)) is not None:
            return (
                f"parameters are on {device}, where libraries' products, attention and sums of a row depend on other "
                f"rows, and Triton's kernels do not serve: {reason}. Use rl.invariant: false there"
            )
    for name, module in model.named_modules():
        for site in _sites(module):
            if (reason := _why_rows_share_scales(site.recipe)) is not None:
                return f"{site.name} runs by {site.recipe.name}, {reason}. Use fp8.recipe {_BY_ROW}"
            backend = site.selections["fwd"].backend.name if site.recipe.fwd is not None else "reference"
            device_type = next((p.device.type for p in module.parameters() if p.device.type in KERNELS), None)
            able = ("reference",) if device_type is None else ("triton", "reference")
            if backend not in able:
                return f"{site.name} runs on {backend}, which tiles by the number of rows. Use fp8.backend: {able[0]}"
        if isinstance(module, nn.Dropout) and module.p > 0:
            return f"{name} drops {module.p} of its input while it trains, and nothing in rollouts. Set lora.dropout: 0"
        if _is_compiled(module):
            return (
                f"{name or 'the model'} is compiled, and a compiler chooses kernels by sizes. Use train.compile: false"
            )
        kind = getattr(getattr(module, "config", None), "_attn_implementation", None)
        if isinstance(kind, str) and kind.startswith(_OTHER_ATTENTION):
            return f"{name or 'the model'} computes attention by {kind}. Use model.attention: sdpa"
    return None


def find_shared_scales(model: nn.Module) -> str | None:
    """Return which layer's activations share a scale between rows, or None if every row has its own scale."""
    for module in model.modules():
        for site in _sites(module):
            if (reason := _why_rows_share_scales(site.recipe)) is not None:
                return f"{site.name} runs by {site.recipe.name}, {reason}"
    return None


def first_compiled_module(model: nn.Module) -> str | None:
    """Return the name of the first compiled module, or None if there is none."""
    return next((name or "the model" for name, m in model.named_modules() if _is_compiled(m)), None)


def _sites(module: nn.Module) -> list[LayerGemms]:
    """Return the sites of an FP8 layer."""
    if isinstance(module, Linear):
        return [module._site]
    return list(module._sites.values()) if isinstance(module, Experts) else []


def _is_compiled(module: nn.Module) -> bool:
    forward = module.__dict__.get("forward")
    return getattr(module, "_compiled_call_impl", None) is not None or hasattr(forward, "_torchdynamo_orig_callable")


def _why_rows_share_scales(recipe: Recipe) -> str | None:
    """Return why the codes of a row of x depend on other rows, or None if they do not."""
    if recipe.delayed is not None:
        return "whose scales come from amax histories of earlier batches"
    if recipe.fwd is not None and recipe.fwd.a.block[0] != 1:
        return f"whose activations share a scale between rows ({recipe.fwd.a})"
    return None
