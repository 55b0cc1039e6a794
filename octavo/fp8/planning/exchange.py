"""Parameters exchanged for weights that are FP8 between steps, with the casts that their layers ask for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from octavo.fp8.dense.gemms import Site
from octavo.fp8.moe.grouped import why_not_grouped
from octavo.fp8.policy.decisions import device_of
from octavo.fp8.policy.policy import PlanError
from octavo.fp8.weights.fp8_rows import Need
from octavo.fp8.weights.fp8_tensor import Fp8Weight, Source
from octavo.fp8.weights.frozen import is_frozen
from octavo.fp8.weights.shards import is_whole


def convert_to_fp8_weights(model: nn.Module, sites: Mapping[tuple[str, str], Site], keep: bool = True) -> None:
    """Make FP8 weights of the parameters that ``sites`` names, by module and parameter.

    A parameter that several layers share becomes one only if all of them ask for FP8 codes; frozen FP8 weights stay.
    ``keep``: whether the codes of shards are kept between two gathers. Raises PlanError for a parameter that is sharded
    already.
    """
    modules = dict(model.named_modules())
    users: dict[int, list[tuple[str, str]]] = {}
    for name, module in modules.items():
        for parameter, value in module._parameters.items():
            if value is not None:
                users.setdefault(id(value), []).append((name, parameter))
    for used in users.values():
        first, name = used[0]
        if is_frozen(modules[first]._parameters[name]):
            continue
        each = [required_casts(modules[user[0]], user[1], sites[user]) if user in sites else [] for user in used]
        if all(each):
            casts = tuple(dict.fromkeys(need for needs in each for need in needs))
            weight = _make_fp8_weight(modules[first]._parameters[name], casts, keep, f"{first}.{name}")
            for where, parameter in used:
                modules[where]._parameters[parameter] = weight
                modules[where].__dict__["_fp8_param"] = True
            _share_cache(modules, used)


def _make_fp8_weight(old: Any, casts: tuple[Need, ...], keep: bool, name: str) -> nn.Parameter:
    if not is_whole(old):
        raise PlanError(
            f"{name} is sharded already, and FP8 weights are made of whole ones. Call fp8.apply before fully_shard."
        )
    new = nn.Parameter(Fp8Weight.of(old.detach(), Source(casts, old.shape, keep)), requires_grad=old.requires_grad)
    new.__dict__.update({k: v for k, v in old.__dict__.items() if k not in new.__dict__})
    new.grad = old.grad
    return new


def _share_cache(modules: Mapping[str, nn.Module], used: list[tuple[str, str]]) -> None:
    """One cache for layers that share a weight: its codes are the same."""
    first = get_sites(modules[used[0][0]])[used[0][1]].codes
    for name, parameter in used[1:]:
        site = get_sites(modules[name])[parameter]
        if site.codes is not None and first is not None and site.codes.keep == first.keep:
            site.codes = first


def get_sites(module: nn.Module) -> dict[str, Site]:
    """Parameter of an FP8 layer, or of a module of FP8 experts -> where its GEMMs run."""
    sites = module.__dict__.get("_sites")
    return sites if sites is not None else {"weight": module.__dict__["_site"]}


def required_casts(module: nn.Module, name: str, site: Site) -> list[Need]:
    """The casts of a weight that the GEMMs of its layer ask for: one or two, none if no FP8 GEMM multiplies by it."""
    weight, recipe = module._parameters[name], site.recipe
    assert weight is not None
    turned, grouped = False, False
    if weight.dim() == 3:
        turned = bool(getattr(module, "is_transposed", False))
        device = device_of(module) if weight.is_meta else weight.device
        grouped = why_not_grouped(recipe, site.selections, device) is None
    needs: list[Need] = []
    if recipe.fwd is not None:
        needs.append(Need(recipe.fwd.b, site.selections["fwd"].backend, 1, turned, grouped))
    if recipe.dgrad is not None and not site.shares_weight:
        needs.append(Need(recipe.dgrad.b, site.selections["dgrad"].backend, 0, turned, grouped))
    return needs
