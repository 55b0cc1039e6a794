"""When a run counts as broken: held against high precision, by its loss or by its time.

A run that raises, or whose loss is not finite, is broken. Else by its figure: ``loss`` is how far its mean loss over
the last half of the steps lies above high precision's on the same data, as a share of it; ``time`` its median seconds a
step over high precision's, less one. A configuration is worth a search where its own figure exceeds the margin; a run
of the search is broken above the bar, half of that figure: as far from what is whole as from what is broken, so that
noise counts least.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from octavo.bisect.trials import BisectError, Outcome

By = Literal["loss", "time"]
MARGINS: dict[By, float] = {"loss": 0.02, "time": 0.05}
LEAST = 4  # steps that a figure is taken of


@dataclass(frozen=True)
class Bar:
    """What a search holds its runs against: high precision, for how many steps, and above which figure."""

    by: By
    reference: Outcome
    steps: int
    bar: float

    def figure(self, outcome: Outcome) -> float:
        """A run's figure; infinite where it broke off."""
        return figure(outcome, self.reference, self.by, self.steps)

    def broken(self, outcome: Outcome) -> bool:
        return self.figure(outcome) > self.bar


def figure(outcome: Outcome, reference: Outcome, by: By, steps: int) -> float:
    """How much worse than high precision the first steps of a run are, as a share; infinite where it broke off."""
    outcome, reference = outcome.upto(steps), reference.upto(steps)
    if outcome.fails_at is not None:
        return math.inf
    if by == "time":
        return outcome.time / reference.time - 1
    ours, theirs = outcome.losses[steps // 2 :], reference.losses[steps // 2 :]
    return float((ours.mean() - theirs.mean()) / abs(theirs.mean()))


def bar_of(whole: Outcome, reference: Outcome, by: By, margin: float) -> Bar | None:
    """The bar of a search, over no more steps than it takes to see the harm; None where the configuration is no worse
    than high precision by the margin. Raises BisectError where high precision fails itself."""
    if (at := reference.fails_at) is not None:
        raise BisectError(
            f"high precision itself fails at step {reference.begins + at} "
            f"({reference.failure or 'its loss is not finite'}), so it is not FP8 that breaks this run. Look at the "
            "data, train.lr and train.clip first"
        )
    if (at := whole.fails_at) is not None:
        return Bar(by, reference, at, margin)
    total = len(whole.losses)
    if not figure(whole, reference, by, total) > margin:
        return None
    steps = total if by == "time" else _seen_after(whole, reference, margin)
    return bar_over(steps, whole, reference, by, margin)


def bar_over(steps: int, whole: Outcome, reference: Outcome, by: By, margin: float) -> Bar:
    """The bar over so many steps: half of what the configuration itself shows, where it goes on for so long."""
    seen = figure(whole, reference, by, steps)
    return Bar(by, reference, steps, margin if math.isinf(seen) else seen / 2)


def _seen_after(whole: Outcome, reference: Outcome, margin: float) -> int:
    """Steps after which the loss is above the margin for good, and a quarter more, so that it is so clearly."""
    total = len(whole.losses)
    sizes = np.arange(min(LEAST, total), total + 1)
    above = np.array([figure(whole, reference, "loss", int(n)) > margin for n in sizes])
    below = np.flatnonzero(~above)
    first = int(sizes[below[-1] + 1]) if below.size else int(sizes[0])
    return min(total, first + max(LEAST, first // 4))
