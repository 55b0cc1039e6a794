"""Modules that the plan leaves in high precision, whose GEMMs are counted, also in compiled graphs.

The class of the module becomes a subclass of its own, with its name: nothing else changes. In a compiled graph a plain
linear layer is the operator of FP8 layers with three GEMMs in high precision, which reports what it runs. Other modules
(routers, patch embeddings, experts) keep their own operators, and their output passes through ``octavo::count``,
which reports and copies it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from octavo.fp8.blocks import compiled  # noqa: F401 (registers octavo::count)
from octavo.fp8.dense import compiled as compiled_linear
from octavo.fp8.dense import graph_counts
from octavo.fp8.dense.graph_arguments import HIGH_KEY
from octavo.fp8.dense.linear import CountedForward
from octavo.fp8.dense.swap import SwappedModule
from octavo.fp8.weights.cache import register_owner

_PLAIN = (Tensor, nn.Parameter)


class CountedModule(CountedForward, SwappedModule):
    """A module in high precision whose forward reports its GEMMs to active counters."""

    prefix = ""
    runs_in_high_precision = True  # stays when blocks are unfused

    def trace_call(self, *args: object, **kwargs: object) -> object:
        """Run the forward while a compiler traces it."""
        inputs, watched = (*args, *kwargs.values()), self._fp8_watched
        weight = next((p for p in self._parameters.values() if p is not None and p.dim() > 1), None)
        if watched is None or type(weight) not in _PLAIN or not inputs or not isinstance(inputs[0], Tensor):
            return self._stock.forward(self, *args, **kwargs)
        assert weight is not None
        x = inputs[0]
        if self._stock is nn.Linear:
            # The operator converts the weight to the dtype of x; the stock layer only does so under autocast.
            if x.dtype == weight.dtype or torch.is_autocast_enabled(x.device.type):
                return compiled_linear.linear(x, weight, self._parameters["bias"], HIGH_KEY)
            return self._stock.forward(self, *args, **kwargs)
        output = self._stock.forward(self, *args, **kwargs)
        y, rows = output[0] if isinstance(output, tuple) else output, watched.rows(inputs)
        y = torch.ops.octavo.count(y, weight, rows, graph_counts.gradient_needs(x, weight))
        return (y, *output[1:]) if isinstance(output, tuple) else y

    def __setattr__(self, name: str, value: Tensor | nn.Module) -> None:
        # FSDP2 swaps the sharded and the gathered parameter by assignment in a class that has this method.
        super().__setattr__(name, value)
        if name in self.__dict__.get("_parameters", ()):
            register_owner(self, (value,))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> CountedModule:
        applied = super()._apply(fn, recurse)
        register_owner(self)
        return applied

    def __setstate__(self, state: dict[str, object]) -> None:  # of copies and pickles
        super().__setstate__(state)
        register_owner(self)
