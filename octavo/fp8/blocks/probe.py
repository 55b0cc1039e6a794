"""Whether a block may replace a module: the checks that norms and MLPs share.

A module is found by its names, which do not say what its forward computes. Its stock forward is therefore tried on
small random layers (:func:`~octavo.fp8.dense.swap.make_trial_module`, also where the model is on the meta device) and
compared with our formula, element by element, under a tolerance that each block states. A reason against a module is a
sentence, which the plan shows; None where nothing does. Of modules that are alike one is tried for all, within
:func:`share_trials`.
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
    """The layer itself, also inside an adapter that wraps it (PEFT's ``base_layer``)."""
    inner = None if module is None else module._modules.get("base_layer")
    return inner if isinstance(inner, nn.Module) else module


def is_idle(child: nn.Module | None) -> bool:
    """Modules that do nothing: None, Identity, Dropout of nothing."""
    return child is None or isinstance(child, nn.Identity) or (isinstance(child, nn.Dropout) and child.p == 0)


def why_replaced(module: nn.Module) -> str | None:
    """Why this module's forward is not the stock one any more."""
    if isinstance(module, SwappedModule):
        return "fused before"
    return "its forward was replaced on the instance (an accelerate hook?)" if "forward" in module.__dict__ else None


def wrong_dtype(what: str, weights: Iterable[Tensor]) -> str | None:
    """Why ``what`` of this module, ``its weight is``, cannot be computed with or cast."""
    wrong = next((w.dtype for w in weights if w.dtype not in sources.DTYPES), None)
    return None if wrong is None else f"{what} {str(wrong).removeprefix('torch.')}"


TrialFunction = Callable[[nn.Module], str | None]
_trial_results: ContextVar[dict[Hashable, str | None] | None] = ContextVar("_tried", default=None)
_MODULE_ATTRIBUTES = frozenset(nn.Module().__dict__) - {"training"}


@contextmanager
def share_trials() -> Iterator[None]:
    """Inside, a trial of a module also answers for those that are alike: a model has hundreds, of few kinds."""
    token = _trial_results.set({})
    try:
        yield
    finally:
        _trial_results.reset(token)


def cache_trial(ask: TrialFunction) -> TrialFunction:
    """A function that tries a module, asked once for all that are alike within :func:`share_trials`."""

    @wraps(ask)
    def asked(module: nn.Module) -> str | None:
        known = {} if (tried := _trial_results.get()) is None else tried
        key = ask, _module_key(module)
        if key not in known:
            threads = torch.get_num_threads()
            torch.set_num_threads(1)  # on a busy machine so small a product waits fifty times as long for a second one
            try:
                known[key] = ask(module)
            finally:
                torch.set_num_threads(threads)
        return known[key]

    return asked


def _module_key(module: nn.Module) -> Hashable:
    """What decides how a module computes, values of its parameters aside. What is no plain value must be the same
    object: a configuration, a buffer, hooks."""
    attributes = module.__dict__
    plain = tuple((name, _value_key(value)) for name, value in attributes.items() if name not in _MODULE_ATTRIBUTES)
    hooks = tuple(
        (name, id(attributes[name])) for name in _MODULE_ATTRIBUTES if "hooks" in name and attributes.get(name)
    )
    parameters = tuple((n, None if p is None else (p.shape, p.dtype)) for n, p in module._parameters.items())
    buffers = tuple((n, id(b)) for n, b in module._buffers.items())
    children = tuple((n, None if child is None else _module_key(child)) for n, child in module._modules.items())
    return type(module), plain, hooks, parameters, buffers, children


def _value_key(value: Any) -> Hashable:
    return (type(value), value) if isinstance(value, bool | int | float | str | torch.dtype | None) else id(value)


def make_generator() -> torch.Generator:
    return torch.Generator("cpu").manual_seed(0)  # torch.manual_seed would seed the GPUs, too


def small_mlp(
    stock_layers: Mapping[str, Any], dtype: torch.dtype | None = None
) -> tuple[dict[str, nn.Linear], nn.Linear, Tensor]:
    """(small random layers in place of ``own``, the last of them, x [16, 24]), in ``dtype`` (None: the layers' own).

    The last layer takes 40 features back to 24. Layers have a bias where ``own`` have one.
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
    """None if the stock forward of ``small`` gives last(``product()``), else why not.

    Tolerance, element by element: ``epsilons`` of x's dtype of sum |h w| + |bias|, the magnitudes of the last product.
    """
    with torch.no_grad(), torch.autocast("cpu", enabled=False), torch.random.fork_rng(devices=[]):
        try:
            stock, h = type(small).forward(small, x), product()
        except Exception as error:  # a forward that is not known may fail in any way
            return describe_failure(on, error)
        ours, size = last(h), h.float().abs() @ last.weight.float().abs().t()
        if last.bias is not None:
            size = size + last.bias.float().abs()
    allowed = epsilons * torch.finfo(x.dtype).eps * size
    return why_unlike(stock, x, like) or why_different(stock, ours, allowed, f"its output is not {formula}")


def describe_failure(on: str, error: Exception) -> str:
    return f"its forward fails on {on} ({type(error).__name__}: {error})"


def why_unlike(stock: Any, x: Tensor, like: str = "shape and dtype") -> str | None:
    """Why an output does not look like its input; ``like``: "shape" where its dtype does not matter."""
    same = isinstance(stock, Tensor) and stock.shape == x.shape and (like == "shape" or stock.dtype == x.dtype)
    return None if same else f"its forward does not return one tensor of the {like} of its input"


def why_different(stock: Tensor, ours: Tensor, allowed: Tensor, what: str) -> str | None:
    """``what`` is the matter, unless both agree within ``allowed``."""
    error = (stock.float() - ours.float()).abs()
    return None if bool((error <= allowed).all()) else f"{what}: off by up to {float(error.max()):.3g} on random input"
