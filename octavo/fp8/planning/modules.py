"""The part of a plan for norms, MLPs, experts and attention modules. It is not based on measurements.

* ``fuse="on"``: which norms pass FP8 codes to the next layers (:mod:`octavo.fp8.blocks.rmsnorm`), and which gated MLPs
  run as one function (:mod:`octavo.fp8.blocks.gated_mlp`).
* ``activations="fp8"`` of a component: which norms and MLPs save FP8 codes for their backward, and which output layers
  of attention save none (:mod:`octavo.fp8.dense.sources`).

Each module has one row for both settings; modules that do not change are listed with the reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from torch import nn

from octavo.fp8.blocks import attention_output, gated_mlp, layernorm, mlp, rmsnorm
from octavo.fp8.blocks.probe import share_trials
from octavo.fp8.dense.swap import PlannedLayer
from octavo.fp8.planning.rows import PlanBlock, PlanRow
from octavo.fp8.policy.globs import template
from octavo.fp8.policy.policy import Policy
from octavo.fp8.policy.topology import CONVENTIONS, component_namer

NORM, MLP, PLAIN, ATTENTION, EXPERTS = "norm", "gated MLP", "MLP", "attention", "experts"


Lookup = Callable[["nn.Module | None"], "PlannedLayer | None"]


@share_trials()
def plan_blocks(
    model: nn.Module,
    rows: Sequence[PlanRow],
    on: bool,
    saving: Collection[str] = (),
    components: Mapping[str, tuple[str, ...]] | None = None,
) -> tuple[PlanBlock, ...]:
    """Return the blocks of ``model`` that the policy affects.

    Args:
        rows: the planned linear layers.
        on: whether to fuse norms and gated MLPs with their FP8 layers.
        saving: the components whose blocks save FP8 for backward.
        components: component -> globs of module names, as for the plan.
    """
    blocks = _plan_fusion(model, _make_lookup(model, rows)) if on else {}
    if saving:
        for block in _plan_saving(model, rows, saving, components):
            fused = blocks.get(block.name)
            blocks[block.name] = block if fused is None else replace(fused, saves=block.saves, why=block.why)
    return tuple(blocks.values())


def components_saving_fp8(policy: Policy, components: Mapping[str, tuple[str, ...]] | None) -> tuple[str, ...]:
    """Return the components whose blocks save FP8 for backward."""
    known = {"foundation", *(CONVENTIONS if components is None else components)}
    return tuple(sorted(c for c in known if policy.activations_of(c) == "fp8"))


def _make_lookup(model: nn.Module, rows: Sequence[PlanRow]) -> Lookup:
    by_module = {id(model.get_submodule(r.row.module)): r for r in rows if r.fp8 and r.kind == "linear"}

    def planned(layer: nn.Module | None) -> PlannedLayer | None:
        row = by_module.get(id(layer))
        if row is None or not isinstance(layer, nn.Linear):
            return None
        return PlannedLayer(layer, row.recipe, {gemm: s.backend.name for gemm, s in row.selections.items()})

    return planned


def _plan_fusion(model: nn.Module, planned: Lookup) -> dict[str, PlanBlock]:
    """Return the norms and gated MLPs with an FP8 layer, by name."""
    out: dict[str, PlanBlock] = {}
    for name, module in model.named_modules():
        if gated_mlp.is_gated_mlp(module):
            layers = [planned(module._modules[child]) for child in gated_mlp.CHILDREN]
            if any(p is not None for p in layers):
                out[name] = _fusion_block(name, MLP, gated_mlp.why_not(module, layers))
    for name, norm, linears in rmsnorm.norms_and_layers(model):
        fed_layers = [p for layer in linears if (p := planned(layer)) is not None]
        if fed_layers:
            out[name] = _fusion_block(name, NORM, rmsnorm.why_not(norm, fed_layers))
    return out


def _fusion_block(name: str, kind: str, why: str | None) -> PlanBlock:
    return PlanBlock(name, kind, why is None, "fuse: on" if why is None else why)


def _plan_saving(
    model: nn.Module, rows: Sequence[PlanRow], saving: Collection[str], components: Mapping[str, tuple[str, ...]] | None
) -> list[PlanBlock]:
    """Return the norms, MLPs, experts and attention modules of the components that save FP8."""
    component, out = component_namer(components), []
    attention = {a.name: a for a in attention_output.find_attention_modules(model)}
    by_name = {r.name: r for r in rows}
    experts = {r.row.module for r in rows if r.kind == "experts" and r.fp8}
    for name, module in model.named_modules():
        if component(name) not in saving:
            continue
        parts = mlp.find_parts(module)
        if layernorm.is_norm(module):
            out.append(_saving_block(name, NORM, layernorm.why_not(module)))
        elif parts is not None:
            kind = MLP if len(parts.first) == 2 else PLAIN
            out.append(_saving_block(name, kind, mlp.why_not(module)))
        elif name in experts:
            out.append(_saving_block(name, EXPERTS, None))
        if name in attention:
            row = by_name.get(attention[name].output_name)
            if row is not None and row.fp8:
                out.append(_saving_block(name, ATTENTION, _why_output_keeps_input(row)))
    return out


def _why_output_keeps_input(row: PlanRow) -> str | None:
    if row.row.frozen:
        return "its output layer is frozen and saves no input"
    assert row.recipe is not None
    return "its output layer saves its input for wgrad in high precision" if row.recipe.wgrad is None else None


def _saving_block(name: str, kind: str, why: str | None) -> PlanBlock:
    return PlanBlock(name, kind, False, "", why is None, "activations: fp8" if why is None else why)


_FUSED = ((MLP, "run as one function"), (NORM, "pass their codes to the layers after them"))
_SAVED = (
    (NORM, "norms save FP8 codes of their input"),
    (MLP, "gated MLPs save gate and up in FP8"),
    (PLAIN, "MLPs save the input of their activation in FP8"),
    (EXPERTS, "modules of experts save gate and up in FP8, and their outputs if the router is trained"),
    (ATTENTION, "attention output layers save no codes, because attention saves their input"),
)


def describe_blocks(blocks: Sequence[PlanBlock]) -> tuple[str, ...]:
    """Return notes on which blocks are fused, which save FP8, and which are unchanged and why."""
    out = []
    for kind, how in _FUSED:
        count = sum(b.fused for b in blocks if b.kind == kind)
        if count:
            out.append(f"{count} {kind}s {how}")
    out += _describe_unchanged("not fused", [(b, b.reason) for b in blocks if b.reason and not b.fused])
    counts = [(sum(b.saves is True for b in blocks if b.kind == kind), how) for kind, how in _SAVED]
    if any(count for count, _ in counts):
        changes = ", ".join(f"{count} {how}" for count, how in counts if count)
        out.append(f"activations: {changes}; under torch.compile they run and save like the stock model")
    out += _describe_unchanged("activations unchanged", [(b, b.why) for b in blocks if b.saves is False])
    return tuple(out)


def _describe_unchanged(what: str, unchanged: Sequence[tuple[PlanBlock, str]]) -> list[str]:
    kinds = Counter((block.kind, template(block.name), why) for block, why in unchanged)
    return [
        f"{what}: {kind} {name}{f' ({n} of them)' if n > 1 else ''}: {why}" for (kind, name, why), n in kinds.items()
    ]
