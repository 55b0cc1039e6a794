"""What a search answers, and its words."""

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
    """A run of the search: what was on, its figure (inf: it broke off) and whether it counts as broken."""

    words: str
    outcome: Outcome
    figure: float
    broken: bool


@dataclass(frozen=True)
class Answer:
    """What a search found.

    status   found; sound (no worse than high precision by the margin); diffuse (many break it a little each, and
             ``how`` works); unsolved (nothing that was tried works)
    bar      the margin: above that share a configuration is broken. Its harm was seen in its first ``steps`` steps
    sets     each a smallest set that breaks a run
    out      what had to go until the rest worked
    how      the change that works, in words; ``works`` the configuration with it
    lines    all runs in the order in which they were asked for: high precision, the configuration as it is, and those
             of the search; ``trained`` of them were trained now
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
            seen = said(self.by, self.lines[1].figure)
            return f"nothing is broken: {seen} over {self.steps} steps, and the margin is {percent(self.bar)}"
        if self.status == DIFFUSE:
            return f"no few of the {self.candidates} candidates break it, many do so a little each; {self.how} works"
        if self.status == UNSOLVED:
            return f"no few of the {self.candidates} candidates break it, and no coarser change that was tried works"
        told = "; and ".join(" together with ".join(one.words for one in found) for found in self.sets)
        return f"{told} break{'s' if len(self.sets) == 1 else ''} it; {self.how} works"


def named(found: Sequence[Candidate]) -> str:
    """Candidates by their words."""
    return ", ".join(one.words for one in found)


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
        return "it broke off"
    what = "loss" if by == "loss" else "seconds a step"
    return f"{what} {100 * share:+.3g} % against high precision"
