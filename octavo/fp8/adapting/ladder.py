"""Ladders: the recipes that each GEMM of a plan may move to, and the plan with moves in it.

    tensorwise > rowwise > blockwise > high precision      an outlier spoils its tensor, its row, its block, nothing
    mxfp8 > high precision                                 nothing is finer than blocks of 32

The order is :data:`octavo.base.recipe_specs.COARSE_TO_FINE`. A finer recipe that no backend can run for a layer is left
out of its ladder. GEMMs outside of the share of linear FLOPs (the head, patch embeddings) do not move, nor do GEMMs
of delayed scaling, whose histories belong to one recipe, and of weights that are codes between steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from octavo.base.recipe_specs import COARSE_TO_FINE
from octavo.fp8.adapting.deciding import HIGH, GemmCost, GemmState, Key, place_on_ladder
from octavo.fp8.arithmetic.recipe import GEMMS, Gemm, Recipe
from octavo.fp8.dense.gemms import select_layer_backends
from octavo.fp8.kernels.registry import BackendError, Selection
from octavo.fp8.planning.plan import Plan
from octavo.fp8.planning.rows import PlanRow
from octavo.fp8.policy.decisions import OUTSIDE


def finer_recipes(name: str, named: Sequence[str] | None = None) -> tuple[str, ...]:
    """Return the recipes between ``name`` and high precision: those after it in ``named``, or all of ``named`` if it is
    not among them; by default the recipes with smaller blocks."""
    ladder = COARSE_TO_FINE if named is None else tuple(named)
    if name in ladder:
        return ladder[ladder.index(name) + 1 :]
    return () if named is None else ladder


def build_ladders(plan: Plan, named: Sequence[str] | None = None) -> dict[Key, tuple[str, ...]]:
    """Return (layer, GEMM) -> recipes of its rungs, from the recipe of the plan to high precision, in the order of the
    model."""
    out: dict[Key, tuple[str, ...]] = {}
    known: dict[tuple[str, tuple[int, int], str, str], bool] = {}
    for row in plan.rows:
        has_codes = row.row.codes is not None or plan.policy.param_of(row.component)
        if row.recipe is None or row.recipe.delayed is not None or row.kind in OUTSIDE or has_codes:
            continue
        for gemm in _fp8_gemms(row):
            word = plan.policy.casts.gemm_precisions(row.recipe)[gemm]
            first = row.recipe.name if word == "fp8" else word
            supported = []
            for other in finer_recipes(first, named):
                key = (other, row.shape, row.kind, gemm)
                if key not in known:
                    known[key] = _has_backend(plan, row, plan.policy.casts.recipe(other), gemm)
                supported += [other] if known[key] else []
            out[row.name, gemm] = (first, *supported, HIGH)
    return out


def ladder_casts(plan: Plan, ladder: Mapping[Key, Sequence[str]]) -> dict[Key, list[Gemm]]:
    """Return the casts of each rung, without high precision."""
    rows, recipe_of = {row.name: row for row in plan.rows}, plan.policy.casts.recipe
    out: dict[Key, list[Gemm]] = {}
    for (layer, gemm), rungs in ladder.items():
        base = rows[layer].recipe
        first = None if base is None else base.gemm(gemm)
        assert first is not None
        out[layer, gemm] = [first, *(g for word in rungs[1:-1] if (g := recipe_of(word).gemm(gemm)) is not None)]
    return out


def casts_to_try(
    plan: Plan, ladder: Mapping[Key, Sequence[str]], states: Mapping[Key, GemmState]
) -> dict[Key, dict[int, Gemm]]:
    """Return the casts that a check tries for each GEMM: the casts of its rung and of the rung below."""
    return {
        key: {rung: gemms[rung] for rung in (state.rung - 1, state.rung) if 0 <= rung < len(gemms)}
        for key, gemms in ladder_casts(plan, ladder).items()
        for state in (place_on_ladder(states.get(key, GemmState()), ladder[key]),)
    }


def gemm_costs(plan: Plan) -> dict[Key, GemmCost]:
    """Return the cost of each GEMM in high precision, as shares of the step."""
    inside = [row for row in plan.rows if row.kind not in OUTSIDE]
    total = sum(row.flops for row in inside) or 1.0
    rows_of_module = Counter(row.row.module for row in inside)  # both rows of a module of experts have its time
    planned = sum(row.times.planned / rows_of_module[row.row.module] for row in inside if row.times is not None)
    out: dict[Key, GemmCost] = {}
    for row in inside:
        gemms, time = _fp8_gemms(row), None
        if row.times is not None and planned:
            extra = max(0.0, row.times.high - row.times.planned)
            time = extra / rows_of_module[row.row.module] / len(gemms) / planned if gemms else None
        count = 2 if row.row.frozen else len(GEMMS)
        out |= {(row.name, gemm): GemmCost(row.flops / count / total, time) for gemm in gemms}
    return out


def apply_moves(plan: Plan, ladder: Mapping[Key, Sequence[str]], states: Mapping[Key, GemmState]) -> Plan:
    """Return the plan with each GEMM on its rung; rows without a move are the same objects."""
    on_ladder = {key: place_on_ladder(state, ladder[key]) for key, state in states.items() if key in ladder}
    moved = {key: state for key, state in on_ladder.items() if state.rung}
    layers = {layer for layer, _ in moved}
    rows = tuple(_move_row(plan, row, moved) if row.name in layers else row for row in plan.rows)
    return plan if not layers else replace(plan, rows=rows)


def _move_row(plan: Plan, row: PlanRow, states: Mapping[Key, GemmState]) -> PlanRow:
    assert row.recipe is not None
    moves = {gemm: states[row.name, gemm] for gemm in GEMMS if (row.name, gemm) in states}
    words = {gemm: state.word for gemm, state in moves.items()}
    changed: dict[str, Any] = {
        gemm: None if word == HIGH else plan.policy.casts.recipe(word).gemm(gemm) for gemm, word in words.items()
    }
    mixed = replace(row.recipe, **changed)
    reasons = [
        f"adapt: {gemm} {'in high precision' if words[gemm] == HIGH else words[gemm]} since step {state.step} "
        f"({state.why})"
        for gemm, state in moves.items()
    ]
    off = all(mixed.gemm(gemm) is None for gemm in GEMMS)
    picked = {} if off else _select_backends(plan, row, mixed, tuple(changed))
    return replace(row, recipe=None if off else mixed, selections=picked, reason="; ".join([row.reason, *reasons]))


def _select_backends(plan: Plan, row: PlanRow, mixed: Recipe, changed: Sequence[str]) -> dict[str, Selection]:
    """Return the backends of a mixed recipe; unchanged GEMMs keep theirs. Experts run grouped only if all of their
    GEMMs support it, so their backends are chosen together."""
    where = torch.device(plan.device), (None, *row.shape), plan.policy.backend, row.kind
    if row.kind == "experts":
        return select_layer_backends(mixed, *where)
    chosen = select_layer_backends(mixed, *where, changed)
    selections = {gemm: chosen.get(gemm) if gemm in changed else row.selections.get(gemm) for gemm in GEMMS}
    return {gemm: selection for gemm, selection in selections.items() if selection is not None}


def _fp8_gemms(row: PlanRow) -> list[str]:
    """Return the GEMMs that a row runs in FP8; a frozen weight has no wgrad."""
    if row.recipe is None:
        return []
    return [g for g in GEMMS if row.recipe.gemm(g) is not None and not (g == "wgrad" and row.row.frozen)]


def _has_backend(plan: Plan, row: PlanRow, mixed: Recipe, gemm: str) -> bool:
    try:
        select_layer_backends(
            mixed, torch.device(plan.device), (None, *row.shape), plan.policy.backend, row.kind, (gemm,)
        )
    except BackendError:
        return False
    return True
