"""When a run counts as broken, compared with high precision by its loss or by its time.

A run that raises, or whose loss is not finite, is broken. Otherwise its figure decides: ``loss`` is how far its mean
loss over the last half of the steps is above high precision's on the same data, relative to it; ``time`` is its median
seconds per step divided by high precision's, minus one. The margin decides whether a configuration is broken and
whether a change works. While a broken configuration is searched, the bar is half of its figure: equally far from a
working and from the broken run, where noise matters least.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from octavo.bisect.short_runs import BisectError, Outcome

By = Literal["loss", "time"]
MARGINS: dict[By, float] = {"loss": 0.02, "time": 0.05}
LEAST = 4  # the fewest steps of a figure


@dataclass(frozen=True)
class Bar:
    """The criterion: high precision, the number of steps, and the figure above which a run is broken."""

    by: By
    reference: Outcome
    steps: int
    bar: float

    def figure(self, outcome: Outcome) -> float:
        """A run's figure; infinite if it failed."""
        return figure(outcome, self.reference, self.by, self.steps)

    def half(self, seen: float) -> Bar:
        """The bar for a search into a configuration of this figure."""
        return self if math.isinf(seen) else replace(self, bar=seen / 2)


def figure(outcome: Outcome, reference: Outcome, by: By, steps: int) -> float:
    """How much worse than high precision the first steps of a run are, as a share; infinite if it failed."""
    outcome, reference = outcome.upto(steps), reference.upto(steps)
    if outcome.fails_at is not None:
        return math.inf
    if by == "time":
        return outcome.time / reference.time - 1
    ours, theirs = outcome.losses[steps // 2 :], reference.losses[steps // 2 :]
    return float((ours.mean() - theirs.mean()) / abs(theirs.mean()))


def short(whole: Outcome, full: Bar) -> Bar:
    """The criterion over as few steps as show the harm. Raises BisectError if high precision itself fails."""
    reference = full.reference
    if (at := reference.fails_at) is not None:
        raise BisectError(
            f"high precision itself fails at step {reference.begins + at} "
            f"({reference.failure or 'its loss is not finite'}), so it is not FP8 that breaks this run. Look at the "
            "data, train.lr and train.clip first"
        )
    if (at := whole.fails_at) is not None:
        return replace(full, steps=at)
    if full.by == "time" or not full.figure(whole) > full.bar:
        return full
    sizes = np.arange(min(LEAST, full.steps), full.steps + 1)
    above = np.array([replace(full, steps=int(n)).figure(whole) > full.bar for n in sizes])
    below = np.flatnonzero(~above)
    first = int(sizes[below[-1] + 1]) if below.size else int(sizes[0])  # the figure stays above the bar from here on
    return replace(full, steps=min(full.steps, first + max(LEAST, first // 4)))  # a quarter more, against noise
