"""RMSNorms that pass their codes to the FP8 layers that read their output.

A block's norm feeds layers that cast its output y [M, K] at once: q, k and v; gate and up. One kernel can compute y and
those codes together, so that y is not read again for them::

    forward    rstd = 1 / sqrt(mean(x^2) + eps)     y = x * rstd * weight     codes of y for fwd and wgrad
    backward   n = x * rstd,  g = dy * weight       dx = rstd * (g - n * mean(g * n))      dw = sum over rows of dy * n

both in fp32, y rounded once (Hugging Face's norms round before the weight as well). y is returned as ever, and its
codes are left for the layers to find (:func:`octavo.fp8.dense.inputs.store_output_codes`): a layer that is called with
y casts nothing, and one with another input or another cast computes as without this. Under autocast y is lowered before
it is cast. What a forward keeps is rstd (fp32, one a row), the weight, and x; of x only FP8 codes where activations are
to be saved so (:mod:`octavo.fp8.dense.sources`): then y comes from x as ever, and the backward reads the decoded codes.
A norm that saves need not feed an FP8 layer: the norms of q and k, and the last one of a model, save as well.

Which norm feeds which layers is known by the names of a block's children (:data:`FEEDS`). A norm must give the stock
forward's output on random input and random weights first (:func:`matches_stock`): Gemma's, which multiply by 1 +
weight, and norms that subtract a mean stay as they are. A norm whose codes are not used twice in a row stops
making them. Under ``torch.compile`` it is an operator of the graph (:mod:`octavo.fp8.blocks.compiled`).
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
"""(norm, its neighbour in a block, the layers of that neighbour which multiply the norm's output)."""

_POST_NORMS = {"pre_feedforward_layernorm", "post_feedforward_layernorm"}
"""In blocks with one of these, post_attention_layernorm follows attention, as its name says, and no MLP follows it."""

_EPS_NAMES = ("variance_epsilon", "eps")
_MAX_MISSES = 2  # in a row, after which a norm makes no more codes


def convert(model: nn.Module) -> tuple[tuple[str, str | None], ...]:
    """Let the norms before FP8 layers make their codes; returns (name, the reason against it or None) of each."""
    fp8 = [(name, norm, select_fp8(layers)) for name, norm, layers in norms_and_layers(model)]
    return tuple((name, fuse(norm, layers)) for name, norm, layers in fp8 if layers)


def select_fp8(layers: Sequence[nn.Module]) -> tuple[Linear, ...]:
    return tuple(m for m in layers if isinstance(m, Linear))


def fuse(norm: nn.Module, layers: tuple[Linear, ...], saves: bool = False) -> str | None:
    """Let a norm make the codes of the FP8 layers that it feeds (and keep codes of its input, with ``saves``); returns
    the reason against it, if there is one."""
    reason = why_not(norm, [p for m in layers if (p := planned_layer(m)) is not None])
    if reason is None:
        _swap(norm, layers, saves)
    return reason


def save_as_codes(norm: nn.Module) -> str | None:
    """Let an RMSNorm keep FP8 codes of its input; returns the reason against it, if there is one."""
    reason = why_not_save(norm)
    if reason is None:
        _swap(norm, (), True)
    return reason


def _swap(norm: nn.Module, layers: tuple[Linear, ...], saves: bool) -> None:
    swap(norm, RmsNorm, _feeds=layers, _eps=_get_eps(norm), _promotes=_promotes_dtype(norm), _misses=0, _saves=saves)


def norms_and_layers(model: nn.Module) -> list[tuple[str, nn.Module, tuple[nn.Linear, ...]]]:
    """(name, norm, the linear layers that it feeds) of every known block that has any."""
    out = []
    for path, parent in model.named_modules():
        for name, neighbour, children in FEEDS:
            norm, holder = parent._modules.get(name), parent._modules.get(neighbour)
            if (
                norm is None
                or holder is None
                or (name == "post_attention_layernorm" and _POST_NORMS & set(parent._modules))
            ):
                continue
            layers = tuple(
                m for child in children if isinstance(m := unwrap_adapter(holder._modules.get(child)), nn.Linear)
            )
            if layers:
                out.append((f"{path}.{name}" if path else name, norm, layers))
    return out


def why_not(norm: nn.Module, layers: Sequence[PlannedLayer]) -> str | None:
    """Why this norm cannot make the codes of these FP8 layers, None if it can."""
    return _why_not_structure(norm) or _why_not_next(layers) or matches_stock(norm)


def why_not_save(norm: nn.Module) -> str | None:
    """Why this norm cannot keep FP8 codes of its input as an RMSNorm, None if it can."""
    return _why_not_structure(norm) or matches_stock(norm)


def _why_not_structure(norm: nn.Module) -> str | None:
    if (reason := why_replaced(norm)) is not None:
        return reason
    held = [n for n, p in norm._parameters.items() if p is not None] + list(norm._modules) + list(norm._buffers)
    weight = norm._parameters.get("weight")
    if held != ["weight"] or weight is None or weight.dim() != 1:
        return f"{type(norm).__name__} holds {', '.join(held) or 'nothing'}, an RMSNorm one weight [K]"
    if not is_whole(weight):
        return "its weight is sharded already (apply the plan before fully_shard)"
    if _get_eps(norm) is None:
        return f"{type(norm).__name__} has no number named {' or '.join(_EPS_NAMES)}"
    return None


def _why_not_next(layers: Sequence[PlannedLayer]) -> str | None:
    recipes = [p.recipe for p in layers if p.recipe is not None]
    if any(r.delayed is not None for r in recipes):
        return "delayed scaling casts by a history of each layer"
    wanted = [
        (_input_specs(r), [p.backends.get(g) for g in ("fwd", "wgrad")]) for p, r in zip(layers, recipes, strict=True)
    ]
    if any(w != wanted[0] for w in wanted):
        return "the layers after it want different casts"
    if wanted[0][0] == (None, None):
        return "the layers after it cast nothing"
    return None


def _get_eps(norm: nn.Module) -> float | None:
    return next((v for name in _EPS_NAMES if isinstance(v := getattr(norm, name, None), float)), None)


def _input_specs(recipe: Recipe) -> tuple[CastSpec | None, CastSpec | None]:
    """The casts of x that a layer asks for, of fwd and of wgrad."""
    fwd, wgrad = recipe.fwd, recipe.wgrad
    return None if fwd is None else fwd.a, None if wgrad is None else wgrad.b


@cache_trial
def matches_stock(norm: nn.Module) -> str | None:
    """Run the stock forward on random input and weights in the weight's dtype: None if it is an RMSNorm, else why not.

    Tolerance, element by element: two epsilons of the dtype of the stock module's value (it rounds twice, we once), and
    never less than 16 of fp32, whose sums are taken in another order.
    """
    weight = norm._parameters["weight"]
    eps = _get_eps(norm)
    assert weight is not None and eps is not None
    if (reason := wrong_dtype("its weight is", (weight,))) is not None:
        return reason
    generator = make_generator()
    random_weight = torch.randn(weight.shape, generator=generator, device="cpu").to(weight.dtype)
    # Rows with a mean, rows of all sizes, among them those in which eps counts.
    x = torch.randn(12, weight.shape[0], generator=generator, device="cpu") + 0.5
    x = (x * 10.0 ** torch.arange(-5.0, 1.0, 0.5, device="cpu").unsqueeze(1)).to(weight.dtype)
    try:
        stock = _run_stock(norm, random_weight, x)
    except Exception as error:  # a forward that is not known may fail in any way
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
    """Whether an input in 16 bits and a weight in fp32 give fp32, as in ``weight * x.to(input_dtype)``."""
    weight = norm._parameters["weight"]
    assert weight is not None
    x = torch.ones(1, weight.shape[0], dtype=torch.bfloat16, device="cpu")
    return _run_stock(norm, torch.ones(weight.shape[0]), x).dtype == torch.float32


class RmsNorm(SwappedModule):
    """The forward of an RMSNorm that leaves codes for other layers, or keeps codes of its input; see the module."""

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
            return None  # whose sums follow from the codes that are wanted, and so from whether it trains
        # An FP8 layer that is one no longer (fp8.high_precision) wants the stock norm before it, too.
        layers = [m for m in self._feeds if isinstance(m, Linear) and m._site.x != (None, None)]
        if not layers and not self._saves:
            return None
        out = torch.promote_types(x.dtype, weight.dtype) if self._promotes else x.dtype
        if layers:
            backend, (row, col) = (
                sources.select_fused_backend("rmsnorm", layers[0]._site, x.device),
                self._wanted(layers),
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
        """Codes are made wherever a later layer asks for them: a graph cannot look whether they were taken."""
        layers = [m for m in self._feeds if isinstance(m, Linear) and not m._fp8_param]
        weight: Tensor = self.weight  # type: ignore[assignment]
        if self._saves or not layers or layers[0]._site.x == (None, None) or not x.dim() or not x.numel():
            return None
        if x.shape[-1] != weight.shape[0] or not {x.dtype, weight.dtype} <= set(sources.DTYPES):
            return None
        out = torch.promote_types(x.dtype, weight.dtype) if self._promotes else x.dtype
        trains = torch.is_grad_enabled() and any(m.weight.requires_grad for m in layers)
        return compiled.rmsnorm(x, weight, self._eps, layers[0]._site.key, out, trains)

    def _wanted(self, layers: list[Linear]) -> tuple[CastRequest | None, CastRequest | None]:
        """The casts to make now: none in inference mode, where they could not be found again, nor if they were left
        lying before."""
        taken: Container[int] | None = self.__dict__.pop("_taken", None)
        if taken is not None:
            self.__dict__["_misses"] = 0 if taken else self._misses + 1
        if self._misses >= _MAX_MISSES or torch.is_inference_mode_enabled():
            return None, None
        row, col = layers[0]._site.x
        trains = torch.is_grad_enabled() and any(m.weight.requires_grad for m in layers)
        return row, col if trains else None


def _next_dtype(x: Tensor, out: torch.dtype) -> torch.dtype:
    """The dtype in which the next layers take an output of dtype ``out``."""
    return compute_dtype(x if x.dtype == out else x.new_empty(0, dtype=out))


class _NormArgs(NamedTuple):
    eps: float
    row: CastRequest | None
    col: CastRequest | None
    backend: Backend
    out: torch.dtype
    low: torch.dtype
    saves: bool
    codes: list[Quantized | None]  # those under ``row`` and ``col``, filled by the forward


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
        ctx.x_shape, ctx.x_dtype = x.shape, x.dtype
        sources.save_named(ctx, x=x if saved is None else saved, weight=weight, rstd=rstd_M)
        # Not a view in autograd's eyes, as the stock norm's output is none: a model may write into it.
        return torch.ops.aten._unsafe_view(y_MK, list(x.shape))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, rstd_M = sources.load_saved(ctx).values()
        needs_x, needs_w = ctx.needs_input_grad[:2]
        with without_autocast(dy):
            dy_MK = dy.reshape(-1, dy.shape[-1]).float()
            x_MK = sources.decode_if_quantized(x, torch.float32).reshape(dy_MK.shape).float()
            dx, dw = compiled.norm_backward(dy_MK, x_MK, weight, rstd_M, needs_x, needs_w)
            dx = None if dx is None else dx.view(ctx.x_shape).to(ctx.x_dtype)
        return dx, dw, None
