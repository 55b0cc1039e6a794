"""Norms and gated MLPs that quantize their output, as operators of a compiled graph; they run the eager kernels.

These operators extend the operators of linear layers (:mod:`octavo.fp8.dense.compiled`), under the same rules::

    octavo::rmsnorm(x, weight, rstd)          -> a carrier of y's gradient, rstd, and the codes of y for the next layers
    octavo::gated_mlp(codes of x, weights)    -> y; for its backward gate, up, and the codes of h for wgrad
    octavo::swiglu_backward(dh, gate, up)     -> the codes of dgate and of dup, for dgrad and for wgrad

The codes of a norm are attached to the traced tensor y, from which the next layers take them; a compiler only sees
operators with a common operand. FP8 layers do not read y: its gradient passes through a carrier, a tensor of y's shape
with one element, and y is computed only where something else reads it. The backward of a norm is plain PyTorch, which a
compiler may fuse. The backward of a gated MLP has the operators of eager mode in the same order. Blocks that save FP8
for their backward (``activations="fp8"``) have no operators: compiled, they run the stock forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from octavo.fp8.arithmetic.cast import CastSpec
from octavo.fp8.dense import compiled, sources
from octavo.fp8.dense.graph_arguments import block_rows, fake_pack, pack_pair, parse_key, parse_operand
from octavo.fp8.dense.graph_counts import DGRAD, WGRAD, gradient_needs
from octavo.fp8.kernels.reference import reciprocal_rms, rmsnorm_backward, swiglu_backward
from octavo.fp8.kernels.registry import Backend

_lib = torch.library.Library("octavo", "FRAGMENT")
_lib.define(
    "rmsnorm(Tensor x, Tensor weight, Tensor? rstd, float eps, str row, str col, str first, ScalarType out, "
    "ScalarType low) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_lib.define(
    "gated_mlp(Tensor x, Tensor gate, Tensor up, Tensor down, Tensor? gate_bias, Tensor? up_bias, Tensor? down_bias, "
    "Tensor row, Tensor row_scale, Tensor col, Tensor col_scale, ScalarType dtype, str key, str down_key, str h_col, "
    "int[] needs) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_lib.define(
    "swiglu_backward(Tensor dh, Tensor gate, Tensor up, str row, str col) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)


def _parse_fused(op: str, device: torch.device, *texts: str) -> tuple[Backend, list[CastSpec | None]]:
    """Return the backend of a fused operation whose outputs have the casts ``texts``, and these casts."""
    specs = [parse_operand(text)[1] if text else None for text in texts]
    spec = next((s for s in specs if s is not None), sources.SPEC)
    return sources.select_backend(op, spec, device, next(t for t in texts if t).partition("@")[0]), specs


# --- RMSNorm ----------------------------------------------------------------------------------------------------------


def _rmsnorm(
    x: Tensor,
    weight: Tensor,
    known_rstd: Tensor | None,
    eps: float,
    row: str,
    col: str,
    first: str,
    out: torch.dtype,
    low: torch.dtype,
) -> tuple[Tensor, ...]:
    """Return the carrier of y [M, K] in ``out``, rstd [M] in fp32 (nothing if it is known), and the codes of y in
    ``low``. The backend of the cast ``first`` is preferred, also if no codes are requested."""
    backend, _ = _parse_fused("rmsnorm", x.device, first)
    specs = [parse_operand(text)[1] if text else None for text in (row, col)]
    rstd, *codes = backend.rmsnorm_codes(x, weight, eps, specs[0], specs[1], out, low, known_rstd)
    if known_rstd is not None:
        rstd = known_rstd.new_empty(0)  # an operator must not return its argument
    # One element, -0, which added to values changes no bit of them.
    carrier = torch.full((1, 1), -0.0, dtype=out, device=x.device).expand(x.shape)
    return carrier, rstd, *pack_pair(x, codes[0], codes[1])


def _rmsnorm_fake(x: Tensor, weight: Tensor, known_rstd: Tensor | None, *arguments: Any) -> tuple[Tensor, ...]:
    _, row, col, _, out, _ = arguments
    carrier = x.new_empty((1, 1), dtype=out).expand(x.shape)
    rstd = x.new_empty(x.shape[0] if known_rstd is None else 0, dtype=torch.float32)
    return carrier, rstd, *fake_pack(x, row, 1), *fake_pack(x, col, 0)


def _save_norm(ctx: Any, inputs: Sequence[Any], output: Sequence[Tensor]) -> None:
    ctx.mark_non_differentiable(*output[1:])
    x, weight, known_rstd = inputs[:3]
    ctx.save_for_backward(x, weight, output[1] if known_rstd is None else known_rstd)


def _rmsnorm_backward(ctx: Any, dy: Tensor, *rest: Any) -> tuple[Tensor | None, ...]:
    return *rmsnorm_backward(dy, *ctx.saved_tensors, *ctx.needs_input_grad[:2]), *[None] * 7


def rmsnorm(x: Tensor, weight: Tensor, eps: float, key: str, out: torch.dtype, needs_wgrad: bool) -> Tensor:
    """Return y [..., K] in ``out``, with its codes under the casts of ``key`` attached to it. ``needs_wgrad`` adds the
    codes for wgrad."""
    parts = parse_key(key)
    row, col = parts.operand("fwd", 0), parts.operand("wgrad", 1)
    first, low = row or col, compiled.traced_compute_dtype(x.device.type, out)
    col = col if needs_wgrad else ""
    x_MK = compiled.as_matrix(x)
    # A kernel of column blocks needs the statistics before it begins. Computed here, a compiler fuses them with the
    # residual sum before the norm. Kernels of other casts compute them from the whole rows that they read.
    known_M = reciprocal_rms(x_MK.detach(), eps) if block_rows(col) > 1 else None
    carrier, computed_M, *codes = torch.ops.octavo.rmsnorm(x_MK, weight, known_M, eps, row, col, first, out, low)
    rstd_M = computed_M if known_M is None else known_M
    # The kernel's formula, for readers other than FP8 layers; without any, a compiler drops it.
    values_MK = (x_MK.detach().float() * rstd_M.unsqueeze(1) * weight.detach().float()).to(out)
    y = (values_MK + carrier).view(x.shape)
    if row or col:
        compiled.attach_codes(y, low, row, col, tuple(codes), carrier if out == low else None)
    return y


# --- a gated MLP ------------------------------------------------------------------------------------------------------


def _gated_mlp(
    x: Tensor, gate: Tensor, up: Tensor, down: Tensor, gate_bias: Tensor | None, up_bias: Tensor | None,
    down_bias: Tensor | None, row: Tensor, row_scale: Tensor, col: Tensor, col_scale: Tensor, dtype: torch.dtype,
    key: str, down_key: str, h_col: str, needs: Sequence[int],
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return y [M, K], gate and up [M, I] in ``dtype``, and the codes of h under ``h_col``. x only has the sizes and
    receives the gradient; only the backward uses ``col``, and only counters ``needs``, of gate, up and down."""
    g = compiled.multiply_fwd(x, row, row_scale, gate, gate_bias, dtype, key, needs[0])
    u = compiled.multiply_fwd(x, row, row_scale, up, up_bias, dtype, key, needs[1])
    backend, specs = _parse_fused("swiglu", x.device, parse_key(down_key).operand("fwd", 0), h_col)
    h_row, h_for_wgrad = backend.swiglu_codes(g, u, *specs)
    h, h_scale, w, w_scale = pack_pair(g, h_row, h_for_wgrad)
    return compiled.multiply_fwd(g, h, h_scale, down, down_bias, dtype, down_key, needs[2]), g, u, w, w_scale


def _gated_mlp_fake(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    dtype, _, _, h_col, _ = arguments[-5:]
    g, u = (x.new_empty(x.shape[0], w.shape[0], dtype=dtype) for w in (gate, up))
    return x.new_empty(x.shape[0], down.shape[0], dtype=dtype), g, u, *fake_pack(g, h_col, 0)


def _save_mlp(ctx: Any, inputs: Sequence[Any], output: Sequence[Tensor]) -> None:
    """Save what the eager function saves: the codes of x and h for wgrad, gate and up, and the weights for dgrad."""
    x, gate, up, down, *biases = inputs[:7]
    ctx.needs = needs_x, *weights = ctx.needs_input_grad[:7]
    needs_h = needs_x or any(weights[i] for i in (0, 1, 3, 4))
    ctx.mark_non_differentiable(*output[1:])
    ctx.needs_h, (ctx.dtype, ctx.key, ctx.down_key, _, _) = needs_h, inputs[11:]
    ctx.x_dtype, ctx.dtypes = x.dtype, [None if t is None else t.dtype for t in (gate, up, down, *biases)]
    tensors = {
        "gate": gate if needs_x or weights[0] else None,
        "up": up if needs_x or weights[1] else None,
        "down": down if needs_h or weights[2] else None,
    }
    tensors |= dict(zip(("g", "u"), output[1:3] if needs_h else (None, None), strict=True))
    tensors |= dict(zip(("x", "x_scale"), inputs[9:11] if any(weights[:2]) else (None, None), strict=True))
    tensors |= dict(zip(("h", "h_scale"), output[3:5] if weights[2] else (None, None), strict=True))
    sources.save_named(ctx, **tensors)


def _mlp_backward(ctx: Any, dy: Tensor, *rest: Any) -> tuple[Tensor | None, ...]:
    ops, saved = torch.ops.octavo, sources.load_saved(ctx)
    needs_x, *needs = ctx.needs
    tokens = dy.shape[0]
    dx: Tensor | None = None
    dws: list[Tensor | None] = [None] * 3
    dbs: list[Tensor | None] = [None] * 3
    parts, down = parse_key(ctx.key), parse_key(ctx.down_key)
    # The same operators in the same order as in the eager backward, so that gradients have the same bits.
    if needs[5]:
        dbs[2] = dy.sum(0, dtype=torch.float32).to(ctx.dtypes[5])
    row, col = down.operand("dgrad", 0) if ctx.needs_h else "", down.operand("wgrad", 0) if needs[2] else ""
    if row or col:
        row_q, row_s, col_q, col_s = ops.cast(dy, row, col)
    if needs[2]:
        dws[2] = ops.wgrad(col_q, col_s, saved["h"], saved["h_scale"], saved["down"], tokens, ctx.down_key)
    if ctx.needs_h:
        dh = ops.dgrad(row_q, row_s, saved["down"], tokens, ctx.dtype, ctx.down_key)
        row, col = parts.operand("dgrad", 0) if needs_x else "", parts.operand("wgrad", 0) if any(needs[:2]) else ""
        for i, codes in enumerate(_cast_gradients(ctx, dh, saved["g"], saved["u"], row, col, dbs)):
            weight = saved[("gate", "up")[i]]
            if needs_x:
                part = ops.dgrad(codes[0], codes[1], weight, tokens, ctx.dtype, ctx.key)
                dx = part.to(ctx.x_dtype) if dx is None else dx + part.to(ctx.x_dtype)
            if needs[i]:
                dws[i] = ops.wgrad(codes[2], codes[3], saved["x"], saved["x_scale"], weight, tokens, ctx.key)
    return dx, *dws, *dbs, *[None] * 9


def _cast_gradients(
    ctx: Any, dh: Tensor, gate: Tensor, up: Tensor, row: str, col: str, dbs: list[Tensor | None]
) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """Return the codes of dgate and of dup, and set the gradients of trained biases in ``dbs``, which are sums of
    exact values."""
    if not any(ctx.needs[4:6]):
        codes = torch.ops.octavo.swiglu_backward(dh, gate, up, row, col)
        return codes[:4], codes[4:]
    pair = swiglu_backward(dh, gate, up)
    for i, d in enumerate(pair):
        if ctx.needs[4 + i]:
            dbs[i] = d.sum(0, dtype=torch.float32).to(ctx.dtypes[3 + i])
    return torch.ops.octavo.cast(pair[0], row, col), torch.ops.octavo.cast(pair[1], row, col)


def _swiglu_backward(dh: Tensor, gate: Tensor, up: Tensor, row: str, col: str) -> tuple[Tensor, ...]:
    backend, specs = _parse_fused("swiglu_backward", dh.device, row, col)
    codes = backend.swiglu_backward_quantize(dh, gate, up, *specs)
    return *pack_pair(gate, *codes[:2]), *pack_pair(up, *codes[2:])


def _swiglu_backward_fake(dh: Tensor, gate: Tensor, up: Tensor, row: str, col: str) -> tuple[Tensor, ...]:
    return tuple(t for _ in range(2) for text, c in ((row, 1), (col, 0)) for t in fake_pack(gate, text, c))


def gated_mlp(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], keys: tuple[str, str]) -> Tensor:
    """Return y [..., K] of x [..., K]. Weights and biases belong to gate, up and down, in this order; ``keys`` are the
    key of gate and up and the key of down."""
    low, grad = compiled.traced_compute_dtype(x.device.type, x.dtype), torch.is_grad_enabled()
    x_MK, parts = compiled.as_matrix(x), parse_key(keys[0])
    needs_wgrad = grad and (weights[0].requires_grad or weights[1].requires_grad)
    row, col = parts.operand("fwd", 0), parts.operand("wgrad", 1) if needs_wgrad else ""
    low_MK = x_MK.to(low)
    carrier, codes = compiled.get_input_codes(x, low_MK, row, col)
    x_MK = x_MK if carrier is low_MK else carrier  # no GEMM reads x itself
    h_col = parse_key(keys[1]).operand("wgrad", 1) if grad and weights[2].requires_grad else ""
    # The gradients of x, gate and up need the gradient of h.
    trained = grad and (x.requires_grad or any(t is not None and t.requires_grad for t in (*weights[:2], *biases[:2])))
    needs = [gradient_needs(x, weight) for weight in weights]
    needs[2] = (DGRAD if trained else 0) + needs[2] // WGRAD * WGRAD
    y, *_ = torch.ops.octavo.gated_mlp(x_MK, *weights, *biases, *codes, low, *keys, h_col, needs)
    return y.view(*x.shape[:-1], weights[2].shape[0])


for _name, _run, _fake in (
    ("rmsnorm", _rmsnorm, _rmsnorm_fake),
    ("gated_mlp", _gated_mlp, _gated_mlp_fake),
    ("swiglu_backward", _swiglu_backward, _swiglu_backward_fake),
):
    _lib.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"octavo::{_name}", _fake, lib=_lib)
torch.library.register_autograd("octavo::rmsnorm", _rmsnorm_backward, setup_context=_save_norm, lib=_lib)
torch.library.register_autograd("octavo::gated_mlp", _mlp_backward, setup_context=_save_mlp, lib=_lib)
torch.library.register_autograd("octavo::swiglu_backward", compiled.refuse_second_derivative, lib=_lib)
