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
from octavo.fp8.arithmetic.recipe import GEMMS, Gemm, Recipe, recipe
from octavo.fp8.dense.gemms import select_layer_backends
from octavo.fp8.kernels.registry import BackendError, Selection
from octavo.fp8.planning.plan import Plan
from octavo.fp8.planning.rows import PlanRow
from octavo.fp8.policy.decisions import OUTSIDE


def finer_recipes(name: str, named: Sequence[str] | None = None) -> tuple[str, ...]:
    """The recipes between one and high precision: the ones ``named`` after it (all of them, where it is not
    among them), or those with smaller blocks."""
    ladder = COARSE_TO_FINE if named is None else tuple(named)
    if name in ladder:
        return ladder[ladder.index(name) + 1 :]
    return () if named is None else ladder


def build_ladders(plan: Plan, named: Sequence[str] | None = None) -> dict[Key, tuple[str, ...]]:
    """(layer, GEMM) -> the words of its rungs, the first the recipe of the plan and the last high precision, in the
    order of the model."""
    out: dict[Key, tuple[str, ...]] = {}
    known: dict[tuple[str, tuple[int, int], str, str], bool] = {}
    for row in plan.rows:
        coded = row.row.codes is not None or plan.policy.param_of(row.component)
        if row.recipe is None or row.recipe.delayed is not None or row.kind in OUTSIDE or coded:
            continue
        for gemm in _fp8_gemms(row):
            word = row.recipe.gemm_precisions()[gemm]
            begins = row.recipe.name if word == "fp8" else word
            able = []
            for other in finer_recipes(begins, named):
                question = (other, row.shape, row.kind, gemm)
                if question not in known:
                    known[question] = _has_backend(plan, row, recipe(other), gemm)
                able += [other] if known[question] else []
            out[row.name, gemm] = (begins, *able, HIGH)
    return out


def ladder_casts(plan: Plan, ladder: Mapping[Key, Sequence[str]]) -> dict[Key, list[Gemm]]:
    """The casts of each rung, without high precision."""
    rows = {row.name: row for row in plan.rows}
    out: dict[Key, list[Gemm]] = {}
    for (layer, gemm), rungs in ladder.items():
        base = rows[layer].recipe
        first = None if base is None else base.gemm(gemm)
        assert first is not None
        out[layer, gemm] = [first, *(g for word in rungs[1:-1] if (g := recipe(word).gemm(gemm)) is not None)]
    return out


def casts_to_try(
    plan: Plan, ladder: Mapping[Key, Sequence[str]], places: Mapping[Key, GemmState]
) -> dict[Key, dict[int, Gemm]]:
    """The casts that a check tries for each GEMM: its rung and the one below."""
    return {
        key: {rung: gemms[rung] for rung in (place.rung - 1, place.rung) if 0 <= rung < len(gemms)}
        for key, gemms in ladder_casts(plan, ladder).items()
        for place in (place_on_ladder(places.get(key, GemmState()), ladder[key]),)
    }


def gemm_costs(plan: Plan) -> dict[Key, GemmCost]:
    """The cost of a GEMM in high precision, as shares of the step."""
    inside = [row for row in plan.rows if row.kind not in OUTSIDE]
    total = sum(row.flops for row in inside) or 1.0
    beside = Counter(row.row.module for row in inside)  # both rows of a module of experts hold its time
    planned = sum(row.times.planned / beside[row.row.module] for row in inside if row.times is not None)
    out: dict[Key, GemmCost] = {}
    for row in inside:
        gemms, time = _fp8_gemms(row), None
        if row.times is not None and planned:
            lost = max(0.0, row.times.high - row.times.planned)
            time = lost / beside[row.row.module] / len(gemms) / planned if gemms else None
        count = 2 if row.row.frozen else len(GEMMS)
        out |= {(row.name, gemm): GemmCost(row.flops / count / total, time) for gemm in gemms}
    return out


def apply_moves(plan: Plan, ladder: Mapping[Key, Sequence[str]], places: Mapping[Key, GemmState]) -> Plan:
    """The plan with each GEMM on its rung; rows without a move are the same objects."""
    on_ladder = {key: place_on_ladder(place, ladder[key]) for key, place in places.items() if key in ladder}
    moved = {key: place for key, place in on_ladder.items() if place.rung}
    layers = {layer for layer, _ in moved}
    rows = tuple(_move_row(plan, row, moved) if row.name in layers else row for row in plan.rows)
    return plan if not layers else replace(plan, rows=rows)


def _move_row(plan: Plan, row: PlanRow, places: Mapping[Key, GemmState]) -> PlanRow:
    assert row.recipe is not None
    moves = {gemm: places[row.name, gemm] for gemm in GEMMS if (row.name, gemm) in places}
    words = {gemm: place.word for gemm, place in moves.items()}
    changed: dict[str, Any] = {gemm: None if word == HIGH else recipe(word).gemm(gemm) for gemm, word in words.items()}
    mixed = replace(row.recipe, **changed)
    reasons = [
        f"adapt: {gemm} {'in high precision' if words[gemm] == HIGH else words[gemm]} since step {place.step} "
        f"({place.why})"
        for gemm, place in moves.items()
    ]
    off = all(mixed.gemm(gemm) is None for gemm in GEMMS)
    picked = {} if off else _select_backends(plan, row, mixed, tuple(changed))
    return replace(row, recipe=None if off else mixed, selections=picked, reason="; ".join([row.reason, *reasons]))


def _select_backends(plan: Plan, row: PlanRow, mixed: Recipe, changed: Sequence[str]) -> dict[str, Selection]:
    """The backends of a mixed recipe: the plan's for GEMMs that have not changed. Experts run grouped where all of
    their GEMMs can, so their backends are chosen together."""
    where = torch.device(plan.device), (None, *row.shape), plan.policy.backend, row.kind
    if row.kind == "experts":
        return select_layer_backends(mixed, *where)
    chosen = select_layer_backends(mixed, *where, changed)
    selections = {gemm: chosen.get(gemm) if gemm in changed else row.selections.get(gemm) for gemm in GEMMS}
    return {gemm: selection for gemm, selection in selections.items() if selection is not None}


def _fp8_gemms(row: PlanRow) -> list[str]:
    """The GEMMs that a row has in FP8; a frozen weight has no gradient."""
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
