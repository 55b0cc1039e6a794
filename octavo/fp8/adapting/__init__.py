"""Adaptive precision: measure GEMMs at checks, decide which of them change their recipe, and update the plan."""

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
