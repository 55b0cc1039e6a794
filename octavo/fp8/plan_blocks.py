"""Which norms hand their codes on and which gated MLPs run as one, and why the others do not: part of the plan.

Asked for by ``fuse="on"``, as a whole: nothing of it is measured. What can be is for :mod:`octavo.fp8.norms` and
:mod:`octavo.fp8.gated_mlp` to say; a module that stays is in the plan with the reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import nn

from octavo.fp8 import gated_mlp, norms
from octavo.fp8.globs import template
from octavo.fp8.plan_sisters import PlanGroup
from octavo.fp8.policy import PlanError
from octavo.fp8.swapped import Planned

if TYPE_CHECKING:
    from octavo.fp8.plan import PlanRow

__all__ = ["PlanBlock", "apart", "blocks_of", "carry_out", "sentences"]

NORM, MLP = "norm", "gated MLP"


@dataclass(frozen=True)
class PlanBlock:
    """A norm or a gated MLP: its name, whether it is fused with the FP8 layers beside it, and if not why."""

    name: str
    kind: str
    fused: bool
    reason: str

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "kind": self.kind, "fused": self.fused, "reason": self.reason}


def blocks_of(model: nn.Module, rows: Sequence[PlanRow], on: bool) -> tuple[PlanBlock, ...]:
    """The norms and gated MLPs of ``model`` that have an FP8 layer beside them; none where nobody asked."""
    if not on:
        return ()
    by_module = {id(model.get_submodule(r.row.module)): r for r in rows if r.fp8 and r.kind == "linear"}

    def planned(layer: nn.Module | None) -> Planned | None:
        row = by_module.get(id(layer))
        if row is None or not isinstance(layer, nn.Linear):
            return None
        return Planned(layer, row.recipe, {gemm: s.backend.name for gemm, s in row.selections.items()})

    out = []
    for name, module in model.named_modules():
        if gated_mlp.is_gated_mlp(module):
            layers = [planned(module._modules[child]) for child in gated_mlp.CHILDREN]
            if any(p is not None for p in layers):
                out.append(_block(name, MLP, gated_mlp.obstacle(module, layers)))
    for name, norm, linears in norms.fed(model):
        found = [p for layer in linears if (p := planned(layer)) is not None]
        if found:
            out.append(_block(name, NORM, norms.obstacle(norm, found)))
    return tuple(out)


def _block(name: str, kind: str, why: str | None) -> PlanBlock:
    return PlanBlock(name, kind, why is None, "fuse: on" if why is None else why)


def apart(groups: Sequence[PlanGroup], blocks: Sequence[PlanBlock]) -> tuple[PlanGroup, ...]:
    """The groups of sisters, without the gate and up of a gated MLP that runs as one."""
    inside = {(f"{b.name}.gate_proj", f"{b.name}.up_proj") for b in blocks if b.kind == MLP and b.fused}
    why = "their gated MLP runs as one"
    return tuple(replace(g, fused=False, reason=why) if g.names in inside else g for g in groups)


def carry_out(model: nn.Module, blocks: Sequence[PlanBlock]) -> None:
    """Fuse what is planned, in a model with FP8 layers. Raises PlanError where the loaded model does not allow it."""
    feeds = {name: layers for name, _, layers in norms.fed(model)}
    for block in blocks:
        if not block.fused:
            continue
        module = model.get_submodule(block.name)
        if block.kind == MLP:
            why = gated_mlp.unite(module)
        else:
            why = norms.unite(module, norms.fp8_of(feeds.get(block.name, ())))
        if why is not None:
            raise PlanError(
                f"The {block.kind} {block.name!r} was planned to be fused with its FP8 layers and cannot: {why}. Plan "
                "again on the loaded model, or use fuse='off'."
            )


def sentences(blocks: Sequence[PlanBlock]) -> tuple[str, ...]:
    """What a reader should know: what is fused, and what stays, each kind of name and reason once."""
    said = []
    for kind, how in ((MLP, "run as one function"), (NORM, "hand their codes to the layers behind them")):
        count = sum(b.fused for b in blocks if b.kind == kind)
        if count:
            said.append(f"{count} {kind}s {how}")
    kinds: dict[tuple[str, str, str], int] = {}
    for b in blocks:
        if not b.fused:
            key = (b.kind, template(b.name), b.reason)
            kinds[key] = kinds.get(key, 0) + 1
    said += [
        f"not fused: {kind} {name}{f' ({n} of them)' if n > 1 else ''}: {why}" for (kind, name, why), n in kinds.items()
    ]
    return tuple(said)
