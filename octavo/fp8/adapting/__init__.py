"""Precision that schedules itself: figures of GEMMs at checks, what follows from them, and the plan that it makes."""

from octavo.fp8.adapting.deciding import Decision, Limits, Place, decide
from octavo.fp8.adapting.judge import Judge
from octavo.fp8.adapting.ladder import apply_moves, casts_to_try, finer, ladders, work_of

__all__ = [
    "Decision",
    "Judge",
    "Limits",
    "Place",
    "apply_moves",
    "decide",
    "finer",
    "ladders",
    "casts_to_try",
    "work_of",
]
