"""What a plan refuses: names that match nothing, requests that cannot be met, another model than it was made for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from octavo.fp8.globs import matches, nearest
from octavo.fp8.policy import AUTO, OFF, PlanError, Policy, Rule
from octavo.fp8.topology import Row, topology

if TYPE_CHECKING:
    from octavo.fp8.plan import Plan, PlanRow

OUTSIDE = ("lm_head", "patch_embed")  # rows of their own, outside the share of linear FLOPs
STAYS = {
    "lm_head": "lm_head stays in high precision",
    "patch_embed": "patch embedding stays in high precision",
    "router": "router stays in high precision",
}


def applies(rule: Rule, row: Row) -> bool:
    """True if the rule speaks of this row; a module of experts may be named for both of its rows."""
    return matches(rule.match, row.name) or (row.kind == "experts" and matches(rule.match, row.module))


def check_names(policy: Policy, rows: tuple[Row, ...], tokens: Mapping[str, int] | None) -> None:
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
                f"tokens says nothing about {', '.join(lacking)}; give every component its tokens a forward, 0 for "
                "none."
            )
        wrong = {c: n for c, n in tokens.items() if not isinstance(n, int) or isinstance(n, bool) or n < 0}
        if wrong or not any(tokens.values()):
            found = ", ".join(f"{c}: {n!r}" for c, n in (wrong or tokens).items()) or "nothing"
            raise PlanError(
                f"tokens holds {found}; give every component a whole number of tokens a forward, 0 for none, and at "
                "least one of them some."
            )
    names = [r.name for r in rows]
    for rule in policy.rules:
        if not any(applies(rule, r) for r in rows):
            close = nearest(rule.match, names)
            hint = f"The nearest names are {', '.join(close)}" if close else "No linear layer has a name like it"
            deeper = any(matches(f"{rule.match}.**", n) for n in names)
            cure = (
                f"write '{rule.match}.**' to mean what is inside that module"
                if deeper
                else "'**.' in front reaches any depth"
            )
            raise PlanError(f"rule {rule.match!r} matches no linear layer of this model. {hint}; {cure}.")


def check_met(policy: Policy, rows: list[PlanRow]) -> None:
    """What was asked to run in FP8 must be able to."""
    asked: list[tuple[str, list[PlanRow]]] = [
        (f"component {c!r}", [r for r in rows if r.component == c])
        for c, p in policy.components.items()
        if p.recipe not in (None, OFF, AUTO)
    ]
    asked += [
        (f"rule {rule.match!r}", [r for r in rows if applies(rule, r.row)])
        for rule in policy.rules
        if rule.recipe not in (None, OFF, AUTO)
    ]
    for what, found in asked:
        # A later rule or a measurement may switch a layer off again: that is met. What cannot be converted is not.
        if not any(r.fp8 or r.reason.endswith("off") or r.decided for r in found):
            why = "; ".join(dict.fromkeys(f"{r.name}: {r.reason}" for r in found[:3]))
            raise PlanError(
                f"{what} asks for FP8, but none of its {len(found)} layers can run in FP8 ({why}). Take it out."
            )
    if policy.asks_fp8 and not any(r.fp8 or r.decided for r in rows):
        why = "; ".join(dict.fromkeys(r.reason for r in rows)) or "it has no linear layers"
        raise PlanError(
            f"FP8 was asked for and nothing of this model would run in it: {why}. Use recipe 'off' for high "
            "precision, or "
            "switch a component or a rule on."
        )


def check_same_model(model: nn.Module, plan: Plan) -> None:
    found = {r.name: (r.kind, r.shape, r.codes) for r in topology(model, plan.components)}
    planned = {r.name: (r.kind, r.shape, r.row.codes) for r in plan.rows}

    def told(row: tuple[str, tuple[int, int], object] | None) -> str:
        codes = "" if row is None or row[2] is None else f" with frozen FP8 codes ({row[2]})"
        return "nothing" if row is None else f"{row[0]} {list(row[1])}{codes}"

    for name in [*planned, *found]:
        if not _same(planned.get(name), found.get(name)):
            has, wants = told(found.get(name)), told(planned.get(name))
            raise PlanError(
                f"This plan belongs to another model: for {name!r} it has {wants}, the model has {has}. Plan this "
                "model."
            )


def _same(planned: tuple[str, tuple[int, int], Any] | None, found: tuple[str, tuple[int, int], Any] | None) -> bool:
    """Whether a row is the one that was planned. That all scales of codes are powers of two is known only once they are
    read: a plan for any scales serves them too."""
    if planned is None or found is None or None in (planned[2], found[2]):
        return planned == found
    mine, theirs = planned[2], found[2]
    scales = mine.scale == theirs.scale or (mine.scale, theirs.scale) == ("fp32", "pow2")
    return planned[:2] == found[:2] and (mine.format, mine.block) == (theirs.format, theirs.block) and scales
