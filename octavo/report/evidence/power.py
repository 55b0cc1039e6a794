"""Predicts the width of the intervals of a trial, and the probability that a claim passes, before the trial runs.

Everything refers to the mean of ``units`` independent gaps (forks, pairs of seeds, questions) that scatter with
standard deviation ``spread`` about a true ``gap``, judged by a 95 % Student's t interval as
:func:`octavo.report.evidence.claims.mean_gap` does. Gaps, spreads and margins are fractions (0.0025 is 0.25 %),
positive where FP8 is worse. Spreads are determined by :mod:`octavo.report.trial.design`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

POWER = 0.8  # the power that a design should have for a true claim, the usual value in trials
MAX_UNITS = 100_000  # upper limit of the search for a number of units


@dataclass(frozen=True)
class Estimate:
    """The expected result of a claim before the first run: the width of its interval, and the probability that it
    passes if FP8 changes nothing.

    ``units`` is the number of independent units, and ``unit`` their name in the plural; ``spread`` is the standard
    deviation of one unit, ``source`` describes its origin, and ``seen`` is True if earlier runs of this trial
    measured it. If nothing can be predicted, ``why_not`` gives the reason.
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
    def expected_half_width(self) -> float:
        return half_width(self.spread, self.units)

    @property
    def pass_probability(self) -> float:
        return pass_probability(self.spread, self.units, self.margin)

    @property
    def needed(self) -> int | None:
        """The number of units with which the claim passes with probability :data:`POWER`; None above
        :data:`MAX_UNITS`."""
        return required_units(self.spread, self.margin)

    def format(self, share: float) -> str:
        """Format a half-width in the unit of the claim: points of accuracy, or per cent of a loss."""
        digits = f"{100 * share:.2g}" if share < 0.1 else f"{100 * share:.0f}"
        unit = "%" if "accuracy" not in self.claim else "point" if digits == "1" else "points"
        return f"+-{digits} {unit}"

    @property
    def line(self) -> str:
        """The line of the estimate that is printed before the first run."""
        if self.why_not:
            return f"{self.title}: {self.why_not}"
        expected = f"{self.format(self.expected_half_width)} from {self.units:,} {self.unit}"
        if self.units < 2:
            expected = f"no interval ({self.unit}: {self.units})"
        needed = f"{self.needed:,}" if self.needed is not None else f"more than {MAX_UNITS:,}"
        return (
            f"{self.title}: {expected}, margin {self.format(self.margin)[2:]}: passes with "
            f"probability {100 * self.pass_probability:.0f} %, {100 * POWER:.0f} % power needs {needed}; spread "
            f"{self.format(self.spread)[2:]}, {self.source}"
        )

    def to_json(self) -> dict[str, Any]:
        """Return all fields, from which the estimate can be restored, and derived values."""
        if self.why_not:
            return asdict(self)
        return asdict(self) | {"half": self.expected_half_width, "chance": self.pass_probability, "needed": self.needed}


def half_width(spread: float, units: int) -> float:
    """Return the expected half-width of the 95 % interval; infinite with fewer than two units."""
    _check_arguments(spread, units)
    return _t_quantile(units - 1) * spread / math.sqrt(units) if units > 1 else math.inf


def spread_from_half_width(half: float, units: int) -> float:
    """Return the spread of single units that gives an interval of this half-width."""
    return half * math.sqrt(units) / _t_quantile(units - 1)


def pass_probability(spread: float, units: int, margin: float, gap: float = 0.0) -> float:
    """Return the probability that the claim "the interval ends below ``margin``" passes if the true gap is ``gap``.

    It passes where (margin - mean) * sqrt(units) / sd exceeds the 97.5 % quantile of Student's t; that quotient follows
    the noncentral t distribution with noncentrality (margin - gap) * sqrt(units) / spread (Johnson and Welch 1940). A
    gap at the margin passes with probability 2.5 %.
    """
    _check_arguments(spread, units)
    if units < 2:
        return 0.0
    if spread == 0:
        return float(gap < margin)
    from scipy.stats import nct

    return float(nct.sf(_t_quantile(units - 1), units - 1, (margin - gap) * math.sqrt(units) / spread))


def required_units(spread: float, margin: float, gap: float = 0.0, power: float = POWER) -> int | None:
    """Return the smallest number of units with which a claim passes with probability ``power``, or None above
    ``MAX_UNITS``."""
    return _smallest_sufficient(lambda units: pass_probability(spread, units, margin, gap) >= power)


def _smallest_sufficient(enough: Callable[[int], bool]) -> int | None:
    """Return the smallest sufficient number of units, by doubling, then bisection (``enough`` must be monotone)."""
    high = 2
    while not enough(high):
        if high >= MAX_UNITS:
            return None
        high = min(2 * high, MAX_UNITS)
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def _check_arguments(spread: float, units: int) -> None:
    if not (math.isfinite(spread) and spread >= 0) or units < 0:
        raise ValueError(
            f"spread {spread} and units {units}: expected a finite spread of at least 0, and units of at least 0"
        )


def _t_quantile(df: int) -> float:
    from scipy.stats import t

    return float(t.ppf(0.975, df))
