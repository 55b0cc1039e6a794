"""The result of a search, and its text."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from octavo.bisect.candidates import Candidate
from octavo.bisect.failure_criterion import By
from octavo.bisect.short_runs import Outcome
from octavo.config import Config

FOUND, SOUND, DIFFUSE, UNSOLVED = "found", "sound", "diffuse", "unsolved"


@dataclass(frozen=True)
class Line:
    """A run of the search: its description, its figure (inf if it failed), and whether it is broken."""

    words: str
    outcome: Outcome
    figure: float
    broken: bool


@dataclass(frozen=True)
class Answer:
    """The result of a search.

    status   found; sound (not worse than high precision by the margin); diffuse (many candidates each do a little harm,
             and ``how`` works); unsolved (no change that was tried works)
    bar      the margin above which a configuration is broken; the problem occurs in the first ``steps`` steps
    sets     smallest sets that break a run
    out      candidates that had to be removed until the rest worked
    how      description of the change that works; ``works``: the configuration with it
    lines    all runs in order: high precision, the unchanged configuration, and the search; ``trained`` of them were
             trained by this call
    """

    status: str
    by: By
    bar: float
    steps: int
    candidates: int
    sets: tuple[tuple[Candidate, ...], ...] = ()
    out: tuple[Candidate, ...] = ()
    how: str = ""
    works: Config | None = None
    lines: tuple[Line, ...] = ()
    trained: int = 0

    @property
    def sentence(self) -> str:
        """The answer in one sentence."""
        if self.status == SOUND:
            result = describe_figure(self.by, self.lines[1].figure)
            return f"nothing is broken: {result} over {self.steps} steps, with a margin of {percent(self.bar)}"
        if self.status == DIFFUSE:
            return (
                f"no small set of {self.candidates} candidates breaks it, many each do a little harm; {self.how} works"
            )
        if self.status == UNSOLVED:
            return f"no small set of {self.candidates} candidates breaks it, and no coarser change that was tried works"
        culprits = "; and ".join(
            " together with ".join(candidate.words for candidate in culprit_set) for culprit_set in self.sets
        )
        return f"{culprits} break{'s' if len(self.sets) == 1 else ''} it; {self.how} works"


def list_words(candidates: Sequence[Candidate]) -> str:
    """List the descriptions of candidates."""
    return ", ".join(candidate.words for candidate in candidates)


def brief(on: Collection[Candidate]) -> str:
    """Describe candidates in a few words."""
    listed = list(on)
    if len(listed) <= 3:
        return list_words(listed)
    return f"{len(listed)} candidates, {listed[0].words} to {listed[-1].words}"


def percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def describe_figure(by: By, share: float) -> str:
    """Describe a figure in words."""
    if math.isinf(share):
        return "it failed"
    what = "loss" if by == "loss" else "seconds per step"
    return f"{what} {100 * share:+.3g} % compared with high precision"
