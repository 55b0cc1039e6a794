"""Make the plan: which linear layer will run in which recipe on which backend, and why. No weight is read.

``plan`` applies a :class:`Policy` to the layers of a model (:func:`describe_layers`; a model on the meta device will
do) and returns one :class:`PlanRow` a layer. What cannot be met is a :class:`PlanError`, never a silent BF16.

With measurements (:func:`octavo.fp8.measure`) a layer runs in FP8 only where that was measured to win; the
recipe "auto" then takes the fastest. Without, "auto" uses the table of :mod:`octavo.fp8.measuring.choose`.
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
    """Plan a model; nothing is changed, and on the meta device nothing is read.

    Args:
        model: real or on the meta device.
        policy: a :class:`Policy`, or a recipe's name for the whole model.
        components: component -> globs of module names (None: conventional names).
        tokens: tokens that one forward sends through each component: they weigh FLOPs, and are the M of what was
            measured. None weighs every component per token.
        measurements: from :func:`octavo.fp8.measure` with the same tokens. A layer then runs in FP8 only where that
            wins, in the recipe that was asked for or, with "auto", in the fastest. Those of a CPU are not used.
        micro_steps: forwards in an optimizer step, which share one cast of the weights.
        step: plan what holds in this step; None: outside of the spans that rules may have.

    Raises:
        PlanError: a rule that matches nothing, a component that the model lacks, FP8 asked for what cannot be
            converted, FP8 asked and nothing converted; a recipe that cannot multiply by the codes of a frozen weight;
            measurements without tokens.
        BackendError: a backend asked for by name that does not exist or cannot do it.
    """
    policy = policy if isinstance(policy, Policy) else _policy_for(policy)
    if measurements is not None and tokens is None:
        raise PlanError("A plan by measurements needs the tokens that they were made with. Give tokens as well.")
    decided = decide_layers(model, policy, components, tokens, step)
    device = device_of(model)
    # Times of FP8 that is emulated on a CPU would switch every layer off: they are shown and decide nothing.
    used = None if measurements is None or measurements.machine.emulated else measurements
    cases = make_cases(model, [row for row, _, _ in decided], tokens) if used is not None and tokens is not None else {}
    chooser = _Chooser(policy, device, used, micro_steps)
    rows: list[PlanRow] = []
    for row, decision, why_not in decided:
        flops = _flops(row, tokens)
        if why_not is not None:
            rows.append(PlanRow(row, None, why_not, {}, flops))
        else:
            rows.append(chooser.choose(row, decision, cases.get(row.name), flops))
    check_requests(policy, rows, {row.name for row, _, why_not in decided if why_not is None}, step)
    total = sum(r.flops for r in rows if r.kind not in OUTSIDE) or 1.0
    done = tuple(replace(r, share=0.0 if r.kind in OUTSIDE else r.flops / total) for r in rows)
    blocks = plan_blocks(model, done, policy.fuse == "on", components_saving_fp8(policy, components), components)
    notes = (
        *make_notes(model, policy, done, tokens, device),
        *measurement_notes(policy, measurements, done),
        *describe_blocks(blocks),
    )
    machine = Machine.detect(device) if measurements is None else measurements.machine
    return Plan(done, policy, components, tokens, str(device), notes, machine, micro_steps, blocks)


def schedule(model: nn.Module, main: Plan, steps: int, measurements: Measurements | None = None) -> Schedule:
    """The plans of a run of so many steps, of which ``main`` is the one outside of spans, made with the same
    ``measurements``. Raises PlanError as plan does."""
    policy = main.policy
    if all(rule.steps is None for rule in policy.rules):
        return Schedule(main)
    plans = {tuple(rule.holds(None) for rule in policy.rules): main}
    spans = []
    for first, last in policy.spans(steps):
        holding = tuple(rule.holds(first) for rule in policy.rules)
        if holding not in plans:
            span_plan = plan(model, policy, main.components, main.tokens, measurements, main.micro_steps, first)
            plans[holding] = replace(span_plan, blocks=main.blocks)
        spans.append(Span(first, last, plans[holding]))
    return Schedule(main, tuple(spans))


class _Chooser:
    """The recipe and the backends of rows that nothing forbids; each distinct question is answered once."""

    def __init__(
        self, policy: Policy, device: torch.device, measurements: Measurements | None, micro_steps: int
    ) -> None:
        self.policy, self.device, self.found, self.micro_steps = policy, device, measurements, micro_steps
        self.sm = accelerator.compute_capability(device)
        self._allowed: dict[Decision, dict[str, Recipe]] = {}
        self._selections: dict[tuple[Any, ...], dict[str, Selection]] = {}

    def _allowed_by(self, decision: Decision) -> dict[str, Recipe]:
        if decision not in self._allowed:
            self._allowed[decision] = decision.allowed(self.policy.candidates)
        return self._allowed[decision]

    def _fitting(self, row: Row, decision: Decision) -> Mapping[str, Recipe]:
        """The same, without those that cannot multiply by the frozen codes of this row."""
        allowed = self._allowed_by(decision)
        return allowed if row.codes is None else recipes_for_codes(row, row.codes, decision, allowed)

    def choose(self, row: Row, decision: Decision, case: Case | None, flops: float) -> PlanRow:
        allowed = self._fitting(row, decision)
        if not allowed and decision.recipe == AUTO and row.codes is not None:
            return PlanRow(row, None, no_recipe_reason(row.codes), {}, flops, decided=True)
        if not allowed:
            off = decision.recipe == OFF and "stays" not in decision.source
            return PlanRow(row, None, decision.reason(": off" if off else ""), {}, flops)
        if self.found is not None and case is not None and case in self.found.cases:
            return self._measured(row, allowed, case, self.found.cases[case], flops)
        if decision.recipe == AUTO:
            return self._by_table(row, allowed, flops)
        recipe = next(iter(allowed.values()))
        return PlanRow(row, recipe, decision.reason(), self._named(row, recipe, decision), flops)

    def _measured(
        self, row: Row, allowed: Mapping[str, Recipe], case: Case, measured: Measured, flops: float
    ) -> PlanRow:
        choice = choose_by_measurement(measured, tuple(allowed.values()), self.micro_steps)
        high = measured.high.cost(self.micro_steps)
        best, fp8 = (None, None) if choice.best is None else (choice.best[0], choice.best[1].cost(self.micro_steps))
        planned = high if choice.entry is None or fp8 is None else fp8
        times = Times(case, measured, best, high, fp8, planned)
        if choice.entry is None:
            return PlanRow(row, None, choice.reason, {}, flops, times=times, decided=True)
        recipe = next(r for r in allowed.values() if r.summary() == choice.entry.recipe)
        picked = self._as_measured(row, recipe, choice.entry, case.m)
        return PlanRow(row, recipe, choice.reason, picked, flops, times=times, decided=True)

    def _by_table(self, row: Row, allowed: Mapping[str, Recipe], flops: float) -> PlanRow:
        recipe, reason = choose_by_table(self.sm, row.shape, allowed)
        if recipe is not None:
            try:
                return PlanRow(row, recipe, reason, self._select(row, recipe), flops, decided=True)
            except BackendError as error:
                if self.policy.backend != "auto":
                    raise
                reason = f"auto, not measured: {error}"
        return PlanRow(row, None, reason, {}, flops, decided=True)

    def _select(self, row: Row, recipe: Recipe, m: int | None = None) -> dict[str, Selection]:
        key = (recipe, m, row.shape, row.kind)
        if key not in self._selections:
            shape = (m, *row.shape)
            self._selections[key] = select_layer_backends(recipe, self.device, shape, self.policy.backend, row.kind)
        return self._selections[key]

    def _named(self, row: Row, recipe: Recipe, decision: Decision) -> dict[str, Selection]:
        """The registry's choice, but for the GEMMs whose backend a rule names."""
        picked = dict(self._select(row, recipe))
        for gemm, name in decision.backends:
            if gemm in picked:
                try:
                    picked |= select_layer_backends(recipe, self.device, (None, *row.shape), name, row.kind, (gemm,))
                except BackendError as error:
                    raise PlanError(f"{decision.source}: {error}") from error
        return picked

    def _as_measured(self, row: Row, recipe: Recipe, entry: Entry, m: int) -> dict[str, Selection]:
        """The backends that were timed. The registry's own choice says what was passed over, and why."""
        key = (recipe, m, row.shape, row.kind, tuple(entry.backends.items()))
        if key not in self._selections:
            shape, usual = (m, *row.shape), self._select(row, recipe, m)
            self._selections[key] = {}
            for gemm, name in entry.backends.items():
                timed = select_layer_backends(recipe, self.device, shape, name, row.kind, (gemm,))[gemm].backend
                first = usual[gemm]
                rejected = first.rejected if first.backend is timed else (
                    *first.rejected, (first.backend.name, "measured, and slower")
                )  # fmt: skip
                self._selections[key][gemm] = Selection(timed, "the fastest as measured", rejected)
        return self._selections[key]


def _policy_for(request: object) -> Policy:
    if isinstance(request, str):
        return Policy(recipe=request)
    hint = f": Policy(recipe={request.name!r}, format={request.format!r})" if isinstance(request, Recipe) else ""
    raise PlanError(f"A plan takes a recipe's name or an fp8.Policy; found a {type(request).__name__}. Pass one{hint}.")


def _flops(row: Row, tokens: Mapping[str, int] | None) -> float:
    """2 N K a token and GEMM, over the experts that work on a token; no wgrad for a frozen weight."""
    weight = 1 if tokens is None else tokens.get(row.component, 0)
    active = 1 if row.experts is None else row.experts_per_token or row.experts
    return 2.0 * row.shape[0] * row.shape[1] * active * weight * (2 if row.frozen else 3)
