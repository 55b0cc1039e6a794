"""What the demo can decide, computed without training from results of the same task that were recorded before.

``seeds.json`` has the demo's accuracies and intervals for several seeds (``benchmarks/demo_seeds.py`` writes it). The
claim passes if the lower end of the interval is at most the margin below 0. Lower ends scatter over seeds, because the
difference does and the width of its interval, too. Moved so that the mean difference is 0, their mean is -b and their
standard deviation s: with no true difference the claim passes with probability Phi((margin - b) / s). For a new seed,
by a spread that is known from n seeds only, it is the same quotient over sqrt(1 + 1/n) in Student's t of n - 1.
"""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import dataclass
from importlib import resources

MARGIN = 0.032
"""How many answers FP8 may lose, as a share. It was fixed by the recorded seeds."""
FILE = "seeds.json"


@dataclass(frozen=True)
class SeedResult:
    """The shares of right answers of both runs with a seed, and the 95 % interval of FP8 minus high precision."""

    seed: int
    status: str
    fp8: float
    high: float
    lower: float
    upper: float

    @property
    def difference(self) -> float:
        return self.fp8 - self.high


@dataclass(frozen=True)
class DemoPower:
    """The recorded results of several seeds, and the margin."""

    results: tuple[SeedResult, ...]
    margin: float = MARGIN

    @property
    def _ends_around_no_difference(self) -> tuple[list[float], list[float]]:
        """The lower and the upper ends of the intervals, less the mean difference."""
        mean = statistics.fmean(result.difference for result in self.results)
        return [result.lower - mean for result in self.results], [result.upper - mean for result in self.results]

    @property
    def spread(self) -> float:
        """The standard deviation of the lower ends over seeds."""
        return statistics.stdev(self._ends_around_no_difference[0])

    @property
    def below(self) -> float:
        """How far the lower ends are below the mean difference, on average."""
        return -statistics.fmean(self._ends_around_no_difference[0])

    @property
    def above(self) -> float:
        """How far the upper ends are above the mean difference, on average."""
        return statistics.fmean(self._ends_around_no_difference[1])

    def pass_probability(self, difference: float = 0.0) -> float:
        """Return the probability that the claim passes with a true ``difference``, by the recorded spread."""
        return statistics.NormalDist().cdf((self.margin + difference - self.below) / self.spread)

    @property
    def careful_probability(self) -> float:
        """The probability to pass with no true difference, if the spread is known from so few seeds."""
        from scipy.stats import t

        seeds = len(self.results)
        quotient = (self.margin - self.below) / (self.spread * math.sqrt(1 + 1 / seeds))
        return float(t.cdf(quotient, seeds - 1))

    @property
    def shown_probability(self) -> str:
        probability = self.pass_probability()
        return f"{100 * probability:.1f} %" if probability < 0.9995 else "over 99.9 %"

    @property
    def smallest_failing(self) -> float:
        """The smallest loss of accuracy, as measured, that the demo would fail."""
        return self.margin + self.above

    @property
    def lines(self) -> list[str]:
        """The lines of ``octavo demo --power``."""
        seeds = ", ".join(str(result.seed) for result in self.results)
        return [
            f"Claim: held-out accuracy of FP8 is at most {100 * self.margin:g} points below high precision's.",
            f"Recorded: {len(self.results)} seeds ({seeds}), in {FILE} of the package. The lower end of the 95 % "
            f"interval is {100 * self.below:.2f} points below the mean difference and scatters by "
            f"{100 * self.spread:.2f}.",
            f"If FP8 changes nothing, the demo passes with probability {self.shown_probability} by that spread, and "
            f"{100 * self.careful_probability:.1f} % if its own uncertainty counts (Student's t).",
            f"It fails if FP8 answers {100 * self.smallest_failing:.1f} points fewer right; a smaller loss beyond the "
            "margin is undecided.",
        ]

    def to_json(self) -> dict[str, object]:
        """Return what ``octavo demo --power --json`` prints, in shares."""
        return {
            "margin": self.margin, "spread": self.spread, "file": FILE, "seeds": [r.seed for r in self.results],
            "pass_probability": self.pass_probability(), "careful_probability": self.careful_probability,
            "smallest_failing": self.smallest_failing,
        }  # fmt: skip


def read(margin: float = MARGIN) -> DemoPower:
    """Return the power of the demo by the recorded seeds."""
    document = json.loads(resources.files(__package__).joinpath(FILE).read_text(encoding="utf-8"))
    return DemoPower(tuple(SeedResult(**row) for row in document["rows"]), margin)
