"""The power of a design agrees with designs that are drawn and judged."""

from __future__ import annotations

import math

import numpy as np
import pytest

from octavo.report.evidence import claims, power


@pytest.mark.parametrize(("units", "gap"), [(3, 0.0), (6, 0.001), (6, 0.0025)])
def test_pass_probability_matches_simulated_designs(units: int, gap: float) -> None:
    spread, margin, draws = 0.002, 0.0025, 1500
    drawn = np.random.default_rng(0).normal(gap, spread, (draws, units))
    found = [claims.mean_gap(list(row)) for row in drawn]
    share = float(np.mean([interval.high <= margin for interval in found]))
    expected = power.pass_probability(spread, units, margin, gap)
    assert abs(share - expected) < 4 * math.sqrt(max(expected * (1 - expected), 0.01) / draws)
    if gap == margin:
        assert expected == pytest.approx(0.025, abs=1e-6)


def test_required_units_reach_the_power() -> None:
    needed = power.required_units(0.011, 0.0025)  # pairs of seeds that scatter by 1.1 %
    assert power.pass_probability(0.011, needed, 0.0025) >= 0.8 > power.pass_probability(0.011, needed - 1, 0.0025)
    assert needed == 154  # (t of 97.5 % + t of 80 %)^2 * (1.1 / 0.25)^2 is 152
    assert power.required_units(0.0, 0.0025) == 2 and power.required_units(1.0, 1e-6) is None
    assert power.required_units(0.001, 0.0025, gap=0.0025) is None  # a gap at the margin never passes


def test_single_unit_has_no_interval() -> None:
    assert power.half_width(0.01, 1) == math.inf and power.pass_probability(0.01, 1, 0.1) == 0.0
    assert power.pass_probability(0.0, 3, 0.1, 0.2) == 0.0 and power.pass_probability(0.0, 3, 0.1) == 1.0
    for spread, units in ((math.nan, 3), (-1.0, 3), (0.1, -1)):
        with pytest.raises(ValueError, match="expected a finite spread"):
            power.pass_probability(spread, units, 0.1)
