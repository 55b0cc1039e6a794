"""What a design can decide, reckoned before it runs: how wide its intervals will be, and how likely a claim passes.

All of it is of the mean of ``units`` independent gaps (forks, pairs of seeds, questions) that scatter with standard
deviation ``spread`` about a true ``gap``, judged by Student's 95 % interval as :func:`octavo.report.claims.mean_gap`
does. Gaps, spreads and margins are shares (0.0025 is 0.25 %), positive where FP8 is worse.
"""

from __future__ import annotations

import math
from collections.abc import Callable

LIKELY = 0.8  # how likely a design should pass a claim that is true: the custom of trials
MOST = 100_000  # units that a search counts up to


def half_width(spread: float, units: int) -> float:
    """The half-width to expect of the 95 % interval; infinite with fewer than two units."""
    _check(spread, units)
    return _t(units - 1) * spread / math.sqrt(units) if units > 1 else math.inf


def chance(spread: float, units: int, margin: float, gap: float = 0.0) -> float:
    """How likely the claim "the interval ends below ``margin``" passes where the true gap is ``gap``.

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
    """The fewest units with which a claim passes with chance ``likely``; None where ``MOST`` do not reach it."""
    return _fewest(lambda units: chance(spread, units, margin, gap) >= likely)


def units_for_half(spread: float, half: float) -> int | None:
    """The fewest units whose interval is expected to be no wider than ``half`` to each side; None beyond ``MOST``."""
    return _fewest(lambda units: half_width(spread, units) <= half)


def _fewest(enough: Callable[[int], bool]) -> int | None:
    """The smallest number of units that is enough, where more are never less enough: doubling, then halving."""
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
        raise ValueError(f"spread {spread} and units {units}: a spread is finite and at least 0, units at least 0")


def _t(freedom: int) -> float:
    from scipy.stats import t

    return float(t.ppf(0.975, freedom))
