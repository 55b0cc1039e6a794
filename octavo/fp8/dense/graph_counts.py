"""Counts of the GEMMs in compiled graphs: the operators report what they run, under the name of the weight's layer.

All blocks of a model may share one graph, so an operator has no argument that names its layer. The weight names it: a
cache of codes is registered by the weight's storage (:func:`octavo.fp8.weights.cache.codes_of`), and so is a module in
high precision (:func:`octavo.fp8.weights.cache.owner_of`). If nothing listens, an operator only asks whether anything
does.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor, nn

from octavo.fp8.dense.graph_arguments import parse_key
from octavo.fp8.kernels.capture import is_capturing
from octavo.fp8.observe import counts, recorder
from octavo.fp8.observe.recorder import HIGH
from octavo.fp8.weights.cache import codes_of, owner_of

DGRAD, WGRAD, GRAD = 1, 2, 4
"""What a forward needs later, as one number: its input's gradient, its weight's gradient, and any gradient at all."""


def gradient_needs(x: Tensor, weight: Tensor) -> int:
    """Return the sum of :data:`DGRAD`, :data:`WGRAD` and :data:`GRAD` for a forward, while a compiler traces it."""
    if not torch.is_grad_enabled():
        return 0
    return GRAD + (DGRAD if x.requires_grad else 0) + (WGRAD if weight.requires_grad else 0)


def count_output(module: nn.Module, inputs: tuple[object, ...], output: object) -> object:
    """Return the output of a module in high precision, or its first one, through the operator that reports and copies
    it, while a compiler traces the module's forward."""
    watched, weight = counts.gemms_of(module), first_matrix(module)
    y = output[0] if isinstance(output, tuple) else output
    if watched is None or weight is None or not isinstance(y, Tensor) or not watched.rows(inputs):
        return output
    x = inputs[0]
    assert isinstance(x, Tensor)  # of others it has no rows
    y = torch.ops.octavo.count(y, weight, watched.rows(inputs), gradient_needs(x, weight))
    return (y, *output[1:]) if isinstance(output, tuple) else y


def first_matrix(module: nn.Module) -> Tensor | None:
    """Return the first parameter with more than one dimension, or None if there is none, or it is a tensor subclass."""
    weight = next((p for p in module._parameters.values() if p is not None and p.dim() > 1), None)
    return weight if type(weight) in (Tensor, nn.Parameter) else None


# --- whose weight it is -----------------------------------------------------------------------------------------------


def _find_module(weight: Tensor) -> counts.HighPrecisionGemms | None:
    module = owner_of(weight)
    return None if module is None else counts.gemms_of(module)


class _Layer(NamedTuple):
    name: str
    is_planned: bool  # counters expect gradients of an FP8 layer, and not of a module that the plan leaves as it is


def _find_layer(weight: Tensor, key: str) -> _Layer:
    """Return the layer of a weight.

    Raises RuntimeError if there is none, as for a weight that was computed or passed by ``functional_call``.
    """
    cache = codes_of(weight)
    if cache is not None and cache.layer:
        return _Layer(cache.layer, True)
    if (name := parse_key(key).name) != "":
        return _Layer(name, True)
    watched = _find_module(weight)
    if watched is not None:
        return _Layer(watched.gemms[0][0], False)
    raise _unknown(weight)


def _unknown(weight: Tensor) -> RuntimeError:
    return RuntimeError(
        f"fp8.count_gemms cannot count a GEMM of a compiled graph: its weight {list(weight.shape)} is not the "
        "parameter of a layer (it was computed, or passed by torch.func.functional_call). Count such a model under "
        'torch.compiler.set_stance("force_eager").'
    )


# --- reports ----------------------------------------------------------------------------------------------------------


def report_forward(weight: Tensor, key: str, tokens: int, needs: int) -> None:
    """Report fwd of a linear layer in a graph; ``needs`` is :func:`gradient_needs`."""
    _check_listeners(weight)
    layer, is_planned = _find_layer(weight, key)
    flops = 2 * tokens * weight.numel()
    if is_planned:
        dgrad, wgrad, grad = bool(needs & DGRAD), bool(needs & WGRAD), bool(needs & GRAD)
        recorder.count_forward(layer, _backend(key, "fwd"), flops, dgrad, wgrad, grad)
    else:
        recorder.count_forward(layer, HIGH, flops, False, False, True)


def report_backward(gemm: str, weight: Tensor, key: str, tokens: int) -> None:
    """Report dgrad or wgrad of a linear layer in a graph."""
    _check_listeners(weight)
    recorder.count_backward(_find_layer(weight, key).name, gemm, _backend(key, gemm), 2 * tokens * weight.numel())


def report_module(weight: Tensor, gemms: Iterable[str], rows: int) -> None:
    """Report GEMMs of a module in high precision that has its own operators in the graph."""
    _check_listeners(weight)
    watched = _find_module(weight)
    if watched is None:
        raise _unknown(weight)
    for name, n, k in watched.gemms:
        for gemm in gemms:
            if gemm == "fwd":
                recorder.count_forward(name, HIGH, 2 * rows * n * k, False, False, True)
            else:
                recorder.count_backward(name, gemm, HIGH, 2 * rows * n * k)


@lru_cache(maxsize=256)
def _backend(key: str, gemm: str) -> str:
    return parse_key(key).text(gemm).partition("@")[0] or HIGH


def _check_listeners(weight: Tensor) -> None:
    """Raise RuntimeError for what a graph cannot report: operands, and replays of a CUDA graph that torch captures."""
    if recorder.needs_operands():
        raise RuntimeError(
            "fp8.health, and every check that reads the operands of GEMMs, needs steps outside of compiled graphs. Run "
            'these steps under torch.compiler.set_stance("force_eager").'
        )
    if not counts.is_recording() and is_capturing(weight.device):
        raise RuntimeError(
            "fp8.count_gemms cannot count what torch.compile runs as CUDA graphs (mode reduce-overhead): a replay "
            'reports nothing. Count under torch.compiler.set_stance("force_eager"), or compile without CUDA graphs.'
        )
