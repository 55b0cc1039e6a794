"""Time several candidates in one run, so that whatever else the machine does affects all of them.

Each round calls every candidate once, in the given order and in the reverse one by turns: clocks that rise or fall
favour no candidate. Before each call on a GPU its L2 cache is written over, since in a step other layers have run since
a tensor was written, and the GPU is kept waiting for :data:`LEAD`. Results are medians; ``spread`` says how far to
trust them.

On a GPU two times are taken of each call: ``device`` by CUDA events, and ``host``, what Python and the launches needed.
A step can be no faster than either: many small calls are paid for on the host, however quick the kernels are.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

Call = Callable[[], Any]

#: Clock cycles that a GPU waits before each call, about 2 ms: the host queues the call's first kernels meanwhile, which
#: takes it 0.1 to 0.2 ms that would else be counted as the device's. A host that is late later on is counted.
LEAD = 4_000_000


@dataclass(frozen=True)
class Timing:
    """``device`` and ``host``: median seconds of a call on either (equal on a CPU). ``spread``: distance between the
    quartiles over the median, 0 for a call that always takes the same time. ``rounds``: calls that were timed."""

    device: float
    host: float
    spread: float
    rounds: int


def time_calls(
    functions: Mapping[str, Call],
    device: torch.device | str,
    *,
    warmup: int = 3,
    rounds: int = 20,
    budget: float = 1.0,
    flush: bool = True,
) -> dict[str, Timing]:
    """Time all functions in turns.

    Args:
        functions: name -> a call without arguments; one that wants fresh inputs rotates its own.
        device: where the work runs; its events (CUDA) or the wall clock (CPU) measure it.
        warmup: untimed calls of each, which compile, allocate and wake the clocks.
        rounds: timed calls of each, at most (rounded up to an even number, for both orders to weigh the same).
        budget: seconds after which no further round begins, once four rounds are done.
        flush: write over the GPU's L2 cache before each call.

    Raises:
        ValueError: no function, or a count below 1.
        Whatever a function raises.
    """
    if not functions or rounds < 1 or warmup < 0:
        raise ValueError(
            f"time_calls times at least one function in at least one round; found {len(functions)} functions, "
            f"rounds={rounds}, warmup={warmup}."
        )
    clock = _Clock(torch.device(device), flush)
    for function in functions.values():
        for _ in range(warmup):
            function()
    clock.collect_times()
    names = list(functions)
    # Both orders must weigh the same: an odd round would favour the candidates that it calls first.
    rounds += rounds % 2
    began, done = time.perf_counter(), 0
    while done < rounds and (done < min(4, rounds) or done % 2 or time.perf_counter() - began < budget):
        for name in names if done % 2 == 0 else reversed(names):
            clock.time(name, functions[name])
        done += 1
        clock.collect_times()
    return {name: clock.result(name) for name in names}


class _Clock:
    """Takes the times of calls and keeps them."""

    def __init__(self, device: torch.device, flush: bool) -> None:
        self.device = device
        self.cuda = device.type == "cuda"
        self._device: dict[str, list[float]] = {}
        self._host: dict[str, list[float]] = {}
        self._open: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._scratch: torch.Tensor | None = None
        if self.cuda and flush:
            size = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0) or 64 << 20
            self._scratch = torch.empty(2 * size, dtype=torch.uint8, device=device)

    def time(self, name: str, function: Call) -> None:
        if not self.cuda:
            began = time.perf_counter()
            function()
            spent = time.perf_counter() - began
            self._device.setdefault(name, []).append(spent)
            self._host.setdefault(name, []).append(spent)
            return
        with torch.cuda.device(self.device):
            if self._scratch is not None:
                self._scratch.zero_()
            torch.cuda._sleep(LEAD)
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            began = time.perf_counter()
            function()
            spent = time.perf_counter() - began
            last.record()
        self._host.setdefault(name, []).append(spent)
        self._open.append((name, first, last))

    def collect_times(self) -> None:
        """Wait for the device, and read its events."""
        if not self.cuda:
            return
        torch.cuda.synchronize(self.device)
        for name, first, last in self._open:
            self._device.setdefault(name, []).append(first.elapsed_time(last) / 1e3)
        self._open.clear()

    def result(self, name: str) -> Timing:
        device, host = self._device[name], self._host[name]
        median = statistics.median(device)
        quartiles = statistics.quantiles(device, n=4) if len(device) > 1 else [median] * 3
        spread = (quartiles[2] - quartiles[0]) / median if median else 0.0
        return Timing(median, statistics.median(host), spread, len(device))
