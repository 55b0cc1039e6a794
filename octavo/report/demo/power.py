"""What a demo can decide, computed without training from results of the same task that were recorded before.

A file of recorded seeds has the figures of both runs and the 95 % interval of their difference for several seeds
(``benchmarks/demo_seeds.py`` writes it). Call the harm of FP8 its difference from high precision, positive where it is
worse. The claim passes if the upper end of the harm's interval is within the margin. Upper ends scatter over seeds,
because the harm does and the width of its interval, too. Moved so that the mean harm is 0, their mean is b and their
standard deviation s: with no true difference the claim passes with probability Phi((margin - b) / s). For a new seed,
by a spread that is known from n seeds only, it is the same quotient over sqrt(1 + 1/n) in Student's t of n - 1.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources


@dataclass(frozen=True)
class Measure:
    """The figure that a demo compares: ``worse`` is the sign of a harm, and a ``relative`` difference is a share of
    high precision's figure. The sentences have {margin} and {smallest}, ``unit`` follows a difference."""

    worse: int
    relative: bool
    unit: str
    claim: str
    failing: str

    def difference(self, fp8: float, high: float) -> float:
        return fp8 / high - 1 if self.relative else fp8 - high


ACCURACY_POINTS = Measure(
    worse=-1,
    relative=False,
    unit="points",
    claim="held-out accuracy of FP8 is at most {margin} points below high precision's",
    failing="FP8 answers {smallest} points fewer right; a smaller loss beyond the margin is undecided",
)
LOSS_PERCENT = Measure(
    worse=1,
    relative=True,
    unit="%",
    claim="held-out loss of FP8 is at most {margin} % above high precision's",
    failing="FP8's held-out loss is {smallest} % higher; a smaller harm beyond the margin is undecided",
)


@dataclass(frozen=True)
class SeedResult:
    """The figures of both runs with a seed, and the 95 % interval of FP8's difference from high precision."""

    seed: int
    status: str
    fp8: float
    high: float
    lower: float
    upper: float


@dataclass(frozen=True)
class DemoPower:
    """The recorded results of several seeds, the margin that was fixed by them, and what is compared.

    ``inputs`` identifies the data of the recorded seeds, if they depend on the machine; ``note`` is a sentence about
    them.
    """

    results: tuple[SeedResult, ...]
    margin: float
    measure: Measure
    file: str
    inputs: Mapping[str, str]
    note: str = ""

    @property
    def mean_difference(self) -> float:
        """FP8's mean difference from high precision, with its sign."""
        return statistics.fmean(self.measure.difference(result.fp8, result.high) for result in self.results)

    @property
    def _ends_around_no_harm(self) -> tuple[list[float], list[float]]:
        """The better and the worse ends of the intervals of harm, less the mean harm."""
        sign, mean = self.measure.worse, self.measure.worse * self.mean_difference
        ends = [sorted((sign * result.lower, sign * result.upper)) for result in self.results]
        return [better - mean for better, _ in ends], [worse - mean for _, worse in ends]

    @property
    def spread(self) -> float:
        """The standard deviation of the worse ends over seeds."""
        return statistics.stdev(self._ends_around_no_harm[1])

    @property
    def reach(self) -> float:
        """How far the worse ends are from the mean harm, on average."""
        return statistics.fmean(self._ends_around_no_harm[1])

    def pass_probability(self, harm: float = 0.0) -> float:
        """Return the probability that the claim passes with a true ``harm``, by the recorded spread."""
        return statistics.NormalDist().cdf((self.margin - harm - self.reach) / self.spread)

    @property
    def careful_probability(self) -> float:
        """The probability to pass with no true difference, if the spread is known from so few seeds."""
        from scipy.stats import t

        seeds = len(self.results)
        quotient = (self.margin - self.reach) / (self.spread * math.sqrt(1 + 1 / seeds))
        return float(t.cdf(quotient, seeds - 1))

    @property
    def shown_probability(self) -> str:
        return _show_probability(self.pass_probability())

    @property
    def smallest_failing(self) -> float:
        """The smallest harm, as measured, that the demo would fail."""
        return self.margin - statistics.fmean(self._ends_around_no_harm[0])

    @property
    def lines(self) -> list[str]:
        """The lines of ``octavo demo --power``."""
        seeds, measure = ", ".join(str(result.seed) for result in self.results), self.measure
        at_mean = _show_probability(self.pass_probability(measure.worse * self.mean_difference))
        failing = measure.failing.format(smallest=f"{100 * self.smallest_failing:.1f}")
        return [
            f"Claim: {measure.claim.format(margin=f'{100 * self.margin:g}')}.",
            f"Recorded: {len(self.results)} seeds ({seeds}), in {self.file} of the package. The worse end of the 95 % "
            f"interval is {100 * self.reach:.2f} {measure.unit} from the mean difference and scatters by "
            f"{100 * self.spread:.2f}.{f' {self.note}' if self.note else ''}",
            f"If FP8 changes nothing, the demo passes with probability {self.shown_probability} by that spread, and "
            f"{100 * self.careful_probability:.1f} % if its own uncertainty counts (Student's t).",
            f"The recorded mean difference is {100 * self.mean_difference:+.2f} {measure.unit}; if it is the true one, "
            f"the demo passes with probability {at_mean}.",
            f"It fails if {failing}.",
        ]

    def to_json(self) -> dict[str, object]:
        """Return what ``octavo demo --power --json`` prints, in shares."""
        return {
            "margin": self.margin, "spread": self.spread, "file": self.file, "seeds": [r.seed for r in self.results],
            "pass_probability": self.pass_probability(), "careful_probability": self.careful_probability,
            "mean_difference": self.mean_difference, "smallest_failing": self.smallest_failing,
        }  # fmt: skip


def _show_probability(probability: float) -> str:
    return f"{100 * probability:.1f} %" if probability < 0.9995 else "over 99.9 %"


def read(file: str, margin: float, measure: Measure, note: str = "") -> DemoPower:
    """Return the power of a demo by the recorded seeds in ``file`` of this package. ``note`` may have {python}, the
    version whose texts were used."""
    document = json.loads(resources.files(__package__).joinpath(file).read_text(encoding="utf-8"))
    inputs = document.get("inputs", {})
    results = tuple(SeedResult(**row) for row in document["rows"])
    return DemoPower(results, margin, measure, file, inputs, note.format(**inputs))
