"""The notes of a plan: what else matters, in sentences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from octavo.fp8.grouped_linear import alone
from octavo.fp8.measure import Measurements
from octavo.fp8.plan_checks import OUTSIDE
from octavo.fp8.plan_frozen import frozen_notes
from octavo.fp8.policy import Policy

if TYPE_CHECKING:
    from octavo.fp8.plan import PlanRow

__all__ = ["measured_notes", "notes_of"]


def notes_of(
    model: nn.Module, rows: Sequence[PlanRow], tokens: Mapping[str, int] | None, device: torch.device
) -> tuple[str, ...]:
    """What a reader should know of a plan, one sentence each."""
    fp8 = [r for r in rows if r.fp8]
    used = {r.recipe.name for r in fp8 if r.recipe is not None}
    notes = []
    if used & {"tensorwise", "delayed"}:
        more = "; fp8.reduce_scaling_state shares the histories of delayed scaling" if "delayed" in used else ""
        notes.append(f"per-tensor amax is local to each data-parallel rank{more}")
    twice = {r.recipe.name for r in fp8 if r.recipe is not None and r.row.codes is None} & {"rowwise", "mxfp8"}
    if twice:
        notes.append(f"{' and '.join(sorted(twice))} cast weights twice: 2 bytes of codes a parameter")
    notes += frozen_notes(model, rows)
    frozen = sum(r.row.frozen for r in fp8)
    if frozen:
        notes.append(f"{frozen} of {len(fp8)} FP8 layers are frozen: no wgrad, no kept input")
    if any(r.row.experts and not r.row.experts_per_token for r in rows):
        notes.append("experts per token are unknown: FLOPs count every expert as active")
    if tokens is None and len({r.component for r in rows if r.kind not in OUTSIDE}) > 1:
        notes.append("shares weigh every component by one token; give tokens per component to weigh by a real step")
    whys = [alone(r.recipe, r.selections, device) for r in rows if r.kind == "experts" and r.recipe is not None]
    notes += [f"{whys.count(why)} rows of experts run expert by expert: {why}" for why in dict.fromkeys(whys) if why]
    return tuple(notes)


def measured_notes(policy: Policy, found: Measurements | None, rows: Sequence[PlanRow]) -> tuple[str, ...]:
    """Whether times decided, and what was not measured."""
    if found is None or found.machine.emulated:
        if not policy.asks_auto:
            return ()
        where = "" if found is None else " that counts: FP8 is emulated on a CPU, and its times decide nothing"
        return (f"recipe auto: nothing was measured{where}; recipes are those of the documented table (docs/plan.md)",)
    unknown = [r.name for r in rows if r.times is None and (r.fp8 or r.decided)]
    more = f"; {len(unknown)} layers that no token reaches were not (such as {unknown[0]})" if unknown else ""
    return (f"measured on {found.machine.gpu}: a layer runs in FP8 only where that won{more}",)
