"""Modules of a model that compute the same in another way: the class is exchanged on the instance.

The new class is a subclass of the stock one, made on the fly, so that parameters, names, hooks and ``isinstance`` stay;
the stock forward is one call away, and is taken whenever the other way cannot be. Nothing of transformers is touched.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from octavo.fp8.arithmetic.recipe import Recipe
from octavo.fp8.dense.inputs import transformed
from octavo.fp8.dense.linear import Linear
from octavo.fp8.weights.shards import ordinary

STOCK = "_as_stock"
"""In the __dict__ of a swapped module whose class cannot be taken off for a moment: it computes as the stock one."""


_PUT = "_fp8_put"


class Planned(NamedTuple):
    """A linear layer as it runs or will run: what decides whether others can work for it, known before its weights."""

    layer: nn.Linear
    recipe: Recipe | None
    backends: Mapping[str, str]


def planned(layer: nn.Module | None) -> Planned | None:
    """An FP8 layer as it is; None for any other module."""
    if not isinstance(layer, Linear):
        return None
    return Planned(layer, layer.recipe, {gemm: s.backend.name for gemm, s in layer._site.selections.items()})


class Swapped(nn.Module):
    """A forward of its own for modules of one input: subclasses say what :meth:`other` does."""

    _stock: ClassVar[type[nn.Module]]
    _kind: ClassVar[type[Swapped]]
    _as_stock = False  # STOCK
    prefix: ClassVar[str] = "Fp8"  # of the class's name
    own: ClassVar[tuple[str, ...]] = ()  # what swapping put into the module's __dict__
    volatile: ClassVar[tuple[str, ...]] = ()  # the part of it that copies and pickles leave out
    precise: ClassVar[bool] = False  # computes in high precision, and stays where FP8 is set aside

    def other(self, x: Tensor) -> Tensor | None:
        """The output; None sends this call to the stock forward."""
        raise NotImplementedError

    def traced(self, x: Tensor) -> Tensor | None:
        """The same while a compiler traces it, in operators of its graph; by default the stock forward, of which a
        compiler fuses what it sees."""
        return None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) + len(kwargs) == 1 and not self._as_stock:
            other = self.traced if torch.compiler.is_compiling() else self.other
            y = other(*args, *kwargs.values())
            if y is not None:
                return y
        return self._stock.forward(self, *args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A copy or a pickle names the stock class, and the class that is made of it."""
        state = {name: value for name, value in self.__dict__.items() if name not in self.volatile}
        return _rebuild, (self._kind, self._stock), state


_classes: dict[tuple[type[Swapped], type[nn.Module]], type[nn.Module]] = {}


def _class(kind: type[Swapped], stock: type[nn.Module]) -> type[nn.Module]:
    if (kind, stock) not in _classes:
        names = {"__module__": __name__, "_stock": stock, "_kind": kind}
        _classes[kind, stock] = type(f"{kind.prefix}{stock.__name__}", (kind, stock), names)
    return _classes[kind, stock]


def _rebuild(kind: type[Swapped], stock: type[nn.Module]) -> nn.Module:
    made = _class(kind, stock)
    return made.__new__(made)


def swap(module: nn.Module, kind: type[Swapped], **own: Any) -> None:
    """Let a module compute as ``kind`` does, with ``own`` (the names of ``kind.own``) in its ``__dict__``."""
    assert set(own) == set(kind.own) - set(kind.volatile)
    module.__dict__.update(own)
    module.__class__ = _class(kind, type(module))


def put(module: nn.Module, name: str, value: Any) -> None:
    """Leave something in the ``__dict__`` of a module that is not swapped, for :func:`unswap` to take back."""
    module.__dict__[name] = value
    module.__dict__[_PUT] = (*module.__dict__.get(_PUT, ()), name)


def unswap(module: nn.Module) -> None:
    """Let a swapped module compute as it did before, and take back what was :func:`put`; others stay."""
    for name in module.__dict__.pop(_PUT, ()):
        module.__dict__.pop(name, None)
    if isinstance(module, Swapped) and "_stock" in type(module).__dict__:
        for name in module.own:
            module.__dict__.pop(name, None)
        object.__setattr__(module, "__class__", module._stock)


def hooked(module: nn.Module) -> bool:
    """Whether somebody wants to see or change the calls of this module: hooks, or a forward on the instance."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in module.__dict__
    )


def probe(module: nn.Module, parameters: dict[str, Any], modules: dict[str, Any]) -> nn.Module:
    """A module with the forward and the attributes of ``module``, on parameters and children of its own, without
    hooks: to try a forward on random numbers, also where the model itself is on the meta device."""
    made = object.__new__(type(module))
    made.__dict__.update({**module.__dict__, "_parameters": parameters, "_modules": modules})
    return made


def computable(x: Tensor) -> bool:
    """Whether a call with x may take another way than the stock one: x is a plain tensor with elements, and no
    transform of torch.func is at work, which our gradients do not know."""
    return ordinary(x) and not x.is_meta and x.dim() > 0 and x.numel() > 0 and not transformed()
