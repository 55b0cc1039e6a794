"""The plan: what every layer will run in and why, on paper, in a file and applied."""

from octavo.fp8.planning.apply import Fusion, unfuse
from octavo.fp8.planning.checks import kernels_of
from octavo.fp8.planning.exchange import needs_of
from octavo.fp8.planning.file import document
from octavo.fp8.planning.modules import blocks_of, saving_of
from octavo.fp8.planning.plan import Schedule, Span
from octavo.fp8.planning.table import lines, totals

__all__ = [
    "Fusion",
    "Schedule",
    "Span",
    "blocks_of",
    "document",
    "kernels_of",
    "lines",
    "needs_of",
    "saving_of",
    "totals",
    "unfuse",
]
