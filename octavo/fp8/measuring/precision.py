"""Run an FP8 model in high precision temporarily, to measure the gain of FP8."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import nn

from octavo.fp8.arithmetic.recipe import Recipe
from octavo.fp8.dense.gemms import LayerGemms
from octavo.fp8.dense.linear import Linear
from octavo.fp8.dense.swap import STOCK_KEY, SwappedModule
from octavo.fp8.moe.experts import Experts


@contextmanager
def high_precision(model: nn.Module) -> Iterator[None]:
    """Run all FP8 layers of ``model`` as their stock layers inside the context, and norms and MLPs that save FP8 or are
    fused as well.

    Parameters, hooks, weight codes and amax histories are not modified. A forward and its backward must be in the same
    context. Not thread-safe.
    """
    changed: list[tuple[nn.Module, dict[str, Any]]] = []
    classes: list[tuple[nn.Module, Any]] = []
    try:
        for module in model.modules():
            kind: Any = type(module)
            precise = isinstance(module, SwappedModule) and kind.runs_in_high_precision
            if precise and not isinstance(module, Linear):
                continue
            if kind is Linear:
                classes.append((module, kind))
                _set_class(module, nn.Linear)
            elif isinstance(module, Experts | SwappedModule) and "_stock" in kind.__dict__ and not precise:
                classes.append((module, kind))
                _set_class(module, kind._stock)
            elif isinstance(module, SwappedModule) and not precise:
                changed.append((module, {}))
                module.__dict__[STOCK_KEY] = True
            elif isinstance(module, Linear | Experts):
                # Keep a subclass that was added later, such as fully_shard's for the layer itself, or a chunked head.
                held: dict[str, Any] = {n: module.__dict__[n] for n in ("_site", "_sites") if n in module.__dict__}
                changed.append((module, held))
                module.__dict__.update({name: _without_fp8(value) for name, value in held.items()})
        yield
    finally:
        for module, kind in classes:
            _set_class(module, kind)
        for module, held in changed:
            module.__dict__.pop(STOCK_KEY, None)
            module.__dict__.update(held)


def _set_class(module: nn.Module, kind: Any) -> None:
    """Change the class and touch the dictionary: compiled code of torch 2.11 checks the class of a module only if its
    dictionary has changed."""
    object.__setattr__(module, "__class__", kind)
    module.__dict__["_changed"] = True
    del module.__dict__["_changed"]


def _without_fp8(value: Any) -> Any:
    """Return a site, or sites by projection, in high precision."""
    if not isinstance(value, LayerGemms):
        return {name: _without_fp8(site) for name, site in value.items()}
    off = Recipe("off", "high precision", None, None, None)
    return replace(value, recipe=off, selections={}, scaling=None)
