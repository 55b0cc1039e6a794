"""The search itself: a smallest set of candidates that fails, in as few questions as halving takes.

``fails(on)`` says whether a run with these candidates on fails. With none of them it passes and with all it fails. Over
the candidates in their order the shortest beginning that fails is found by halving, in ceil(log2 n) questions: its last
candidate is a culprit, for without it the rest of that beginning passes. If the culprits found so far fail by
themselves, they are all; else the same is asked of what stands before, with the culprits on. So k culprits cost
k ceil(log2 n) questions and k more. This is the dichotomic search for a minimal unsatisfiable set (F. Hemery,
C. Lecoutre, L. Sais, F. Boussemart, Extracting MUCs from constraint networks, ECAI 2006), with runs for constraints.

It presumes that what fails fails with more on as well. Where that is not so, each culprit is still one whose taking
away, at that moment, made a run pass.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

T = TypeVar("T")


class Diffuse(Exception):
    """More culprits are needed together than were looked for: the harm is of many, a little each. ``beginning`` is
    the shortest beginning of the candidates that fails."""

    def __init__(self, beginning: Sequence[object]) -> None:
        super().__init__(f"{len(beginning)} together")
        self.beginning = beginning


def smallest(fails: Callable[[Collection[T]], bool], candidates: Sequence[T], most: int = 4) -> list[T]:
    """A set of candidates that fails, none of which can be left out, in the order in which they were found.

    Raises Diffuse where it would have more than ``most``.
    """
    found: list[T] = []
    left = list(candidates)
    first = len(left)
    while not found or (left and not fails(found)):
        if len(found) == most:
            raise Diffuse(candidates[:first])
        end = _shortest(lambda count: fails([*left[:count], *found]), len(left))  # noqa: B023  called at once
        first = end if not found else first
        found.append(left[end - 1])
        left = left[: end - 1]
    return found


def _shortest(fails: Callable[[int], bool], known: int) -> int:
    """The least count that fails, between 0, which passes, and `known`, which fails."""
    passes, failing = 0, known
    while failing - passes > 1:
        middle = (passes + failing) // 2
        if fails(middle):
            failing = middle
        else:
            passes = middle
    return failing
