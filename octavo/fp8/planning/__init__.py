"""Plans: the recipe and backend of each layer, with reasons. Plans can be printed, saved, loaded and applied."""

from octavo.fp8.planning.apply import Fusion, unfuse
from octavo.fp8.planning.checks import collect_kernel_checks
from octavo.fp8.planning.exchange import required_casts
from octavo.fp8.planning.file import changed_casts, document, outdated_casts, read_casts, saved_recipes
from octavo.fp8.planning.modules import components_saving_fp8, plan_blocks
from octavo.fp8.planning.plan import Schedule, Span
from octavo.fp8.planning.table import lines, totals

__all__ = [
    "Fusion",
    "Schedule",
    "Span",
    "plan_blocks",
    "changed_casts",
    "document",
    "collect_kernel_checks",
    "lines",
    "outdated_casts",
    "read_casts",
    "required_casts",
    "saved_recipes",
    "components_saving_fp8",
    "totals",
    "unfuse",
]
