"""Times long work on a CPU in turns: the minimum of wall-clock and CPU seconds counts.

Other work on the machine only adds time, so the fastest of several turns is closest to the true cost. Short calls, and
calls on a GPU, are timed by :mod:`octavo.fp8.measuring.timing`, whose medians need many rounds.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

Call = Callable[[], object]


@dataclass
class Turns:
    """Seconds of each turn of one contender."""

    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)

    @property
    def spread(self) -> float:
        """Distance between the quartiles over the median."""
        low, middle, high = statistics.quantiles(self.seconds, n=4)
        return (high - low) / middle


def take(
    ways: Mapping[str, Call], rounds: int, *, before: Call = lambda: None, after: Call = lambda: None, warmup: int = 0
) -> dict[str, Turns]:
    """Everybody once a round, in order; ``before`` and ``after`` each turn run untimed, the first rounds not kept."""
    taken = {name: Turns() for name in ways}
    for number in range(warmup + rounds):
        for name, way in ways.items():
            before()
            began, worked = time.perf_counter(), time.process_time()
            way()
            if number >= warmup:
                taken[name].seconds.append(time.perf_counter() - began)
                taken[name].cpu_seconds.append(time.process_time() - worked)
            after()
    return taken


def interval(slow: Sequence[float], fast: Sequence[float]) -> dict[str, float]:
    """How many times as long, in the geometric mean of rounds, and the 95 % interval of it."""
    ratios = [math.log(a / b) for a, b in zip(slow, fast, strict=True)]
    draw = random.Random(0)
    means = sorted(statistics.fmean(draw.choices(ratios, k=len(ratios))) for _ in range(2000))
    low, high = means[50], means[-51]
    return {"ratio": math.exp(statistics.fmean(ratios)), "low": math.exp(low), "high": math.exp(high)}
