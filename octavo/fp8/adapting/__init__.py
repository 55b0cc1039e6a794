"""Precision that schedules itself: figures of GEMMs at checks, what follows from them, and the plan that it makes."""

from octavo.fp8.adapting.deciding import Decision, GemmState, Limits, decide
from octavo.fp8.adapting.judge import RecipeTrials
from octavo.fp8.adapting.ladder import apply_moves, build_ladders, casts_to_try, finer_recipes, gemm_costs

__all__ = [
    "Decision",
    "RecipeTrials",
    "Limits",
    "GemmState",
    "apply_moves",
    "decide",
    "finer_recipes",
    "build_ladders",
    "casts_to_try",
    "gemm_costs",
]
