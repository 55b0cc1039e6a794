"""Modules that the plan leaves in high precision, whose GEMMs are counted, also in compiled graphs.

The class of the module becomes a subclass of its own, with its name: nothing else changes. In a compiled graph a plain
linear layer is the operator of FP8 layers with three GEMMs in high precision, which reports what it runs. Other modules
(routers, patch embeddings, experts) keep their own operators, and their output passes through ``octavo::count``,
which reports and copies it. Experts, and modules with a forward on the instance, keep their class and have a hook.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from octavo.fp8.blocks import compiled  # noqa: F401 (registers octavo::count)
from octavo.fp8.dense import compiled as compiled_linear
from octavo.fp8.dense import graph_counts
from octavo.fp8.dense.graph_arguments import HIGH_KEY
from octavo.fp8.dense.linear import CountedForward
from octavo.fp8.dense.swap import SwappedModule
from octavo.fp8.observe import counts, recorder

Inputs = tuple[object, ...]


def observe_forward(module: nn.Module, args: Inputs, kwargs: dict[str, object], output: object) -> object:
    """Report a forward, as a hook of a module that keeps its class. In a compiled graph, return the output that the
    graph counts."""
    if torch.compiler.is_compiling():
        return _count_output(module, (*args, *kwargs.values()), output)
    if recorder.counters():
        counts.report_module(module, (*args, *kwargs.values()), output)
    return None


def _count_output(module: nn.Module, inputs: Inputs, output: object) -> object:
    """Pass the output of a module, or its first one, through the operator that counts, while a compiler traces it."""
    watched, weight = counts.gemms_of(module), _first_matrix(module)
    y = output[0] if isinstance(output, tuple) else output
    if watched is None or weight is None or not isinstance(y, Tensor) or not watched.rows(inputs):
        return output
    x = inputs[0]
    assert isinstance(x, Tensor)  # of others it has no rows
    y = torch.ops.octavo.count(y, weight, watched.rows(inputs), graph_counts.gradient_needs(x, weight))
    return (y, *output[1:]) if isinstance(output, tuple) else y


def _first_matrix(module: nn.Module) -> Tensor | None:
    """Return the first parameter with more than one dimension, or None if there is none, or it is a tensor subclass."""
    weight = next((p for p in module._parameters.values() if p is not None and p.dim() > 1), None)
    return weight if type(weight) in (Tensor, nn.Parameter) else None


class CountedModule(CountedForward, SwappedModule):
    """A module in high precision whose forward reports its GEMMs to active counters."""

    prefix = ""
    runs_in_high_precision = True  # stays when blocks are unfused

    def trace_call(self, *args: object, **kwargs: object) -> object:
        """Run the forward while a compiler traces it."""
        inputs, weight = (*args, *kwargs.values()), _first_matrix(self)
        x = inputs[0] if inputs else None
        # The operator converts the weight to the dtype of x; the stock layer only does so under autocast.
        if (
            self._stock is nn.Linear
            and weight is not None
            and isinstance(x, Tensor)
            and (x.dtype == weight.dtype or torch.is_autocast_enabled(x.device.type))
            and counts.gemms_of(self) is not None
        ):
            return compiled_linear.linear(x, weight, self._parameters["bias"], HIGH_KEY)
        return _count_output(self, inputs, self._stock.forward(self, *args, **kwargs))
