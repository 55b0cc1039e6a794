"""Time several candidates in one run, so that other load on the machine affects all of them equally.

Each round calls every candidate once, in alternating order, so that changing clocks do not favor a candidate. Before
each call on a GPU the L2 cache is overwritten, as other layers would in a step, and the GPU waits for :data:`LEAD`.
Results are medians; ``spread`` is their uncertainty.

On a GPU each call has two times: ``device`` by CUDA events, and ``host``, the time of Python and kernel launches. A
step cannot be faster than either, so many small calls can be limited by the host.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

Call = Callable[[], Any]

#: Clock cycles that a GPU waits before each call, about 2 ms. Meanwhile the host queues the first kernels of the call,
#: which takes 0.1 to 0.2 ms that would otherwise count as device time. Later delays of the host do count.
LEAD = 4_000_000


@dataclass(frozen=True)
class Timing:
    """``device`` and ``host``: median seconds of a call (equal on a CPU). ``spread``: interquartile range divided by
    the median. ``rounds``: number of timed calls."""

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
    """Time functions, in alternating order.

    Args:
        functions: name -> function without arguments.
        device: device of the work, which is timed by its events (CUDA) or the wall clock (CPU).
        warmup: untimed calls of each function.
        rounds: maximum timed calls of each function, rounded up to an even number so that both orders are equally
        frequent.
        budget: seconds after which no round starts, after at least four rounds.
        flush: overwrite the L2 cache of the GPU before each call.

    Raises:
        ValueError: there is no function, or a count is below 1.
        Errors of the functions.
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
    # Both orders must be equally frequent: an odd number of rounds would favor the candidates that are called first.
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
