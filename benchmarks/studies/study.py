"""The structure of a study, and the figures that all studies share: gaps to high precision, intervals and verdicts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from unit import Outcome, Unit

from octavo.report.evidence import claims, power

Outcomes = Mapping[str, Outcome]


@dataclass(frozen=True)
class Design:
    """One design of a study, as it was planned: what it measures, in how many units, how they were expected to scatter
    (``spread``, standard deviation, from ``source``) and the bar that its interval must stay below; with ``both_sides``
    it must stay above minus the bar too."""

    name: str
    units: int
    spread: float
    source: str
    margin: float
    both_sides: bool = False

    def estimate(self) -> dict[str, Any]:
        """The power of the design, before it runs. On both sides the chance is a lower bound."""
        line: dict[str, Any] = {
            "design": self.name, "units": self.units, "spread": self.spread, "source": self.source,
            "margin": self.margin, "half_width": power.half_width(self.spread, self.units),
            "chance": power.pass_probability(self.spread, self.units, self.margin),
            "units_for_80": power.required_units(self.spread, self.margin),
        }  # fmt: skip
        if self.both_sides:
            # Each end of the interval crosses its bar with probability 1 - chance.
            line |= {"both_sides": True, "chance": max(0.0, 2 * line["chance"] - 1)}
            line["units_for_80"] = _units_for_both_sides(self.spread, self.margin)
        return line


@dataclass(frozen=True)
class Study:
    """One question. ``units`` makes what is trained below a folder; ``judge`` makes rows and curves of what came."""

    name: str
    question: str
    designs: tuple[Design, ...]
    units: Callable[[Path], list[Unit]]
    judge: Callable[[Path, Outcomes], dict[str, Any]]
    draw: Callable[[Mapping[str, Any], Path], None] | None = None
    home: str = ""  # the folder of another study, whose units it begins from
    archive: Path | None = None  # a folder of the repository for the files of done units, so that any machine continues


def row(
    design: str, what: str, gaps: Sequence[float], margin: float, failed: Sequence[str] = (), both_sides: bool = False
) -> dict[str, Any]:
    """A line of a study's table: the mean of independent gaps (shares; positive: FP8 is worse) with Student's 95 %
    interval, held against the margin; where undecided, how many units would decide if estimate and spread stayed.
    A gap that is not finite is a failure too.

    ``both_sides`` asks for equality: the whole interval passes between -margin and margin, and fails outside."""
    interval = claims.mean_gap(gaps)
    wild = sum(not math.isfinite(gap) for gap in gaps)
    failed = [*failed, *([f"{wild} of {len(gaps)} gaps are not finite"] if wild else [])]
    line: dict[str, Any] = {"design": design, "what": what, "margin": margin, "units": len(gaps), "gaps": list(gaps)}
    if both_sides:
        line["both_sides"] = True
    if failed:
        return {**line, "status": "fail", "failed": list(failed)}
    if interval is None:
        return {**line, "status": "undecided"}
    line |= {"estimate": interval.estimate, "low": interval.low, "high": interval.high, "half": interval.half}
    if interval.low > margin or (both_sides and interval.high < -margin):
        return {**line, "status": "fail"}
    if interval.high <= margin and (not both_sides or interval.low >= -margin):
        return {**line, "status": "pass"}
    spread = float(np.std(gaps, ddof=1))
    if both_sides:
        return {**line, "status": "undecided", "needed": _units_for_both_sides(spread, margin, abs(interval.estimate))}
    return {**line, "status": "undecided", "needed": power.required_units(spread, margin, max(interval.estimate, 0.0))}


def _units_for_both_sides(spread: float, margin: float, gap: float = 0.0) -> int | None:
    """How many units keep each end of an interval inside its bar with 90 %, so that both are with 80 % or more."""
    return power.required_units(spread, margin, gap, power=0.9)


def gap(ours: Outcome, theirs: Outcome, first: int, last: int) -> float:
    """Mean loss over steps ``first`` to ``last`` (both counted from 1 in the whole training), ours over theirs - 1."""
    mine, other = (of.losses[first - 1 - of.begins : last - of.begins] for of in (ours, theirs))
    if len(mine) != len(other) or not mine:
        return math.nan
    return float(np.mean(mine) / np.mean(other) - 1)


def held(ours: Outcome, theirs: Outcome, word: str = "own", other: str = "own") -> float:
    """Held-out loss, ours over theirs - 1."""
    return ours.held[word] / theirs.held[other] - 1


def same_weights(ours: Sequence[Outcome]) -> list[float]:
    """Held-out loss in FP8 over that of the same weights in high precision, less 1: the mean of each seed. What a seed
    trained from one beginning hangs together, so that its units are one gap and not several."""
    gaps: dict[str, list[float]] = {}
    for one in ours:
        gaps.setdefault(seed_of(one.name), []).append(held(one, one, "own", "high"))
    return [float(np.mean(of_seed)) for of_seed in gaps.values()]


def pooled(
    outcomes: Outcomes, names: Sequence[str], beside: Callable[[str], str] | None = None
) -> tuple[list[Outcome], list[str]]:
    """Those of the named units that are trained and did not fail, and the sentences of those that did. ``beside`` names
    the unit that one is held against: without that one, or where it failed, there is no gap to take."""
    present = [outcomes[name] for name in names if name in outcomes]
    if beside is not None:
        others = {one.name: outcomes.get(beside(one.name)) for one in present}
        present = [one for one in present if (other := others[one.name]) is not None and not other.failure]
    return [one for one in present if not one.failure], [f"{one.name}: {one.failure}" for one in present if one.failure]


def make_pairs(
    outcomes: Outcomes, names: Sequence[str], other: Callable[[str], str]
) -> tuple[list[tuple[Outcome, Outcome]], list[str]]:
    """Each of the named units with the unit that ``other`` names, and the sentences of those that failed."""
    present, lost = pooled(outcomes, names, other)
    return [(one, outcomes[other(one.name)]) for one in present], lost


def seed_of(name: str) -> str:
    return name.rpartition("-")[2]


def beside_high(name: str) -> str:
    """High precision's whole training of the same seed."""
    return f"high-seed-{seed_of(name)}"
