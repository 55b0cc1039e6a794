"""A gated MLP in FP8 as one autograd function: y = down(silu(gate(x)) * up(x)).

With x [M, K], the weights of gate and up [I, K] and of down [K, I], h = silu(gate) * up [M, I]::

    forward    gate, up = x @ w_gate.T, x @ w_up.T        one cast of x, as for separate layers with one input
               h        -> its codes for down's fwd and wgrad, in one kernel; h itself is never written
               y        = h @ w_down.T
    backward   dh       = dy @ w_down
               dgate, dup -> their codes for dgrad and wgrad, in one kernel; never written in 16 bits
               dx       = dgate @ w_gate + dup @ w_up,    dw of each layer from the codes

A forward saves the codes of x in wgrad layout (once), gate and up in the dtype of the GEMMs, the codes of h in wgrad
layout, and references to the weights. The stock module additionally saves silu(gate) and h.

If activations are saved in FP8 (:mod:`octavo.fp8.dense.sources`), the codes of x, gate and up in blocks of 1 x 128 are
saved. h is computed from the decoded codes, in the forward too, and the backward recomputes its codes for wgrad bit for
bit.

Casts, weight codes, GEMMs, counts and backends are as in the three separate layers. Values differ by rounding: the
stock module rounds silu(gate) and then the product, this function rounds only h; the backward also rounds once. The
gradients of a layer with a trained bias are written in the dtype of the GEMMs, because their sums must be exact.

A module is recognized by its children gate_proj, up_proj, down_proj and act_fn, and must reproduce the output of the
stock forward on random input (:func:`matches_stock`). It runs the stock forward, layer by layer, if its inside is
observed (hooks on its children, an adapter around one of them, a step that collects health figures), and if a weight is
a DTensor. Under ``torch.compile`` it consists of operators of the graph (:mod:`octavo.fp8.blocks.compiled`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from octavo.fp8.arithmetic.cast import CastSpec, Quantized
from octavo.fp8.arithmetic.recipe import GEMMS, Recipe
from octavo.fp8.blocks import compiled, mlp
from octavo.fp8.blocks.probe import cache_trial, compare_mlp, small_mlp, why_replaced
from octavo.fp8.dense import gemms, sources
from octavo.fp8.dense.gemms import DENSE_OPS, INFERENCE_OPS, LayerGemms
from octavo.fp8.dense.inputs import CastRequest, Input, QuantizedPair, cast_matrix, compute_dtype, without_autocast
from octavo.fp8.dense.linear import WHOLE_WEIGHT, Linear
from octavo.fp8.dense.swap import (
    PlannedLayer,
    SwappedModule,
    has_hooks,
    is_supported_input,
    make_trial_module,
    planned_layer,
    swap,
)
from octavo.fp8.invariance import is_active
from octavo.fp8.kernels.reference import swiglu_backward
from octavo.fp8.observe import recorder
from octavo.fp8.weights.shards import is_whole

CHILDREN = ("gate_proj", "up_proj", "down_proj")
_CHILD_NAMES = {*CHILDREN, "act_fn"}
_PARTS = mlp.MlpParts(CHILDREN[:2], CHILDREN[2], "act_fn")


def convert(model: nn.Module) -> tuple[tuple[str, str | None], ...]:
    """Fuse the gated MLPs of a model that have FP8 layers. Returns the name of each, and why it was not fused or
    None."""
    mlps = [(n, m) for n, m in model.named_modules() if is_gated_mlp(m)]
    fp8 = [(n, m) for n, m in mlps if any(isinstance(m._modules[c], Linear) for c in CHILDREN)]
    return tuple((name, fuse(module)) for name, module in fp8)


def fuse(module: nn.Module, saves: bool = False) -> str | None:
    """Fuse a gated MLP of FP8 layers; ``saves`` makes it save gate and up in FP8. Returns why it cannot be fused, or
    None."""
    reason = why_not(module, [planned_layer(module._modules[name]) for name in CHILDREN])
    if reason is None:
        swap(module, GatedMlp, _saves=saves)
    return reason


def is_gated_mlp(module: nn.Module) -> bool:
    """True if a module has the children of a gated MLP, possibly among others."""
    return all(module._modules.get(name) is not None for name in _CHILD_NAMES)


def why_not(module: nn.Module, layers: Sequence[PlannedLayer | None]) -> str | None:
    """Return why this gated MLP cannot be fused, or None. ``layers`` are gate, up and down, None if not in FP8."""
    if (reason := why_replaced(module)) is not None:
        return reason
    extra = [name for name in (*module._modules, *module._parameters, *module._buffers) if name not in _CHILD_NAMES]
    if extra:
        return f"it has {', '.join(extra)} in addition to the layers of a gated MLP"
    whole = [p for p in layers if p is not None and type(p.layer) in (nn.Linear, Linear) and is_whole(p.layer.weight)]
    if len(whole) < len(CHILDREN):
        return "not all of its layers are whole FP8 layers"
    gate, up, _ = whole
    if gate.recipe != up.recipe or gate.backends != up.backends:
        return "gate_proj and up_proj have different recipes or backends"
    reason = next((r for p in whole if (r := _why_not_recipe(p.recipe)) is not None), None)
    if reason is not None:
        return reason
    shapes = [tuple(p.layer.weight.shape) for p in whole]
    if shapes[1] != shapes[0] or shapes[2][1] != shapes[0][0]:
        return f"the shapes of its weights, {', '.join(map(str, shapes))}, do not match"
    return matches_stock(module)


def _why_not_recipe(recipe: Recipe | None) -> str | None:
    if recipe is None:
        return "not all of its layers are whole FP8 layers"
    if recipe.delayed is not None:
        return "delayed scaling keeps an amax history of each layer"
    high = [gemm for gemm in GEMMS if recipe.gemm(gemm) is None]
    return f"{high[0]} stays in high precision" if high else None


@cache_trial
def matches_stock(module: nn.Module) -> str | None:
    """Run the stock forward on small random layers of the weights' dtype. Returns None if it computes a gated SiLU MLP,
    else why not.

    Tolerance, element by element: four epsilons of the dtype of sum |h w_down| + |bias|, for h that is rounded twice
    there and once here, the outputs' own rounding, and sums in another order.
    """
    layers, down, x = small_mlp({name: module._modules[name] for name in CHILDREN})
    gate, up, _ = layers.values()
    small = make_trial_module(module, {}, {**layers, "act_fn": module._modules["act_fn"]})

    def product() -> Tensor:
        return (F.silu(gate(x).float()) * up(x).float()).to(x.dtype)

    return compare_mlp(small, x, product, down, "down(silu(gate(x)) * up(x))", 4, "three small layers")


class GatedMlp(SwappedModule):
    """The forward of a gated MLP in FP8; see the module's docstring."""

    _saves: bool
    attributes = ("_saves",)

    def replacement_forward(self, x: Tensor) -> Tensor | None:
        layers = [self._modules.get(name) for name in CHILDREN]
        if not self._can_fuse(x, layers):
            return mlp.run_mlp(self, _PARTS, x) if self._saves else None
        gate, up, down = (m for m in layers if isinstance(m, Linear))
        call = _MlpArgs((gate._site, up._site, down._site), torch.is_grad_enabled(), self._saves)
        return _Mlp.apply(x, call, gate.weight, up.weight, down.weight, gate.bias, up.bias, down.bias)

    def traced_forward(self, x: Tensor) -> Tensor | None:
        layers = [self._modules.get(name) for name in CHILDREN]
        act = self._modules.get("act_fn")
        if self._saves or act is None or has_hooks(act) or len(self._modules) != len(_CHILD_NAMES):
            return None
        linears = [m for m in layers if type(m) is Linear and not has_hooks(m) and not m._fp8_param]
        if len(linears) < len(CHILDREN) or not x.dim() or not x.numel():
            return None
        gate, up, down = linears
        if x.shape[-1] != gate.weight.shape[1] or x.dtype not in sources.DTYPES:
            return None
        weights, biases = (gate.weight, up.weight, down.weight), (gate.bias, up.bias, down.bias)
        return compiled.gated_mlp(x, weights, biases, (gate._site.key, down._site.key))

    def _can_fuse(self, x: Tensor, layers: list[nn.Module | None]) -> bool:
        """True if this call can be fused. Otherwise the separate layers run, and report invalid input."""
        act = self._modules.get("act_fn")
        if recorder.is_watching() or _has_global_hooks() or not is_supported_input(x) or is_active():
            return False
        if act is None or has_hooks(act) or len(self._modules) != len(_CHILD_NAMES):
            return False
        linears = [m for m in layers if type(m) is Linear and not has_hooks(m)]
        if len(linears) < len(CHILDREN) or compute_dtype(x) not in sources.DTYPES:
            return False
        if any(not is_whole(m.weight) or m.weight.device != x.device for m in linears):
            return False
        return x.shape[-1] == linears[0].weight.shape[1] and all(_why_not_recipe(m.recipe) is None for m in linears)


def _has_global_hooks() -> bool:
    """True if global module hooks of the process need the calls of the children.

    Hooks that are marked as passive (``_octavo_watches``) are ignored: a forward must save the same tensors with and
    without them, because its recomputation runs without them.
    """
    module = nn.modules.module
    hooks = (*module._global_forward_pre_hooks.values(), *module._global_forward_hooks.values())
    others = (hook for hook in hooks if not getattr(hook, "_octavo_watches", False))
    return bool(module._global_backward_hooks or module._global_backward_pre_hooks or next(others, None) is not None)


class _MlpArgs(NamedTuple):
    sites: tuple[LayerGemms, LayerGemms, LayerGemms]  # gate, up, down
    grad: bool
    saves: bool  # gate and up are saved in FP8


class _GradNeeds(NamedTuple):
    """The inputs that need a gradient."""

    x: bool
    weights: tuple[bool, ...]  # gate, up, down
    biases: tuple[bool, ...]

    @property
    def h(self) -> bool:
        return self.x or any(self.weights[:2]) or any(self.biases[:2])


class _Mlp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, call: _MlpArgs, *parameters: Tensor | None) -> Tensor:
        needs_grad = [call.grad and n for n in ctx.needs_input_grad]
        needs = _GradNeeds(needs_grad[0], tuple(needs_grad[2:5]), tuple(needs_grad[5:]))
        gate, _, down = call.sites
        dgrads = (needs.x, needs.x, needs.h)
        records = [
            recorder.begin(site.name, dgrad, wgrad, call.grad)
            for site, dgrad, wgrad in zip(call.sites, dgrads, needs.weights, strict=True)
        ]
        records[0].shows_operands = records[1].shows_operands = False  # dgate and dup are never written in 16 bits
        source, way = Input(x, gate), DENSE_OPS if call.grad else INFERENCE_OPS

        def forward(index: int, x_q: Quantized | None) -> tuple[Tensor, Quantized | None]:
            weight = parameters[index]
            assert weight is not None
            bias = parameters[3 + index]
            return gemms.fwd(
                call.sites[index], way, None, x_q, weight, WHOLE_WEIGHT, bias, source.dtype, records[index]
            )

        with source.autocast_off:
            x_row, x_col = source.codes(gate.x.row, gate.x.col if any(needs.weights[:2]) else None)
            (g, g_w), (u, u_w) = forward(0, x_row), forward(1, x_row)
            pair: list[Tensor | Quantized] = [g, u]
            if call.saves:
                pair = [sources.encode_activation(g), sources.encode_activation(u)]
                g, u = (sources.decode_if_quantized(q, source.dtype) for q in pair)
            h_row, h_col = _cast_h(down, g, u, down.x.row, down.x.col if needs.weights[2] and not call.saves else None)
            y, y_w = forward(2, h_row)
        weights = {f"w{i}": parameters[i] if due else None for i, due in enumerate(dgrads)}
        codes = {f"q{i}": (g_w, u_w, y_w)[i] if due else None for i, due in enumerate(dgrads)}
        needs_gate_and_up = needs.h or (call.saves and needs.weights[2])
        saved_g, saved_u = pair if needs_gate_and_up else (None, None)
        sources.save_named(ctx, x_col=x_col, h_col=h_col, gate=saved_g, up=saved_u, **weights, **codes)
        ctx.call, ctx.needs, ctx.records, ctx.drop_codes = call, needs, records, source.drop_codes
        ctx.x_shape, ctx.x_dtype, ctx.compute_dtype = x.shape, x.dtype, source.dtype
        ctx.dtypes = [None if p is None else p.dtype for p in parameters]
        # Autograd must not see a view: a model may write into the output, as into F.linear's.
        return torch.ops.aten._unsafe_view(y, [*x.shape[:-1], y.shape[1]])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        ctx.drop_codes()
        saved, needs = sources.load_saved(ctx), ctx.needs
        _, _, down = ctx.call.sites
        dy_MK = dy.reshape(dy.shape[:-1].numel(), dy.shape[-1])
        dx: Tensor | None = None
        dws: list[Tensor | None] = [None] * 3
        dbs: list[Tensor | None] = [None] * 3
        with without_autocast(dy):
            requests = (down.dy.row if needs.h else None, down.dy.col if needs.weights[2] else None)
            row, col = cast_matrix(dy_MK, *requests)
            if needs.biases[2]:
                dbs[2] = dy_MK.sum(0, dtype=torch.float32).to(ctx.dtypes[5])
            # If codes were saved, these are the decoded values, from which the forward computed h, too.
            gate_MI, up_MI = (sources.decode_if_quantized(saved[name], ctx.compute_dtype) for name in ("gate", "up"))
            if needs.weights[2]:
                h_col = saved["h_col"]
                if ctx.call.saves:
                    _, h_col = _cast_h(down, gate_MI, up_MI, None, down.x.col)
                dws[2] = _wgrad(ctx, 2, dy_MK, col, h_col)
            if needs.h:
                dh = _dgrad(ctx, 2, dy_MK, row, saved)
                for i, (row, col) in enumerate(_cast_gradients(ctx, dh, gate_MI, up_MI, dbs)):
                    if needs.x:
                        part = _dgrad(ctx, i, dh, row, saved).view(ctx.x_shape).to(ctx.x_dtype)
                        dx = part if dx is None else dx + part
                    if needs.weights[i]:
                        dws[i] = _wgrad(ctx, i, dh, col, saved["x_col"])
        return dx, None, *dws, *dbs


def _cast_h(
    down: LayerGemms, gate: Tensor, up: Tensor, row: CastRequest | None, col: CastRequest | None
) -> QuantizedPair:
    backend = sources.select_fused_backend("swiglu", down, gate.device)
    return backend.swiglu_codes(gate, up, _request_spec(row), _request_spec(col))


def _request_spec(request: CastRequest | None) -> CastSpec | None:
    return None if request is None else request.spec


def _cast_gradients(
    ctx: Any, dh: Tensor, gate: Tensor, up: Tensor, dbs: list[Tensor | None]
) -> tuple[QuantizedPair, QuantizedPair]:
    """Return the codes of dgate and of dup, and set the gradients of trained biases in ``dbs``."""
    site, needs = ctx.call.sites[0], ctx.needs
    row, col = site.dy.row if needs.x else None, site.dy.col if any(needs.weights[:2]) else None
    if any(needs.biases[:2]):
        pair = swiglu_backward(dh, gate, up)
        for i, d in enumerate(pair):
            if needs.biases[i]:
                dbs[i] = d.sum(0, dtype=torch.float32).to(ctx.dtypes[3 + i])
        return cast_matrix(pair[0], row, col), cast_matrix(pair[1], row, col)
    backend = sources.select_fused_backend("swiglu_backward", site, dh.device)
    codes = backend.swiglu_backward_quantize(dh, gate, up, _request_spec(row), _request_spec(col))
    return codes[:2], codes[2:]


def _dgrad(ctx: Any, index: int, dy: Tensor, dy_q: Quantized | None, saved: dict[str, Any]) -> Tensor:
    site, weight, w_q = ctx.call.sites[index], saved[f"w{index}"], saved[f"q{index}"]
    return gemms.dgrad(site, DENSE_OPS, dy, dy_q, weight, WHOLE_WEIGHT, w_q, ctx.compute_dtype, ctx.records[index])


def _wgrad(ctx: Any, index: int, dy: Tensor, dy_q: Quantized | None, x_q: Quantized) -> Tensor:
    return gemms.wgrad(ctx.call.sites[index], DENSE_OPS, dy, dy_q, x_q, None, ctx.dtypes[index], ctx.records[index])
