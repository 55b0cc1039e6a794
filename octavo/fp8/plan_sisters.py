"""Which sisters (q, k and v; gate and up) run as one GEMM, and why the others do not: part of the plan.

Two things are decided here, in this order. Where sisters were measured together, how they are fastest: each as it was
chosen for itself, all in FP8 on a shared cast of their input, or all in FP8 as one GEMM; a k or v that loses alone may
win as a part of the three. Then whether layers that are to run as one can (:func:`octavo.fp8.fusion.obstacle`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import nn

from octavo.fp8 import fusion
from octavo.fp8.arithmetic.recipe import Recipe
from octavo.fp8.kernels.registry import Selection
from octavo.fp8.measuring.cases import Case, Entry, Measured, Measurements
from octavo.fp8.measuring.choose import Single, SistersChoice, for_sisters
from octavo.fp8.planning.rows import PlanGroup
from octavo.fp8.policy.policy import AUTO, OFF
from octavo.fp8.policy.topology import Row

if TYPE_CHECKING:
    from octavo.fp8.planning.rows import PlanRow

__all__ = ["groups_of", "notes"]

Selecting = Callable[[Row, Recipe, Entry, int], dict[str, Selection]]


def settle(
    model: nn.Module,
    rows: Sequence[PlanRow],
    allowed: Mapping[str, Mapping[str, Recipe]],
    fuse: str,
    found: Measurements | None,
    cases: Mapping[tuple[str, ...], Case],
    micro_steps: int,
    select: Selecting,
) -> tuple[list[PlanRow], tuple[PlanGroup, ...]]:
    """The rows as their groups were measured to be fastest, and the groups.

    Args:
        allowed: the recipes by name that each row may take; only rows that nothing forbids are in it.
        fuse: the policy's.
        found, cases: measurements, and the case of each group.
        select: the backends of a measured entry for a row, given the tokens.
    """
    by_name = {row.name: row for row in rows}
    out: list[PlanGroup] = []
    for names in families(model):
        case = cases.get(names)
        measured = None if found is None or case is None else found.cases.get(case)
        choice = None
        if case is not None and measured is not None and all(by_name[n].times is not None for n in names):
            shared = [r for r in allowed[names[0]].values() if all(r in allowed[n].values() for n in names)]
            if shared:
                singles = [_single(by_name[n]) for n in names]
                tied = len({id(model.get_submodule(by_name[n].row.module).weight) for n in names}) < len(names)
                choice = for_sisters(measured, singles, shared, micro_steps, OFF if tied else fuse)
                if choice.entry is not None:
                    recipe = next(r for r in shared if r.short() == choice.entry.recipe)
                    for name in names:
                        by_name[name] = _as_chosen(by_name[name], recipe, choice, case.m, select)
        if choice is not None or any(by_name[n].fp8 for n in names):
            out.append(_group(model, [by_name[n] for n in names], fuse, case, measured, choice))
    return [by_name[row.name] for row in rows], tuple(out)


def groups_of(
    model: nn.Module, rows: Sequence[PlanRow], wanted: Callable[[tuple[str, ...]], tuple[bool, str]]
) -> tuple[PlanGroup, ...]:
    """The groups of rows that are settled; ``wanted``: names -> (whether to run them as one, who says so)."""
    by_name = {row.name: row for row in rows}
    out = []
    for names in families(model):
        found = [by_name[n] for n in names]
        if any(row.fp8 for row in found):
            asked, reason = wanted(names)
            why = obstacle(model, found) if asked else None
            out.append(PlanGroup(names, asked and why is None, reason if why is None else why))
    return tuple(out)


def families(model: nn.Module) -> list[tuple[str, ...]]:
    """The names of the layers of each family of sisters, of plain linear layers alone."""
    names = {id(module): name for name, module in model.named_modules()}
    return [
        tuple(names[id(layer)] for layer in layers)
        for _, layers in fusion.families(model)
        if len({id(layer) for layer in layers}) == len(layers) and all(isinstance(x, nn.Linear) for x in layers)
    ]


def obstacle(model: nn.Module, rows: Sequence[PlanRow]) -> str | None:
    """Why these layers cannot run as one, None if they can."""
    return fusion.obstacle([fusion.sister(model.get_submodule(r.row.module), r.recipe, r.selections) for r in rows])


def notes(groups: Sequence[PlanGroup], fuse: str) -> tuple[str, ...]:
    """What a reader should know of layers that run as one."""
    if any(g.fused for g in groups):
        return (
            "layers that run as one GEMM give columns of one buffer: .view(-1) of such an output raises, .reshape is "
            "fine",
        )
    return ("fuse is on, and no group of layers can run as one GEMM",) if fuse == "on" and groups else ()


def _single(row: PlanRow) -> Single:
    assert row.times is not None
    times = row.times
    entry = None if row.recipe is None or times.best is None else times.measured.entries[times.best]
    return Single(times.measured, entry, times.planned)


def _as_chosen(row: PlanRow, recipe: Recipe, choice: SistersChoice, m: int, select: Selecting) -> PlanRow:
    """The row in FP8 with its sisters; its time is its part of theirs."""
    assert row.times is not None and choice.entry is not None
    part = row.times.high * (choice.planned / choice.high) if choice.high else 0.0
    return replace(
        row,
        recipe=recipe,
        reason=choice.reason,
        selections=select(row.row, recipe, choice.entry, m),
        times=row.times._replace(planned=part),
        decided=True,
    )


def _group(
    model: nn.Module,
    rows: Sequence[PlanRow],
    fuse: str,
    case: Case | None,
    measured: Measured | None,
    choice: SistersChoice | None,
) -> PlanGroup:
    names, why = tuple(r.name for r in rows), obstacle(model, rows)
    if choice is not None:
        told = choice.reason if why is None or not any(r.fp8 for r in rows) else f"{why}; {choice.reason}"
        return PlanGroup(names, choice.layout == "joined" and why is None, told, case, measured, choice)
    if fuse == OFF:
        return PlanGroup(names, False, "fuse: off")
    if why is not None or fuse == AUTO:
        return PlanGroup(names, False, why or "fuse: auto, and nothing was measured")
    return PlanGroup(names, True, "fuse: on")
