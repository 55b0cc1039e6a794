"""Carrying a plan out, in place: layers become FP8, blocks exchange their forward, weights become FP8 between steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from octavo.fp8.arithmetic.recipe import Recipe
from octavo.fp8.blocks import attention_output, gated_mlp, layernorm, mlp, rmsnorm
from octavo.fp8.dense.gemms import Site
from octavo.fp8.dense.linear import Linear
from octavo.fp8.moe import experts
from octavo.fp8.moe import experts as moe
from octavo.fp8.moe.experts import Experts
from octavo.fp8.moe.grouped import alone
from octavo.fp8.observe import counts
from octavo.fp8.planning.modules import ATTENTION, EXPERTS, MLP, NORM
from octavo.fp8.planning.plan import Plan
from octavo.fp8.planning.rows import PlanBlock, PlanRow
from octavo.fp8.policy.decisions import _is_meta
from octavo.fp8.policy.policy import OFF, PlanError
from octavo.fp8.policy.topology import topology
from octavo.fp8.weights.cache import CachesWeights
from octavo.fp8.weights.fp8_rows import Need
from octavo.fp8.weights.fp8_tensor import Fp8Weight, Source
from octavo.fp8.weights.frozen import is_frozen
from octavo.fp8.weights.shards import is_whole


def apply(model: nn.Module, plan: Plan) -> nn.Module:
    """Carry a plan out, in place; returns the model. Parameters, their names, shapes and values stay as they are.

    Raises:
        PlanError: the plan is another model's, FP8 was applied before, or experts on a real device turn out not to
            compute what the loop over experts computes.
    """
    modules = dict(model.named_modules())
    done = [name for name, module in modules.items() if isinstance(module, CachesWeights)]
    if done:
        raise PlanError(
            f"FP8 was applied to this model before ({done[0]!r} is an FP8 layer). Apply a plan once, to a stock model."
        )
    check_same_model(model, plan)
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
            counts.watch(module, counts.Watched(gemms, routed=rows[0].kind == "experts"))
        elif rows[0].kind == "experts":
            Experts.convert(module, {r.name.rpartition(".")[2]: _site(r) for r in rows})
        else:
            assert isinstance(module, nn.Linear)
            Linear.convert(module, _site(rows[0]))
    _settle_weights(model, plan)
    carry_out(model, plan.blocks)
    return model


def _settle_weights(model: nn.Module, plan: Plan) -> None:
    """What the policy says of weights between steps: whether their codes are kept, and which weights are FP8."""
    sites: dict[tuple[str, str], Site] = {}
    keep = plan.policy.weight_codes == "keep"
    for row in plan.rows:
        if not row.fp8:
            continue
        module: Any = model.get_submodule(row.row.module)
        parameter = row.name.rpartition(".")[2] if row.kind == "experts" else "weight"
        site = module._sites[parameter] if row.kind == "experts" else module._site
        site.codes.keep = keep
        if plan.policy.param_of(row.component):
            sites[row.row.module, parameter] = site
    exchange(model, sites, keep)


_HIGH = Recipe(OFF, "high precision", None, None, None)


def _site(row: PlanRow) -> Site:
    return Site(row.name, row.recipe or _HIGH, row.selections)


def carry_out(model: nn.Module, blocks: Sequence[PlanBlock]) -> None:
    """Do what is planned, in a model with FP8 layers. Raises PlanError where the loaded model does not allow it."""
    feeds = {name: layers for name, _, layers in rmsnorm.fed(model)}
    attention = {a.name: a for a in attention_output.outputs(model)}
    for block in blocks:
        if not block.fused and not block.saves:
            continue
        module, saves, why = model.get_submodule(block.name), bool(block.saves), None
        if block.kind == ATTENTION:
            attention_output.mark(attention[block.name])
        elif block.kind == EXPERTS:
            experts.mark(module)
        elif block.fused and block.kind == MLP:
            why = gated_mlp.unite(module, saves)
        elif block.fused:
            why = rmsnorm.unite(module, rmsnorm.fp8_of(feeds.get(block.name, ())), saves)
        else:
            why = layernorm.save(module) if block.kind == NORM else mlp.save(module)
        if why is not None:
            what = "be fused with its FP8 layers" if block.fused else "keep FP8 for its backward"
            cure = "use fuse='off'" if block.fused else "use activations='bf16'"
            raise PlanError(
                f"The {block.kind} {block.name!r} was planned to {what} and cannot: {why}. Plan again on the loaded "
                f"model, or {cure}."
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


def exchange(model: nn.Module, sites: Mapping[tuple[str, str], Site], keep: bool = True) -> tuple[str, ...]:
    """Make FP8 weights of the parameters that ``sites`` names, by module and parameter; the names of those made.

    ``keep``: whether the codes of shards are kept between two gathers.

    Raises PlanError for a parameter that is sharded already.
    """
    modules = dict(model.named_modules())
    users: dict[int, list[tuple[str, str]]] = {}
    for name, module in modules.items():
        for parameter, value in module._parameters.items():
            if value is not None:
                users.setdefault(id(value), []).append((name, parameter))
    made: list[str] = []
    for used in users.values():
        casts: list[Need] = []
        if is_frozen(modules[used[0][0]]._parameters[used[0][1]]):
            continue  # it is FP8 for good
        for user in used:
            here = needs_of(modules[user[0]], user[1], sites[user]) if user in sites else []
            if not here:  # in high precision for somebody
                casts = []
                break
            casts += [need for need in here if need not in casts]
        if casts:
            first, name = used[0]
            weight = _exchanged(modules[first]._parameters[name], tuple(casts), keep, f"{first}.{name}")
            for where, parameter in used:
                modules[where]._parameters[parameter] = weight
                modules[where].__dict__["_fp8_param"] = True
                made.append(f"{where}.{parameter}")
            _share(modules, used)
    return tuple(made)


def _exchanged(old: Any, casts: tuple[Need, ...], keep: bool, name: str) -> nn.Parameter:
    if not is_whole(old):
        raise PlanError(
            f"{name} is sharded already, and FP8 weights are made of whole ones. Call fp8.apply before fully_shard."
        )
    new = nn.Parameter(Fp8Weight.of(old.detach(), Source(casts, old.shape, keep)), requires_grad=old.requires_grad)
    new.__dict__.update({k: v for k, v in old.__dict__.items() if k not in new.__dict__})
    new.grad = old.grad
    return new


def _share(modules: Mapping[str, nn.Module], used: list[tuple[str, str]]) -> None:
    """One cache for layers that share a weight: its codes are the same."""
    first = _sites(modules[used[0][0]])[used[0][1]].codes
    for name, parameter in used[1:]:
        site = _sites(modules[name])[parameter]
        if site.codes is not None and first is not None and site.codes.keep == first.keep:
            site.codes = first


def _sites(module: nn.Module) -> dict[str, Site]:
    own = module.__dict__.get("_sites")
    return own if own is not None else {"weight": module.__dict__["_site"]}


def needs_of(module: nn.Module, name: str, site: Site) -> list[Need]:
    """The casts of a weight that the GEMMs of its layer ask for: one or two, none if no FP8 GEMM multiplies by it."""
    weight, recipe = module._parameters[name], site.recipe
    assert weight is not None
    turned, grouped = False, False
    if weight.dim() == 3:
        turned = bool(getattr(module, "is_transposed", False))
        grouped = alone(recipe, site.selections, weight.device) is None
    found: list[Need] = []
    if recipe.fwd is not None:
        found.append(Need(recipe.fwd.b, site.selections["fwd"].backend, 1, turned, grouped))
    if recipe.dgrad is not None and not site.shares_weight:
        found.append(Need(recipe.dgrad.b, site.selections["dgrad"].backend, 0, turned, grouped))
    return found
