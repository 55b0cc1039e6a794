"""Apply a plan to a model in place: convert layers, replace the forwards of blocks, and convert weights to FP8.

:func:`fuse` fuses the gated MLPs and norms of a model that has FP8 layers, without a plan.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from octavo.fp8.arithmetic.recipe import Recipe
from octavo.fp8.blocks import attention_output, gated_mlp, layernorm, mlp, rmsnorm
from octavo.fp8.blocks.counted import CountedModule, observe_forward
from octavo.fp8.blocks.probe import share_trials
from octavo.fp8.dense.delayed import convert
from octavo.fp8.dense.gemms import LayerGemms
from octavo.fp8.dense.swap import SwappedModule, replace
from octavo.fp8.moe import experts
from octavo.fp8.moe.experts import Experts
from octavo.fp8.observe import counts
from octavo.fp8.planning.checks import collect_kernel_checks
from octavo.fp8.planning.exchange import convert_to_fp8_weights, get_sites
from octavo.fp8.planning.modules import ATTENTION, EXPERTS, MLP, NORM
from octavo.fp8.planning.plan import Plan
from octavo.fp8.planning.rows import PlanBlock, PlanRow
from octavo.fp8.policy.decisions import is_meta
from octavo.fp8.policy.policy import HEAD, OFF, PlanError
from octavo.fp8.policy.topology import describe_layers
from octavo.fp8.self_check.untested import may_be_due, run_checks
from octavo.fp8.weights.cache import CachesWeights, register_owner

_HIGH = Recipe(OFF, "high precision", None, None, None)


def apply(model: nn.Module, plan: Plan, others: Iterable[Plan] = ()) -> nn.Module:
    """Apply a plan in place and return the model. Parameters keep their names, shapes and values.

    ``others``: further plans of the same model, for later calls of :func:`switch_plan`. Layers that are FP8 in any of
    them are converted now, and compute in high precision while this plan requires that. With untested versions of torch
    or Triton the kernels are first compared with the reference (:mod:`octavo.fp8.self_check.untested`).

    Raises:
        PlanError: a layer cannot switch between the plans; the plan is for a different model; FP8 was applied before;
            or the FP8 forward of experts does not match the stock module (on the meta device, two random experts are
            compared instead).
        SelfCheckError: with an untested version, a kernel fails or its results differ from the reference.
    """
    others = tuple(others)
    modules = dict(model.named_modules())
    converted = [name for name, module in modules.items() if isinstance(module, CachesWeights)]
    if converted:
        raise PlanError(
            f"FP8 is already applied to this model ({converted[0]!r} is an FP8 layer). Apply one plan to a stock model."
        )
    _check_same_model(model, plan)
    by_module: dict[str, list[PlanRow]] = {}
    for row in plan.rows:
        by_module.setdefault(row.row.module, []).append(row)
    # Checked before any layer is converted, so that an error does not leave a partly converted model.
    pairs = [pair for other in others for pair in _changed_rows(plan, other)]
    for old, new in pairs:
        if (why := _why_not_switchable(plan, old, new)) is not None:
            raise PlanError(_switch_error(old, new, why))
    switchable = frozenset(old.name for old, _ in pairs)
    _check_modules(modules, by_module, switchable)
    device = torch.device(plan.device)
    if may_be_due():
        run_checks(collect_kernel_checks((plan, *others), device), device)
    for name, rows in by_module.items():
        module = modules[name]
        if not any(r.fp8 or r.name in switchable for r in rows):
            gemms = tuple((r.name, *r.shape) for r in rows)
            _count_module(module, counts.HighPrecisionGemms(gemms, routed=rows[0].kind == "experts"))
        elif rows[0].kind == "experts":
            Experts.convert(module, {r.name.rpartition(".")[2]: _make_site(r) for r in rows})
        else:
            assert isinstance(module, nn.Linear)
            convert(module, _make_site(rows[0]))
    _apply_weights(model, plan, switchable)
    _apply_blocks(model, plan.blocks)
    return model


def switch_plan(model: nn.Module, before: Plan, after: Plan) -> tuple[str, ...]:
    """Switch a model from the applied plan to another plan of the same layers; return the names of changed layers.

    Parameters, gradients and layers with an unchanged row are not modified. Raises PlanError, before any change, if a
    row has no FP8 layer, or if its recipe cannot change: delayed scaling, and weights that are stored as codes.
    """
    switched = []
    for old, new in _changed_rows(before, after):
        module = model.get_submodule(new.row.module)
        stock = not isinstance(module, CachesWeights)
        why = (
            "it is not an FP8 layer (pass this plan to apply as well)"
            if stock
            else _why_not_switchable(after, old, new)
        )
        if why is not None:
            raise PlanError(_switch_error(old, new, why))
        switched.append((get_sites(module)[_parameter_name(new)], new))
    for site, new in switched:
        site.set_recipe(new.recipe or _HIGH, new.selections)
    return tuple(new.name for _, new in switched)


def _changed_rows(before: Plan, after: Plan) -> list[tuple[PlanRow, PlanRow]]:
    return [
        (old, new)
        for old, new in zip(before.rows, after.rows, strict=True)
        if old.recipe != new.recipe or old.selections != new.selections
    ]


def _why_not_switchable(plan: Plan, old: PlanRow, new: PlanRow) -> str | None:
    """Return why a row must keep its recipe for the whole run, or None if it can change."""
    if new.row.codes is not None or plan.policy.param_of(new.component):
        return "its weight is stored as codes of one recipe"
    if any(row.recipe is not None and row.recipe.delayed is not None for row in (old, new)):
        return "the amax histories of delayed scaling are specific to a recipe"
    return "the head keeps one recipe for the whole run" if new.kind == HEAD else None


def _switch_error(old: PlanRow, new: PlanRow, why: str) -> str:
    names = f"{_recipe_name(old)} to {_recipe_name(new)}"
    return f"{new.name!r} cannot switch from {names}: {why}. Give it one recipe in all steps."


def _recipe_name(row: PlanRow) -> str:
    return "high precision" if row.recipe is None else row.recipe.summary()


def _parameter_name(row: PlanRow) -> str:
    return row.name.rpartition(".")[2] if row.kind == "experts" else "weight"


@share_trials()
def _check_modules(
    modules: Mapping[str, nn.Module], by_module: Mapping[str, Sequence[PlanRow]], switchable: Collection[str] = ()
) -> None:
    """Raise PlanError, before any change, for a module that cannot be converted."""
    for name, rows in by_module.items():
        if not any(r.fp8 or r.name in switchable for r in rows):
            continue
        module = modules[name]
        if "forward" in module.__dict__:
            raise PlanError(
                f"the forward of {name!r} was replaced on the instance after the plan was made (an accelerate hook?), "
                "which would bypass FP8. Apply the plan first, and add hooks afterwards."
            )
        why = _why_experts_differ(module) if rows[0].kind == "experts" else None
        if why is not None:
            raise PlanError(
                f"{name!r} cannot be converted: {why}. Make a new plan for the loaded model; it will skip this module."
            )


def _why_experts_differ(module: nn.Module) -> str | None:
    return experts.stand_in_matches(module) if is_meta(module) else experts.matches_stock(module)


def _count_module(module: nn.Module, gemms: counts.HighPrecisionGemms) -> None:
    """Let counters see a module that stays in high precision: by its class, or by a hook if it has to keep that."""
    is_new = counts.gemms_of(module) is None
    counts.watch_module(module, gemms)
    # A chunked head reports by itself. Experts keep their class, because others read the arguments of its forward; so
    # does a module with a forward on the instance, which hides the forward of any class.
    if not isinstance(module, SwappedModule) and not gemms.routed:
        replace(module, CountedModule)
    register_owner(module)
    if is_new and not isinstance(module, SwappedModule):
        module.register_forward_hook(observe_forward, with_kwargs=True)


def _make_site(row: PlanRow) -> LayerGemms:
    return LayerGemms(row.name, row.recipe or _HIGH, row.selections)


def _apply_weights(model: nn.Module, plan: Plan, switchable: Collection[str]) -> None:
    """Apply the settings for weights between steps: ``weight_codes`` to caches, and ``param`` to parameters."""
    sites: dict[tuple[str, str], LayerGemms] = {}
    keep = plan.policy.weight_codes != "recast"
    for row in plan.rows:
        if not row.fp8 and row.name not in switchable:
            continue
        parameter = _parameter_name(row)
        site = get_sites(model.get_submodule(row.row.module))[parameter]
        site.codes.keep, site.codes.both = keep, plan.policy.weight_codes == "both"
        if plan.policy.param_of(row.component):
            sites[row.row.module, parameter] = site
    convert_to_fp8_weights(model, sites, keep)


@share_trials()
def _apply_blocks(model: nn.Module, blocks: Sequence[PlanBlock]) -> None:
    """Fuse blocks and make them save FP8, as planned. Raises PlanError if the loaded model does not support it."""
    feeds = {name: layers for name, _, layers in rmsnorm.norms_and_layers(model)}
    attention = {a.name: a for a in attention_output.find_attention_modules(model)}
    for block in blocks:
        if not block.fused and not block.saves:
            continue
        module, saves, why_not = model.get_submodule(block.name), bool(block.saves), None
        if block.kind == ATTENTION:
            attention_output.recompute_input(attention[block.name])
        elif block.kind == EXPERTS:
            experts.save_in_fp8(module)
        elif block.fused and block.kind == MLP:
            why_not = gated_mlp.fuse(module, saves)
        elif block.fused:
            why_not = rmsnorm.fuse(module, rmsnorm.select_fp8(feeds.get(block.name, ())), saves)
        else:
            why_not = layernorm.save_as_codes(module) if block.kind == NORM else mlp.save_as_codes(module)
        if why_not is not None:
            what = "be fused with its FP8 layers" if block.fused else "save FP8 for its backward"
            fix = "use fuse='off'" if block.fused else "use activations='bf16'"
            raise PlanError(
                f"the {block.kind} {block.name!r} was planned to {what}, but it cannot: {why_not}. Make a new plan for "
                f"the loaded model, or {fix}."
            )


def _check_same_model(model: nn.Module, plan: Plan) -> None:
    present = {r.name: (r.kind, r.shape, r.codes) for r in describe_layers(model, plan.components)}
    planned = {r.name: (r.kind, r.shape, r.row.codes) for r in plan.rows}

    def describe(row: tuple[str, tuple[int, int], object] | None) -> str:
        codes = "" if row is None or row[2] is None else f" with frozen FP8 codes ({row[2]})"
        return "missing" if row is None else f"{row[0]} {list(row[1])}{codes}"

    for name in [*planned, *present]:
        if not _is_same_row(planned.get(name), present.get(name)):
            in_model, in_plan = describe(present.get(name)), describe(planned.get(name))
            raise PlanError(
                f"This plan is for a different model: {name!r} is {in_plan} in the plan and {in_model} in the model. "
                "Make a plan for this model."
            )


def _is_same_row(
    planned: tuple[str, tuple[int, int], Any] | None, present: tuple[str, tuple[int, int], Any] | None
) -> bool:
    """Return True if a row matches the planned one. Codes whose scales are all powers of two match a plan for fp32
    scales, because that is known only after the scales are read."""
    if planned is None or present is None or None in (planned[2], present[2]):
        return planned == present
    plan_cast, model_cast = planned[2], present[2]
    scales = plan_cast.scale == model_cast.scale or (plan_cast.scale, model_cast.scale) == ("fp32", "pow2")
    formats = (plan_cast.format, plan_cast.block) == (model_cast.format, model_cast.block)
    return planned[:2] == present[:2] and formats and scales


class Fusion(NamedTuple):
    """Result of :func:`fuse` for a gated MLP or a norm. ``reason``: why it is not fused, or None if it is."""

    names: tuple[str, ...]
    reason: str | None


def fuse(model: nn.Module) -> tuple[Fusion, ...]:
    """Fuse gated MLPs into one function, and norms with the FP8 layers after them, where possible.

    Returns one :class:`Fusion` for each gated MLP and norm with an FP8 layer. Parameters, names and state dicts do not
    change; :func:`unfuse` undoes the fusion.
    """
    return tuple(Fusion((name,), why) for name, why in (*gated_mlp.convert(model), *rmsnorm.convert(model)))


def unfuse(model: nn.Module) -> None:
    """Restore the stock forwards of norms, MLPs and attention outputs."""
    for module in list(model.modules()):
        if not (isinstance(module, SwappedModule) and module.runs_in_high_precision):
            replace(module, CountedModule if counts.gemms_of(module) is not None else None)
