"""Learning-rate schedules: step -> factor of the peak rate. Pure functions, so a resume needs no state.

Steps count from 1 to `steps`. The first `warmup` steps rise linearly, step s at s / warmup. After them p runs from 0
(first step) towards 1: p = (s - 1 - warmup) / (steps - warmup), so that the last step still has a positive rate. The
curve would reach `floor` = min_lr / lr one step later.
"""

from __future__ import annotations

import math
from collections.abc import Callable

Schedule = Callable[[int, int, int, float], float]


def cosine(step: int, steps: int, warmup: int = 0, floor: float = 0.0) -> float:
    """floor + (1 - floor) (1 + cos(pi p)) / 2 (Loshchilov & Hutter 2017, without restarts)."""
    if step <= warmup:
        return step / warmup
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * _progress(step, steps, warmup)))


def linear(step: int, steps: int, warmup: int = 0, floor: float = 0.0) -> float:
    """floor + (1 - floor) (1 - p)."""
    if step <= warmup:
        return step / warmup
    return floor + (1 - floor) * (1 - _progress(step, steps, warmup))


def constant(step: int, steps: int, warmup: int = 0, floor: float = 0.0) -> float:
    """1 after the warm-up."""
    return step / warmup if step <= warmup else 1.0


def onecycle(step: int, steps: int, warmup: int = 0, floor: float = 0.0) -> float:
    """One cycle (Smith 2018, cosine form): from 1/25 to 1 over `warmup` steps (0: 30 % of the run), down to `floor`."""
    rise = warmup or max(1, round(0.3 * steps))
    if step <= rise:
        return 1 / 25 + (1 - 1 / 25) * 0.5 * (1 - math.cos(math.pi * step / rise))
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * _progress(step, steps, rise)))


def _progress(step: int, steps: int, warmup: int) -> float:
    return (step - 1 - warmup) / max(1, steps - warmup)


SCHEDULES: dict[str, Schedule] = {"cosine": cosine, "linear": linear, "constant": constant, "onecycle": onecycle}


def lr_at(step: int, *, schedule: str, lr: float, steps: int, warmup: int = 0, min_lr: float = 0.0) -> float:
    """Return the learning rate of a step, 1 <= step <= steps."""
    if not 1 <= step <= steps:
        raise ValueError(f"step {step} is outside 1..{steps}")
    return lr * SCHEDULES[schedule](step, steps, warmup, min_lr / lr)
