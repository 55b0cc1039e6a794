"""Apply a policy to each linear layer of a model, and find layers that cannot run in FP8."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn

from octavo.base import accelerator
from octavo.base.wording import did_you_mean
from octavo.fp8.dense.linear import Linear
from octavo.fp8.moe import experts as moe
from octavo.fp8.moe.experts import Experts
from octavo.fp8.policy.globs import matches, nearest
from octavo.fp8.policy.policy import HEAD, Decision, PlanError, Policy, Rule, decide
from octavo.fp8.policy.stays import reasons_to_stay
from octavo.fp8.policy.topology import Row, describe_layers
from octavo.fp8.weights.shards import is_whole

_CASTABLE = (torch.float32, torch.bfloat16, torch.float16)

LayerDecision = tuple[Row, Decision, "str | None"]


def decide_layers(
    model: nn.Module,
    policy: Policy,
    components: Mapping[str, tuple[str, ...]] | None = None,
    tokens: Mapping[str, int] | None = None,
    step: int | None = None,
) -> list[LayerDecision]:
    """Return (row, decision of the policy in ``step``, reason against FP8 or None) for each linear map.

    Raises PlanError as :func:`octavo.fp8.plan` does.
    """
    rows = describe_layers(model, components)
    check_names(policy, rows, tokens, components or ())
    policy = policy.at(step)
    modules = dict(model.named_modules())
    reasons = reasons_to_stay(rows, modules, policy)
    verdicts: dict[tuple[Any, ...], str | None] = {}
    return [
        (
            row,
            decide(policy, row.component, tuple(r for r in policy.rules if applies(r, row))),
            _why_gate_stays(row, modules, policy)
            or reasons.get(row.name)
            or _why_not(row, modules[row.module], verdicts, requests_head(policy, row)),
        )
        for row in rows
    ]


def is_meta(module: nn.Module) -> bool:
    return any(p.is_meta for p in module.parameters(recurse=False))


def device_of(model: nn.Module) -> torch.device:
    """Return the device that the GEMMs will run on: the device of the weights, or for a meta model this process's."""
    device = next((p.device for p in model.parameters() if not p.is_meta), None)
    return device or accelerator.default_device()


def requests_head(policy: Policy, row: Row) -> bool:
    """Return True if the policy requests FP8 for this head: by the recipe of its component, or by a rule with its exact
    name. A matching glob is not enough."""
    component = policy.components.get(HEAD)
    named = any(rule.match == row.name and rule.recipe is not None for rule in policy.rules)
    return row.kind == HEAD and (named or (component is not None and component.recipe is not None))


def _why_gate_stays(row: Row, modules: Mapping[str, nn.Module], policy: Policy) -> str | None:
    """Return why a decay gate of a recurrent layer, with one or two outputs per head, stays in high precision.

    Such gates are ``in_proj_a`` and ``in_proj_b`` of Qwen3.5, and ``in_proj_ba`` of Qwen3-Next. None for other layers,
    and for gates that a rule names, as plan files of older runs do.
    """
    decay = modules[row.module.rpartition(".")[0]]._parameters.get("A_log")
    gates = row.kind == "linear" and decay is not None and row.shape[0] in (decay.numel(), 2 * decay.numel())
    return GATE if gates and not any(_is_named_by(rule, row) for rule in policy.rules) else None


def _is_named_by(rule: Rule, row: Row) -> bool:
    """Return True if a rule sets the recipe of a layer and ends in its name."""
    same_name = rule.match.rpartition(".")[2] == row.name.rpartition(".")[2]
    return same_name and rule.recipe is not None and applies(rule, row)


def _why_not(row: Row, module: nn.Module, verdicts: dict[tuple[Any, ...], str | None], head: bool) -> str | None:
    """Return why this row cannot run in FP8, or None if it can. ``head``: it is a head that the policy requests in FP8.

    Modules of experts are run once per class and size; ``verdicts`` has the results.
    """
    if row.kind in STAYS and not head:
        return CONVOLUTION if row.kind == "patch_embed" and row.component.endswith("_projector") else STAYS[row.kind]
    if row.kind == "subclass" or (head and type(module) not in (nn.Linear, Linear)):
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
        if any(not is_whole(p) for p in module.parameters(recurse=False)):
            verdicts[key] = "experts already sharded (plan and apply before fully_shard)"
        else:
            verdicts[key] = moe.why_not(module) or (None if is_meta(module) else moe.matches_stock(module))
    return verdicts[key]


OUTSIDE = ("lm_head", "patch_embed")  # kinds that are excluded from the share of linear FLOPs

STAYS = {
    "lm_head": "lm_head stays in high precision",
    "patch_embed": "patch embedding stays in high precision",
    "router": "router stays in high precision",
}
GATE = "gate of a recurrence stays in high precision"
"""Errors of a decay gate accumulate in the recurrent state."""
CONVOLUTION = "convolution stays in high precision"
"""For a projector, such as GLM's ``downsample``, which merges patches but is not a patch embedding."""


def applies(rule: Rule, row: Row) -> bool:
    """Return True if the rule matches this row; the name of a module of experts matches both of its rows."""
    return matches(rule.match, row.name) or (row.kind == "experts" and matches(rule.match, row.module))


def check_names(
    policy: Policy, rows: tuple[Row, ...], tokens: Mapping[str, int] | None, parts: Collection[str] = ()
) -> None:
    """Raise PlanError if a component or a rule names something that does not exist. ``parts``: the components of the
    model, including those without a linear layer, such as a projector that is a parameter."""
    # A misspelled name would otherwise be ignored silently, and the wrong model would be trained.
    present = tuple(dict.fromkeys(r.component for r in rows))
    for word, requested in (("component", policy.components), ("tokens of component", tokens or {})):
        for component in requested:
            if component not in present and (word == "component" or (requested[component] and component not in parts)):
                fix = did_you_mean(component, present) or f" Remove {component!r}."
                raise PlanError(
                    f"{word} {component!r} was requested, but this model has no linear layers there; its components "
                    f"are {', '.join(present) or 'none'}.{fix}"
                )
    if tokens is not None:
        needed = (c for c in present if any(r.component == c and r.kind not in OUTSIDE for r in rows))
        missing = [c for c in needed if c not in tokens]
        if missing:
            raise PlanError(
                f"tokens has no entry for {', '.join(missing)}; set the tokens per forward of every component (0 for "
                "none)."
            )
        wrong = {c: n for c, n in tokens.items() if not isinstance(n, int) or isinstance(n, bool) or n < 0}
        if wrong or not any(tokens.values()):
            counts = ", ".join(f"{c}: {n!r}" for c, n in (wrong or tokens).items()) or "nothing"
            raise PlanError(
                f"tokens has {counts}; set a whole number of tokens per forward for every component (0 for none), and "
                "at least one above 0."
            )
    names = [r.name for r in rows]
    for rule in policy.rules:
        if not any(applies(rule, r) for r in rows):
            similar = nearest(rule.match, names)
            hint = f"The nearest names are {', '.join(similar)}" if similar else "No linear layer has a similar name"
            deeper = any(matches(f"{rule.match}.**", n) for n in names)
            fix = (
                f"use '{rule.match}.**' to match everything in that module"
                if deeper
                else "a leading '**.' matches at any depth"
            )
            raise PlanError(f"{rule.title} matches no linear layer of this model. {hint}; {fix}.")
