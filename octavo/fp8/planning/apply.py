"""Apply a plan in place: layers become FP8 layers, blocks get another forward, weights become FP8 between steps.

:func:`fuse` fuses gated MLPs and norms of a model with FP8 layers, without a plan.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from octavo.fp8.arithmetic.recipe import Recipe
from octavo.fp8.blocks import attention_output, gated_mlp, layernorm, mlp, rmsnorm
from octavo.fp8.blocks.probe import share_trials
from octavo.fp8.dense.delayed import convert
from octavo.fp8.dense.gemms import Site
from octavo.fp8.dense.swap import SwappedModule, unswap
from octavo.fp8.kernels.self_check import run_checks
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
from octavo.fp8.weights.cache import CachesWeights

_HIGH = Recipe(OFF, "high precision", None, None, None)


def apply(model: nn.Module, plan: Plan, others: Iterable[Plan] = ()) -> nn.Module:
    """Apply a plan, in place; returns the model. Parameters, their names, shapes and values stay as they are.

    ``others``: plans of the same model that :func:`switch_plan` will be called with. Layers that one of them has in
    FP8 become FP8 layers too, and compute in high precision while this plan has them so. Where torch or Triton is newer
    than tested, the kernels of the plans are first compared with the reference (:mod:`octavo.fp8.kernels.self_check`).

    Raises:
        PlanError: a layer cannot turn as the others have it; the plan is another model's, FP8 was applied before, or
            experts turn out not to compute what the loop over experts computes (two random ones in place of those on
            the meta device).
        SelfCheckError: a kernel computes otherwise than the reference, or does not run, in a version not tested.
    """
    others = tuple(others)
    modules = dict(model.named_modules())
    done = [name for name, module in modules.items() if isinstance(module, CachesWeights)]
    if done:
        raise PlanError(
            f"FP8 was applied to this model before ({done[0]!r} is an FP8 layer). Apply a plan once, to a stock model."
        )
    _check_same_model(model, plan)
    by_module: dict[str, list[PlanRow]] = {}
    for row in plan.rows:
        by_module.setdefault(row.row.module, []).append(row)
    # Checked before any layer is converted: a plan that cannot be switched to must not leave a half-converted model.
    pairs = [pair for other in others for pair in _changed_rows(plan, other)]
    for old, new in pairs:
        if (why := _why_not_switchable(plan, old, new)) is not None:
            raise PlanError(_switch_error(old, new, why))
    also = frozenset(old.name for old, _ in pairs)
    _check_modules(modules, by_module, also)
    device = torch.device(plan.device)
    run_checks(collect_kernel_checks((plan, *others), device), device)
    for name, rows in by_module.items():
        module = modules[name]
        if not any(r.fp8 or r.name in also for r in rows):
            gemms = tuple((r.name, *r.shape) for r in rows)
            counts.watch_module(module, counts.HighPrecisionGemms(gemms, routed=rows[0].kind == "experts"))
        elif rows[0].kind == "experts":
            Experts.convert(module, {r.name.rpartition(".")[2]: _make_site(r) for r in rows})
        else:
            assert isinstance(module, nn.Linear)
            convert(module, _make_site(rows[0]))
    _apply_weights(model, plan, also)
    _apply_blocks(model, plan.blocks)
    return model


def switch_plan(model: nn.Module, before: Plan, after: Plan) -> tuple[str, ...]:
    """Switch a model from the plan that was applied to another plan of the same layers; returns the names of the
    layers that changed. Parameters, gradients and the layers whose row is the same are not touched.

    Raises PlanError, before anything is changed, for a row without an FP8 layer, and for a recipe that cannot be
    exchanged: one with amax histories, or of weights that are stored as codes.
    """
    turned = []
    for old, new in _changed_rows(before, after):
        module = model.get_submodule(new.row.module)
        stock = not isinstance(module, CachesWeights)
        why = "it is no FP8 layer (apply the plan with the others)" if stock else _why_not_switchable(after, old, new)
        if why is not None:
            raise PlanError(_switch_error(old, new, why))
        turned.append((get_sites(module)[_parameter_name(new)], new))
    for site, new in turned:
        site.set_recipe(new.recipe or _HIGH, new.selections)
    return tuple(new.name for _, new in turned)


def _changed_rows(before: Plan, after: Plan) -> list[tuple[PlanRow, PlanRow]]:
    return [
        (old, new)
        for old, new in zip(before.rows, after.rows, strict=True)
        if old.recipe != new.recipe or old.selections != new.selections
    ]


def _why_not_switchable(plan: Plan, old: PlanRow, new: PlanRow) -> str | None:
    """Why a row must keep its recipe for a whole run; None if it may change."""
    if new.row.codes is not None or plan.policy.param_of(new.component):
        return "its weight is kept as codes of one recipe"
    if any(row.recipe is not None and row.recipe.delayed is not None for row in (old, new)):
        return "the amax histories of delayed scaling belong to one recipe"
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
    modules: Mapping[str, nn.Module], by_module: Mapping[str, Sequence[PlanRow]], also: Collection[str] = ()
) -> None:
    """Raises PlanError, before anything is changed, for a module that cannot be converted as it is now."""
    for name, rows in by_module.items():
        if not any(r.fp8 or r.name in also for r in rows):
            continue
        module = modules[name]
        if "forward" in module.__dict__:
            raise PlanError(
                f"{name!r} got a forward of its own on the instance since the plan was made (an accelerate hook?), "
                "which would bypass FP8. Apply the plan first and add the hooks afterwards."
            )
        why = _why_experts_differ(module) if rows[0].kind == "experts" else None
        if why is not None:
            raise PlanError(
                f"{name!r} cannot be converted: {why}. Plan again on the loaded model, which leaves it out."
            )


def _why_experts_differ(module: nn.Module) -> str | None:
    return experts.stand_in_matches(module) if is_meta(module) else experts.matches_stock(module)


def _make_site(row: PlanRow) -> Site:
    return Site(row.name, row.recipe or _HIGH, row.selections)


def _apply_weights(model: nn.Module, plan: Plan, also: Collection[str]) -> None:
    """What the policy says of weights between steps: whether their codes are kept, and which weights are FP8."""
    sites: dict[tuple[str, str], Site] = {}
    keep = plan.policy.weight_codes != "recast"
    for row in plan.rows:
        if not row.fp8 and row.name not in also:
            continue
        parameter = _parameter_name(row)
        site = get_sites(model.get_submodule(row.row.module))[parameter]
        site.codes.keep, site.codes.both = keep, plan.policy.weight_codes == "both"
        if plan.policy.param_of(row.component):
            sites[row.row.module, parameter] = site
    convert_to_fp8_weights(model, sites, keep)


@share_trials()
def _apply_blocks(model: nn.Module, blocks: Sequence[PlanBlock]) -> None:
    """What is planned of blocks, in a model with FP8 layers. Raises PlanError where the loaded model does not allow
    it."""
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
            what = "be fused with its FP8 layers" if block.fused else "keep FP8 for its backward"
            fix = "use fuse='off'" if block.fused else "use activations='bf16'"
            raise PlanError(
                f"The {block.kind} {block.name!r} was planned to {what} and cannot: {why_not}. Plan again on the "
                f"loaded model, or {fix}."
            )


def _check_same_model(model: nn.Module, plan: Plan) -> None:
    present = {r.name: (r.kind, r.shape, r.codes) for r in describe_layers(model, plan.components)}
    planned = {r.name: (r.kind, r.shape, r.row.codes) for r in plan.rows}

    def shown(row: tuple[str, tuple[int, int], object] | None) -> str:
        codes = "" if row is None or row[2] is None else f" with frozen FP8 codes ({row[2]})"
        return "nothing" if row is None else f"{row[0]} {list(row[1])}{codes}"

    for name in [*planned, *present]:
        if not _is_same_row(planned.get(name), present.get(name)):
            has, wants = shown(present.get(name)), shown(planned.get(name))
            raise PlanError(
                f"This plan belongs to another model: for {name!r} it has {wants}, the model has {has}. Plan this "
                "model."
            )


def _is_same_row(
    planned: tuple[str, tuple[int, int], Any] | None, present: tuple[str, tuple[int, int], Any] | None
) -> bool:
    """Whether a row is the one that was planned. That all scales of codes are powers of two is known only once they are
    read: a plan for any scales serves them too."""
    if planned is None or present is None or None in (planned[2], present[2]):
        return planned == present
    mine, theirs = planned[2], present[2]
    scales = mine.scale == theirs.scale or (mine.scale, theirs.scale) == ("fp32", "pow2")
    return planned[:2] == present[:2] and (mine.format, mine.block) == (theirs.format, theirs.block) and scales


class Fusion(NamedTuple):
    """The result of :func:`fuse` for a gated MLP or a norm: ``reason`` is None if it is fused now, else why not."""

    names: tuple[str, ...]
    reason: str | None


def fuse(model: nn.Module) -> tuple[Fusion, ...]:
    """Fuse gated MLPs into one function, and norms with the FP8 layers that read their output, where possible.

    Returns one :class:`Fusion` for each gated MLP and norm next to an FP8 layer. Parameters, names and state dicts
    stay the same; :func:`unfuse` undoes it.
    """
    return tuple(Fusion((name,), why) for name, why in (*gated_mlp.convert(model), *rmsnorm.convert(model)))


def unfuse(model: nn.Module) -> None:
    """Restore the stock forward of norms, MLPs and the output of attention."""
    for module in list(model.modules()):
        if not (isinstance(module, SwappedModule) and module.runs_in_high_precision):
            unswap(module)
