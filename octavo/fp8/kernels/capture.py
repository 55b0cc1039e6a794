"""CUDA graphs: how work is recorded into one, and whether what runs now is.

What is recorded reads and writes fixed memory and decides nothing on the host; nothing may be kept from it that a
replay would not make again.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

_lasting = 0


def capturing(device: torch.device) -> bool:
    """Whether what runs now on this device goes into a CUDA graph, of ours or of Inductor's (``reduce-overhead``, whose
    memory pool may hold nothing that outlives a run)."""
    if device.type != "cuda":
        return False
    if torch.cuda.is_current_stream_capturing():
        return True
    trees = sys.modules.get("torch._inductor.cudagraph_trees")
    return trees is not None and trees.get_manager(device.index, create_if_none_exists=False) is not None


class Graph(Protocol):
    """What is captured once and replayed; tests put one in place that runs on a CPU."""

    def capture(self, work: Callable[[], Tensor]) -> Tensor:
        """Record ``work`` without running it; the tensor that holds its result after each replay."""

    def replay(self) -> None: ...


class CudaGraph:
    """A ``torch.cuda.CUDAGraph`` with its memory in ``pool``, which several share that are replayed in turn."""

    def __init__(self, pool: Any) -> None:
        self._graph, self._pool = torch.cuda.CUDAGraph(), pool

    def capture(self, work: Callable[[], Tensor]) -> Tensor:
        """As :class:`Graph` has it. Where ``work`` cannot be recorded, it raises what ``work`` raised, and random
        numbers go on where they were: ending a capture that was broken off raises an error of its own, and leaves
        torch's generator waiting for a replay."""
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        before, cause = generator.clone_state(), None
        try:
            with torch.cuda.graph(self._graph, pool=self._pool):
                try:
                    return work()
                except Exception as error:
                    cause = error
                    raise
        except Exception as error:
            generator.graphsafe_set_state(before)
            raise cause or error from None
        finally:
            cause = None  # or it would hold this frame, and through it what work made, until garbage is collected

    def replay(self) -> None:
        self._graph.replay()


@contextmanager
def without_waits(device: torch.device) -> Iterator[None]:
    """Inside, an operation that would wait for the GPU raises RuntimeError: it could not be captured."""
    if device.type != "cuda":
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@contextmanager
def weights_stay() -> Iterator[None]:
    """Inside, what is captured may read codes of weights that are cached already, instead of casting in each replay.
    Whoever captures sees to it that no weight changes, and none is moved, while the graph is in use."""
    global _lasting
    _lasting += 1
    try:
        yield
    finally:
        _lasting -= 1


def lasting() -> bool:
    """Whether this is inside :func:`weights_stay`."""
    return _lasting > 0
