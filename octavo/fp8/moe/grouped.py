"""The linear layer of all experts at once in FP8: three grouped GEMMs, one autograd function.

With the rows of all experts x [R, K] (laid out by :mod:`octavo.fp8.kernels.groups`), w [E, N, K] and dy [R, N], each
expert e alone::

    fwd    y_e  = x_e @ w_e.T (+ bias_e)     dgrad  dx_e = dy_e @ w_e     wgrad  dw_e = dy_e.T @ x_e

What a forward keeps is what :mod:`octavo.fp8.dense.linear` keeps: the codes of x in wgrad layout, and none where the
weight is frozen or the backward can get x again. Nothing here waits for the device: sizes of experts stay there, and
FLOPs of real rows are added up when somebody reads them.

Where grouped GEMMs cannot be (delayed scaling, whose histories are each expert's own; a backend without them) the
experts run one by one, each with the three GEMMs of a linear layer; :func:`alone` says why, and the plan shows it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from octavo.fp8.arithmetic.cast import CastSpec, Quantized
from octavo.fp8.arithmetic.recipe import Recipe
from octavo.fp8.dense.casts import _autocast_enabled, _no_autocast
from octavo.fp8.dense.gemms import Site
from octavo.fp8.dense.sources import Source
from octavo.fp8.kernels.groups import TILE, Groups, of_expert, spans
from octavo.fp8.kernels.registry import Borrower, Selection
from octavo.fp8.moe import grouped_high
from octavo.fp8.observe import counts, health
from octavo.fp8.weights.cache import Part, has_values
from octavo.fp8.weights.shards import is_whole


def alone(chosen: Recipe, selections: Mapping[str, Selection], device: torch.device) -> str | None:
    """Why experts of this recipe run one by one on these backends; None if they run grouped.

    The plan's backends are those of grouped GEMMs where all of a recipe's GEMMs have one; so this has one answer.
    """
    if chosen.delayed is not None:
        return "delayed scaling keeps a history of each expert"
    for gemm, selection in selections.items():
        lack = selection.backend.supports(f"grouped_{gemm}", chosen, device, None)
        if lack is not None:
            return f"{selection.backend.name}: {lack}"
    return None


class GroupedCall(NamedTuple):
    """What a forward knows besides its tensors."""

    site: Site
    part: Part  # the whole parameter, transposed if stored as [E, K, N]
    grad: bool  # gradients are enabled
    source: Source | None = None  # how the backward gets x again, where it need not be kept


def grouped_gemms(x: Tensor, weight: Tensor, bias: Tensor | None, groups: Groups, call: GroupedCall) -> Tensor:
    """x [R, K] -> [R, N] in x's dtype (autocast's under autocast); padding rows hold anything.

    ``weight`` is the parameter itself, [E, N, K] or transposed; ``bias`` [E, N]. Not for ``torch.compile`` to trace.
    """
    if not is_whole(weight):
        raise RuntimeError(
            f"The weights of {call.site.name!r} are a DTensor where their GEMMs run. FP8 experts multiply by plain "
            "weights: under FSDP2 call the module that fully_shard wrapped, so that its hooks gather them first; "
            "expert and tensor parallelism are not supported."
        )
    if _autocast_enabled(x) and x.dtype != torch.float64:
        x = x.to(torch.get_autocast_dtype(x.device.type))
    return _GroupedGemms.apply(x, weight, bias, groups, call)


class _GroupedGemms(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_RK: Tensor, weight: Tensor, bias: Tensor | None, groups: Groups, call: GroupedCall
    ) -> Tensor:
        site, now = call.site, counts.phase()
        needs_x, needs_w, needs_b = (call.grad and n for n in ctx.needs_input_grad[:3])
        watched = health.watching() and now.counted
        with _no_autocast(x_RK):
            source = call.source if needs_w else None
            x_q, kept = _codes_of_x(x_RK, groups, site, needs_w and source is None)
            y_RN = _fwd(x_RK, x_q, weight, bias, groups, call, now, watched and not now.recompute)
        if now.counted and counts.counting():
            for gemm, needed in (("dgrad", needs_x), ("wgrad", needs_w)):
                if needed:
                    counts.promise(site.name, gemm, now, groups.experts)
            if not call.grad and not now.recompute:
                counts.gradless(site.name, groups.experts)
        codes: tuple[Tensor, ...] = () if source is None else source.tensors
        if kept is not None:
            codes = (kept.data, kept.scale) if isinstance(kept, Quantized) else (kept,)
        ctx.remake = None if source is None else source.remake
        exact = (x_RK,) if watched and needs_w and isinstance(kept, Quantized) else ()
        ctx.save_for_backward(*groups[:3], *((weight,) if needs_x else ()), *codes, *exact)
        ctx.site, ctx.part, ctx.rows = site, call.part, groups.rows
        ctx.counted, ctx.born, ctx.watched = now.counted, now.gemm, watched
        ctx.needs = (needs_x, needs_w, needs_b)
        ctx.kept_spec = None if site.recipe.wgrad is None else site.recipe.wgrad.b
        ctx.x_dtype, ctx.w_dtype, ctx.inputs = x_RK.dtype, weight.dtype, x_RK.shape[1]
        ctx.b_dtype = None if bias is None else bias.dtype
        return y_RN

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_RN: Tensor) -> tuple[Tensor | None, ...]:
        needs_x, needs_w, needs_b = ctx.needs
        sizes, starts, tiles, *saved = ctx.saved_tensors
        groups = Groups(sizes, starts, tiles, ctx.rows)
        dx = dw = db = None
        with _no_autocast(dy_RN):
            casts = _codes_of_dy(ctx, dy_RN, groups)
            if needs_x:
                dx = _dgrad(ctx, dy_RN, groups, saved.pop(0), casts)
            if needs_w:
                dw = _wgrad(ctx, dy_RN, groups, saved if ctx.remake is None else _again(ctx, groups, saved), casts)
            if needs_b:
                db = grouped_high.bias_grad(dy_RN, groups).to(ctx.b_dtype)
        return dx, dw, db, None, None


def _codes_of_x(
    x_RK: Tensor, groups: Groups, site: Site, needs_w: bool
) -> tuple[Quantized | None, Quantized | Tensor | None]:
    """(codes of x for the forward, x as wgrad wants it): codes, or x itself where a GEMM stays in high precision."""
    fwd, wgrad = site.recipe.fwd, site.recipe.wgrad
    if fwd is not None and wgrad is not None and needs_w and fwd.a != wgrad.b:
        return _cast_both(site, ("fwd", fwd.a), ("wgrad", wgrad.b), x_RK, groups)
    x_q = None if fwd is None else site.selections["fwd"].backend.quantize_rows(x_RK, fwd.a, groups, 1)
    if not needs_w:
        return x_q, None
    if wgrad is None:
        return x_q, x_RK
    if x_q is not None:
        return x_q, x_q
    return None, site.selections["wgrad"].backend.quantize_rows(x_RK, wgrad.b, groups, 0)


def _again(ctx: Any, groups: Groups, saved: list[Tensor]) -> list[Tensor]:
    """What the forward would have kept of x, made again, and x: [codes, scales, x], or [x] in high precision."""
    x_RK, gemm = ctx.remake(*saved).to(ctx.x_dtype), ctx.site.recipe.wgrad
    if gemm is None:
        return [x_RK]
    x_q = ctx.site.selections["wgrad"].backend.quantize_rows(x_RK, gemm.b, groups, 0)
    return [x_q.data, x_q.scale, x_RK]


def _codes_of_dy(ctx: Any, dy_RN: Tensor, groups: Groups) -> dict[CastSpec, Quantized]:
    """Both casts of dy, where dgrad and wgrad want different ones; each casts its own otherwise."""
    (needs_x, needs_w, _), site = ctx.needs, ctx.site
    dgrad, wgrad = site.recipe.dgrad, site.recipe.wgrad
    if not (needs_x and needs_w) or dgrad is None or wgrad is None or dgrad.a == wgrad.a:
        return {}
    row, col = _cast_both(site, ("dgrad", dgrad.a), ("wgrad", wgrad.a), dy_RN, groups)
    return {dgrad.a: row, wgrad.a: col}


def _cast_both(
    site: Site, row: tuple[str, CastSpec], col: tuple[str, CastSpec], x: Tensor, groups: Groups
) -> tuple[Quantized, Quantized]:
    """x cast for two GEMMs, in one pass where one backend can do both: all of them give the same codes."""
    first, second = site.selections[row[0]].backend, site.selections[col[0]].backend
    if first is second or isinstance(first, Borrower):
        return first.quantize_rows_both(x, row[1], col[1], groups)
    return first.quantize_rows(x, row[1], groups, 1), second.quantize_rows(x, col[1], groups, 0)


def _fwd(
    x_RK: Tensor,
    x_q: Quantized | None,
    weight: Tensor,
    bias: Tensor | None,
    groups: Groups,
    call: GroupedCall,
    now: counts.Phase,
    watched: bool,
) -> Tensor:
    """y [R, N]"""
    site = call.site
    gemm = site.recipe.fwd
    each = 2 * weight[0].numel()
    if gemm is None or x_q is None:
        _count(site.name, now.gemm, counts.HIGH, each, groups, now.counted)
        return grouped_high.fwd(x_RK, call.part.of(weight), bias, groups)
    backend = site.selections["fwd"].backend
    w_q = _codes(site, "fwd", weight, call.part, gemm.b)
    if watched:
        _look(site.name, "x", x_RK, x_q, groups)
        for expert, _ in spans(groups) if has_values(weight) else ():
            own = Quantized(w_q.data[expert], w_q.scale[expert], w_q.spec)
            health.operand(site.name, "w", call.part.of(weight)[expert], own)
    _count(site.name, now.gemm, backend.name, each, groups, now.counted)
    return backend.grouped_fwd(x_q, w_q, groups, x_RK.dtype, bias)


def _dgrad(ctx: Any, dy_RN: Tensor, groups: Groups, weight: Tensor, casts: dict[CastSpec, Quantized]) -> Tensor:
    """dx [R, K] in the dtype of x."""
    site, gemm = ctx.site, ctx.site.recipe.dgrad
    each = 2 * weight[0].numel()
    if gemm is None:
        _count_backward(ctx, "dgrad", counts.HIGH, each, groups)
        return grouped_high.dgrad(dy_RN, ctx.part.of(weight), groups)
    dy_q = _cast_dy(ctx, "dgrad", dy_RN, gemm.a, groups, casts)
    w_q = _codes(site, "dgrad", weight, ctx.part, gemm.b)
    backend = site.selections["dgrad"].backend
    if ctx.watched:
        _look(site.name, "dy", dy_RN, dy_q, groups)
    _count_backward(ctx, "dgrad", backend.name, each, groups)
    return backend.grouped_dgrad(dy_q, w_q, groups, ctx.x_dtype)


def _wgrad(ctx: Any, dy_RN: Tensor, groups: Groups, saved: list[Tensor], casts: dict[CastSpec, Quantized]) -> Tensor:
    """dw in the shape and dtype of the parameter."""
    site, gemm = ctx.site, ctx.site.recipe.wgrad
    each = 2 * dy_RN.shape[1] * ctx.inputs
    if gemm is None:
        _count_backward(ctx, "wgrad", counts.HIGH, each, groups)
        dw = grouped_high.wgrad(dy_RN, saved[0], groups, ctx.w_dtype)
    else:
        x_q = Quantized(saved[0], saved[1], ctx.kept_spec)
        dy_q = _cast_dy(ctx, "wgrad", dy_RN, gemm.a, groups, casts)
        backend = site.selections["wgrad"].backend
        _count_backward(ctx, "wgrad", backend.name, each, groups)
        dw = backend.grouped_wgrad(dy_q, x_q, groups, ctx.w_dtype)
        if ctx.watched:
            _look(site.name, "x_wgrad", saved[2], x_q, groups)
            _look(site.name, "dy_wgrad", dy_RN, dy_q, groups)
            for expert, span in spans(groups):
                health.gradient(site.name, dw[expert], dy_RN[span], saved[2][span])
    return dw.mT if ctx.part.transposed else dw


def _cast_dy(
    ctx: Any, gemm: str, dy_RN: Tensor, spec: CastSpec, groups: Groups, casts: dict[CastSpec, Quantized]
) -> Quantized:
    """Each cast of dy once: a recipe may use the same codes in dgrad and wgrad."""
    if spec not in casts:
        backend = ctx.site.selections[gemm].backend
        casts[spec] = backend.quantize_rows(dy_RN, spec, groups, 1 if gemm == "dgrad" else 0)
    return casts[spec]


def _codes(site: Site, gemm: str, weight: Tensor, part: Part, spec: CastSpec) -> Quantized:
    """The codes of the whole parameter, from the cache while they are valid."""
    backend, codes = site.selections[gemm].backend, site.codes
    cast = partial(backend.quantize_experts, contract=1 if gemm == "fwd" or site.shares_weight else 0)
    if codes is None:
        return cast(part.of(weight), spec)
    return codes.get(weight, part, spec, backend, forward=gemm == "fwd", cast=cast)


def _look(layer: str, role: str, x: Tensor, q: Quantized, groups: Groups) -> None:
    """Health figures of each expert with rows; they read values and wait for the device in any case."""
    for expert, span in spans(groups):
        health.operand(layer, role, x[span], of_expert(q, expert, span))


def _count(layer: str, gemm: str, backend: str, each: int, groups: Groups, counted: bool) -> None:
    if counted and counts.counting():
        counts.record_grouped(layer, gemm, backend, each, groups.sizes)


def _count_backward(ctx: Any, gemm: str, backend: str, each: int, groups: Groups) -> None:
    _count(ctx.site.name, gemm, backend, each, groups, ctx.counted)
    if ctx.counted and counts.counting():
        counts.came(ctx.site.name, gemm, ctx.born, groups.experts)


def one_by_one(x: Tensor, groups: Groups, run: Callable[[int, Tensor], Tensor]) -> tuple[Tensor, int]:
    """(``run(expert, its rows)`` of every expert with rows, where the rows lay, zeros in between; how many there were).

    With no row at all the first expert runs on none, so that its weights belong to the graph. Waits for the device.
    """
    found = list(spans(groups)) or [(0, slice(0, 0))]
    parts = []
    for expert, span in found:
        y = run(expert, x[span])
        parts.append(F.pad(y, (0, 0, 0, -y.shape[0] % TILE)))
    y = torch.cat(parts)
    return F.pad(y, (0, 0, 0, groups.rows - y.shape[0])), len(found)
