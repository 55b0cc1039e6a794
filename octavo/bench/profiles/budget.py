"""The budget of an eager step: its seconds by part.

The parts are linear layers, attention, the head, norms, the optimizer, and the rest (embeddings, residual sums,
activation functions, idle time). Times are measured with CUDA events on a GPU and with the clock on a CPU. A part runs
during the calls wrapped for it (the forward of a module, the loss, the optimizer step), and in the backward during the
autograd nodes that these calls created. At any time exactly one part runs, so the parts add up to the step.

Modules are neither hooked, which would disable fusions, nor called with different tensors. Each event costs the host a
few microseconds; if the GPU waits for the host, the time counts for the current part. Compiled blocks have no modules
to instrument; :mod:`~octavo.bench.profiles.kernel_profile` divides their steps by kernel.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from octavo.base import accelerator
from octavo.fp8.memory import ChunkedHead

#: parts in the order in which they are shown; the last is all time of no other part
PARTS = ("linears", "attention", "head", "norms", "optimizer", "rest")
LINEARS, ATTENTION, HEAD, NORMS, OPTIMIZER, REST = PARTS

_ATTENTION = re.compile(r"(^|_)(attn|attention)$", re.IGNORECASE)
_MLP = re.compile(r"(^|_)(mlp|ffn|feed_forward)$", re.IGNORECASE)


class Budget:
    """Measures the seconds of a step by part: wrap functions with :meth:`wrap`, then call :meth:`step`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._marks: list[tuple[str, Any]] = []
        self._claimed: set[Any] = set()

    def wrap(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``function`` so that its calls in a step, and their backward, count as ``part``."""

        def run(*args: Any, **kwargs: Any) -> Any:
            before = self._marks[-1][0] if self._marks else REST
            self._mark(part)
            output = function(*args, **kwargs)
            self._mark(before)
            self._claim(part, output, (args, kwargs))
            return output

        return run

    @property
    def _has_events(self) -> bool:
        return accelerator.why_no_streams(self.device) is None

    def step(self, call: Callable[[], Any]) -> dict[str, float]:
        """Run a step; return seconds by part."""
        self._wait()
        self._marks.clear()
        self._mark(REST)
        call()
        self._mark(REST)
        self._wait()
        self._claimed.clear()
        seconds = dict.fromkeys(PARTS, 0.0)
        for (part, begins), (_, ends) in zip(self._marks, self._marks[1:], strict=False):
            seconds[part] += begins.elapsed_time(ends) / 1e3 if self._has_events else ends - begins
        return seconds

    def _mark(self, part: str) -> None:
        """Record that ``part`` starts now."""
        if self._has_events:
            moment: Any = accelerator.new_event(self.device, timing=True)
            moment.record(accelerator.current_stream(self.device))
        else:
            moment = time.perf_counter()
        self._marks.append((part, moment))

    def _claim(self, part: str, output: Any, inputs: Any) -> None:
        """Assign autograd nodes between inputs and outputs to this part, unless a nested part has them."""
        border = {t.grad_fn for t in tree_leaves(inputs) if isinstance(t, Tensor)}
        todo = [t.grad_fn for t in tree_leaves(output) if isinstance(t, Tensor)]
        seen = set()
        while todo:
            node = todo.pop()
            if node is None or node in border or node in seen:
                continue
            seen.add(node)
            todo += [before for before, _ in node.next_functions]
            if node not in self._claimed and node.name() != "torch::autograd::AccumulateGrad":
                self._claimed.add(node)
                node.register_prehook(lambda *_: self._mark(part))
                node.register_hook(lambda *_: self._mark(REST))

    def _wait(self) -> None:
        accelerator.synchronize(self.device)


@contextmanager
def measure_parts(model: nn.Module, budget: Budget) -> Iterator[None]:
    """Context in which the modules of a model count as parts: linear layers, MLPs (as a whole, to compare with fused
    MLPs), norms, and attention without its linear layers and norms."""
    changed = list(_iter_parts(model, ""))
    for part, module in changed:
        module.forward = budget.wrap(part, module.forward)
    try:
        yield
    finally:
        for _, module in changed:
            del module.forward


def _iter_parts(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """Iterate over (part, module) of the modules that count as parts, outermost first."""
    if isinstance(module, ChunkedHead):
        yield HEAD, module
    elif isinstance(module, nn.Linear) or _MLP.search(name):
        yield LINEARS, module
    elif "norm" in type(module).__name__.lower():
        yield NORMS, module
    else:
        if _ATTENTION.search(name):
            yield ATTENTION, module
        for child, inner in module.named_children():
            yield from _iter_parts(inner, child)
