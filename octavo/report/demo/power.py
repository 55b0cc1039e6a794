"""What the demo can decide, computed without training from results of the same task that were recorded before.

``seeds.json`` has the demo's accuracies and intervals for several seeds (``benchmarks/demo_seeds.py`` writes it).
The difference FP8 minus high precision scatters over seeds with standard deviation s, and its interval reaches h below
it. The claim passes if difference - h >= -margin, so that with no true difference it does with probability
Phi((margin - h) / s). It fails if the whole interval is beyond the margin.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass
from importlib import resources

MARGIN = 0.025
"""How many answers FP8 may lose, as a share; it was fixed by the first seeds, before any other run of the demo."""
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
    def spread(self) -> float:
        """The standard deviation of the difference over seeds."""
        return statistics.stdev(result.difference for result in self.results)

    @property
    def below(self) -> float:
        """How far the interval reaches below the difference, the mean over seeds."""
        return statistics.fmean(result.difference - result.lower for result in self.results)

    @property
    def above(self) -> float:
        """How far the interval reaches above the difference, the mean over seeds."""
        return statistics.fmean(result.upper - result.difference for result in self.results)

    def pass_probability(self, difference: float = 0.0) -> float:
        """Return the probability that the claim passes with a true ``difference``."""
        return 1 - statistics.NormalDist(difference, self.spread).cdf(self.below - self.margin)

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
            f"Recorded: {len(self.results)} seeds ({seeds}), in {FILE} of the package. FP8 minus high precision "
            f"scatters by {100 * self.spread:.2f} points; its 95 % interval reaches {100 * self.below:.2f} points "
            f"below and {100 * self.above:.2f} above it.",
            f"If FP8 changes nothing, the demo passes with probability {self.shown_probability}.",
            f"It fails if FP8 answers {100 * self.smallest_failing:.1f} points fewer right; a smaller loss beyond the "
            "margin is undecided.",
        ]

    def to_json(self) -> dict[str, object]:
        """Return what ``octavo demo --power --json`` prints, in shares."""
        return {
            "margin": self.margin, "spread": self.spread, "file": FILE, "seeds": [r.seed for r in self.results],
            "pass_probability": self.pass_probability(), "smallest_failing": self.smallest_failing,
        }  # fmt: skip


def read(margin: float = MARGIN) -> DemoPower:
    """Return the power of the demo by the recorded seeds."""
    document = json.loads(resources.files(__package__).joinpath(FILE).read_text(encoding="utf-8"))
    return DemoPower(tuple(SeedResult(**row) for row in document["rows"]), margin)
