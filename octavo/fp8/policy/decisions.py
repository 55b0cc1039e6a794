"""What a policy says of each linear layer of a model, and what forbids FP8 there."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn

from octavo.base import accelerator
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
    """(row, what the policy says of it in ``step``, what forbids FP8 or None) for every linear map. Raises PlanError as
    plan."""
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
    """Where the GEMMs will run: where the weights are; for a meta model where this process
    computes."""
    first = next((p.device for p in model.parameters() if not p.is_meta), None)
    return first or accelerator.default_device()


def requests_head(policy: Policy, row: Row) -> bool:
    """Whether a head is meant: by its component's recipe, or by a rule that names it. A glob that happens to match does
    not."""
    component = policy.components.get(HEAD)
    named = any(rule.match == row.name and rule.recipe is not None for rule in policy.rules)
    return row.kind == HEAD and (named or (component is not None and component.recipe is not None))


def _why_gate_stays(row: Row, modules: Mapping[str, nn.Module], policy: Policy) -> str | None:
    """Why a layer that says how fast a state is forgotten, a number or two a head, stays: ``in_proj_a`` and
    ``in_proj_b`` of Qwen3.5's recurrent layers, ``in_proj_ba`` of Qwen3-Next's. None for any other, and for one that a
    rule names, as plan files of runs do that were begun when they did not stay."""
    decay = modules[row.module.rpartition(".")[0]]._parameters.get("A_log")
    gates = row.kind == "linear" and decay is not None and row.shape[0] in (decay.numel(), 2 * decay.numel())
    return GATE if gates and not any(_is_named_by(rule, row) for rule in policy.rules) else None


def _is_named_by(rule: Rule, row: Row) -> bool:
    """Whether a rule gives a layer a recipe by its own name, at whatever depth."""
    same_name = rule.match.rpartition(".")[2] == row.name.rpartition(".")[2]
    return same_name and rule.recipe is not None and applies(rule, row)


def _why_not(row: Row, module: nn.Module, verdicts: dict[tuple[Any, ...], str | None], head: bool) -> str | None:
    """Why this row cannot run in FP8, None if it can. Modules of experts of one kind and size are tried once. ``head``:
    it is a head, and meant."""
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


OUTSIDE = ("lm_head", "patch_embed")  # rows of their own, outside the share of linear FLOPs

STAYS = {
    "lm_head": "lm_head stays in high precision",
    "patch_embed": "patch embedding stays in high precision",
    "router": "router stays in high precision",
}
GATE = "gate of a recurrence stays in high precision"
"""Its error is multiplied into all that a state remembers."""
CONVOLUTION = "convolution stays in high precision"
"""Of a projector, such as GLM's ``downsample``: what is no patch embedding, though it merges squares as one does."""


def applies(rule: Rule, row: Row) -> bool:
    """True if the rule speaks of this row; a module of experts may be named for both of its rows."""
    return matches(rule.match, row.name) or (row.kind == "experts" and matches(rule.match, row.module))


def check_names(
    policy: Policy, rows: tuple[Row, ...], tokens: Mapping[str, int] | None, parts: Collection[str] = ()
) -> None:
    """Components and rules must name something that exists. ``parts``: components that the model has, some maybe
    without a linear layer, such as a projector that is a parameter."""
    # A misspelt name would otherwise do nothing in silence, and train another model than was asked for.
    here = tuple(dict.fromkeys(r.component for r in rows))
    for word, requested in (("component", policy.components), ("tokens of component", tokens or {})):
        for component in requested:
            if component not in here and (word == "component" or (requested[component] and component not in parts)):
                raise PlanError(
                    f"{word} {component!r} was asked for, but this model has no linear layers there; it has "
                    f"{', '.join(here) or 'none at all'}. Leave {component!r} out."
                )
    if tokens is not None:
        missing = [c for c in here if c not in tokens and any(r.component == c and r.kind not in OUTSIDE for r in rows)]
        if missing:
            raise PlanError(
                f"tokens says nothing about {', '.join(missing)}; give every component its tokens a forward, 0 for "
                "none."
            )
        wrong = {c: n for c, n in tokens.items() if not isinstance(n, int) or isinstance(n, bool) or n < 0}
        if wrong or not any(tokens.values()):
            counts = ", ".join(f"{c}: {n!r}" for c, n in (wrong or tokens).items()) or "nothing"
            raise PlanError(
                f"tokens holds {counts}; give every component a whole number of tokens a forward, 0 for none, and at "
                "least one of them some."
            )
    names = [r.name for r in rows]
    for rule in policy.rules:
        if not any(applies(rule, r) for r in rows):
            close = nearest(rule.match, names)
            hint = f"The nearest names are {', '.join(close)}" if close else "No linear layer has a name like it"
            deeper = any(matches(f"{rule.match}.**", n) for n in names)
            fix = (
                f"write '{rule.match}.**' to mean what is inside that module"
                if deeper
                else "'**.' in front reaches any depth"
            )
            raise PlanError(f"{rule.title} matches no linear layer of this model. {hint}; {fix}.")
