"""MLPs that save FP8 codes of the inputs of their activation, and recompute its output in the backward.

Let a [M, I] be the output of the first layer (gate), b [M, I] the output of the second layer of a gated MLP (up), and
a^, b^ their values decoded from E4M3 codes in blocks of 1 x 128::

    forward    h = act(a^) (* b^)       y = h @ w_down.T
    backward   h recomputed bit for bit from the same codes, and cast for wgrad
               da = dh (* b^) * act'(a^)       db = dh * act(a^)

A forward saves only the codes of a and b: not a, act(a), b, h or the codes of h. Everything is computed in the dtype of
a, as in the stock module. The activation is the module's own, and autograd computes its derivative at a^.

The first layers and the last layer are called as modules, so that they may have any recipe or high precision, hooks,
or an adapter around them. The last layer detects that its input can be recomputed
(:class:`octavo.fp8.dense.inputs.Recomputable`): an FP8 layer casts it in the backward, a stock layer
(:class:`HighLinear`) multiplies by it. The trained matrices of an adapter save h in 16 bits, unless they
recompute it too.

A module is recognized by the names of its children (:data:`LAYER_NAMES`), and must reproduce the output of the stock
forward on random input (:func:`matches_stock`). Modules with additional children (dropout, a norm in between) are not
replaced.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from octavo.fp8.arithmetic.cast import CastSpec, Quantized
from octavo.fp8.blocks.counted import CountedModule
from octavo.fp8.blocks.probe import (
    cache_trial,
    compare_mlp,
    is_idle,
    small_mlp,
    unwrap_adapter,
    why_replaced,
    wrong_dtype,
)
from octavo.fp8.dense import gemms, sources
from octavo.fp8.dense.inputs import Recomputable, get_recomputable, with_recomputable, without_autocast
from octavo.fp8.dense.swap import (
    SwappedModule,
    has_hooks,
    is_supported_input,
    make_trial_module,
    replace,
    stock_type,
    swap,
)
from octavo.fp8.weights.shards import is_plain_tensor, is_whole

Act = Callable[[Tensor], Tensor]

LAYER_NAMES = (
    (("gate_proj", "up_proj"), "down_proj"),
    (("linear_fc1",), "linear_fc2"),
    (("fc1",), "fc2"),
    (("up_proj",), "down_proj"),
    (("dense_h_to_4h",), "dense_4h_to_h"),
)
"""(first layers, last layer). In a gated MLP, the activation is applied to the output of the first of two layers."""
ACTIVATION_NAMES = ("act_fn", "activation_fn", "act", "activation")


class MlpParts(NamedTuple):
    """The names of an MLP's children."""

    first: tuple[str, ...]
    last: str
    act: str

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.first, self.last, self.act)


def find_parts(module: nn.Module) -> MlpParts | None:
    """Return the names of an MLP's children, or None if the module is not an MLP. It may have other children."""
    children = {name for name, child in module._modules.items() if child is not None}
    act = next((name for name in ACTIVATION_NAMES if name in children), None)
    if act is None:
        return None
    return next((MlpParts(first, last, act) for first, last in LAYER_NAMES if {*first, last} <= children), None)


def why_not(module: nn.Module) -> str | None:
    """Return why this MLP cannot save FP8 codes, or None if it can."""
    mlp_parts = find_parts(module)
    assert mlp_parts is not None
    if (reason := why_replaced(module)) is not None:
        return reason
    extra = [name for name, child in module._modules.items() if name not in mlp_parts.names and not is_idle(child)]
    extra += [*module._parameters, *module._buffers]
    if extra:
        return f"it has {', '.join(extra)} in addition to the layers of an MLP"
    act = module._modules[mlp_parts.act]
    assert act is not None
    if next(act.parameters(), None) is not None or next(act.buffers(), None) is not None:
        return f"its activation {type(act).__name__} has parameters or buffers"
    if getattr(act, "inplace", False):
        return f"its activation {type(act).__name__} writes in place"
    if has_hooks(act):
        return f"its activation {type(act).__name__} has hooks"
    layers = [unwrap_adapter(module._modules[name]) for name in (*mlp_parts.first, mlp_parts.last)]
    if not all(isinstance(m, nn.Linear) for m in layers):
        return "not all of its layers are linear"
    weights = [m.weight for m in layers if isinstance(m, nn.Linear)]
    return wrong_dtype("its weights are", weights) or matches_stock(module)


@cache_trial
def matches_stock(module: nn.Module) -> str | None:
    """Run the stock forward on small random layers in fp32, and return why it is not last(act(first) * second), or None
    if it is.

    Tolerance: 16 fp32 epsilons times the sum of the magnitudes in the last product.
    """
    mlp_parts = find_parts(module)
    assert mlp_parts is not None
    first, act = mlp_parts.first, module._modules[mlp_parts.act]
    assert act is not None
    stock_layers = {name: unwrap_adapter(module._modules[name]) for name in (*first, mlp_parts.last)}
    layers, last, x = small_mlp(stock_layers, torch.float32)
    small = make_trial_module(module, {}, {**module._modules, **layers})
    small.__dict__["training"] = True

    def product() -> Tensor:
        h = act(layers[first[0]](x))
        return h * layers[first[1]](x) if len(first) == 2 else h

    second = f" * {first[1]}(x)" if first[1:] else ""
    formula = f"{mlp_parts.last}({mlp_parts.act}({first[0]}(x)){second})"
    return compare_mlp(small, x, product, last, formula, 16, "small layers", "shape")


def save_as_codes(module: nn.Module) -> str | None:
    """Let this MLP save FP8 codes. Returns why it cannot, or None."""
    reason = why_not(module)
    if reason is None:
        mlp_parts = find_parts(module)
        assert mlp_parts is not None
        prepare_last_layer(module, mlp_parts)
        swap(module, SavedMlp, _parts=mlp_parts)
    return reason


def prepare_last_layer(module: nn.Module, mlp_parts: MlpParts) -> None:
    """Let a last layer in high precision recompute its input, as FP8 layers do."""
    last = unwrap_adapter(module._modules[mlp_parts.last])
    if last is not None and stock_type(last) is nn.Linear:
        replace(last, HighLinear)


class SavedMlp(SwappedModule):
    """An MLP whose forward saves FP8 codes; see the module docstring."""

    _parts: MlpParts
    attributes = ("_parts",)

    def replacement_forward(self, x: Tensor) -> Tensor | None:
        return run_mlp(self, self._parts, x)


def run_mlp(module: nn.Module, mlp_parts: MlpParts, x: Tensor) -> Tensor | None:
    """Run an MLP by its children, and return its output, or None if the stock forward must run."""
    act, last = module._modules[mlp_parts.act], module._modules[mlp_parts.last]
    if act is None or last is None or has_hooks(act) or not is_supported_input(x) or x.dtype not in sources.DTYPES:
        return None
    if not all(is_idle(m) for name, m in module._modules.items() if name not in mlp_parts.names):
        return None
    inner = [module._modules[name](x) for name in mlp_parts.first]  # type: ignore[misc]
    if not all(is_plain_tensor(t) and t.dtype in sources.DTYPES and t.numel() for t in inner):
        h = act(inner[0])
        return last(h * inner[1] if len(inner) == 2 else h)
    h, recomputable = activation_product(act, *inner)
    del inner  # frees them before the last layer runs
    if recomputable is None:
        return last(h)
    with with_recomputable(h, recomputable):
        return last(h)


def activation_product(act: Act, a: Tensor, b: Tensor | None = None) -> tuple[Tensor, Recomputable | None]:
    """Return (act(a^) * b^, its recomputation or None if neither a nor b needs a gradient) for a, b [..., I].

    Autocast is disabled, because it would choose dtypes again in the backward. Gradients flow to a and b.
    """
    codes = _encode(a, b)
    specs = tuple((q.spec, dtype) for q, dtype in codes)
    tensors = tuple(t for q, _ in codes for t in (q.data, q.scale))
    call = _ProductArgs(act, specs, a.shape, tensors)
    h = _Product.apply(a, b, call)
    # If a and b need no gradient, their codes are not saved, and saving the codes of h takes less memory.
    return h, Recomputable(tensors, partial(_recompute_product, act, specs, a.shape)) if h.requires_grad else None


def _encode(*tensors: Tensor | None) -> list[tuple[Quantized, torch.dtype]]:
    with torch.no_grad():
        return [(sources.encode_activation(t), t.dtype) for t in tensors if t is not None]


Specs = tuple[tuple[CastSpec, torch.dtype], ...]


class _ProductArgs(NamedTuple):
    act: Act
    specs: Specs
    shape: torch.Size
    tensors: tuple[Tensor, ...]


def _decode(specs: Specs, shape: torch.Size, tensors: tuple[Tensor, ...]) -> list[Tensor]:
    return [
        sources.decode_activation(Quantized(tensors[2 * i], tensors[2 * i + 1], spec), dtype).view(shape)
        for i, (spec, dtype) in enumerate(specs)
    ]


def _recompute_product(act: Act, specs: Specs, shape: torch.Size, *tensors: Tensor) -> Tensor:
    """Compute h from the codes, in the forward and again in the backward."""
    with torch.no_grad(), torch.autocast(tensors[0].device.type, enabled=False):
        values = _decode(specs, shape, tensors)
        h = act(values[0])
        return h * values[1] if len(values) == 2 else h


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor | None, call: _ProductArgs) -> Tensor:
        ctx.act, ctx.specs, ctx.shape = call.act, call.specs, call.shape
        ctx.save_for_backward(*call.tensors)
        return _recompute_product(call.act, call.specs, call.shape, *call.tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dh: Tensor) -> tuple[Tensor | None, ...]:
        needs_a, needs_b = ctx.needs_input_grad[:2]
        da = db = None
        with torch.autocast(dh.device.type, enabled=False):
            a, *rest = _decode(ctx.specs, ctx.shape, ctx.saved_tensors)
            with torch.set_grad_enabled(needs_a):
                s = ctx.act(a.requires_grad_(needs_a))
            if needs_b:
                db = dh * s.detach()
            if needs_a:
                ds = dh * rest[0] if rest else dh
                (da,) = torch.autograd.grad(s, a, ds.to(s.dtype))
        return da, db, None


class HighLinear(CountedModule):
    """A stock linear layer that saves nothing of an input that can be recomputed."""

    runs_in_high_precision = False

    weight: Tensor
    bias: Tensor | None

    def eager_call(self, *args: object, **kwargs: object) -> object:
        return SwappedModule.forward(self, *args, **kwargs)

    def replacement_forward(self, x: Tensor) -> Tensor | None:
        recomputable = get_recomputable(x)
        if recomputable is None or not self.weight.requires_grad or not is_whole(self.weight):
            return gemms.stock_forward(self._stock, self, x)  # a frozen weight saves no input
        return _HighLinear.apply(x, self.weight, self.bias, recomputable)


class _HighLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, recomputable: Recomputable) -> Tensor:
        ctx.save_for_backward(weight, *recomputable.tensors)
        ctx.recompute, ctx.b_dtype, ctx.x_dtype = recomputable.recompute, None if bias is None else bias.dtype, x.dtype
        return gemms.high_linear(x, weight, bias)  # autocast applies as in the stock layer

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        weight, *tensors = ctx.saved_tensors
        needs_x, _, needs_b = ctx.needs_input_grad[:3]
        with without_autocast(dy):
            dy_MN = dy.reshape(-1, dy.shape[-1])
            dx = gemms.high_mm(dy_MN, weight.to(dy.dtype)).view(*dy.shape[:-1], -1).to(ctx.x_dtype) if needs_x else None
            h = ctx.recompute(*tensors).to(dy.dtype)
            dw = gemms.high_mm(dy_MN.t(), h.reshape(-1, h.shape[-1])).to(weight.dtype)
            db = dy_MN.sum(0, dtype=torch.float32).to(ctx.b_dtype) if needs_b else None
        return dx, dw, db, None
