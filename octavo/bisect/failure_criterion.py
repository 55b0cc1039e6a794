"""Decides whether a run is broken, compared with high precision by its loss or its time.

A run that raises, or whose loss is not finite, is broken. Otherwise its figure decides: ``loss`` is the relative
difference between its mean loss over the last half of the steps and the mean loss of high precision on the same data;
``time`` is the ratio of its median seconds per step to high precision's, minus one. The margin decides whether a
configuration is broken and whether a change works. During the search in a broken configuration the bar is half of its
figure: equally far from a working and from the broken run, where noise matters least.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from octavo.bisect.short_runs import BisectError, Outcome

By = Literal["loss", "time"]
MARGINS: dict[By, float] = {"loss": 0.02, "time": 0.05}
MIN_STEPS = 4  # of a figure


@dataclass(frozen=True)
class Bar:
    """The criterion: the high-precision run, the number of steps, and the figure above which a run is broken."""

    by: By
    reference: Outcome
    steps: int
    bar: float

    def figure(self, outcome: Outcome) -> float:
        """Return the figure of a run, infinite if it failed."""
        return figure(outcome, self.reference, self.by, self.steps)

    def halfway(self, broken_figure: float) -> Bar:
        """Return the bar for the search in a configuration with this figure."""
        return self if math.isinf(broken_figure) else replace(self, bar=broken_figure / 2)


def figure(outcome: Outcome, reference: Outcome, by: By, steps: int) -> float:
    """Return how much worse than high precision the first steps of a run are, as a fraction; infinite if it failed."""
    outcome, reference = outcome.upto(steps), reference.upto(steps)
    if outcome.fails_at is not None:
        return math.inf
    if by == "time":
        return outcome.time / reference.time - 1
    losses, reference_losses = outcome.losses[steps // 2 :], reference.losses[steps // 2 :]
    return float((losses.mean() - reference_losses.mean()) / abs(reference_losses.mean()))


def shorten(unchanged: Outcome, full: Bar) -> Bar:
    """Return the criterion over as few steps as show the problem. Raises BisectError if high precision itself fails."""
    reference = full.reference
    if (at := reference.fails_at) is not None:
        raise BisectError(
            f"high precision itself fails at step {reference.begins + at} "
            f"({reference.failure or 'its loss is not finite'}), so FP8 is not the cause. Check the data, train.lr "
            "and train.clip first"
        )
    if (at := unchanged.fails_at) is not None:
        return replace(full, steps=at)
    if full.by == "time" or not full.figure(unchanged) > full.bar:
        return full
    sizes = np.arange(min(MIN_STEPS, full.steps), full.steps + 1)
    above = np.array([replace(full, steps=int(n)).figure(unchanged) > full.bar for n in sizes])
    below = np.flatnonzero(~above)
    first = int(sizes[below[-1] + 1]) if below.size else int(sizes[0])  # above the bar from here on
    return replace(full, steps=min(full.steps, first + max(MIN_STEPS, first // 4)))  # a quarter more because of noise
