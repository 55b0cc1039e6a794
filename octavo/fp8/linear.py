"""The linear layer in FP8: three GEMMs, one autograd function.

With x [M, K], w [N, K], dy [M, N] and the casts of a :class:`~octavo.fp8.recipe.Recipe`::

    fwd    y  = x @ w.T (+ bias)     dgrad  dx = dy @ w     wgrad  dw = dy.T @ x,  accumulated in fp32

What a forward keeps for its backward: the FP8 codes and scales of x in wgrad layout, and a reference to the weight.
Nothing in 16 or 32 bits, unless the recipe keeps wgrad itself in high precision. A frozen weight keeps no x; an input
without gradient asks for no dgrad. The weight's codes live in the module's cache (:mod:`octavo.fp8.weights`) and serve
the backward and all micro-steps until the weight changes.

The trade-off against keeping x itself: one more cast in the forward (x along M for wgrad) buys half the memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from octavo.fp8 import health, observe, scaling, traced
from octavo.fp8.cast import CastSpec, Quantized
from octavo.fp8.kernels import ops
from octavo.fp8.kernels.registry import Selection, select
from octavo.fp8.recipe import GEMMS, Recipe
from octavo.fp8.recipe import recipe as named_recipe
from octavo.fp8.weights import HoldsCodes, Part, WeightCodes, is_dtensor


@dataclass(eq=False)
class Site:
    """Where GEMMs run: the name they are counted under, the recipe, the backend of each FP8 GEMM, the weight's codes.

    ``codes`` is None for :func:`linear`, which keeps nothing between calls.
    """

    name: str
    recipe: Recipe
    selections: Mapping[str, Selection]
    codes: WeightCodes | None = field(default_factory=WeightCodes)
    key: str = field(init=False)  # what of this a compiled graph knows, the same text for all layers of a recipe

    def __post_init__(self) -> None:
        self.key = ops.describe(self.recipe, self.selections)

    def __deepcopy__(self, memo: dict[int, Any]) -> Site:
        return Site(self.name, self.recipe, self.selections, None if self.codes is None else WeightCodes())

    @property
    def backend(self) -> Selection:
        """The selection of the first GEMM that runs in FP8."""
        return next(iter(self.selections.values()))

    def cast(self, gemm: str, x: Tensor, spec: CastSpec) -> Quantized:
        return self.selections[gemm].backend.quantize(x, spec)

    def weight(self, gemm: str, owner: Tensor, part: Part, spec: CastSpec) -> Quantized:
        backend = self.selections[gemm].backend
        if self.codes is None:
            return backend.quantize(part.of(owner), spec)
        return self.codes.get(owner, part, spec, backend, forward=gemm == "fwd")


def select_backends(chosen: Recipe, device: torch.device, requested: str = "auto") -> dict[str, Selection]:
    """The backend of each GEMM that the recipe runs in FP8. Raises BackendError where one asked for cannot serve."""
    return {
        gemm: select(gemm, recipe_or_spec=chosen, device=device, requested=requested)
        for gemm in GEMMS
        if chosen.gemm(gemm) is not None
    }


class Call(NamedTuple):
    """What a forward knows besides its tensors."""

    site: Site
    owner: Tensor  # the parameter that holds the weight
    part: Part
    history: scaling.History | None
    record: bool  # enter amaxes into the history
    grad: bool  # gradients are enabled


@torch._disable_dynamo  # what torch.compiler.disable does, without importing torch._dynamo before the first call
def three_gemms(x: Tensor, weight: Tensor, bias: Tensor | None, call: Call) -> Tensor:
    """x [..., K] times weight [N, K] transposed, plus bias [N] -> [..., N], in x's dtype (autocast's under autocast).

    ``torch.compile`` leaves it out in one piece: caches, counters and casts that look at values cannot be traced.
    """
    _check(x, weight, call.site.name)
    if _autocast_enabled(x) and x.dtype != torch.float64:
        x = x.to(torch.get_autocast_dtype(x.device.type))
    return _ThreeGemms.apply(x, weight, bias, call)


class _ThreeGemms(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, call: Call) -> Tensor:
        site, now = call.site, observe.phase()
        x_MK = x.reshape(x.shape[:-1].numel(), x.shape[-1])  # no -1, which is ambiguous in an empty tensor
        needs_x, needs_w, needs_b = (call.grad and n for n in ctx.needs_input_grad[:3])
        watched = health.watching() and now.counted
        with _no_autocast(x):
            y_MN, x_q = _forward_gemm(x_MK, bias, weight, call, now, watched and not now.recompute)
            kept = _keep_x(x_MK, x_q, call, now) if needs_w else None
        if now.counted and observe.counting():
            for gemm, needed in (("dgrad", needs_x), ("wgrad", needs_w)):
                if needed:
                    observe.promise(site.name, gemm, now)
            if not call.grad and not now.recompute:
                observe.gradless(site.name)
        exact = (x_MK,) if watched and needs_w and isinstance(kept, Quantized) else ()
        codes = () if kept is None else (kept.data, kept.scale) if isinstance(kept, Quantized) else (kept,)
        ctx.save_for_backward(*((call.owner,) if needs_x else ()), *codes, *exact)
        ctx.site, ctx.part, ctx.history = site, call.part, call.history
        ctx.record = call.record and now.counted
        ctx.counted, ctx.born, ctx.watched = now.counted, now.gemm, watched
        ctx.needs = (needs_x, needs_w, needs_b)
        ctx.kept_spec = kept.spec if isinstance(kept, Quantized) else None
        ctx.x_shape, ctx.x_dtype, ctx.w_dtype = x.shape, x.dtype, weight.dtype
        ctx.b_dtype = None if bias is None else bias.dtype
        # Not a view in autograd's eyes, as F.linear's output is none: a model may write into it (+=, inplace=True).
        return torch.ops.aten._unsafe_view(y_MN, [*x.shape[:-1], weight.shape[0]])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        needs_x, needs_w, needs_b = ctx.needs
        saved = list(ctx.saved_tensors)
        dy_MN = dy.reshape(dy.shape[:-1].numel(), dy.shape[-1])
        dx = dw = db = None
        casts: dict[CastSpec, Quantized] = {}
        with _no_autocast(dy):
            if needs_x:
                dx = _dgrad(ctx, dy_MN, saved.pop(0), casts)
            if needs_w:
                dw = _wgrad(ctx, dy_MN, saved, casts)
            if needs_b:
                db = dy_MN.sum(0, dtype=torch.float32).to(ctx.b_dtype)
        return dx, dw, db, None


def _forward_gemm(
    x_MK: Tensor, bias: Tensor | None, weight: Tensor, call: Call, now: observe.Phase, watched: bool
) -> tuple[Tensor, Quantized | None]:
    """y [M, N] and the codes of x that it used."""
    site = call.site
    gemm = site.recipe.fwd
    flops = 2 * x_MK.shape[0] * weight.numel()
    if gemm is None:
        _count(site.name, now.gemm, observe.HIGH, flops, now.counted)
        w = weight.to(x_MK.dtype)
        return F.linear(x_MK, w, None if bias is None else bias.to(x_MK.dtype)), None
    backend = site.selections["fwd"].backend
    x_q = _cast_x("fwd", x_MK, gemm.a, call, now)
    w_q = site.weight("fwd", call.owner, call.part, gemm.b)
    if watched:
        health.operand(site.name, "x", x_MK, x_q)
        health.operand(site.name, "w", weight, w_q)
    _count(site.name, now.gemm, backend.name, flops, now.counted)
    return backend.gemm_fwd(x_q, w_q, x_MK.dtype, bias), x_q


def _keep_x(x_MK: Tensor, x_q: Quantized | None, call: Call, now: observe.Phase) -> Quantized | Tensor:
    """x as wgrad wants it: its codes (those of the forward where the cast is the same), or x itself."""
    gemm = call.site.recipe.wgrad
    if gemm is None:
        return x_MK
    if x_q is not None and x_q.spec == gemm.b:
        return x_q
    return _cast_x("wgrad", x_MK, gemm.b, call, now)


def _cast_x(gemm: str, x_MK: Tensor, spec: CastSpec, call: Call, now: observe.Phase) -> Quantized:
    if call.site.recipe.delayed is None or call.history is None:
        return call.site.cast(gemm, x_MK, spec)
    return scaling.quantize_x(x_MK, spec, call.history, call.record and now.counted, now.recompute)


def _cast_dy(ctx: Any, gemm: str, dy_MN: Tensor, spec: CastSpec, casts: dict[CastSpec, Quantized]) -> Quantized:
    """Each cast of dy once: a recipe may use the same codes in dgrad and wgrad."""
    if spec not in casts:
        delayed = ctx.site.recipe.delayed is not None and ctx.history is not None
        casts[spec] = (
            scaling.quantize_dy(dy_MN, spec, ctx.history, ctx.record) if delayed else ctx.site.cast(gemm, dy_MN, spec)
        )
    return casts[spec]


def _dgrad(ctx: Any, dy_MN: Tensor, owner: Tensor, casts: dict[CastSpec, Quantized]) -> Tensor:
    """dx in the shape and dtype of x."""
    site, gemm = ctx.site, ctx.site.recipe.dgrad
    flops = 2 * dy_MN.numel() * ctx.x_shape[-1]
    if gemm is None:
        _count_backward(ctx, "dgrad", observe.HIGH, flops)
        return (dy_MN @ ctx.part.of(owner).to(dy_MN.dtype)).view(ctx.x_shape)
    dy_q = _cast_dy(ctx, "dgrad", dy_MN, gemm.a, casts)
    # Valid codes if the weight is as it was; otherwise (resharded meanwhile) the regathered weight is cast again.
    w_q = site.weight("dgrad", owner, ctx.part, gemm.b)
    backend = site.selections["dgrad"].backend
    if ctx.watched:
        health.operand(site.name, "dy", dy_MN, dy_q)
    _count_backward(ctx, "dgrad", backend.name, flops)
    return backend.gemm_dgrad(dy_q, w_q, ctx.x_dtype).view(ctx.x_shape)


def _wgrad(ctx: Any, dy_MN: Tensor, saved: list[Tensor], casts: dict[CastSpec, Quantized]) -> Tensor:
    """dw [N, K] in the weight's dtype."""
    site, gemm = ctx.site, ctx.site.recipe.wgrad
    flops = 2 * dy_MN.numel() * ctx.x_shape[-1]
    if gemm is None:
        _count_backward(ctx, "wgrad", observe.HIGH, flops)
        return (dy_MN.t() @ saved[0]).to(ctx.w_dtype)
    x_q = Quantized(saved[0], saved[1], ctx.kept_spec)
    dy_q = _cast_dy(ctx, "wgrad", dy_MN, gemm.a, casts)
    backend = site.selections["wgrad"].backend
    _count_backward(ctx, "wgrad", backend.name, flops)
    dw = backend.gemm_wgrad(dy_q, x_q, ctx.w_dtype)
    if ctx.watched:
        health.operand(site.name, "x_wgrad", saved[2], x_q)
        health.operand(site.name, "dy_wgrad", dy_MN, dy_q)
        health.gradient(site.name, dw, dy_MN, saved[2])
    return dw


def _count(layer: str, gemm: str, backend: str, flops: int, counted: bool) -> None:
    if counted and observe.counting():
        observe.record(layer, gemm, backend, flops)


def _count_backward(ctx: Any, gemm: str, backend: str, flops: int) -> None:
    _count(ctx.site.name, gemm, backend, flops, ctx.counted)
    if ctx.counted and observe.counting():
        observe.came(ctx.site.name, gemm, ctx.born)


def _no_autocast(x: Tensor) -> AbstractContextManager[Any]:
    return torch.autocast(x.device.type, enabled=False) if _autocast_enabled(x) else nullcontext()


def _autocast_enabled(x: Tensor) -> bool:
    """False also for devices without autocast, such as meta, where asking is an error."""
    device = x.device.type
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def _check(x: Tensor, weight: Tensor, name: str) -> None:
    if is_dtensor(weight):
        raise RuntimeError(
            f"The weight of {name!r} is a DTensor where its GEMM runs. FP8 layers multiply by plain weights: "
            "under FSDP2 call the "
            "module that fully_shard wrapped, so that its hooks gather the weight first; tensor parallelism is "
            "not supported."
        )
    if x.dim() == 0 or x.shape[-1] != weight.shape[1]:
        raise RuntimeError(
            f"{name!r} multiplies inputs of {weight.shape[1]} features, its weight being {list(weight.shape)}; "
            "found an "
            f"input of shape {list(x.shape)}."
        )


class Linear(HoldsCodes, nn.Linear):
    """An ``nn.Linear`` whose GEMMs run in FP8. Made by :func:`octavo.fp8.apply` out of a stock layer, in place: same
    object, same parameters, hooks and names, so that checkpoints, optimizers and PEFT see nothing new."""

    _site: Site

    @classmethod
    def convert(cls, module: nn.Linear, site: Site) -> Linear:
        """Turn a stock ``nn.Linear`` into an FP8 one, in place. Raises TypeError for anything else."""
        if type(module) is not nn.Linear:
            raise TypeError(
                f"{site.name!r} is a {type(module).__name__}; only a plain torch.nn.Linear can become fp8.Linear."
            )
        if "forward" in module.__dict__:
            raise TypeError(
                f"{site.name!r} has a forward of its own on the instance (an accelerate hook?), which would bypass "
                "FP8. Convert first and hook afterwards, or take the hook off (accelerate's remove_hook_from_module)."
            )
        module.__dict__["_site"] = site  # before the class, whose __setattr__ asks for it
        module.__class__ = cls
        assert isinstance(module, cls)
        module.own_weights()
        if site.recipe.delayed is not None:
            scaling.attach(module, site.recipe.delayed)
        return module

    @property
    def recipe(self) -> Recipe:
        return self._site.recipe

    @property
    def backend(self) -> str:
        return self._site.backend.backend.name

    @property
    def name(self) -> str:
        return self._site.name

    def _weight_codes(self) -> Mapping[str, WeightCodes]:
        codes = self._site.codes
        assert codes is not None
        return {"weight": codes}

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        out = super()._apply(fn, recurse)
        scaling.follow(self)
        return out

    def forward(self, input: Tensor) -> Tensor:
        """input [..., K] -> [..., N]; the argument is named as in ``nn.Linear``, for callers by keyword."""
        site = self._site
        if torch.compiler.is_compiling() and site.recipe.delayed is None:
            return traced.linear(input, self.weight, self.bias, site.key)
        history = scaling.history(self, 0, input.device) if site.recipe.delayed is not None else None
        call = Call(site, self.weight, Part(), history, self.training, torch.is_grad_enabled())
        return three_gemms(input, self.weight, self.bias, call)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, fp8={self.recipe.short()}, backend={self.backend}"


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, recipe: str | Recipe = "blockwise", backend: str = "auto"
) -> Tensor:
    """``torch.nn.functional.linear`` in FP8, differentiable.

    Args:
        x: [..., K], fp32, bf16 or fp16.
        weight: [N, K]. Cast anew in forward and backward: what keeps codes between calls is :class:`Linear`.
        bias: [N] or None.
        recipe: a recipe or its name. ``delayed`` has no history here and scales by the current amax.
        backend: "auto", or the name of the one that must do it.

    Returns:
        [..., N] in the dtype of x, rounded once.

    Raises:
        RecipeError, BackendError: unknown names; a backend that cannot do what was asked.
        RuntimeError: shapes that do not fit.
    """
    chosen = recipe if isinstance(recipe, Recipe) else named_recipe(recipe)
    if weight.dim() != 2 or (bias is not None and bias.shape != weight.shape[:1]):
        found = "" if bias is None else f" and bias {list(bias.shape)}"
        raise RuntimeError(
            f"fp8.linear takes a weight of two dimensions [N, K] and a bias of one [N]; found weight "
            f"{list(weight.shape)}{found}."
        )
    _check(x, weight, "linear")
    site = Site("linear", chosen, select_backends(chosen, x.device, backend), codes=None)
    if torch.compiler.is_compiling():
        return traced.linear(x, weight, bias, site.key)
    return three_gemms(x, weight, bias, Call(site, weight, Part(), None, False, torch.is_grad_enabled()))
