"""Checks of a plan's requests, notes for the user, and the kernels that a plan uses."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial

import torch
from torch import nn

from octavo.base.recipe_specs import TENSOR
from octavo.fp8.arithmetic.recipe import RECIPES, Recipe
from octavo.fp8.dense.compiled_check import check_compiled_layer
from octavo.fp8.kernels.registry import select
from octavo.fp8.measuring.cases import Measurements
from octavo.fp8.moe.grouped import why_not_grouped
from octavo.fp8.planning.frozen import frozen_notes
from octavo.fp8.planning.modules import MLP, NORM
from octavo.fp8.planning.plan import Plan
from octavo.fp8.planning.rows import PlanRow
from octavo.fp8.planning.table import describe_padding
from octavo.fp8.policy.decisions import OUTSIDE, applies
from octavo.fp8.policy.globs import template
from octavo.fp8.policy.policy import AUTO, OFF, PlanError, Policy
from octavo.fp8.policy.stays import last_layer
from octavo.fp8.self_check.reference_checks import fused_checks, kernel_checks
from octavo.fp8.self_check.untested import Check, failed_checks

_FUSED = {
    NORM: ("rmsnorm",),
    MLP: ("swiglu", "swiglu_backward"),
}  # operators of blocks, in addition to their linear layers


def check_requests(policy: Policy, rows: Sequence[PlanRow], able: Collection[str], step: int | None = None) -> None:
    """Raise PlanError if a component or a rule requests FP8 and none of its layers can run it.

    ``able``: names of the rows that can run in FP8. A ``step`` entirely in high precision is allowed, because rules
    with spans can request it.
    """
    parts = {c: p for c, p in policy.components.items() if p.recipe not in (None, OFF, AUTO)}
    rules = [rule for rule in policy.rules if rule.recipe not in (None, OFF, AUTO)]
    requests = [(f"component {c!r}", [r for r in rows if r.component == c]) for c in parts]
    requests += [(rule.title, [r for r in rows if applies(rule, r.row)]) for rule in rules]
    for what, matching in requests:
        # A layer that a later rule or a measurement keeps in high precision meets the request; others do not.
        if not any(r.name in able for r in matching):
            why = "; ".join(dict.fromkeys(f"{r.name}: {r.reason}" for r in matching[:3]))
            raise PlanError(
                f"{what} requests FP8, but none of its {len(matching)} layers can run in FP8 ({why}). Remove it."
            )
    if step is None and policy.at(None).requests_fp8 and not any(r.fp8 or r.automatic for r in rows):
        why = "; ".join(dict.fromkeys(r.reason for r in rows)) or "it has no linear layers"
        raise PlanError(
            f"FP8 is requested, but no layer of this model would run in FP8: {why}. Use recipe 'off' for high "
            "precision, or enable a component or a rule."
        )


def make_notes(
    model: nn.Module, policy: Policy, rows: Sequence[PlanRow], tokens: Mapping[str, int] | None, device: torch.device
) -> tuple[str, ...]:
    """Return notes on a plan, one sentence each."""
    fp8 = [r for r in rows if r.fp8]
    notes = _output_note(rows) + _cast_notes(policy, fp8)
    notes += frozen_notes(model, rows)
    notes += describe_padding(rows)
    frozen = sum(r.row.frozen for r in fp8)
    if frozen:
        notes.append(f"{frozen} of {len(fp8)} FP8 layers are frozen: no wgrad, no saved input")
    if any(r.row.experts and not r.row.experts_per_token for r in rows):
        notes.append("the number of experts per token is unknown: FLOPs count all experts as active")
    # Towers and decoders process different numbers of tokens, so shares with equal weights can mislead.
    if tokens is None and len({r.component for r in rows if r.kind not in OUTSIDE}) > 1:
        notes.append(
            "shares weight all components equally; set --tokens (tokens= in Python) to weight them by a real step"
        )
    whys = [
        why_not_grouped(r.recipe, r.selections, device) for r in rows if r.kind == "experts" and r.recipe is not None
    ]
    notes += [
        f"{whys.count(why)} rows of experts run one expert at a time: {why}" for why in dict.fromkeys(whys) if why
    ]
    notes += _failed_kernel_notes(fp8, device)
    if policy.fuse == AUTO:
        notes.append(
            "fuse: auto means off: version 0.4.0 measured whether to run q, k and v, or gate and up, as one GEMM; now "
            "each layer runs its own GEMM on a shared cast of the input"
        )
    return tuple(notes)


def _failed_kernel_notes(rows: Sequence[PlanRow], device: torch.device) -> list[str]:
    """Return a note for each kernel of a chosen backend that computed wrong results on this machine."""
    backends = {chosen.backend.name for row in rows for chosen in row.selections.values()}
    return [
        f"{name} computes wrong results here ({result}), so training stops before its first step; fp8.backend: "
        "reference avoids it, and `octavo doctor` checks it again"
        for name, result in failed_checks(device).items()
        if name.rpartition(" on ")[2] in backends
    ]


def _cast_notes(policy: Policy, rows: Sequence[PlanRow]) -> list[str]:
    """Return notes on the casts of FP8 rows: per-tensor scales, and weights that are cast twice."""
    notes = []
    if any(_scales_by_tensor(row) for row in rows):
        uses_delayed = any(r.recipe is not None and r.recipe.delayed is not None for r in rows)
        advice = "; fp8.delayed.reduce_scaling_state shares the histories of delayed scaling" if uses_delayed else ""
        notes.append(f"per-tensor amax is local to each data-parallel rank{advice}")
    casts_weights = [row.recipe for row in rows if row.recipe is not None and row.row.codes is None]
    twice = sorted({_describe_recipe(recipe) for recipe in casts_weights if len(recipe.weight_casts()) > 1})
    if twice:
        where = " at each use" if policy.weight_codes == "recast" else ": 2 bytes of codes per parameter"
        notes.append(f"{' and '.join(twice)} cast weights twice{where}")
    return notes


def _describe_recipe(recipe: Recipe) -> str:
    """Return the name of a recipe with the recipes of its weight casts, such as "blockwise with dgrad of mxfp8"."""
    lent = [
        f"{gemm} of {word}" for gemm, word in recipe.gemm_precisions().items() if gemm != "wgrad" and word in RECIPES
    ]
    return " with ".join([recipe.name, *([" and ".join(lent)] if lent else [])])


def _scales_by_tensor(row: PlanRow) -> bool:
    """Return True if x or dy has one scale per tensor, computed from this rank's tokens only. (Weights are gathered
    before the cast.)"""
    assert row.recipe is not None
    casts = [gemm.a for gemm in (row.recipe.fwd, row.recipe.dgrad) if gemm is not None]
    if row.recipe.wgrad is not None and not row.row.frozen:
        casts += [row.recipe.wgrad.a, row.recipe.wgrad.b]
    return any(spec.block == TENSOR for spec in casts)


def _output_note(rows: Sequence[PlanRow]) -> list[str]:
    """Return a note if the last layer of a network without a known head runs in FP8, unless other layers have the same
    name and shape, as in a stack of blocks."""
    last = last_layer([row.row for row in rows])
    if last is None or not any(row.fp8 for row in rows if row.row is last):
        return []
    alike = [r for r in rows if (template(r.name), r.shape) == (template(last.name), last.shape)]
    if len(alike) > 1 or last.shape[0] == last.shape[1]:
        return []
    outputs, inputs = last.shape
    return [
        f"{last.name} ({outputs} x {inputs}) is the last layer and runs in FP8; if it is the output head, "
        f"Rule({last.name!r}, recipe='off') keeps it in high precision"
    ]


def measurement_notes(policy: Policy, measurements: Measurements | None, rows: Sequence[PlanRow]) -> tuple[str, ...]:
    """Return notes on which measurements were used, and which layers were not measured."""
    if measurements is None or measurements.machine.emulated:
        if not policy.requests_auto:
            return ()
        where = "" if measurements is None else " on a GPU: FP8 is emulated on a CPU, and its times are ignored"
        return (f"recipe auto: nothing was measured{where}; recipes come from the table in docs/plan.md",)
    unknown = [r.name for r in rows if r.times is None and (r.fp8 or r.automatic)]
    unmeasured = f"; {len(unknown)} layers without tokens were not measured (such as {unknown[0]})" if unknown else ""
    return (f"measured on {measurements.machine.gpu}: a layer runs in FP8 only if it is faster{unmeasured}",)


def collect_kernel_checks(plans: Sequence[Plan], device: torch.device) -> dict[str, Check]:
    """Return the checks of all kernels that the plans use on a device, by name, and of one compiled layer at the end.

    :func:`octavo.fp8.self_check.untested.run_checks` runs them with untested versions of torch or Triton.
    """
    checks: dict[str, Check] = {}
    compiled: dict[str, Check] = {}
    fused = {op for plan in plans for b in plan.blocks if b.fused or b.saves for op in _FUSED.get(b.kind, ())}
    rows = [row for plan in plans for row in plan.rows]
    recipes: dict[Recipe, None] = {}
    for row in rows:
        if (recipe := row.recipe) is None:
            continue
        recipes[recipe] = None
        grouped = row.kind == "experts" and why_not_grouped(recipe, row.selections, device) is None
        for gemm, chosen in row.selections.items():
            if not (gemm == "wgrad" and row.row.frozen):
                checks |= kernel_checks(recipe, gemm, chosen.backend.name, device, grouped)
        backends = {chosen.backend.name for chosen in row.selections.values()} - {"reference"}
        if backends and not grouped and not compiled:
            name = f"a compiled layer of {recipe.summary()} on {', '.join(sorted(backends))}"
            compiled[name] = partial(check_compiled_layer, recipe, row.selections, device)
    for recipe in recipes:
        for op in sorted(fused):
            chosen = select(op, recipe_or_spec=recipe, device=device)
            checks |= fused_checks(recipe, op, chosen.backend.name, device)
    return checks | compiled
