"""Replace the forward of modules in a model by another implementation, by changing the class of the instance.

The new class is a dynamic subclass of the stock class, so that parameters, names, hooks and ``isinstance`` are
unchanged. It calls the stock forward for inputs that the replacement does not support. transformers is not patched.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple, SupportsIndex

import torch
from torch import Tensor, nn

from octavo.fp8.arithmetic.recipe import Recipe
from octavo.fp8.dense.inputs import is_functorch_active
from octavo.fp8.dense.linear import Linear
from octavo.fp8.weights.shards import is_plain_tensor

STOCK_KEY = "_as_stock"
"""The key in the ``__dict__`` of a swapped module that temporarily runs the stock forward without changing its
class."""


_ADDED = "_fp8_put"


class PlannedLayer(NamedTuple):
    """A linear layer with its planned recipe and backends, from which other modules can compute codes for it."""

    layer: nn.Linear
    recipe: Recipe | None
    backends: Mapping[str, str]


def planned_layer(layer: nn.Module | None) -> PlannedLayer | None:
    """Return the current recipe and backends of an FP8 layer, or None for other modules."""
    if not isinstance(layer, Linear):
        return None
    return PlannedLayer(layer, layer.recipe, {gemm: s.backend.name for gemm, s in layer._site.selections.items()})


class SwappedModule(nn.Module):
    """A module with one input whose forward is replaced: subclasses implement :meth:`replacement_forward`."""

    _stock: ClassVar[type[Any]]
    _kind: ClassVar[type[SwappedModule]]
    _as_stock = False  # STOCK_KEY
    prefix: ClassVar[str] = "Fp8"  # of the name of the dynamic class
    attributes: ClassVar[tuple[str, ...]] = ()  # names that swapping adds to the module's __dict__
    transient_attributes: ClassVar[tuple[str, ...]] = ()  # those that copies and pickles omit
    runs_in_high_precision: ClassVar[bool] = False  # also used inside fp8.high_precision

    def replacement_forward(self, x: Tensor) -> Tensor | None:
        """Return the output, or None to run the stock forward for this call."""
        raise NotImplementedError

    def traced_forward(self, x: Tensor) -> Tensor | None:
        """Return the output of :meth:`replacement_forward` while a compiler traces it, or None to run the stock
        forward, which is the default and which a compiler can fuse."""
        return None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) + len(kwargs) == 1 and not self._as_stock:
            forward = self.traced_forward if torch.compiler.is_compiling() else self.replacement_forward
            y = forward(*args, *kwargs.values())
            if y is not None:
                return y
        return self._stock.forward(self, *args, **kwargs)

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        """Pickle the stock class and the kind, because the dynamic class cannot be imported by name."""
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
    """Replace the class of a module by a subclass of ``kind``, and add ``attributes``, whose names must equal
    ``kind.attributes``, to its ``__dict__``."""
    assert set(attributes) == set(kind.attributes) - set(kind.transient_attributes)
    module.__dict__.update(attributes)
    module.__class__ = _get_class(kind, type(module))


def replace(module: nn.Module, kind: type[SwappedModule] | None) -> None:
    """Replace the forward of a module by ``kind``'s, in place of any other replacement, or restore its class. A forward
    on the instance stays, because it hides the forward of any class."""
    unswap(module)
    if kind is not None and "forward" not in module.__dict__:
        swap(module, kind)


def stock_type(module: nn.Module) -> type[nn.Module]:
    """Return the class that a module had before :func:`swap`."""
    return module._stock if isinstance(module, SwappedModule) else type(module)


def add_attribute(module: nn.Module, name: str, value: object) -> None:
    """Add an entry to the ``__dict__`` of a module that is not swapped; :func:`unswap` removes it."""
    module.__dict__[name] = value
    module.__dict__[_ADDED] = (*module.__dict__.get(_ADDED, ()), name)


def unswap(module: nn.Module) -> None:
    """Restore the stock class of a module, and remove the entries that :func:`add_attribute` added."""
    for name in module.__dict__.pop(_ADDED, ()):
        module.__dict__.pop(name, None)
    if isinstance(module, SwappedModule) and "_stock" in type(module).__dict__:
        for name in module.attributes:
            module.__dict__.pop(name, None)
        object.__setattr__(module, "__class__", module._stock)


def has_hooks(module: nn.Module) -> bool:
    """True if user code observes or changes the calls of this module, by hooks or a forward on the instance."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in module.__dict__
    )


def make_trial_module(module: nn.Module, parameters: dict[str, Any], modules: dict[str, Any]) -> nn.Module:
    """Return a module with the forward and attributes of ``module``, but with the given parameters and children.

    It is used to run a module's forward on random numbers, also if the model itself is on the meta device.
    """
    copy = object.__new__(type(module))
    copy.__dict__.update({**module.__dict__, "_parameters": parameters, "_modules": modules})
    return copy


def is_supported_input(x: Tensor) -> bool:
    """True if a replacement forward supports x: a nonempty plain tensor, outside of transforms of torch.func, which
    the gradients of replaced modules do not support."""
    return is_plain_tensor(x) and not x.is_meta and x.dim() > 0 and x.numel() > 0 and not is_functorch_active()
