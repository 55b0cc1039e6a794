"""A token of each sequence on a GPU: one function of fixed memory, run as a CUDA graph.

A step of decoding is hundreds of small kernels, which a host queues one by one; a graph is queued at once. Everything
that a step decides by lies in one matrix of numbers, a row a sequence, which the host fills and sends before it::

    slot    where its tokens, random numbers, log-probabilities and entropies are kept
    held    tokens in the cache: the new one is written behind them; -1 in rows of nobody
    made    tokens chosen so far; the last of them is what the model gets
    position    of that token
    pages   the numbers of its pages, in order

From there to the chosen tokens no number passes through the host. A number of rows is captured when it comes the second
time, first run under CUDA's check for operations that wait: rows are filled up to a power of two, or to all slots, with
slots that are free, so that few graphs serve a rollout to its end. They live as long as the call in which no weight
changes, read the codes of weights that are cached, and share one pool of memory.

Stops are the host's business, after each step. What cannot be captured runs eagerly (:func:`why_eager`, or what the
capture meets), with no row too many, and is said once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from octavo import fp8
from octavo.base.safe_read import first_line
from octavo.fp8 import observe
from octavo.fp8.kernels import CudaGraph, Graph, weights_stay, without_waits
from octavo.fp8.measuring import find_shared_scales, first_compiled_module
from octavo.generation.attention import PagedDecode
from octavo.generation.caller import Caller
from octavo.generation.kv_cache import Cache
from octavo.generation.request import Sampling
from octavo.generation.slots import Slots

_NUMBERS = 4  # of a row, before its pages


@dataclass
class _Captured:
    """A graph, where it leaves the chosen tokens, and its GEMMs."""

    graph: Graph
    chosen: Tensor
    tape: fp8.GemmCounts


class Replayed:
    """`graph` makes what a step is captured into (None: a CUDA graph); `say` gets why a step runs without."""

    def __init__(
        self, caller: Caller, cache: Cache, slots: Slots, sampling: Sampling, given: Tensor | None,
        say: Callable[[str], None] = lambda text: None, graph: Callable[[], Graph] | None = None,
    ) -> None:  # fmt: skip
        self.caller, self.cache, self.slots, self.sampling, self.given = caller, cache, slots, sampling, given
        self.say, self.graph, self.replays = say, graph, 0
        size = (len(slots), _NUMBERS + slots.pages.shape[1])
        gpu = caller.device.type == "cuda"
        self._host = torch.zeros(size, dtype=torch.int32, pin_memory=gpu)
        self._rows = torch.zeros(size, dtype=torch.int32, device=caller.device)
        self._captured: dict[int, _Captured] = {}
        self._seen: set[int] = set()
        self._eager = given is not None  # somebody looks into it (`Engine.replay`)
        if not self._eager and (why := why_eager(caller)):
            self._go_eagerly(why)
        elif graph is None and not self._eager:
            self.graph = partial(CudaGraph, torch.cuda.graph_pool_handle())

    def __call__(self, active: np.ndarray) -> Tensor:
        """Choose the next token of the slots `active` [B], which have a page for it: int64 [B], -1 for NaN."""
        rows = len(active) if self._eager else min(1 << (len(active) - 1).bit_length(), len(self.slots))
        self._send(active, rows)
        found = self._captured.get(rows)
        if found is None and rows in self._seen and not self._eager:
            found = self._capture(rows)
        self._seen.add(rows)
        if found is None:
            return self.step(rows)[: len(active)]
        found.graph.replay()
        observe.replayed(found.tape)
        self.replays += 1
        return found.chosen[: len(active)]

    def step(self, rows: int) -> Tensor:
        """The next token of each of the first `rows` rows that were sent, by what lies in the device's memory alone."""
        slots, page = self.slots, self.cache.page
        slot, held, made, position = self._rows[:rows, :_NUMBERS].long().unbind(1)
        table = self._rows[:rows, _NUMBERS:]
        own = table.gather(1, (held // page).clamp_min(0)[:, None])[:, 0].long() * page + held % page
        attention = PagedDecode(self.cache, own.masked_fill(held < 0, -1), table, held.add(1).int())
        last = slots.tokens[slot, made - 1]
        logits = self.caller.forward(last, position.expand(self.caller.axes, -1), attention)
        return slots.choose(slot, made, logits, self.sampling, self.given, invariant=False)

    def _send(self, active: np.ndarray, rows: int) -> None:
        """Fill the rows. The copy is over when the tokens of the step before have come back."""
        slots, count = self.slots, len(active)
        host = self._host.numpy()
        host[:count, 0], host[:count, 1], host[:count, 2] = active, slots.held[active], slots.made[active]
        host[:count, 3], host[:count, _NUMBERS:] = slots.position[active], slots.pages[active]
        if rows > count:  # in free slots a token is written that nobody reads
            host[count:rows] = 0
            host[count:rows, 0] = slots.free[: rows - count]
            host[count:rows, 1:3] = -1, 1
        self._rows[:rows].copy_(self._host[:rows], non_blocking=True)

    def _capture(self, rows: int) -> _Captured | None:
        """The step of so many rows as a graph. It may run as often as it likes: it writes the same to the same."""
        assert self.graph is not None
        try:
            with observe.muted(), without_waits(self.caller.device):
                self.step(rows)
            graph = self.graph()
            with observe.taped() as tape, weights_stay():
                chosen = graph.capture(partial(self.step, rows))
        except Exception as error:  # whatever cannot be captured is the answer, and is said
            self._go_eagerly(f"a step cannot be captured ({first_line(error)})")
            return None
        self._captured[rows] = _Captured(graph, chosen, tape)
        return self._captured[rows]

    def _go_eagerly(self, why: str) -> None:
        self._eager = True
        self._captured.clear()
        self.say(f"generation: decodes without a CUDA graph: {why}")


def why_eager(caller: Caller) -> str | None:
    """Why no decode step of this model is captured; None where one may be."""
    world: Any = caller.context.world
    if world is not None and world.size > 1:
        return f"{world.size} ranks share the model, and agree on the host who has work"
    if (why := find_shared_scales(caller.model)) is not None:
        return f"{why}, those of free slots too"
    if (name := first_compiled_module(caller.model)) is not None:
        return f"{name} is compiled, and looks at its inputs on the host"
    return None
