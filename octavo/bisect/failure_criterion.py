"""When a run counts as broken: held against high precision, by its loss or by its time.

A run that raises, or whose loss is not finite, is broken. Else by its figure: ``loss`` is how far its mean loss over
the last half of the steps lies above high precision's on the same data, as a share of it; ``time`` its median seconds a
step over high precision's, less one. A configuration is broken, and a change works, by the margin. Within a search into
what is broken the bar is half of its figure: as far from what is whole as from what is broken, so that noise counts
least.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from octavo.bisect.short_runs import BisectError, Outcome

By = Literal["loss", "time"]
MARGINS: dict[By, float] = {"loss": 0.02, "time": 0.05}
LEAST = 4  # steps that a figure is taken of


@dataclass(frozen=True)
class Bar:
    """What runs are held against: high precision, over how many steps, and above which figure they are broken."""

    by: By
    reference: Outcome
    steps: int
    bar: float

    def figure(self, outcome: Outcome) -> float:
        """A run's figure; infinite where it broke off."""
        return figure(outcome, self.reference, self.by, self.steps)

    def half(self, seen: float) -> Bar:
        """The bar for a search into a configuration of this figure."""
        return self if math.isinf(seen) else replace(self, bar=seen / 2)


def figure(outcome: Outcome, reference: Outcome, by: By, steps: int) -> float:
    """How much worse than high precision the first steps of a run are, as a share; infinite where it broke off."""
    outcome, reference = outcome.upto(steps), reference.upto(steps)
    if outcome.fails_at is not None:
        return math.inf
    if by == "time":
        return outcome.time / reference.time - 1
    ours, theirs = outcome.losses[steps // 2 :], reference.losses[steps // 2 :]
    return float((ours.mean() - theirs.mean()) / abs(theirs.mean()))


def short(whole: Outcome, full: Bar) -> Bar:
    """The bar over no more steps than show the harm. Raises BisectError where high precision fails itself."""
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
    first = int(sizes[below[-1] + 1]) if below.size else int(sizes[0])  # above from here on
    return replace(full, steps=min(full.steps, first + max(LEAST, first // 4)))  # and clearly so
