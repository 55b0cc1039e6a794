"""Modules of a model with another implementation of the same computation: the class of the instance is replaced.

The new class is a dynamic subclass of the stock one, so that parameters, names, hooks and ``isinstance`` are unchanged;
it calls the stock forward whenever its own implementation does not apply. transformers itself is not patched.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from octavo.fp8.arithmetic.recipe import Recipe
from octavo.fp8.dense.inputs import is_functorch_active
from octavo.fp8.dense.linear import Linear
from octavo.fp8.weights.shards import is_plain_tensor

STOCK_KEY = "_as_stock"
"""The key in the __dict__ of a swapped module that runs the stock forward for now, because its class must stay."""


_ADDED = "_fp8_put"


class PlannedLayer(NamedTuple):
    """A linear layer and its planned recipe and backends: what other modules need to know to make codes for it."""

    layer: nn.Linear
    recipe: Recipe | None
    backends: Mapping[str, str]


def planned_layer(layer: nn.Module | None) -> PlannedLayer | None:
    """The current recipe and backends of an FP8 layer; None for other modules."""
    if not isinstance(layer, Linear):
        return None
    return PlannedLayer(layer, layer.recipe, {gemm: s.backend.name for gemm, s in layer._site.selections.items()})


class SwappedModule(nn.Module):
    """A replacement forward for modules with one input: subclasses implement :meth:`replacement_forward`."""

    _stock: ClassVar[type[nn.Module]]
    _kind: ClassVar[type[SwappedModule]]
    _as_stock = False  # STOCK
    prefix: ClassVar[str] = "Fp8"  # of the class's name
    attributes: ClassVar[tuple[str, ...]] = ()  # names that swapping adds to the module's __dict__
    transient_attributes: ClassVar[tuple[str, ...]] = ()  # the part of ``attributes`` that copies and pickles omit
    runs_in_high_precision: ClassVar[bool] = False  # computes in high precision, and stays inside fp8.high_precision

    def replacement_forward(self, x: Tensor) -> Tensor | None:
        """The output; None: this call runs the stock forward."""
        raise NotImplementedError

    def traced_forward(self, x: Tensor) -> Tensor | None:
        """:meth:`replacement_forward` while a compiler traces it, in operators of its graph; by default the stock
        forward, which a compiler can fuse."""
        return None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) + len(kwargs) == 1 and not self._as_stock:
            other = self.traced_forward if torch.compiler.is_compiling() else self.replacement_forward
            y = other(*args, *kwargs.values())
            if y is not None:
                return y
        return self._stock.forward(self, *args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies and pickles refer to the stock class and the kind, since the dynamic class has no importable name."""
        state = {name: value for name, value in self.__dict__.items() if name not in self.transient_attributes}
        return _rebuild, (self._kind, self._stock), state


_classes: dict[tuple[type[SwappedModule], type[nn.Module]], type[nn.Module]] = {}


def _get_class(kind: type[SwappedModule], stock: type[nn.Module]) -> type[nn.Module]:
    if (kind, stock) not in _classes:
        names = {"__module__": __name__, "_stock": stock, "_kind": kind}
        _classes[kind, stock] = type(f"{kind.prefix}{stock.__name__}", (kind, stock), names)
    return _classes[kind, stock]


def _rebuild(kind: type[SwappedModule], stock: type[nn.Module]) -> nn.Module:
    cls = _get_class(kind, stock)
    return cls.__new__(cls)


def swap(module: nn.Module, kind: type[SwappedModule], **attributes: object) -> None:
    """Replace the class of a module by ``kind``, with ``attributes`` (the names of ``kind.attributes``) in its
    ``__dict__``."""
    assert set(attributes) == set(kind.attributes) - set(kind.transient_attributes)
    module.__dict__.update(attributes)
    module.__class__ = _get_class(kind, type(module))


def add_attribute(module: nn.Module, name: str, value: object) -> None:
    """Add an entry to the ``__dict__`` of a module that is not swapped, which :func:`unswap` removes."""
    module.__dict__[name] = value
    module.__dict__[_ADDED] = (*module.__dict__.get(_ADDED, ()), name)


def unswap(module: nn.Module) -> None:
    """Restore the stock class of a swapped module, and remove what :func:`add_attribute` added; other modules are
    unchanged."""
    for name in module.__dict__.pop(_ADDED, ()):
        module.__dict__.pop(name, None)
    if isinstance(module, SwappedModule) and "_stock" in type(module).__dict__:
        for name in module.attributes:
            module.__dict__.pop(name, None)
        object.__setattr__(module, "__class__", module._stock)


def has_hooks(module: nn.Module) -> bool:
    """Whether user code observes or changes the calls of this module: hooks, or a forward on the instance."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in module.__dict__
    )


def make_trial_module(module: nn.Module, parameters: dict[str, Any], modules: dict[str, Any]) -> nn.Module:
    """A module with the forward and the attributes of ``module``, but other parameters and children, and no hooks: for
    a test of its forward on random numbers, also if the model itself is on the meta device."""
    copy = object.__new__(type(module))
    copy.__dict__.update({**module.__dict__, "_parameters": parameters, "_modules": modules})
    return copy


def is_supported_input(x: Tensor) -> bool:
    """Whether a replacement forward supports x: a plain tensor with elements, outside of transforms of torch.func,
    which our gradients do not support."""
    return is_plain_tensor(x) and not x.is_meta and x.dim() > 0 and x.numel() > 0 and not is_functorch_active()
