"""The answer of a search, and its text."""

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
    """A run of the search: what was on, its figure (inf: it failed) and whether it counts as broken."""

    words: str
    outcome: Outcome
    figure: float
    broken: bool


@dataclass(frozen=True)
class Answer:
    """The answer of a search.

    status   found; sound (not worse than high precision by the margin); diffuse (many candidates each do a little harm,
             and ``how`` works); unsolved (nothing that was tried works)
    bar      the margin: above that share a configuration is broken. The harm appeared in the first ``steps`` steps
    sets     smallest sets that break a run
    out      candidates that had to be removed until the rest worked
    how      the change that works, in words; ``works``: the configuration with it
    lines    all runs in order: high precision, the unchanged configuration, and the search; ``trained`` of them were
             trained now
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
            result = said(self.by, self.lines[1].figure)
            return f"nothing is broken: {result} over {self.steps} steps, and the margin is {percent(self.bar)}"
        if self.status == DIFFUSE:
            return f"no few of the {self.candidates} candidates break it, many each do a little harm; {self.how} works"
        if self.status == UNSOLVED:
            return f"no few of the {self.candidates} candidates break it, and no coarser change that was tried works"
        culprits = "; and ".join(" together with ".join(one.words for one in culprit_set) for culprit_set in self.sets)
        return f"{culprits} break{'s' if len(self.sets) == 1 else ''} it; {self.how} works"


def named(candidates: Sequence[Candidate]) -> str:
    """Candidates by their words."""
    return ", ".join(one.words for one in candidates)


def brief(on: Collection[Candidate]) -> str:
    """Candidates in a few words."""
    listed = list(on)
    if len(listed) <= 3:
        return named(listed)
    return f"{len(listed)} candidates, {listed[0].words} to {listed[-1].words}"


def percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def said(by: By, share: float) -> str:
    """A figure in words."""
    if math.isinf(share):
        return "it failed"
    what = "loss" if by == "loss" else "seconds a step"
    return f"{what} {100 * share:+.3g} % against high precision"
