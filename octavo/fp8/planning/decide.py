"""Make plans: choose a recipe and a backend for each linear layer, with a reason. Weights are not read.

``plan`` applies a :class:`Policy` to the layers of a model (:func:`describe_layers`), which may be on the meta device,
and returns one :class:`PlanRow` per layer. Requests that cannot be met raise :class:`PlanError`; there is no silent
fallback to BF16.

With measurements (:func:`octavo.fp8.measure`) a layer runs in FP8 only if FP8 was faster; the recipe "auto" then
selects the fastest candidate. Without measurements "auto" uses the table of :mod:`octavo.fp8.measuring.choose`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from octavo.base import accelerator
from octavo.fp8.arithmetic.recipe import Recipe
from octavo.fp8.dense.gemms import select_layer_backends
from octavo.fp8.kernels.registry import BackendError, Selection
from octavo.fp8.measuring.cases import Case, Entry, Measured, Measurements, make_cases
from octavo.fp8.measuring.choose import choose_by_measurement, choose_by_table
from octavo.fp8.measuring.machine import Machine
from octavo.fp8.planning.checks import check_requests, make_notes, measurement_notes
from octavo.fp8.planning.frozen import no_recipe_reason, recipes_for_codes
from octavo.fp8.planning.modules import components_saving_fp8, describe_blocks, plan_blocks
from octavo.fp8.planning.plan import Plan, Schedule, Span
from octavo.fp8.planning.rows import PlanRow, Times
from octavo.fp8.policy.decisions import OUTSIDE, decide_layers, device_of
from octavo.fp8.policy.policy import AUTO, OFF, Decision, PlanError, Policy
from octavo.fp8.policy.topology import Row


def plan(
    model: nn.Module,
    policy: Policy | str = "blockwise",
    components: Mapping[str, tuple[str, ...]] | None = None,
    tokens: Mapping[str, int] | None = None,
    measurements: Measurements | None = None,
    micro_steps: int = 1,
    step: int | None = None,
) -> Plan:
    """Make a plan for a model, without modifying it.

    Args:
        model: real or on the meta device.
        policy: a :class:`Policy`, or the name of a recipe for the whole model.
        components: component -> globs of module names. Default: common module names.
        tokens: tokens of one forward for each component. Used to weight FLOPs, and as M of the benchmarked
            GEMMs. None weights all components equally.
        measurements: from :func:`octavo.fp8.measure` with the same tokens. A layer then runs in FP8 only if it is
            faster, in the requested recipe or, with "auto", in the fastest one. Measurements made on a CPU are ignored.
        micro_steps: forwards per optimizer step; they share one cast of the weights.
        step: plan for this step; None: the plan in effect outside every rule's step range.

    Raises:
        PlanError: a rule that matches nothing; an unknown component; a request for FP8 that no layer can meet; a recipe
            that cannot use the codes of a frozen weight; measurements without tokens.
        BackendError: a requested backend does not exist or does not support the GEMM.
    """
    policy = policy if isinstance(policy, Policy) else _policy_for(policy)
    if measurements is not None and tokens is None:
        raise PlanError("measurements also need tokens: pass the tokens that they were made with.")
    layer_decisions = decide_layers(model, policy, components, tokens, step)
    device = device_of(model)
    # FP8 is emulated on a CPU: its times are reported, but would disable every layer, so they decide nothing.
    used = None if measurements is None or measurements.machine.emulated else measurements
    cases = (
        make_cases(model, [row for row, _, _ in layer_decisions], tokens)
        if used is not None and tokens is not None
        else {}
    )
    chooser = _Chooser(policy, device, used, micro_steps)
    rows: list[PlanRow] = []
    for row, decision, why_not in layer_decisions:
        flops = _flops(row, tokens)
        if why_not is not None:
            rows.append(PlanRow(row, None, why_not, {}, flops))
        else:
            rows.append(chooser.choose(row, decision, cases.get(row.name), flops))
    check_requests(policy, rows, {row.name for row, _, why_not in layer_decisions if why_not is None}, step)
    total = sum(r.flops for r in rows if r.kind not in OUTSIDE) or 1.0
    plan_rows = tuple(replace(r, share=0.0 if r.kind in OUTSIDE else r.flops / total) for r in rows)
    blocks = plan_blocks(model, plan_rows, policy.fuse == "on", components_saving_fp8(policy, components), components)
    notes = (
        *make_notes(model, policy, plan_rows, tokens, device),
        *measurement_notes(policy, measurements, plan_rows),
        *describe_blocks(blocks),
    )
    machine = Machine.detect(device) if measurements is None else measurements.machine
    return Plan(plan_rows, policy, components, tokens, str(device), notes, machine, micro_steps, blocks)


def schedule(model: nn.Module, main: Plan, steps: int, measurements: Measurements | None = None) -> Schedule:
    """Return the plans of a run of ``steps`` steps. ``main``: the plan outside every rule's step range, made with
    the same ``measurements``. Raises PlanError as :func:`plan` does."""
    policy = main.policy
    if all(rule.steps is None for rule in policy.rules):
        return Schedule(main)
    plans = {tuple(rule.applies_at(None) for rule in policy.rules): main}
    spans = []
    for first, last in policy.spans(steps):
        active = tuple(rule.applies_at(first) for rule in policy.rules)
        if active not in plans:
            span_plan = plan(model, policy, main.components, main.tokens, measurements, main.micro_steps, first)
            plans[active] = replace(span_plan, blocks=main.blocks)
        spans.append(Span(first, last, plans[active]))
    return Schedule(main, tuple(spans))


class _Chooser:
    """Chooses recipes and backends for rows that can run in FP8. Results are cached."""

    def __init__(
        self, policy: Policy, device: torch.device, measurements: Measurements | None, micro_steps: int
    ) -> None:
        self.policy, self.device, self.measurements, self.micro_steps = policy, device, measurements, micro_steps
        self.sm = accelerator.compute_capability(device)
        self._allowed: dict[Decision, dict[str, Recipe]] = {}
        self._selections: dict[tuple[Any, ...], dict[str, Selection]] = {}

    def _allowed_recipes(self, decision: Decision) -> dict[str, Recipe]:
        if decision not in self._allowed:
            self._allowed[decision] = decision.allowed_recipes(self.policy)
        return self._allowed[decision]

    def _allowed_for_row(self, row: Row, decision: Decision) -> Mapping[str, Recipe]:
        """Return the allowed recipes, without those that cannot use the frozen codes of this row."""
        allowed = self._allowed_recipes(decision)
        return allowed if row.codes is None else recipes_for_codes(row, row.codes, decision, allowed)

    def choose(self, row: Row, decision: Decision, case: Case | None, flops: float) -> PlanRow:
        allowed = self._allowed_for_row(row, decision)
        if not allowed and decision.recipe == AUTO and row.codes is not None:
            return PlanRow(row, None, no_recipe_reason(row.codes), {}, flops, automatic=True)
        if not allowed:
            off = decision.recipe == OFF and not decision.kept_high
            return PlanRow(row, None, decision.reason(": off" if off else ""), {}, flops)
        if self.measurements is not None and case is not None and case in self.measurements.cases:
            return self._choose_measured(row, allowed, case, self.measurements.cases[case], flops)
        if decision.recipe == AUTO:
            return self._choose_by_table(row, allowed, flops)
        recipe = next(iter(allowed.values()))
        return PlanRow(row, recipe, decision.reason(), self._select_requested(row, recipe, decision), flops)

    def _choose_measured(
        self, row: Row, allowed: Mapping[str, Recipe], case: Case, measured: Measured, flops: float
    ) -> PlanRow:
        choice = choose_by_measurement(measured, tuple(allowed.values()), self.micro_steps)
        high_cost = measured.high.cost(self.micro_steps)
        best, fp8_cost = (
            (None, None) if choice.best is None else (choice.best[0], choice.best[1].cost(self.micro_steps))
        )
        planned = high_cost if choice.entry is None or fp8_cost is None else fp8_cost
        times = Times(case, measured, best, high_cost, fp8_cost, planned)
        if choice.entry is None:
            return PlanRow(row, None, choice.reason, {}, flops, times=times, automatic=True)
        recipe = next(r for r in allowed.values() if r.summary() == choice.entry.recipe)
        picked = self._measured_backends(row, recipe, choice.entry, case.m)
        return PlanRow(row, recipe, choice.reason, picked, flops, times=times, automatic=True)

    def _choose_by_table(self, row: Row, allowed: Mapping[str, Recipe], flops: float) -> PlanRow:
        recipe, reason = choose_by_table(self.sm, row.shape, allowed)
        if recipe is not None:
            try:
                return PlanRow(row, recipe, reason, self._select(row, recipe), flops, automatic=True)
            except BackendError as error:
                if self.policy.backend != "auto":
                    raise
                reason = f"auto, not measured: {error}"
        return PlanRow(row, None, reason, {}, flops, automatic=True)

    def _select(self, row: Row, recipe: Recipe, m: int | None = None) -> dict[str, Selection]:
        key = (recipe, m, row.shape, row.kind)
        if key not in self._selections:
            shape = (m, *row.shape)
            self._selections[key] = select_layer_backends(recipe, self.device, shape, self.policy.backend, row.kind)
        return self._selections[key]

    def _select_requested(self, row: Row, recipe: Recipe, decision: Decision) -> dict[str, Selection]:
        """Return the registry's choice, except for GEMMs whose backend a rule sets."""
        picked = dict(self._select(row, recipe))
        for gemm, name in decision.backends:
            if gemm in picked:
                try:
                    picked |= select_layer_backends(recipe, self.device, (None, *row.shape), name, row.kind, (gemm,))
                except BackendError as error:
                    raise PlanError(f"{decision.source}: {error}") from error
        return picked

    def _measured_backends(self, row: Row, recipe: Recipe, entry: Entry, m: int) -> dict[str, Selection]:
        """Return the measured backends; their `rejected` lists are taken from the registry's default selection."""
        key = (recipe, m, row.shape, row.kind, tuple(entry.backends.items()))
        if key not in self._selections:
            shape, default = (m, *row.shape), self._select(row, recipe, m)
            self._selections[key] = {}
            for gemm, name in entry.backends.items():
                timed = select_layer_backends(recipe, self.device, shape, name, row.kind, (gemm,))[gemm].backend
                first = default[gemm]
                rejected = first.rejected if first.backend is timed else (
                    *first.rejected, (first.backend.name, "measured, and slower")
                )  # fmt: skip
                self._selections[key][gemm] = Selection(timed, "fastest in the measurements", rejected)
        return self._selections[key]


def _policy_for(request: object) -> Policy:
    if isinstance(request, str):
        return Policy(recipe=request)
    hint = f": Policy(recipe={request.name!r}, format={request.format!r})" if isinstance(request, Recipe) else ""
    raise PlanError(f"policy must be the name of a recipe or an fp8.Policy{hint}, got {type(request).__name__}.")


def _flops(row: Row, tokens: Mapping[str, int] | None) -> float:
    """Return 2 N K per token and GEMM, times the active experts; a frozen weight has no wgrad."""
    weight = 1 if tokens is None else tokens.get(row.component, 0)
    active = 1 if row.experts is None else row.experts_per_token or row.experts
    return 2.0 * row.shape[0] * row.shape[1] * active * weight * (2 if row.frozen else 3)
