"""Modules that the plan leaves in high precision, whose GEMMs are counted, also in compiled graphs.

The class of the module becomes a subclass of its own, with its name: nothing else changes. In a compiled graph a plain
linear layer is the operator of FP8 layers with three GEMMs in high precision, which reports what it runs. Other modules
(routers, patch embeddings, experts) keep their own operators, and their output passes through ``octavo::count``,
which reports and copies it. Experts, and modules with a forward on the instance, keep their class and have a hook.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from octavo.fp8.dense import compiled as compiled_linear
from octavo.fp8.dense import graph_counts
from octavo.fp8.dense.graph_arguments import HIGH_KEY
from octavo.fp8.dense.linear import CountedForward
from octavo.fp8.dense.swap import SwappedModule
from octavo.fp8.observe import counts, recorder


def observe_forward(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object], output: object) -> object:
    """Report a forward, as a hook of a module that keeps its class. In a compiled graph, return the counted output."""
    if torch.compiler.is_compiling():
        return graph_counts.count_output(module, (*args, *kwargs.values()), output)
    if recorder.counters():
        counts.report_module(module, (*args, *kwargs.values()), output)
    return None


class CountedModule(CountedForward, SwappedModule):
    """A module in high precision whose forward reports its GEMMs to active counters."""

    prefix = ""
    runs_in_high_precision = True  # stays when blocks are unfused

    def trace_call(self, *args: object, **kwargs: object) -> object:
        """Run the forward while a compiler traces it."""
        inputs, weight = (*args, *kwargs.values()), graph_counts.first_matrix(self)
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
        return graph_counts.count_output(self, inputs, CountedForward.eager_call(self, *args, **kwargs))
