"""The plan: which linear layer will run in which recipe on which backend, and why; made before a weight is touched.

``plan`` lays a :class:`Policy` over the :func:`topology` of a model (a model on the meta device will do) and answers
with one :class:`PlanRow` a layer. What cannot be met is a :class:`PlanError`, never a silent BF16. ``apply`` carries a
plan out, in place.

With measurements (:func:`octavo.fp8.measure`) a layer runs in FP8 only where that was measured to win; the recipe
"auto" then takes the fastest. Without, "auto" goes by the table of :mod:`octavo.fp8.choose`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from octavo.fp8 import experts as moe
from octavo.fp8 import observe
from octavo.fp8.choose import backends_for, by_measurement, by_table
from octavo.fp8.experts import Experts
from octavo.fp8.fusion import unite
from octavo.fp8.kernels.registry import BackendError, Selection
from octavo.fp8.linear import Linear, Site
from octavo.fp8.machine import Machine
from octavo.fp8.measure import Case, Entry, Measured, Measurements, cases_of, cases_of_sisters
from octavo.fp8.param import exchange
from octavo.fp8.plan_blocks import PlanBlock, apart, blocks_of, carry_out, saving_of, sentences
from octavo.fp8.plan_checks import OUTSIDE, STAYS, applies, check_met, check_names, check_same_model
from octavo.fp8.plan_frozen import fitting, none_fits
from octavo.fp8.plan_notes import measured_notes, notes_of
from octavo.fp8.plan_sisters import PlanGroup, notes, settle
from octavo.fp8.policy import AUTO, OFF, Decision, PlanError, Policy, decide
from octavo.fp8.recipe import GEMMS, Recipe
from octavo.fp8.topology import Row, topology
from octavo.fp8.weights import HoldsCodes, is_dtensor

if TYPE_CHECKING:
    from octavo.fp8.plan_table import BackendLine

__all__ = ["Plan", "PlanError", "PlanRow", "apply", "plan"]

_CASTABLE = (torch.float32, torch.bfloat16, torch.float16)


class Times(NamedTuple):
    """What was measured of a row's case: the candidates, the best FP8 one, and seconds a micro-step in high precision,
    of that best one and as planned. Both rows of a module of experts hold the time of the whole module."""

    case: Case
    measured: Measured
    best: str | None
    high: float
    fp8: float | None
    planned: float

    def to_json(self) -> dict[str, Any]:
        fp8 = None if self.fp8 is None else 1e3 * self.fp8
        return {
            "case": str(self.case), "best": self.best, "bf16_ms": 1e3 * self.high, "fp8_ms": fp8,
            "planned_ms": 1e3 * self.planned, "candidates": self.measured.to_json(),
        }  # fmt: skip


@dataclass(frozen=True)
class PlanRow:
    """One layer's fate. ``recipe`` is None in high precision; ``reason`` says who decided or what forbids;
    ``selections`` holds the backend of each FP8 GEMM; ``flops`` counts all three GEMMs of one step (two if frozen).
    ``times`` is what was measured; ``decided`` is True where a measurement or the table chose, not the policy."""

    row: Row
    recipe: Recipe | None
    reason: str
    selections: Mapping[str, Selection]
    flops: float
    share: float = 0.0
    times: Times | None = None
    decided: bool = False

    @property
    def name(self) -> str:
        return self.row.name

    @property
    def component(self) -> str:
        return self.row.component

    @property
    def kind(self) -> str:
        return self.row.kind

    @property
    def shape(self) -> tuple[int, int]:
        return self.row.shape

    @property
    def fp8(self) -> bool:
        return self.recipe is not None

    @property
    def backend(self) -> Selection | None:
        """The backend of the first FP8 GEMM, with the reason and what was rejected; None in high precision."""
        return next(iter(self.selections.values()), None)

    @property
    def fp8_flops(self) -> float:
        """The part of ``flops`` that runs in FP8."""
        gemms = GEMMS[:2] if self.row.frozen else GEMMS
        return self.flops * sum(g in self.selections for g in gemms) / len(gemms)

    def to_json(self) -> dict[str, Any]:
        recipe = self.recipe
        return {
            **self.row.to_json(),
            "recipe": None
            if recipe is None
            else {"name": recipe.name, "format": recipe.format}
            | {g: "bf16" if recipe.gemm(g) is None else "fp8" for g in GEMMS},
            "backend": {g: s.backend.name for g, s in self.selections.items()},
            "reason": self.reason,
            "flops": self.flops,
            "share": self.share,
            **({} if self.times is None else {"measured": self.times.to_json()}),
        }


@dataclass(frozen=True)
class Plan:
    """Rows in the order of the model, ``groups`` of sisters among them, ``blocks`` around them (norms, gated MLPs), and
    ``notes`` on what else matters."""

    rows: tuple[PlanRow, ...]
    policy: Policy
    components: Mapping[str, tuple[str, ...]] | None
    tokens: Mapping[str, int] | None
    device: str
    notes: tuple[str, ...]
    machine: Machine
    micro_steps: int = 1
    groups: tuple[PlanGroup, ...] = ()
    blocks: tuple[PlanBlock, ...] = ()

    @cached_property
    def share(self) -> float:
        """Share of the linear FLOPs of a training step in FP8, 0 to 1; lm_head and patch embedding are outside."""
        return _share(self.rows)

    def share_of(self, component: str) -> float:
        """The same within one component. Raises KeyError for one that the model lacks."""
        if component not in self.parts:
            raise KeyError(f"the model has no component {component!r}; it has {', '.join(self.parts)}")
        return _share(r for r in self.rows if r.component == component)

    @cached_property
    def parts(self) -> tuple[str, ...]:
        """The components, in the order of the model."""
        return tuple(dict.fromkeys(r.component for r in self.rows))

    def backends(self) -> list[BackendLine]:
        """Why each GEMM runs where it does, once for each recipe and shape."""
        from octavo.fp8.plan_table import backends

        return backends(self)

    def table(self) -> str:
        """The plan as plain text: repeated layers in one line, then what is FP8, what is not and why."""
        from octavo.fp8.plan_table import table

        return table(self)

    def to_json(self) -> dict[str, Any]:
        """Everything as JSON types; equal plans give equal dictionaries."""
        return {
            "policy": self.policy.to_json(),
            "device": self.device,
            "tokens": None if self.tokens is None else dict(self.tokens),
            "share": self.share,
            "shares": {c: self.share_of(c) for c in self.parts if c != "lm_head"},
            "backends": [line.to_json() for line in self.backends()],
            "rows": [r.to_json() for r in self.rows],
            "groups": [g.to_json() for g in self.groups],
            "blocks": [b.to_json() for b in self.blocks],
            "notes": list(self.notes),
        }


def plan(
    model: nn.Module,
    policy: Policy | str = "blockwise",
    components: Mapping[str, tuple[str, ...]] | None = None,
    tokens: Mapping[str, int] | None = None,
    measurements: Measurements | None = None,
    micro_steps: int = 1,
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

    Raises:
        PlanError: a rule that matches nothing, a component that the model lacks, FP8 asked for what cannot be
            converted, FP8 asked and nothing converted; a recipe that cannot multiply by the codes of a frozen weight;
            measurements without tokens.
        BackendError: a backend asked for by name that does not exist or cannot do it.
    """
    policy = policy if isinstance(policy, Policy) else _policy_named(policy)
    if measurements is not None and tokens is None:
        raise PlanError("A plan by measurements needs the tokens that they were made with. Give tokens as well.")
    asked = decisions(model, policy, components, tokens)
    device = device_of(model)
    used = None if measurements is None or measurements.machine.emulated else measurements
    cases = cases_of(model, [row for row, _, _ in asked], tokens) if used is not None and tokens is not None else {}
    chooser = _Chooser(policy, device, used, micro_steps)
    out: list[PlanRow] = []
    for row, decision, obstacle in asked:
        flops = _flops(row, tokens)
        if obstacle is not None:
            out.append(PlanRow(row, None, obstacle, {}, flops))
        else:
            out.append(chooser.choose(row, decision, cases.get(row.name), flops))
    allowed = {row.name: chooser.fitting(row, decision) for row, decision, obstacle in asked if obstacle is None}
    together = cases_of_sisters(model, cases)
    out, groups = settle(model, out, allowed, policy.fuse, used, together, micro_steps, chooser.as_measured)
    check_met(policy, out)
    total = sum(r.flops for r in out if r.kind not in OUTSIDE) or 1.0
    done = tuple(replace(r, share=0.0 if r.kind in OUTSIDE else r.flops / total) for r in out)
    said = (*notes_of(model, done, tokens, device), *measured_notes(policy, measurements, done))
    blocks = blocks_of(model, done, policy.fuse == "on", saving_of(policy, components), components)
    groups = apart(groups, blocks)
    said = (*said, *notes(groups, policy.fuse), *sentences(blocks))
    machine = Machine.here(device) if measurements is None else measurements.machine
    return Plan(done, policy, components, tokens, str(device), said, machine, micro_steps, groups, blocks)


Asked = tuple[Row, Decision, "str | None"]


def decisions(
    model: nn.Module,
    policy: Policy,
    components: Mapping[str, tuple[str, ...]] | None = None,
    tokens: Mapping[str, int] | None = None,
) -> list[Asked]:
    """(row, what the policy says of it, what forbids FP8 or None) for every linear map. Raises PlanError as plan."""
    rows = topology(model, components)
    check_names(policy, rows, tokens)
    modules = dict(model.named_modules())
    verdicts: dict[tuple[Any, ...], str | None] = {}
    return [
        (
            row,
            decide(policy, row.component, tuple(r for r in policy.rules if applies(r, row))),
            _obstacle(row, modules[row.module], verdicts),
        )
        for row in rows
    ]


class _Chooser:
    """The recipe and the backends of rows that nothing forbids; each distinct question is answered once."""

    def __init__(self, policy: Policy, device: torch.device, found: Measurements | None, micro_steps: int) -> None:
        self.policy, self.device, self.found, self.micro_steps = policy, device, found, micro_steps
        self.sm = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
        self._allowed: dict[Decision, dict[str, Recipe]] = {}
        self._selections: dict[tuple[Any, ...], dict[str, Selection]] = {}

    def allowed(self, decision: Decision) -> dict[str, Recipe]:
        if decision not in self._allowed:
            self._allowed[decision] = decision.allowed(self.policy.candidates)
        return self._allowed[decision]

    def fitting(self, row: Row, decision: Decision) -> Mapping[str, Recipe]:
        """The same, without those that cannot multiply by the frozen codes of this row."""
        allowed = self.allowed(decision)
        return allowed if row.codes is None else fitting(row, row.codes, decision, allowed)

    def choose(self, row: Row, decision: Decision, case: Case | None, flops: float) -> PlanRow:
        allowed = self.fitting(row, decision)
        if not allowed and decision.recipe == AUTO and row.codes is not None:
            return PlanRow(row, None, none_fits(row.codes), {}, flops, decided=True)
        if not allowed:
            stays = decision.recipe == OFF and "stays" not in decision.source
            return PlanRow(row, None, decision.source + (": off" if stays else ""), {}, flops)
        if self.found is not None and case is not None and case in self.found.cases:
            return self._measured(row, allowed, case, self.found.cases[case], flops)
        if decision.recipe == AUTO:
            return self._by_table(row, allowed, flops)
        recipe = next(iter(allowed.values()))
        return PlanRow(row, recipe, decision.source, self._select(row, recipe), flops)

    def _measured(self, row: Row, allowed: Mapping[str, Recipe], case: Case, found: Measured, flops: float) -> PlanRow:
        choice = by_measurement(found, tuple(allowed.values()), self.micro_steps)
        high = found.high.cost(self.micro_steps)
        best, fp8 = (None, None) if choice.best is None else (choice.best[0], choice.best[1].cost(self.micro_steps))
        planned = high if choice.entry is None or fp8 is None else fp8
        times = Times(case, found, best, high, fp8, planned)
        if choice.entry is None:
            return PlanRow(row, None, choice.reason, {}, flops, times=times, decided=True)
        recipe = next(r for r in allowed.values() if r.short() == choice.entry.recipe)
        picked = self.as_measured(row, recipe, choice.entry, case.m)
        return PlanRow(row, recipe, choice.reason, picked, flops, times=times, decided=True)

    def _by_table(self, row: Row, allowed: Mapping[str, Recipe], flops: float) -> PlanRow:
        recipe, reason = by_table(self.sm, row.shape, allowed)
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
            self._selections[key] = backends_for(recipe, self.device, shape, self.policy.backend, row.kind)
        return self._selections[key]

    def as_measured(self, row: Row, recipe: Recipe, entry: Entry, m: int) -> dict[str, Selection]:
        """The backends that were timed. The registry's own choice says what was passed over, and why."""
        key = (recipe, m, row.shape, row.kind, tuple(entry.backends.items()))
        if key not in self._selections:
            shape, usual = (m, *row.shape), self._select(row, recipe, m)
            self._selections[key] = {}
            for gemm, name in entry.backends.items():
                timed = backends_for(recipe, self.device, shape, name, row.kind, (gemm,))[gemm].backend
                first = usual[gemm]
                rejected = first.rejected if first.backend is timed else (
                    *first.rejected, (first.backend.name, "measured, and slower")
                )  # fmt: skip
                self._selections[key][gemm] = Selection(timed, "the fastest as measured", rejected)
        return self._selections[key]


def apply(model: nn.Module, plan: Plan) -> nn.Module:
    """Carry a plan out, in place; returns the model. Parameters, their names, shapes and values stay as they are.

    Raises:
        PlanError: the plan is another model's, FP8 was applied before, or experts on a real device turn out not to
            compute what the loop over experts computes.
    """
    modules = dict(model.named_modules())
    done = [name for name, module in modules.items() if isinstance(module, HoldsCodes)]
    if done:
        raise PlanError(
            f"FP8 was applied to this model before ({done[0]!r} is an FP8 layer). Apply a plan once, to a stock model."
        )
    check_same_model(model, plan)
    by_module: dict[str, list[PlanRow]] = {}
    for row in plan.rows:
        by_module.setdefault(row.row.module, []).append(row)
    for name, rows in by_module.items():
        module = modules[name]
        if any(r.fp8 for r in rows) and "forward" in module.__dict__:
            raise PlanError(
                f"{name!r} got a forward of its own on the instance since the plan was made (an accelerate hook?), "
                "which would bypass FP8. Apply the plan first and add the hooks afterwards."
            )
        if any(r.fp8 for r in rows) and rows[0].kind == "experts" and not _is_meta(module):
            why = moe.agrees(module)
            if why is not None:
                raise PlanError(
                    f"{name!r} cannot be converted: {why}. Plan again on the loaded model, which leaves it out."
                )
    for name, rows in by_module.items():
        module = modules[name]
        if not any(r.fp8 for r in rows):
            gemms = tuple((r.name, *r.shape) for r in rows)
            observe.watch(module, observe.Watched(gemms, routed=rows[0].kind == "experts"))
        elif rows[0].kind == "experts":
            Experts.convert(module, {r.name.rpartition(".")[2]: _site(r) for r in rows})
        else:
            assert isinstance(module, nn.Linear)
            Linear.convert(module, _site(rows[0]))
    _settle_weights(model, plan)
    carry_out(model, plan.blocks)
    for group in plan.groups:
        why = unite([modules[name] for name in group.names]) if group.fused else None
        if why is not None:
            raise PlanError(
                f"{' and '.join(group.names)} were planned to run as one GEMM and cannot: {why}. Plan again on the "
                "loaded model, or use fuse='off'."
            )
    return model


def _settle_weights(model: nn.Module, plan: Plan) -> None:
    """What the policy says of weights between steps: whether their codes are kept, and which weights are FP8."""
    sites: dict[tuple[str, str], Site] = {}
    keep = plan.policy.weight_codes == "keep"
    for row in plan.rows:
        if not row.fp8:
            continue
        module: Any = model.get_submodule(row.row.module)
        parameter = row.name.rpartition(".")[2] if row.kind == "experts" else "weight"
        site = module._sites[parameter] if row.kind == "experts" else module._site
        site.codes.keep = keep
        if plan.policy.param_of(row.component):
            sites[row.row.module, parameter] = site
    exchange(model, sites, keep)


def _policy_named(given: object) -> Policy:
    if isinstance(given, str):
        return Policy(recipe=given)
    hint = f": Policy(recipe={given.name!r}, format={given.format!r})" if isinstance(given, Recipe) else ""
    raise PlanError(f"A plan takes a recipe's name or an fp8.Policy; found a {type(given).__name__}. Pass one{hint}.")


_HIGH = Recipe(OFF, "high precision", None, None, None)


def _site(row: PlanRow) -> Site:
    return Site(row.name, row.recipe or _HIGH, row.selections)


def _is_meta(module: nn.Module) -> bool:
    return any(p.is_meta for p in module.parameters(recurse=False))


def device_of(model: nn.Module) -> torch.device:
    """Where the GEMMs will run: where the weights are; for a meta model the GPU if there is one."""
    first = next((p.device for p in model.parameters() if not p.is_meta), None)
    return first or torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _obstacle(row: Row, module: nn.Module, verdicts: dict[tuple[Any, ...], str | None]) -> str | None:
    """Why this row cannot run in FP8, None if it can. Modules of experts of one kind and size are tried once."""
    if row.kind in STAYS:
        return STAYS[row.kind]
    if row.kind == "subclass":
        return f"{row.type} is a subclass of nn.Linear and is left as it is"
    if "forward" in module.__dict__:
        return "its forward was replaced on the instance (an accelerate hook?)"
    dtype = next(p.dtype for p in module.parameters(recurse=False))
    if dtype not in _CASTABLE:
        return f"weights of {str(dtype).removeprefix('torch.')} cannot be cast to FP8"
    if row.kind != "experts" or isinstance(module, Experts):
        return None
    key = (type(module), *(tuple(p.shape) for p in module.parameters(recurse=False)))
    if key not in verdicts:
        if any(is_dtensor(p) for p in module.parameters(recurse=False)):
            verdicts[key] = "experts already sharded (plan and apply before fully_shard)"
        else:
            verdicts[key] = moe.obstacle(module) or (None if _is_meta(module) else moe.agrees(module))
    return verdicts[key]


def _flops(row: Row, tokens: Mapping[str, int] | None) -> float:
    """2 N K a token and GEMM, over the experts that work on a token; no wgrad for a frozen weight."""
    weight = 1 if tokens is None else tokens.get(row.component, 0)
    active = 1 if row.experts is None else row.experts_per_token or row.experts
    return 2.0 * row.shape[0] * row.shape[1] * active * weight * (2 if row.frozen else 3)


def _share(rows: Iterable[PlanRow]) -> float:
    inside = [r for r in rows if r.kind not in OUTSIDE]
    total = sum(r.flops for r in inside)
    return sum(r.fp8_flops for r in inside) / total if total else 0.0
