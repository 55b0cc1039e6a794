"""Precision that schedules itself: figures of GEMMs at checks, what follows from them, and the plan that it makes."""

from octavo.fp8.adapting.deciding import Decision, Limits, Place, decide
from octavo.fp8.adapting.judge import Judge
from octavo.fp8.adapting.ladder import climbed, finer, ladders, wanted, work_of

__all__ = ["Decision", "Judge", "Limits", "Place", "climbed", "decide", "finer", "ladders", "wanted", "work_of"]
