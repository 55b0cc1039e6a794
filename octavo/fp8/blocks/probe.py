"""Decide whether a block may replace a module: the checks that norms and MLPs share.

A module is found by names, which do not determine what its forward computes. Its stock forward is therefore run on
small random layers (:func:`~octavo.fp8.dense.swap.make_trial_module`, also if the model is on the meta device) and
compared element by element with the formula of the block, under a tolerance that each block defines. Functions return
the reason against a module as a sentence for the plan, or None. Inside :func:`share_trials`, one trial serves all
modules that are alike.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import skip_init

from octavo.fp8.dense import sources
from octavo.fp8.dense.swap import SwappedModule


def unwrap_adapter(module: nn.Module | None) -> nn.Module | None:
    """Return the layer inside an adapter (PEFT's ``base_layer``), or the module itself if it is not an adapter."""
    inner = None if module is None else module._modules.get("base_layer")
    return inner if isinstance(inner, nn.Module) else module


def is_idle(child: nn.Module | None) -> bool:
    """True for children without effect: None, Identity, Dropout with p = 0."""
    return child is None or isinstance(child, nn.Identity) or (isinstance(child, nn.Dropout) and child.p == 0)


def why_replaced(module: nn.Module) -> str | None:
    """Return why this module's forward is no longer the stock forward, or None."""
    if isinstance(module, SwappedModule):
        return "it is already fused"
    return "its forward was replaced on the instance (an accelerate hook?)" if "forward" in module.__dict__ else None


def wrong_dtype(what: str, weights: Iterable[Tensor]) -> str | None:
    """Return ``what`` (such as ``its weight is``) with the first unsupported dtype of ``weights``, or None."""
    wrong = next((w.dtype for w in weights if w.dtype not in sources.DTYPES), None)
    return None if wrong is None else f"{what} {str(wrong).removeprefix('torch.')}"


TrialFunction = Callable[[nn.Module], str | None]
_trial_results: ContextVar[dict[Hashable, str | None] | None] = ContextVar("_tried", default=None)
_MODULE_ATTRIBUTES = frozenset(nn.Module().__dict__) - {"training"}


@contextmanager
def share_trials() -> Iterator[None]:
    """Inside this context, a trial also serves modules that are alike: a model has hundreds of modules of few kinds."""
    token = _trial_results.set({})
    try:
        yield
    finally:
        _trial_results.reset(token)


def cache_trial(run_trial: TrialFunction) -> TrialFunction:
    """Cache the result of a trial for modules that are alike, inside :func:`share_trials`."""

    @wraps(run_trial)
    def cached(module: nn.Module) -> str | None:
        results = {} if (shared := _trial_results.get()) is None else shared
        key = run_trial, _module_key(module)
        if key not in results:
            threads = torch.get_num_threads()
            torch.set_num_threads(
                1
            )  # on a busy machine, waiting for a second thread takes 50 times as long as the product
            try:
                results[key] = run_trial(module)
            finally:
                torch.set_num_threads(threads)
        return results[key]

    return cached


def _module_key(module: nn.Module) -> Hashable:
    """Return a key of everything except parameter values that determines what a module computes.

    Plain values are compared by value; a configuration, buffers and hooks must be the is_like objects.
    """
    attributes = module.__dict__
    values = tuple((name, _value_key(value)) for name, value in attributes.items() if name not in _MODULE_ATTRIBUTES)
    hooks = tuple(
        (name, id(attributes[name])) for name in _MODULE_ATTRIBUTES if "hooks" in name and attributes.get(name)
    )
    parameters = tuple((n, None if p is None else (p.shape, p.dtype)) for n, p in module._parameters.items())
    buffers = tuple((n, id(b)) for n, b in module._buffers.items())
    children = tuple((n, None if child is None else _module_key(child)) for n, child in module._modules.items())
    return type(module), values, hooks, parameters, buffers, children


def _value_key(value: Any) -> Hashable:
    return (type(value), value) if isinstance(value, bool | int | float | str | torch.dtype | None) else id(value)


def make_generator() -> torch.Generator:
    return torch.Generator("cpu").manual_seed(0)  # torch.manual_seed would seed the GPUs, too


def small_mlp(
    stock_layers: Mapping[str, Any], dtype: torch.dtype | None = None
) -> tuple[dict[str, nn.Linear], nn.Linear, Tensor]:
    """Return (small random layers in place of ``stock_layers``, the last of them, x [16, 24]).

    They have ``dtype``, by default the dtype of the stock layers. The last layer maps 40 features to 24, the others 24
    to 40. A layer has a bias if its stock layer has one.
    """
    generator, *_, last = make_generator(), *stock_layers
    layers: dict[str, nn.Linear] = {}
    for name, layer in stock_layers.items():
        k, n = (40, 24) if name == last else (24, 40)
        bias = getattr(layer, "bias", None) is not None
        layers[name] = skip_init(nn.Linear, k, n, bias=bias, dtype=dtype or layer.weight.dtype, device="cpu")
        for parameter in layers[name].parameters():
            nn.init.normal_(parameter, std=0.5, generator=generator)
    x = 2 * torch.randn(16, 24, generator=generator, device="cpu")
    return layers, layers[last], x.to(layers[last].weight.dtype)


def compare_mlp(
    small: nn.Module, x: Tensor, product: Callable[[], Tensor], last: nn.Linear, formula: str, epsilons: int, on: str,
    like: str = "shape and dtype",
) -> str | None:  # fmt: skip
    """Return why the stock forward of ``small`` does not return last(``product()``), or None if it does.

    Tolerance for each element: ``epsilons`` of x's dtype times sum |h w| + |bias|, the magnitudes in the last product.
    """
    with torch.no_grad(), torch.autocast("cpu", enabled=False), torch.random.fork_rng(devices=[]):
        try:
            stock, h = type(small).forward(small, x), product()
        except Exception as error:  # an unknown forward may raise any error
            return describe_failure(on, error)
        ours, size = last(h), h.float().abs() @ last.weight.float().abs().t()
        if last.bias is not None:
            size = size + last.bias.float().abs()
    allowed = epsilons * torch.finfo(x.dtype).eps * size
    return why_unlike(stock, x, like) or why_different(stock, ours, allowed, f"its output is not {formula}")


def describe_failure(on: str, error: Exception) -> str:
    return f"its forward fails on {on} ({type(error).__name__}: {error})"


def why_unlike(stock: Any, x: Tensor, like: str = "shape and dtype") -> str | None:
    """Return why an output is not a tensor of its input's shape and dtype, or None; ``like="shape"`` ignores the
    dtype."""
    is_like = isinstance(stock, Tensor) and stock.shape == x.shape and (like == "shape" or stock.dtype == x.dtype)
    return None if is_like else f"its forward does not return one tensor of the {like} of its input"


def why_different(stock: Tensor, ours: Tensor, allowed: Tensor, what: str) -> str | None:
    """Return ``what`` with the largest error, or None if both agree within ``allowed``."""
    error = (stock.float() - ours.float()).abs()
    return None if bool((error <= allowed).all()) else f"{what}: off by up to {float(error.max()):.3g} on random input"
