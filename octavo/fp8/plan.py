"""The plan: which linear layer will run in which recipe on which backend, and why; made before a weight is touched.

``plan`` lays a :class:`Policy` over the :func:`topology` of a model (a model on the meta device will do) and answers
with one :class:`PlanRow` a layer. What cannot be met is a :class:`PlanError`, never a silent BF16. ``apply`` carries a
plan out, in place.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from octavo.fp8 import experts as moe
from octavo.fp8 import observe
from octavo.fp8.experts import Experts
from octavo.fp8.globs import matches, nearest
from octavo.fp8.kernels.registry import Selection
from octavo.fp8.linear import Linear, Site, select_backends
from octavo.fp8.policy import OFF, Decision, PlanError, Policy, Rule, decide
from octavo.fp8.recipe import GEMMS, Recipe
from octavo.fp8.topology import Row, topology
from octavo.fp8.weights import HoldsCodes, is_dtensor

__all__ = ["Plan", "PlanError", "PlanRow", "apply", "plan"]

OUTSIDE = ("lm_head", "patch_embed")  # rows of their own, outside the share of linear FLOPs
_CASTABLE = (torch.float32, torch.bfloat16, torch.float16)
_STAYS = {
    "lm_head": "lm_head stays in high precision",
    "patch_embed": "patch embedding stays in high precision",
    "router": "router stays in high precision",
}


@dataclass(frozen=True)
class PlanRow:
    """One layer's fate. ``recipe`` is None in high precision; ``reason`` says who decided or what forbids;
    ``selections`` holds the backend of each FP8 GEMM; ``flops`` counts all three GEMMs of one step (two if frozen)."""

    row: Row
    recipe: Recipe | None
    reason: str
    selections: Mapping[str, Selection]
    flops: float
    share: float = 0.0

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
        }


@dataclass(frozen=True)
class Plan:
    """Rows in the order of the model, and what else a reader should know (``notes``)."""

    rows: tuple[PlanRow, ...]
    policy: Policy
    components: Mapping[str, tuple[str, ...]] | None
    tokens: Mapping[str, int] | None
    device: str
    notes: tuple[str, ...]

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
            "rows": [r.to_json() for r in self.rows],
            "notes": list(self.notes),
        }


def plan(
    model: nn.Module,
    policy: Policy | str = "blockwise",
    components: Mapping[str, tuple[str, ...]] | None = None,
    tokens: Mapping[str, int] | None = None,
) -> Plan:
    """Plan a model; nothing is changed, and on the meta device nothing is read.

    Args:
        model: real or on the meta device.
        policy: a :class:`Policy`, or a recipe's name for the whole model.
        components: component -> globs of module names (None: conventional names).
        tokens: tokens a step sends through each component, to weigh FLOPs; None weighs every component per token.

    Raises:
        PlanError: a rule that matches nothing, a component that the model lacks, FP8 asked for what cannot be
            converted, FP8 asked and nothing converted.
        BackendError: a backend asked for by name that does not exist or cannot do it.
    """
    policy = policy if isinstance(policy, Policy) else _policy_named(policy)
    rows = topology(model, components)
    _check_names(policy, rows, tokens)
    modules = dict(model.named_modules())
    device = _device(model)
    verdicts: dict[tuple[Any, ...], str | None] = {}
    selections: dict[Recipe, dict[str, Selection]] = {}
    recipes: dict[Decision, Recipe | None] = {}
    out: list[PlanRow] = []
    for row in rows:
        decision = decide(policy, row.component, tuple(r for r in policy.rules if _applies(r, row)))
        if decision not in recipes:
            recipes[decision] = decision.build()
        chosen = recipes[decision]
        reason = obstacle = _obstacle(row, modules[row.module], verdicts)
        if obstacle is not None:
            chosen = None
        else:
            reason = decision.source + (": off" if decision.recipe == OFF and "stays" not in decision.source else "")
        if chosen is not None and chosen not in selections:
            selections[chosen] = select_backends(chosen, device, policy.backend)
        picked = {} if chosen is None else selections[chosen]
        out.append(PlanRow(row, chosen, reason or "", picked, _flops(row, tokens)))
    _check_met(policy, out)
    total = sum(r.flops for r in out if r.kind not in OUTSIDE) or 1.0
    done = tuple(
        PlanRow(r.row, r.recipe, r.reason, r.selections, r.flops, 0.0 if r.kind in OUTSIDE else r.flops / total)
        for r in out
    )
    return Plan(done, policy, components, tokens, str(device), _notes(done, tokens))


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
    _check_same_model(model, plan)
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
    return model


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


def _device(model: nn.Module) -> torch.device:
    """Where the GEMMs will run: where the weights are; for a meta model the GPU if there is one."""
    first = next((p.device for p in model.parameters() if not p.is_meta), None)
    return first or torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _applies(rule: Rule, row: Row) -> bool:
    return matches(rule.match, row.name) or (row.kind == "experts" and matches(rule.match, row.module))


def _obstacle(row: Row, module: nn.Module, verdicts: dict[tuple[Any, ...], str | None]) -> str | None:
    """Why this row cannot run in FP8, None if it can. Modules of experts of one kind and size are tried once."""
    if row.kind in _STAYS:
        return _STAYS[row.kind]
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


def _check_names(policy: Policy, rows: tuple[Row, ...], tokens: Mapping[str, int] | None) -> None:
    """Components and rules must name something that exists."""
    here = tuple(dict.fromkeys(r.component for r in rows))
    for word, asked in (("component", policy.components), ("tokens of component", tokens or {})):
        for component in asked:
            if component not in here and (word == "component" or asked[component]):
                raise PlanError(
                    f"{word} {component!r} was asked for, but this model has no linear layers there; it has "
                    f"{', '.join(here) or 'none at all'}. Leave {component!r} out."
                )
    if tokens is not None:
        lacking = [c for c in here if c not in tokens and any(r.component == c and r.kind not in OUTSIDE for r in rows)]
        if lacking:
            raise PlanError(
                f"tokens says nothing about {', '.join(lacking)}; give every component its tokens a step, 0 for none."
            )
    names = [r.name for r in rows]
    for rule in policy.rules:
        if not any(_applies(rule, r) for r in rows):
            close = nearest(rule.match, names)
            hint = f"The nearest names are {', '.join(close)}" if close else "No linear layer has a name like it"
            deeper = any(matches(f"{rule.match}.**", n) for n in names)
            cure = (
                f"write '{rule.match}.**' to mean what is inside that module"
                if deeper
                else "'**.' in front reaches any depth"
            )
            raise PlanError(f"rule {rule.match!r} matches no linear layer of this model. {hint}; {cure}.")


def _check_met(policy: Policy, rows: list[PlanRow]) -> None:
    """What was asked to run in FP8 must be able to."""
    asked: list[tuple[str, list[PlanRow]]] = [
        (f"component {c!r}", [r for r in rows if r.component == c])
        for c, p in policy.components.items()
        if p.recipe not in (None, OFF)
    ]
    asked += [
        (f"rule {rule.match!r}", [r for r in rows if _applies(rule, r.row)])
        for rule in policy.rules
        if rule.recipe not in (None, OFF)
    ]
    for what, found in asked:
        # A later rule may switch a layer off again: that is met. What cannot be converted is not.
        if not any(r.fp8 or r.reason.endswith("off") for r in found):
            why = "; ".join(dict.fromkeys(f"{r.name}: {r.reason}" for r in found[:3]))
            raise PlanError(
                f"{what} asks for FP8, but none of its {len(found)} layers can run in FP8 ({why}). Take it out."
            )
    if policy.asks_fp8 and not any(r.fp8 for r in rows):
        why = "; ".join(dict.fromkeys(r.reason for r in rows)) or "it has no linear layers"
        raise PlanError(
            f"FP8 was asked for and nothing of this model would run in it: {why}. Use recipe 'off' for high "
            "precision, or "
            "switch a component or a rule on."
        )


def _check_same_model(model: nn.Module, plan: Plan) -> None:
    found = {r.name: (r.kind, r.shape) for r in topology(model, plan.components)}
    planned = {r.name: (r.kind, r.shape) for r in plan.rows}
    for name in [*planned, *found]:
        if planned.get(name) != found.get(name):
            has, wants = (f"{v[0]} {list(v[1])}" if v else "nothing" for v in (found.get(name), planned.get(name)))
            raise PlanError(
                f"This plan belongs to another model: for {name!r} it has {wants}, the model has {has}. Plan this "
                "model."
            )


def _notes(rows: tuple[PlanRow, ...], tokens: Mapping[str, int] | None) -> tuple[str, ...]:
    fp8 = [r for r in rows if r.fp8]
    used = {r.recipe.name for r in fp8 if r.recipe is not None}
    notes = []
    if used & {"tensorwise", "delayed"}:
        more = "; fp8.reduce_scaling_state shares the histories of delayed scaling" if "delayed" in used else ""
        notes.append(f"per-tensor amax is local to each data-parallel rank{more}")
    if used & {"rowwise", "mxfp8"}:
        notes.append(
            f"{' and '.join(sorted(used & {'rowwise', 'mxfp8'}))} cast weights twice: 2 bytes of codes a parameter"
        )
    frozen = sum(r.row.frozen for r in fp8)
    if frozen:
        notes.append(f"{frozen} of {len(fp8)} FP8 layers are frozen: no wgrad, no kept input")
    if any(r.row.experts and not r.row.experts_per_token for r in rows):
        notes.append("experts per token are unknown: FLOPs count every expert as active")
    if tokens is None and len({r.component for r in rows if r.kind not in OUTSIDE}) > 1:
        notes.append("shares weigh every component by one token; give tokens per component to weigh by a real step")
    return tuple(notes)
