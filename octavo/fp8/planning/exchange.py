"""Replace parameters by weights that are FP8 between steps, with the casts that their layers need."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from octavo.fp8.dense.gemms import LayerGemms
from octavo.fp8.moe.grouped import why_not_grouped
from octavo.fp8.policy.decisions import device_of
from octavo.fp8.policy.policy import PlanError
from octavo.fp8.weights.fp8_rows import Need
from octavo.fp8.weights.fp8_tensor import Fp8Weight, Source
from octavo.fp8.weights.frozen import is_frozen
from octavo.fp8.weights.shards import is_whole


def convert_to_fp8_weights(model: nn.Module, sites: Mapping[tuple[str, str], LayerGemms], keep: bool = True) -> None:
    """Replace the parameters in ``sites``, which has (module, parameter) keys, by FP8 weights.

    A parameter that several layers share is replaced only if all of them use FP8 codes. Frozen FP8 weights are not
    changed. ``keep``: whether codes of shards are kept between two gathers. Raises PlanError for a sharded parameter.
    """
    modules = dict(model.named_modules())
    users: dict[int, list[tuple[str, str]]] = {}
    for name, module in modules.items():
        for parameter, value in module._parameters.items():
            if value is not None:
                users.setdefault(id(value), []).append((name, parameter))
    for uses in users.values():
        first, name = uses[0]
        if is_frozen(modules[first]._parameters[name]):
            continue
        needs_by_use = [required_casts(modules[use[0]], use[1], sites[use]) if use in sites else [] for use in uses]
        if all(needs_by_use):
            casts = tuple(dict.fromkeys(need for needs in needs_by_use for need in needs))
            weight = _make_fp8_weight(modules[first]._parameters[name], casts, keep, f"{first}.{name}")
            for where, parameter in uses:
                modules[where]._parameters[parameter] = weight
                modules[where].__dict__["_fp8_param"] = True
            _share_cache(modules, uses)


def _make_fp8_weight(old: Any, casts: tuple[Need, ...], keep: bool, name: str) -> nn.Parameter:
    if not is_whole(old):
        raise PlanError(f"{name} is already sharded. Call fp8.apply before fully_shard.")
    new = nn.Parameter(Fp8Weight.of(old.detach(), Source(casts, old.shape, keep)), requires_grad=old.requires_grad)
    new.__dict__.update({k: v for k, v in old.__dict__.items() if k not in new.__dict__})
    new.grad = old.grad
    return new


def _share_cache(modules: Mapping[str, nn.Module], uses: list[tuple[str, str]]) -> None:
    """Share one cache among layers with a common weight, whose codes are equal."""
    first = get_sites(modules[uses[0][0]])[uses[0][1]].codes
    for name, parameter in uses[1:]:
        site = get_sites(modules[name])[parameter]
        if site.codes is not None and first is not None and site.codes.keep == first.keep:
            site.codes = first


def get_sites(module: nn.Module) -> dict[str, LayerGemms]:
    """Return parameter name -> site of its GEMMs, for an FP8 layer or a module of FP8 experts."""
    sites = module.__dict__.get("_sites")
    return sites if sites is not None else {"weight": module.__dict__["_site"]}


def required_casts(module: nn.Module, name: str, site: LayerGemms) -> list[Need]:
    """Return the casts of a weight for the GEMMs of its layer: one or two, or none if no FP8 GEMM uses it."""
    weight, recipe = module._parameters[name], site.recipe
    assert weight is not None
    transposed, grouped = False, False
    if weight.dim() == 3:
        transposed = bool(getattr(module, "is_transposed", False))
        device = device_of(module) if weight.is_meta else weight.device
        grouped = why_not_grouped(recipe, site.selections, device) is None
    needs: list[Need] = []
    if recipe.fwd is not None:
        needs.append(Need(recipe.fwd.b, site.selections["fwd"].backend, 1, transposed, grouped))
    if recipe.dgrad is not None and not site.shares_weight:
        needs.append(Need(recipe.dgrad.b, site.selections["dgrad"].backend, 0, transposed, grouped))
    return needs
