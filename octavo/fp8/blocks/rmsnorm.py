"""RMSNorms that compute FP8 codes of their output for the layers that read it.

The norm of a block feeds layers that cast its output y [M, K]: q, k and v, or gate and up. One kernel computes y and
these codes together, so that y is not read again to cast it::

    forward    rstd = 1 / sqrt(mean(x^2) + eps)     y = x * rstd * weight     codes of y for fwd and wgrad
    backward   n = x * rstd,  g = dy * weight       dx = rstd * (g - n * mean(g * n))      dw = sum over rows of dy * n

Both are computed in fp32, and y is rounded once (Hugging Face's norms also round before multiplying by the weight). y
is returned as usual, and its codes are stored for the next layers
(:func:`octavo.fp8.dense.inputs.store_output_codes`): a layer that is called with y casts nothing, and a layer with
another input or another cast is not affected. Under autocast, y is converted before it is cast.

A forward saves rstd (fp32, one per row), the weight, and x, or only FP8 codes of x if activations are saved in FP8
(:mod:`octavo.fp8.dense.sources`). y is computed from the exact x in both cases; the backward reads the decoded codes. A
norm that saves codes need not feed an FP8 layer: the norms of q and k, and the last norm of a model, can save codes
too.

The names of a block's children determine which norm feeds which layers (:data:`FEEDS`). A norm must reproduce the
output of the stock forward on random input and random weights (:func:`matches_stock`): Gemma's norms, which multiply by
1 + weight, and norms that subtract a mean are not replaced. A norm whose codes are unused twice in a row stops
computing them. Under ``torch.compile`` it is an operator of the graph (:mod:`octavo.fp8.blocks.compiled`).
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from octavo.fp8.arithmetic.cast import CastSpec, Quantized
from octavo.fp8.arithmetic.recipe import Recipe
from octavo.fp8.blocks import compiled
from octavo.fp8.blocks.probe import (
    cache_trial,
    describe_failure,
    make_generator,
    unwrap_adapter,
    why_different,
    why_replaced,
    why_unlike,
    wrong_dtype,
)
from octavo.fp8.dense import inputs, sources
from octavo.fp8.dense.inputs import CastRequest, compute_dtype, without_autocast
from octavo.fp8.dense.linear import Linear
from octavo.fp8.dense.swap import (
    PlannedLayer,
    SwappedModule,
    is_supported_input,
    make_trial_module,
    planned_layer,
    swap,
)
from octavo.fp8.invariance import is_active, kernels_for
from octavo.fp8.kernels.registry import Backend
from octavo.fp8.weights.shards import is_whole

FEEDS = (
    ("input_layernorm", "self_attn", ("q_proj", "k_proj", "v_proj")),
    ("post_attention_layernorm", "mlp", ("gate_proj", "up_proj")),
    ("norm1", "attn", ("qkv",)),
    ("norm2", "mlp", ("gate_proj", "up_proj")),
)
"""(norm, the module after it in a block, the layers of that module that multiply by the norm's output)."""

_POST_NORMS = {"pre_feedforward_layernorm", "post_feedforward_layernorm"}
"""In blocks with one of these, post_attention_layernorm follows attention, and no MLP follows it."""

_EPS_NAMES = ("variance_epsilon", "eps")
_MAX_MISSES = 2  # consecutive calls with unused codes, after which a norm computes no more codes


def convert(model: nn.Module) -> tuple[tuple[str, str | None], ...]:
    """Let the norms before FP8 layers compute their codes. Returns the name of each, and why it does not or None."""
    fp8 = [(name, norm, select_fp8(layers)) for name, norm, layers in norms_and_layers(model)]
    return tuple((name, fuse(norm, layers)) for name, norm, layers in fp8 if layers)


def select_fp8(layers: Sequence[nn.Module]) -> tuple[Linear, ...]:
    return tuple(m for m in layers if isinstance(m, Linear))


def fuse(norm: nn.Module, layers: tuple[Linear, ...], saves: bool = False) -> str | None:
    """Let a norm compute the codes of the FP8 layers that it feeds; ``saves`` makes it save codes of its input. Returns
    why it cannot, or None."""
    reason = why_not(norm, [p for m in layers if (p := planned_layer(m)) is not None])
    if reason is None:
        _swap(norm, layers, saves)
    return reason


def save_as_codes(norm: nn.Module) -> str | None:
    """Let an RMSNorm save FP8 codes of its input. Returns why it cannot, or None."""
    reason = why_not_save(norm)
    if reason is None:
        _swap(norm, (), True)
    return reason


def _swap(norm: nn.Module, layers: tuple[Linear, ...], saves: bool) -> None:
    swap(norm, RmsNorm, _feeds=layers, _eps=_get_eps(norm), _promotes=_promotes_dtype(norm), _misses=0, _saves=saves)


def norms_and_layers(model: nn.Module) -> list[tuple[str, nn.Module, tuple[nn.Linear, ...]]]:
    """Return (name, norm, the linear layers that it feeds) for each norm in :data:`FEEDS`."""
    out = []
    for path, parent in model.named_modules():
        for name, next_module, children in FEEDS:
            norm, parent_of_layers = parent._modules.get(name), parent._modules.get(next_module)
            if (
                norm is None
                or parent_of_layers is None
                or (name == "post_attention_layernorm" and _POST_NORMS & set(parent._modules))
            ):
                continue
            layers = tuple(
                m
                for child in children
                if isinstance(m := unwrap_adapter(parent_of_layers._modules.get(child)), nn.Linear)
            )
            if layers:
                out.append((f"{path}.{name}" if path else name, norm, layers))
    return out


def why_not(norm: nn.Module, layers: Sequence[PlannedLayer]) -> str | None:
    """Return why this norm cannot compute the codes of these FP8 layers, or None if it can."""
    return _why_not_structure(norm) or _why_not_next(layers) or matches_stock(norm)


def why_not_save(norm: nn.Module) -> str | None:
    """Return why this norm cannot save FP8 codes of its input as an RMSNorm, or None if it can."""
    return _why_not_structure(norm) or matches_stock(norm)


def _why_not_structure(norm: nn.Module) -> str | None:
    if (reason := why_replaced(norm)) is not None:
        return reason
    members = [n for n, p in norm._parameters.items() if p is not None] + list(norm._modules) + list(norm._buffers)
    weight = norm._parameters.get("weight")
    if members != ["weight"] or weight is None or weight.dim() != 1:
        return f"{type(norm).__name__} has {', '.join(members) or 'nothing'}; an RMSNorm has only a weight [K]"
    if not is_whole(weight):
        return "its weight is already sharded (apply the plan before fully_shard)"
    if _get_eps(norm) is None:
        return f"{type(norm).__name__} has no float attribute {' or '.join(_EPS_NAMES)}"
    return None


def _why_not_next(layers: Sequence[PlannedLayer]) -> str | None:
    recipes = [p.recipe for p in layers if p.recipe is not None]
    if any(r.delayed is not None for r in recipes):
        return "delayed scaling casts by a history of each layer"
    layer_casts = [
        (_input_specs(r), [p.backends.get(g) for g in ("fwd", "wgrad")]) for p, r in zip(layers, recipes, strict=True)
    ]
    if any(w != layer_casts[0] for w in layer_casts):
        return "the layers after it have different casts"
    if layer_casts[0][0] == (None, None):
        return "the layers after it cast nothing"
    return None


def _get_eps(norm: nn.Module) -> float | None:
    return next((v for name in _EPS_NAMES if isinstance(v := getattr(norm, name, None), float)), None)


def _input_specs(recipe: Recipe) -> tuple[CastSpec | None, CastSpec | None]:
    """Return the casts of x for fwd and for wgrad."""
    fwd, wgrad = recipe.fwd, recipe.wgrad
    return None if fwd is None else fwd.a, None if wgrad is None else wgrad.b


@cache_trial
def matches_stock(norm: nn.Module) -> str | None:
    """Run the stock forward on random input and weights in the weight's dtype, and return why it is not an RMSNorm, or
    None if it is.

    Relative tolerance for each element: two epsilons of the dtype, because the stock module rounds twice and this
    module once, but at least 16 fp32 epsilons, because sums are computed in another order.
    """
    weight = norm._parameters["weight"]
    eps = _get_eps(norm)
    assert weight is not None and eps is not None
    if (reason := wrong_dtype("its weight is", (weight,))) is not None:
        return reason
    generator = make_generator()
    random_weight = torch.randn(weight.shape, generator=generator, device="cpu").to(weight.dtype)
    # Rows with a nonzero mean and with magnitudes down to those for which eps matters.
    x = torch.randn(12, weight.shape[0], generator=generator, device="cpu") + 0.5
    x = (x * 10.0 ** torch.arange(-5.0, 1.0, 0.5, device="cpu").unsqueeze(1)).to(weight.dtype)
    try:
        stock = _run_stock(norm, random_weight, x)
    except Exception as error:  # an unknown forward may raise any error
        return describe_failure("a matrix", error)
    if (reason := why_unlike(stock, x)) is not None:
        return reason
    wide = x.float()
    ours = (wide * torch.rsqrt(wide.square().mean(1, keepdim=True) + eps) * random_weight.float()).to(x.dtype)
    allowed = max(2 * torch.finfo(x.dtype).eps, 16 * torch.finfo(torch.float32).eps) * stock.float().abs()
    allowed = allowed + torch.finfo(x.dtype).tiny
    reason = why_different(stock, ours, allowed, f"the output of {type(norm).__name__} is not x / rms(x) * weight")
    return None if reason is None else f"{reason} (Gemma's norms multiply by 1 + weight)"


def _run_stock(norm: nn.Module, weight: Tensor, x: Tensor) -> Tensor:
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        return type(norm).forward(make_trial_module(norm, {**norm._parameters, "weight": nn.Parameter(weight)}, {}), x)


def _promotes_dtype(norm: nn.Module) -> bool:
    """True if a 16-bit input and an fp32 weight give an fp32 output, as in ``weight * x.to(input_dtype)``."""
    weight = norm._parameters["weight"]
    assert weight is not None
    x = torch.ones(1, weight.shape[0], dtype=torch.bfloat16, device="cpu")
    return _run_stock(norm, torch.ones(weight.shape[0]), x).dtype == torch.float32


class RmsNorm(SwappedModule):
    """An RMSNorm that computes codes for other layers, or saves codes of its input; see the module docstring."""

    _feeds: tuple[Linear, ...]
    _eps: float
    _promotes: bool
    _misses: int
    _saves: bool
    attributes = ("_feeds", "_eps", "_promotes", "_misses", "_saves", "_taken")
    transient_attributes = ("_taken",)

    def replacement_forward(self, x: Tensor) -> Tensor | None:
        weight = self._parameters.get("weight")
        if weight is None or not is_whole(weight) or not is_supported_input(x):
            return None
        if weight.device != x.device or x.shape[-1] != weight.shape[0]:
            return None
        if x.dtype not in sources.DTYPES or weight.dtype not in sources.DTYPES:
            return None
        if kernels_for(x) is not None and is_active():
            return None  # its sums depend on the requested codes, and so on whether it trains
        # A layer that is currently not in FP8 (fp8.high_precision) also needs the stock norm before it.
        layers = [m for m in self._feeds if isinstance(m, Linear) and m._site.x != (None, None)]
        if not layers and not self._saves:
            return None
        out = torch.promote_types(x.dtype, weight.dtype) if self._promotes else x.dtype
        if layers:
            backend, (row, col) = (
                sources.select_fused_backend("rmsnorm", layers[0]._site, x.device),
                self._select_casts(layers),
            )
        else:
            backend, row, col = sources.select_backend("rmsnorm", sources.SPEC, x.device), None, None
        saves = self._saves and torch.is_grad_enabled()
        call = _NormArgs(self._eps, row, col, backend, out, _next_dtype(x, out), saves, [])
        y = _RmsNorm.apply(x, weight, call)
        if call.codes:
            self.__dict__["_taken"] = inputs.store_output_codes(
                y, call.low, (call.row, call.col), (call.codes[0], call.codes[1])
            )
        return y

    def traced_forward(self, x: Tensor) -> Tensor | None:
        """Return y with codes for the layers after it; a graph cannot check whether the codes are used."""
        layers = [m for m in self._feeds if isinstance(m, Linear) and not m._fp8_param]
        weight: Tensor = self.weight  # type: ignore[assignment]
        if self._saves or not layers or layers[0]._site.x == (None, None) or not x.dim() or not x.numel():
            return None
        if x.shape[-1] != weight.shape[0] or not {x.dtype, weight.dtype} <= set(sources.DTYPES):
            return None
        out = torch.promote_types(x.dtype, weight.dtype) if self._promotes else x.dtype
        needs_wgrad = torch.is_grad_enabled() and any(m.weight.requires_grad for m in layers)
        return compiled.rmsnorm(x, weight, self._eps, layers[0]._site.key, out, needs_wgrad)

    def _select_casts(self, layers: list[Linear]) -> tuple[CastRequest | None, CastRequest | None]:
        """Return the casts to compute in this call: none in inference mode, where layers could not find them, nor if
        layers did not use them before."""
        users: Container[int] | None = self.__dict__.pop("_taken", None)
        if users is not None:
            self.__dict__["_misses"] = 0 if users else self._misses + 1
        if self._misses >= _MAX_MISSES or torch.is_inference_mode_enabled():
            return None, None
        row, col = layers[0]._site.x
        needs_wgrad = torch.is_grad_enabled() and any(m.weight.requires_grad for m in layers)
        return row, col if needs_wgrad else None


def _next_dtype(x: Tensor, out: torch.dtype) -> torch.dtype:
    """Return the dtype to which the next layers convert an output of dtype ``out``."""
    return compute_dtype(x if x.dtype == out else x.new_empty(0, dtype=out))


class _NormArgs(NamedTuple):
    eps: float
    row: CastRequest | None
    col: CastRequest | None
    backend: Backend
    out: torch.dtype
    low: torch.dtype
    saves: bool
    codes: list[Quantized | None]  # under ``row`` and ``col``; the forward appends them


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, call: _NormArgs) -> Tensor:
        row, col = (None if want is None else want.spec for want in (call.row, call.col))
        with without_autocast(x):
            x_MK = x.detach().reshape(-1, x.shape[-1])
            y_MK, rstd_M, *codes = call.backend.rmsnorm_quantize(x_MK, weight, call.eps, row, col, call.out, call.low)
            saved = sources.encode_activation(x_MK) if call.saves and any(ctx.needs_input_grad) else None
        if (row, col) != (None, None):
            call.codes.extend(codes)
        ctx.x_shape, ctx.x_dtype, ctx.backend = x.shape, x.dtype, call.backend
        sources.save_named(ctx, x=x if saved is None else saved, weight=weight, rstd=rstd_M)
        # Autograd must not see a view: a model may write into the output, as into the stock norm's.
        return torch.ops.aten._unsafe_view(y_MK, list(x.shape))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, rstd_M = sources.load_saved(ctx).values()
        needs_x, needs_w = ctx.needs_input_grad[:2]
        with without_autocast(dy):
            dy_MK = dy.reshape(-1, dy.shape[-1])
            x_MK = sources.decode_if_quantized(x, torch.float32).reshape(dy_MK.shape)
            dx, dw = ctx.backend.rmsnorm_backward(dy_MK, x_MK, weight, rstd_M, needs_x, needs_w)
            dx = None if dx is None else dx.view(ctx.x_shape).to(ctx.x_dtype)
        return dx, dw, None
