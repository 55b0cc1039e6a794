"""Decode steps on a GPU: one function over fixed memory, replayed as a CUDA graph.

A decode step is hundreds of small kernels, which the host launches one by one; a graph is launched at once. Its input
is one integer matrix with a row per sequence, which the host fills and copies to the device before each step::

    slot       row of its tokens, random numbers, log-probabilities and entropies
    cached     tokens in the cache; the new one is written after them (-1 in empty rows)
    generated  tokens generated so far; the model gets the last one
    position   position of that token
    pages      its page numbers, in order

From there to the chosen tokens nothing depends on the host. Rows are padded with free slots to a power of two, or to
all slots, so that a rollout needs few graphs. A number of rows is captured at its second use, after a run under CUDA's
check for synchronizing operations. Graphs live for one call, in which no weight changes; they read the cached codes of
weights and share one memory pool.

The host checks stop conditions after each step. A step that cannot be captured (:func:`why_eager`, or an error of the
capture) runs eagerly without padding, and the reason is logged once.
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
from octavo.fp8.kernels import CudaGraph, Graph, assume_constant_weights, forbid_synchronization
from octavo.fp8.measuring import find_shared_scales, first_compiled_module
from octavo.generation.attention import PagedDecode
from octavo.generation.caller import Caller
from octavo.generation.kv_cache import Cache
from octavo.generation.request import Sampling
from octavo.generation.slots import Slots

_NUMBERS = 4  # columns before the pages of a row


@dataclass
class _Captured:
    """A graph, its output (the chosen tokens), and the GEMMs that a replay runs."""

    graph: Graph
    chosen: Tensor
    tape: fp8.GemmCounts


class CudaGraphDecoder:
    """Decodes by replaying graphs. `graph` creates the object that captures a step, or None for a CUDA graph; `log` is
    called with the reason if steps run without one."""

    def __init__(
        self, caller: Caller, cache: Cache, slots: Slots, sampling: Sampling, forced: Tensor | None,
        log: Callable[[str], None] = lambda text: None, graph: Callable[[], Graph] | None = None,
    ) -> None:  # fmt: skip
        self.caller, self.cache, self.slots, self.sampling, self.forced = caller, cache, slots, sampling, forced
        self.log, self.graph, self.replays = log, graph, 0
        size = (len(slots), _NUMBERS + slots.pages.shape[1])
        gpu = caller.device.type == "cuda"
        self._host = torch.zeros(size, dtype=torch.int32, pin_memory=gpu)
        self._rows = torch.zeros(size, dtype=torch.int32, device=caller.device)
        self._captured: dict[int, _Captured] = {}
        self._seen: set[int] = set()
        self._eager = forced is not None  # `Engine.replay` runs hooks, which a graph would skip
        if not self._eager and (why := why_eager(caller)):
            self._fall_back(why)
        elif graph is None and not self._eager:
            self.graph = partial(CudaGraph, torch.cuda.graph_pool_handle())

    def __call__(self, active: np.ndarray) -> Tensor:
        """Choose the next token of the slots `active` [B], which have a page for it. Returns int64 [B], -1 for NaN
        logits."""
        rows = len(active) if self._eager else min(1 << (len(active) - 1).bit_length(), len(self.slots))
        self._send(active, rows)
        captured = self._captured.get(rows)
        if captured is None and rows in self._seen and not self._eager:
            captured = self._capture(rows)
        self._seen.add(rows)
        if captured is None:
            return self.step(rows)[: len(active)]
        captured.graph.replay()
        observe.report_replay(captured.tape)
        self.replays += 1
        return captured.chosen[: len(active)]

    def step(self, rows: int) -> Tensor:
        """Choose the next token of each of the first `rows` rows, from device memory only."""
        slots, page = self.slots, self.cache.page
        slot, cached, generated, position = self._rows[:rows, :_NUMBERS].long().unbind(1)
        table = self._rows[:rows, _NUMBERS:]
        where = table.gather(1, (cached // page).clamp_min(0)[:, None])[:, 0].long() * page + cached % page
        attention = PagedDecode(self.cache, where.masked_fill(cached < 0, -1), table, cached.add(1).int())
        last = slots.tokens[slot, generated - 1]
        logits = self.caller.forward(last, position.expand(self.caller.axes, -1), attention)
        return slots.choose(slot, generated, logits, self.sampling, self.forced, invariant=False)

    def _send(self, active: np.ndarray, rows: int) -> None:
        """Copy the input rows to the device. The pinned buffer can be reused, because the previous step has
        finished."""
        slots, count = self.slots, len(active)
        host = self._host.numpy()
        host[:count, 0], host[:count, 1], host[:count, 2] = active, slots.cached[active], slots.generated[active]
        host[:count, 3], host[:count, _NUMBERS:] = slots.position[active], slots.pages[active]
        if rows > count:  # padding rows write only to free slots
            host[count:rows] = 0
            host[count:rows, 0] = slots.free[: rows - count]
            host[count:rows, 1:3] = -1, 1
        self._rows[:rows].copy_(self._host[:rows], non_blocking=True)

    def _capture(self, rows: int) -> _Captured | None:
        """Capture the step for this number of rows. The runs before it are harmless: they write the same values to the
        same memory."""
        assert self.graph is not None
        try:
            with observe.mute_reports(), forbid_synchronization(self.caller.device):
                self.step(rows)
            graph = self.graph()
            with observe.record_gemms() as tape, assume_constant_weights():
                chosen = graph.capture(partial(self.step, rows))
        except Exception as error:  # any error means that it cannot be captured
            self._fall_back(f"a step cannot be captured ({first_line(error)})")
            return None
        self._captured[rows] = _Captured(graph, chosen, tape)
        return self._captured[rows]

    def _fall_back(self, why: str) -> None:
        self._eager = True
        self._captured.clear()
        self.log(f"generation: decodes without a CUDA graph: {why}")


def why_eager(caller: Caller) -> str | None:
    """Return why decode steps of this model cannot be captured, or None if they may be."""
    world: Any = caller.context.world
    if world is not None and world.size > 1:
        return f"{world.size} ranks share the model and agree on the host about which ranks have work"
    if (why := find_shared_scales(caller.model)) is not None:
        return f"{why}, including the rows of free slots"
    if (name := first_compiled_module(caller.model)) is not None:
        return f"{name} is compiled and checks its inputs on the host"
    return None
