"""Capture of CUDA graphs, and detection of a capture in progress.

Captured work reads and writes fixed memory and makes no decisions on the host. Results that are computed during a
capture must not be cached, because a replay does not fill the cache again.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from octavo.base import accelerator

_constant_weights_depth = 0  # nested calls of assume_constant_weights


def is_capturing(device: torch.device) -> bool:
    """True if work on this device is being captured into a CUDA graph.

    This includes Inductor's graphs (``reduce-overhead``), whose memory pool must not hold tensors that outlive a run.
    """
    if device.type != "cuda":
        return False
    return torch.cuda.is_current_stream_capturing() or accelerator.runs_inductor_graphs(device.index)


class Graph(Protocol):
    """Work that is captured once and replayed. Tests use an implementation for the CPU."""

    def capture(self, work: Callable[[], Tensor]) -> Tensor:
        """Record ``work`` without running it. Returns the tensor that holds the result after each replay."""

    def replay(self) -> None: ...


class CudaGraph:
    """A ``torch.cuda.CUDAGraph`` that allocates from ``pool``, which graphs that never run at the same time share."""

    def __init__(self, pool: Any) -> None:
        self._graph, self._pool = torch.cuda.CUDAGraph(), pool

    def capture(self, work: Callable[[], Tensor]) -> Tensor:
        """Record ``work``. If this fails, restore the state of the random generator and raise the error of ``work``."""
        # Ending a failed capture raises another error, and leaves torch's generator waiting for a replay.
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
            cause = (
                None  # a reference cycle would keep this frame and the tensors of work alive until garbage collection
            )

    def replay(self) -> None:
        self._graph.replay()


@contextmanager
def forbid_synchronization(device: torch.device) -> Iterator[None]:
    """Inside this context, operations that wait for the GPU raise RuntimeError, because they cannot be captured."""
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
    """Inside this context, captured work reads cached codes of weights instead of casting in each replay.

    The caller must ensure that no weight changes or moves while the graph is in use.
    """
    global _constant_weights_depth
    _constant_weights_depth += 1
    try:
        yield
    finally:
        _constant_weights_depth -= 1


def are_weights_constant() -> bool:
    """True inside :func:`assume_constant_weights`."""
    return _constant_weights_depth > 0
