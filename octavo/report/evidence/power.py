"""Predicts, before a trial runs, how wide its intervals will be and how likely a claim passes.

Everything refers to the mean of ``units`` independent gaps (forks, pairs of seeds, questions) that scatter with
standard deviation ``spread`` about a true ``gap``, judged by Student's 95 % interval as
:func:`octavo.report.evidence.claims.mean_gap` does. Gaps, spreads and margins are shares (0.0025 is 0.25 %), positive
where FP8 is worse. Spreads are determined by :mod:`octavo.report.trial.design`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

LIKELY = 0.8  # the power that a design should have for a true claim, the usual value in trials
MOST = 100_000  # units that a search counts up to


@dataclass(frozen=True)
class Estimate:
    """What is expected of a claim before the first run: the width of its interval, and its chance to pass if FP8
    changes nothing.

    ``units`` is the number of independent units, and ``unit`` their name in the plural; ``spread`` is the standard
    deviation of one unit, ``source`` describes where it comes from, and ``seen`` whether earlier runs of this trial
    measured it. If nothing can be predicted, ``why_not`` says why.
    """

    claim: str
    title: str
    unit: str
    units: int
    spread: float
    margin: float
    source: str
    seen: bool = False
    why_not: str = ""

    @property
    def half(self) -> float:
        return half_width(self.spread, self.units)

    @property
    def chance(self) -> float:
        return chance(self.spread, self.units, self.margin)

    @property
    def needed(self) -> int | None:
        """The number of units with which the claim passes with probability :data:`LIKELY`."""
        return units_for(self.spread, self.margin)

    def shown(self, share: float) -> str:
        """A half-width in the claim's unit: points of accuracy, or per cent of a loss."""
        digits = f"{100 * share:.2g}" if share < 0.1 else f"{100 * share:.0f}"
        unit = "%" if "accuracy" not in self.claim else "point" if digits == "1" else "points"
        return f"+-{digits} {unit}"

    @property
    def line(self) -> str:
        """One line of text."""
        if self.why_not:
            return f"{self.title}: {self.why_not}"
        expected = f"{self.shown(self.half)} from {self.units:,} {self.unit}"
        if self.units < 2:
            expected = f"no interval ({self.unit}: {self.units})"
        needed = f"{self.needed:,}" if self.needed is not None else f"more than {MOST:,}"
        return (
            f"{self.title}: {expected}, margin {self.shown(self.margin)[2:]}: passes with {100 * self.chance:.0f} %, "
            f"{100 * LIKELY:.0f} % takes {needed}; spread {self.shown(self.spread)[2:]}, {self.source}"
        )

    def to_json(self) -> dict[str, Any]:
        """Its fields, from which it can be restored, and derived figures; null where there is no number."""
        if self.why_not:
            return asdict(self)
        return asdict(self) | {"half": self.half, "chance": self.chance, "needed": self.needed}


def half_width(spread: float, units: int) -> float:
    """The expected half-width of the 95 % interval; infinite with fewer than two units."""
    _check(spread, units)
    return _t(units - 1) * spread / math.sqrt(units) if units > 1 else math.inf


def spread_of(half: float, units: int) -> float:
    """The spread of single units behind an interval of this half-width."""
    return half * math.sqrt(units) / _t(units - 1)


def chance(spread: float, units: int, margin: float, gap: float = 0.0) -> float:
    """The probability that the claim "the interval ends below ``margin``" passes if the true gap is ``gap``.

    It passes where (margin - mean) * sqrt(units) / sd exceeds Student's t of 97.5 %; that quotient follows the
    noncentral t distribution about (margin - gap) * sqrt(units) / spread (Johnson and Welch 1940). A gap at the margin
    passes with 2.5 %.
    """
    _check(spread, units)
    if units < 2:
        return 0.0
    if spread == 0:
        return float(gap < margin)
    from scipy.stats import nct

    return float(nct.sf(_t(units - 1), units - 1, (margin - gap) * math.sqrt(units) / spread))


def units_for(spread: float, margin: float, gap: float = 0.0, likely: float = LIKELY) -> int | None:
    """The fewest units with which a claim passes with probability ``likely``; None if ``MOST`` are not enough."""
    return _fewest(lambda units: chance(spread, units, margin, gap) >= likely)


def _fewest(enough: Callable[[int], bool]) -> int | None:
    """The smallest number of units that is enough, by doubling, then bisection (``enough`` must be monotone)."""
    high = 2
    while not enough(high):
        if high >= MOST:
            return None
        high = min(2 * high, MOST)
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def _check(spread: float, units: int) -> None:
    if not (math.isfinite(spread) and spread >= 0) or units < 0:
        raise ValueError(
            f"spread {spread} and units {units}: expected a finite spread of at least 0, and units of at least 0"
        )


def _t(freedom: int) -> float:
    from scipy.stats import t

    return float(t.ppf(0.975, freedom))
