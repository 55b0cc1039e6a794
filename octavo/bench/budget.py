"""Where the time of a training step goes: linear layers, attention, the head, norms, the optimizer, the rest.

A step is cut where one part ends and another begins: by CUDA events on a GPU, by the clock on a CPU. What is called for
a part (a module's forward, the loss, the optimizer's step) opens it and closes it; the autograd nodes that its forward
made belong to it too, each of which opens and closes it in backward. Every moment thus belongs to exactly one part, and
the parts add up to the step. What nobody claims is the rest: embeddings, residual sums, activation functions, waiting.

Nothing is handed to modules but what they get anyway: no hooks, which would take fused ones apart, and no tensors in
place of theirs. The events cost the host a few microseconds each; a GPU that waits for its host shows that in the part
under way. What runs compiled has no modules inside and cannot be cut so.
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

#: parts in the order in which they are shown; the last is what no other claims
PARTS = ("linears", "attention", "head", "norms", "optimizer", "rest")
LINEARS, ATTENTION, HEAD, NORMS, OPTIMIZER, REST = PARTS

_ATTENTION = re.compile(r"(^|_)(attn|attention)$", re.IGNORECASE)
_MLP = re.compile(r"(^|_)(mlp|ffn|feed_forward)$", re.IGNORECASE)


class Budget:
    """Seconds of one step by part. ``calls`` around it, then :meth:`step`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._marks: list[tuple[str, Any]] = []
        self._claimed: set[Any] = set()

    def around(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, whose calls in a step, and the backward of what they make, count as ``part``."""

        def run(*args: Any, **kwargs: Any) -> Any:
            before = self._marks[-1][0] if self._marks else REST
            self._mark(part)
            made = function(*args, **kwargs)
            self._mark(before)
            self._claim(part, made, (args, kwargs))
            return made

        return run

    @property
    def _has_events(self) -> bool:
        return accelerator.why_no_streams(self.device) is None

    def step(self, call: Callable[[], Any]) -> dict[str, float]:
        """Run a step; seconds by part."""
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
        """From here on, ``part`` runs."""
        if self._has_events:
            moment: Any = accelerator.event(self.device, timing=True)
            moment.record(accelerator.current_stream(self.device))
        else:
            moment = time.perf_counter()
        self._marks.append((part, moment))

    def _claim(self, part: str, made: Any, given: Any) -> None:
        """Nodes between what went in and what came out are this part's, unless a part within it has them."""
        border = {t.grad_fn for t in tree_leaves(given) if isinstance(t, Tensor)}
        todo = [t.grad_fn for t in tree_leaves(made) if isinstance(t, Tensor)]
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
def claimed(model: nn.Module, budget: Budget) -> Iterator[None]:
    """Inside, the modules of a model open their parts: linear layers, MLPs (whole, since one that is fused has nothing
    inside, and rows shall compare), norms, and attention, which is what no linear layer or norm inside it claims."""
    changed = list(_parts(model, ""))
    for part, module in changed:
        module.forward = budget.around(part, module.forward)
    try:
        yield
    finally:
        for _, module in changed:
            del module.forward


def _parts(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """(part, module) of what opens one, outermost first."""
    if isinstance(module, nn.Linear) or _MLP.search(name):
        yield LINEARS, module
    elif "norm" in type(module).__name__.lower():
        yield NORMS, module
    else:
        if _ATTENTION.search(name):
            yield ATTENTION, module
        for child, inner in module.named_children():
            yield from _parts(inner, child)
