"""CUDA graphs: capture of work, and whether a capture is in progress.

Captured work reads and writes fixed memory and makes no decision on the host. Nothing computed during a capture may be
cached, because a replay does not fill the cache again.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

_constant_weights_depth = 0  # nested weights_stay()


def is_capturing(device: torch.device) -> bool:
    """Whether work on this device is now captured into a CUDA graph, ours or Inductor's (``reduce-overhead``, whose
    memory pool must not hold anything that outlives a run)."""
    if device.type != "cuda":
        return False
    if torch.cuda.is_current_stream_capturing():
        return True
    trees = sys.modules.get("torch._inductor.cudagraph_trees")
    return trees is not None and trees.get_manager(device.index, create_if_none_exists=False) is not None


class Graph(Protocol):
    """Work that is captured once and replayed; tests replace it with one that runs on a CPU."""

    def capture(self, work: Callable[[], Tensor]) -> Tensor:
        """Record ``work`` without running it. Returns the tensor that holds its result after each replay."""

    def replay(self) -> None: ...


class CudaGraph:
    """A ``torch.cuda.CUDAGraph`` with its memory in ``pool``, which graphs that are replayed in turn share."""

    def __init__(self, pool: Any) -> None:
        self._graph, self._pool = torch.cuda.CUDAGraph(), pool

    def capture(self, work: Callable[[], Tensor]) -> Tensor:
        """See :class:`Graph`. If ``work`` cannot be recorded, raises its error and restores the random generator."""
        # Ending a capture that failed raises an error of its own, and leaves torch's generator waiting for a replay.
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
            cause = None  # else it keeps this frame, and the tensors of work, alive until garbage is collected

    def replay(self) -> None:
        self._graph.replay()


@contextmanager
def forbid_synchronization(device: torch.device) -> Iterator[None]:
    """A context in which an operation that would wait for the GPU raises RuntimeError: it cannot be captured."""
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
def assume_constant_weights() -> Iterator[None]:
    """A context in which captured work may read cached codes of weights instead of casting in each replay.

    The caller must ensure that no weight changes or moves while the graph is in use.
    """
    global _constant_weights_depth
    _constant_weights_depth += 1
    try:
        yield
    finally:
        _constant_weights_depth -= 1


def are_weights_constant() -> bool:
    """Whether this is inside :func:`assume_constant_weights`."""
    return _constant_weights_depth > 0
