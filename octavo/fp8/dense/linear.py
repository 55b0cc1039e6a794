"""The linear layer in FP8: three GEMMs, one autograd function.

With x [M, K], w [N, K], dy [M, N] and the casts of a :class:`~octavo.fp8.arithmetic.recipe.Recipe`::

    fwd    y  = x @ w.T (+ bias)     dgrad  dx = dy @ w     wgrad  dw = dy.T @ x,  accumulated in fp32

What a forward keeps for its backward: the FP8 codes and scales of x in wgrad layout, and a reference to the weight.
Nothing in 16 or 32 bits, unless the recipe keeps wgrad itself in high precision. Where the backward can get x again
(:class:`octavo.fp8.dense.sources.Source`) not even that: x is cast for wgrad there, to the same codes. A frozen weight
keeps no x; an input without gradient asks for no dgrad. The weight's codes live in the module's cache
(:mod:`octavo.fp8.weights.cache`) and serve the backward and all micro-steps until the weight changes.

The trade-off against keeping x itself: one more cast in the forward (x along M for wgrad) buys half the memory. Where
x or dy is cast twice, both casts are asked of the backend at once, which may read the tensor once; layers that multiply
the same x share its codes (:mod:`octavo.fp8.dense.inputs`), and sisters may run as one GEMM
(:mod:`octavo.fp8.fusion`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from octavo.fp8.arithmetic.cast import Quantized
from octavo.fp8.arithmetic.recipe import Recipe
from octavo.fp8.arithmetic.recipe import recipe as named_recipe
from octavo.fp8.blocks import attention_output
from octavo.fp8.dense import compiled, delayed
from octavo.fp8.dense.casts import Want, _no_autocast, cast_both, compute_dtype, transformed
from octavo.fp8.dense.gemms import Site, select_backends
from octavo.fp8.dense.inputs import Input
from octavo.fp8.dense.sources import Source, source_of
from octavo.fp8.observe import counts, health
from octavo.fp8.weights import cache
from octavo.fp8.weights.cache import HoldsCodes, Part, WeightCodes
from octavo.fp8.weights.fp8_tensor import Fp8Weight
from octavo.fp8.weights.shards import is_whole


class Call(NamedTuple):
    """What a forward knows besides its tensors."""

    site: Site
    owner: Tensor  # the parameter that holds the weight
    part: Part
    history: delayed.History | None
    record: bool  # enter amaxes into the history
    grad: bool  # gradients are enabled
    source: Source | None = None  # how the backward gets x again, where it need not be kept


@torch._disable_dynamo  # what torch.compiler.disable does, without importing torch._dynamo before the first call
def three_gemms(x: Tensor, weight: Tensor, bias: Tensor | None, call: Call) -> Tensor:
    """x [..., K] times weight [N, K] transposed, plus bias [N] -> [..., N], in x's dtype (autocast's under autocast).

    ``torch.compile`` leaves it out in one piece: caches, counters and casts that look at values cannot be traced. What
    it does trace is :mod:`octavo.fp8.dense.compiled`; only layers with delayed scaling come here from compiled code.
    """
    _check(x, weight, call.site.name)
    return _ThreeGemms.apply(x, weight, bias, call)


class _ThreeGemms(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, call: Call) -> Tensor:
        site, now = call.site, counts.phase()
        given = Input(x, compute_dtype(x), None if site.codes is None else site)
        needs_x, needs_w, needs_b = (call.grad and n for n in ctx.needs_input_grad[:3])
        watched = health.watching() and now.counted
        with _no_autocast(x):
            x_q, kept = _codes_of_x(given, call, now, needs_w)
            y_MN, w_q = _forward_gemm(given, x_q, weight, bias, call, now, watched and not now.recompute)
        if now.counted and counts.counting():
            for gemm, needed in (("dgrad", needs_x), ("wgrad", needs_w)):
                if needed:
                    counts.promise(site.name, gemm, now)
            if not call.grad and not now.recompute:
                counts.gradless(site.name)
        # Weights cast inside a graph capture are in no cache, but they are this backward's.
        inside = needs_x and w_q is not None and site.shares_weight and cache.capturing(x)
        source = call.source if needs_w else None
        exact = (given.matrix(),) if watched and needs_w and isinstance(kept, Quantized) and source is None else ()
        of_x = _tensors(kept) if source is None else (*source.tensors, *_tensors(kept)[1:])  # delayed: with its scale
        ctx.save_for_backward(*((call.owner,) if needs_x else ()), *(_tensors(w_q) if inside else ()), *of_x, *exact)
        ctx.remake = None if source is None else (source.remake, len(source.tensors))
        ctx.site, ctx.part, ctx.history = site, call.part, call.history
        ctx.record = call.record and now.counted
        ctx.counted, ctx.born, ctx.watched = now.counted, now.gemm, watched
        ctx.needs, ctx.inside, ctx.forget_input = (needs_x, needs_w, needs_b), inside, given.forgetter()
        ctx.kept_spec = None if site.recipe.wgrad is None else site.recipe.wgrad.b
        ctx.x_shape, ctx.x_dtype, ctx.compute_dtype, ctx.w_dtype = x.shape, x.dtype, given.dtype, weight.dtype
        ctx.b_dtype = None if bias is None else bias.dtype
        # Not a view in autograd's eyes, as F.linear's output is none: a model may write into it (+=, inplace=True).
        return torch.ops.aten._unsafe_view(y_MN, [*x.shape[:-1], weight.shape[0]])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        ctx.forget_input()
        needs_x, needs_w, needs_b = ctx.needs
        saved = list(ctx.saved_tensors)
        dy_MN = dy.reshape(dy.shape[:-1].numel(), dy.shape[-1])
        dx = dw = db = None
        with _no_autocast(dy):
            dy_row, dy_col = _codes_of_dy(ctx, dy_MN, needs_x, needs_w)
            if needs_x:
                owner, w_q = saved.pop(0), None
                if ctx.inside:
                    w_q = Quantized(saved.pop(0), saved.pop(0), ctx.site.recipe.dgrad.b)
                dx = _dgrad(ctx, dy_MN, dy_row, owner, w_q)
            if needs_w:
                dw = _wgrad(ctx, dy_MN, dy_col, saved if ctx.remake is None else _again(ctx, saved))
            if needs_b:
                db = dy_MN.sum(0, dtype=torch.float32).to(ctx.b_dtype)
        return dx, dw, db, None


def _tensors(kept: Quantized | Tensor | None) -> tuple[Tensor, ...]:
    if isinstance(kept, Quantized):
        return kept.data, kept.scale
    return () if kept is None else (kept,)


def _codes_of_x(
    x: Input, call: Call, now: counts.Phase, needs_w: bool
) -> tuple[Quantized | None, Quantized | Tensor | None]:
    """x as fwd wants it, and as wgrad does: the same codes where the cast is the same, x itself in high precision.

    Where the backward has a source of x, there is nothing for wgrad but codes under delayed scaling, for their scale.
    """
    recipe, history = call.site.recipe, call.history
    needs_w = needs_w and (call.source is None or (recipe.delayed is not None and recipe.wgrad is not None))
    fwd = None if recipe.fwd is None else recipe.fwd.a
    wgrad = recipe.wgrad.b if needs_w and recipe.wgrad is not None else None
    row = None if fwd is None else call.site.want("fwd", fwd)
    col = None if wgrad is None or wgrad == fwd else call.site.want("wgrad", wgrad)
    if recipe.delayed is not None and history is not None:

        def cast(want: Want, contract: int) -> Quantized:
            record = call.record and now.counted
            return delayed.quantize_x(x.matrix(), want, contract, history, record=record, recompute=now.recompute)

        x_row = None if row is None else cast(row, 1)
        x_col = None if col is None else cast(col, 0)
    else:
        x_row, x_col = x.codes(row, col)
    if needs_w and recipe.wgrad is None:
        return x_row, x.high()
    return x_row, x_row if wgrad is not None and wgrad == fwd else x_col


def _again(ctx: Any, saved: list[Tensor]) -> list[Tensor]:
    """What the forward would have kept of x, made again, and x: [codes, scales, x], or [x] in high precision."""
    (remake, count), gemm = ctx.remake, ctx.site.recipe.wgrad
    x_MK = remake(*saved[:count]).to(ctx.compute_dtype).reshape(ctx.x_shape[:-1].numel(), ctx.x_shape[-1])
    if gemm is None:
        return [x_MK]
    backend = ctx.site.selections["wgrad"].backend
    if len(saved) > count:
        x_q = backend.quantize_with_scale(x_MK, saved[count], gemm.b, contract=0)
    else:
        x_q = backend.quantize(x_MK, gemm.b, 0)
    return [x_q.data, x_q.scale, x_MK]


def _codes_of_dy(ctx: Any, dy_MN: Tensor, needs_x: bool, needs_w: bool) -> tuple[Quantized | None, Quantized | None]:
    """dy as dgrad wants it and as wgrad does; each cast once."""
    site, recipe = ctx.site, ctx.site.recipe
    row = site.want("dgrad", recipe.dgrad.a) if needs_x and recipe.dgrad is not None else None
    col = site.want("wgrad", recipe.wgrad.a) if needs_w and recipe.wgrad is not None else None
    same = row is not None and col is not None and row.spec == col.spec
    if recipe.delayed is not None and ctx.history is not None:

        def cast(want: Want, contract: int) -> Quantized:
            return delayed.quantize_dy(dy_MN, want, contract, ctx.history, ctx.record)

    else:
        if row is not None and col is not None and not same:
            return cast_both(dy_MN, row, col)

        def cast(want: Want, contract: int) -> Quantized:
            return want.backend.quantize(dy_MN, want.spec, contract)

    dy_row = None if row is None else cast(row, 1)
    return dy_row, dy_row if same else None if col is None else cast(col, 0)


def _forward_gemm(
    x: Input,
    x_q: Quantized | None,
    weight: Tensor,
    bias: Tensor | None,
    call: Call,
    now: counts.Phase,
    watched: bool,
) -> tuple[Tensor, Quantized | None]:
    """y [M, N], and the codes of w that it used."""
    site, gemm = call.site, call.site.recipe.fwd
    flops = 2 * x.rows * weight.numel()
    if gemm is None or x_q is None:
        _count(site.name, now.gemm, counts.HIGH, flops, now.counted)
        w_high = call.part.of(call.owner).to(x.dtype)
        return F.linear(x.high(), w_high, None if bias is None else bias.to(x.dtype)), None
    backend = site.selections["fwd"].backend
    w_q = site.weight("fwd", call.owner, call.part, gemm.b)
    if watched:
        health.operand(site.name, "x", x.matrix(), x_q)
        if cache.has_values(weight):
            health.operand(site.name, "w", weight, w_q)
    _count(site.name, now.gemm, backend.name, flops, now.counted)
    return backend.gemm_fwd(x_q, w_q, x.dtype, bias), w_q


def _dgrad(ctx: Any, dy_MN: Tensor, dy_q: Quantized | None, owner: Tensor, w_q: Quantized | None) -> Tensor:
    """dx in the shape and dtype of x. ``w_q``: the codes of w where the forward kept them."""
    site, gemm = ctx.site, ctx.site.recipe.dgrad
    flops = 2 * dy_MN.numel() * ctx.x_shape[-1]
    if gemm is None or dy_q is None:
        _count_backward(ctx, "dgrad", counts.HIGH, flops)
        return (dy_MN @ ctx.part.of(owner).to(dy_MN.dtype)).view(ctx.x_shape).to(ctx.x_dtype)
    if w_q is None:
        # Valid codes if the weight is as it was; otherwise (resharded meanwhile) the regathered weight is cast again.
        w_q = site.weight("dgrad", owner, ctx.part, gemm.b)
    backend = site.selections["dgrad"].backend
    if ctx.watched:
        health.operand(site.name, "dy", dy_MN, dy_q)
    _count_backward(ctx, "dgrad", backend.name, flops)
    # Rounded to the dtype of the GEMMs first, as the gradient of autocast's copy would be.
    return backend.gemm_dgrad(dy_q, w_q, ctx.compute_dtype).view(ctx.x_shape).to(ctx.x_dtype)


def _wgrad(ctx: Any, dy_MN: Tensor, dy_q: Quantized | None, saved: list[Tensor]) -> Tensor:
    """dw [N, K] in the weight's dtype."""
    site, gemm = ctx.site, ctx.site.recipe.wgrad
    flops = 2 * dy_MN.numel() * ctx.x_shape[-1]
    if gemm is None or dy_q is None:
        _count_backward(ctx, "wgrad", counts.HIGH, flops)
        return (dy_MN.t() @ saved[0]).to(ctx.w_dtype)
    x_q = Quantized(saved[0], saved[1], ctx.kept_spec)
    backend = site.selections["wgrad"].backend
    _count_backward(ctx, "wgrad", backend.name, flops)
    dw = backend.gemm_wgrad(dy_q, x_q, ctx.w_dtype)
    if ctx.watched:
        health.operand(site.name, "x_wgrad", saved[2], x_q)
        health.operand(site.name, "dy_wgrad", dy_MN, dy_q)
        health.gradient(site.name, dw, dy_MN, saved[2])
    return dw


def _count(layer: str, gemm: str, backend: str, flops: int, counted: bool) -> None:
    if counted and counts.counting():
        counts.record(layer, gemm, backend, flops)


def _count_backward(ctx: Any, gemm: str, backend: str, flops: int) -> None:
    _count(ctx.site.name, gemm, backend, flops, ctx.counted)
    if ctx.counted and counts.counting():
        counts.came(ctx.site.name, gemm, ctx.born)


def _check(x: Tensor, weight: Tensor, name: str) -> None:
    if transformed():
        raise RuntimeError(
            f"{name!r} was called under a transform of torch.func (grad, vmap, jvp, ...), and FP8 layers are "
            "differentiated by torch.autograd alone. Use loss.backward() or torch.autograd.grad, or call the model "
            "inside fp8.high_precision(model)."
        )
    if not is_whole(weight):
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
    _fp8_param = False  # whether its weight is an Fp8Weight
    _group: Any  # octavo.fp8.fusion.Group, where the layer has one

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
        module.__dict__["_fp8_param"] = isinstance(module.weight, Fp8Weight)
        module.__class__ = cls
        assert isinstance(module, cls)
        module.own_weights()
        if site.recipe.delayed is not None:
            delayed.attach(module, site.recipe.delayed)
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
        delayed.follow(self)
        return out

    def forward(self, input: Tensor) -> Tensor:
        """input [..., K] -> [..., N]; the argument is named as in ``nn.Linear``, for callers by keyword."""
        site = self._site
        if torch.compiler.is_compiling():
            if site.recipe.delayed is None and not self._fp8_param:
                return compiled.linear(input, self.weight, self.bias, site.key)
            if self._fp8_param:
                compiled.leave_weight()
                return self._apart(input)
            compiled.leave()
        group = self.__dict__.get("_group")
        if group is not None:
            y = group.output(self, input)
            if y is not None:
                return y
        history = delayed.history(self, 0, input.device) if site.recipe.delayed is not None else None
        source = source_of(input) or attention_output.source(self, input, compute_dtype(input))
        call = Call(site, self.weight, Part(), history, self.training, torch.is_grad_enabled(), source)
        return three_gemms(input, self.weight, self.bias, call)

    @torch._disable_dynamo
    def _apart(self, input: Tensor) -> Tensor:
        """The forward outside a compiled graph, which cannot even look at an FP8 weight."""
        return self.forward(input)

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
    if torch.compiler.is_compiling():
        return compiled.linear(x, weight, bias, compiled.key(compiled.casts_of(chosen), str(x.device), backend))
    site = Site("linear", chosen, select_backends(chosen, x.device, backend), codes=None)
    return three_gemms(x, weight, bias, Call(site, weight, Part(), None, False, torch.is_grad_enabled()))
