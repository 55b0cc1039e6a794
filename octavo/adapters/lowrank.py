"""The low-rank product added to a linear layer: y + s B (A d(x)), and the tensors saved for its backward.

With x [M, K], A [r, K], B [N, r], s = alpha / r (rsLoRA: alpha / sqrt(r)), d dropout, y [M, N] the base's output::

    fwd   h = d(x) A^T [M, r]      y' = y + s h B^T
    bwd   g = s dy B   [M, r]      dB = s dy^T h      dA = g^T d(x)      dx = d'(g A)

All products are in the dtype of y, which is the dtype in which the base layer computes (autocast's under autocast): A
and B are cast for each product, the casts are not saved, and s is applied in the GEMM's addition, before the only
rounding to y's dtype. PEFT's layer casts x to the dtype of A instead: for fp32 adapters of a BF16 model this is a copy
of x in fp32, saved for the backward.

Saved are h, the unchanged x, which is the same tensor for all adapters that share it (q, k, v), and with dropout its
mask, one byte for each element. Under autocast x is saved in the lower precision, cast once for all layers of that
input (:mod:`octavo.fp8.dense.inputs`). If the block can recompute x (:mod:`octavo.fp8.dense.sources`), x is not saved.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from octavo.fp8.dense import Input, Recomputable, get_recomputable, high_addmm, high_mm


def low_rank(y: Tensor, x: Tensor, a: Tensor, b: Tensor, scale: float, dropout: float, user: object) -> Tensor:
    """Return y [..., N] + scale * B (A d(x)), x [..., K], in the dtype of y.

    dropout: the share of x that is zeroed, 0 outside training. user: the layer, the same object in every args.
    """
    mask = None
    if dropout:
        mask = torch.empty(x.shape, dtype=torch.bool, device=x.device).bernoulli_(1 - dropout)
    args = LowRankArgs(scale, dropout, user, get_recomputable(x))
    out: Tensor = _LowRank.apply(y, x, a, b, mask, args)
    return out


def low_rank_traced(y: Tensor, x: Tensor, a: Tensor, b: Tensor, scale: float, dropout: float) -> Tensor:
    """Return the same result in traceable operators; the compiler decides what is saved."""
    dropped = torch.nn.functional.dropout(x, dropout) if dropout else x
    dropped = dropped.to(y.dtype).reshape(x.shape[:-1].numel(), x.shape[-1])
    h = dropped @ a.to(y.dtype).t()
    out = torch.addmm(y.reshape(h.shape[0], y.shape[-1]), h, b.to(y.dtype).t(), alpha=scale)
    return out.view(y.shape)


class LowRankArgs(NamedTuple):
    """The arguments of a forward except its tensors."""

    scale: float
    dropout: float
    user: object
    recomputable: Recomputable | None  # how the backward recomputes x, if it need not be saved


class _LowRank(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, x: Tensor, a: Tensor, b: Tensor, mask: Tensor | None, args: LowRankArgs) -> Tensor:
        dtype = y.dtype
        with torch.autocast(x.device.type, enabled=False):
            operand = Input(x, args.user, dtype)
            x_MK = operand.high_precision() if x.dtype != dtype else operand.matrix()
            h = high_mm(_apply_mask(x_MK, mask, args.dropout), a.to(dtype).t())
            y_MN = y.reshape(h.shape[0], y.shape[-1])
            out = high_addmm(y_MN, h, b.to(dtype).t(), alpha=args.scale)
        recomputable = args.recomputable
        # Save x itself and not a view, because its other users save x too, and the memory is then shared.
        saved = recomputable.tensors if recomputable is not None else (x if x.dtype == dtype else x_MK,)
        masks = () if mask is None else (mask,)
        ctx.save_for_backward(a, b, h, *masks, *(saved if ctx.needs_input_grad[2] else ()))
        ctx.recompute = None if recomputable is None else recomputable.recompute
        ctx.scale, ctx.dropout, ctx.masked = args.scale, args.dropout, mask is not None
        ctx.x_shape, ctx.x_dtype, ctx.dtype = x.shape, x.dtype, dtype
        return torch.ops.aten._unsafe_view(out, y.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        a, b, h, *rest = ctx.saved_tensors
        mask = rest.pop(0) if ctx.masked else None
        _, needs_x, needs_a, needs_b = ctx.needs_input_grad[:4]
        dx = da = db = None
        with torch.autocast(dy.device.type, enabled=False):
            dy_MN = dy.reshape(h.shape[0], dy.shape[-1])
            g = high_mm(dy_MN, b.to(ctx.dtype)) * ctx.scale if needs_x or needs_a else None
            if needs_b:
                db = (high_mm(dy_MN.t(), h) * ctx.scale).to(b.dtype)
            if needs_a:
                assert g is not None
                x = rest[0] if ctx.recompute is None else ctx.recompute(*rest).to(ctx.dtype)
                x_MK = x.reshape(h.shape[0], a.shape[1])
                da = high_mm(g.t(), _apply_mask(x_MK, mask, ctx.dropout)).to(a.dtype)
            if needs_x:
                assert g is not None
                dx = _apply_mask(high_mm(g, a.to(ctx.dtype)), mask, ctx.dropout).view(ctx.x_shape).to(ctx.x_dtype)
        return dy, dx, da, db, None, None


def _apply_mask(x_MK: Tensor, mask: Tensor | None, dropout: float) -> Tensor:
    """Zero the masked elements of x and scale the others by 1 / (1 - dropout); the gradient is the same map."""
    if mask is None:
        return x_MK
    return (x_MK * mask.view(x_MK.shape)).mul_(1 / (1 - dropout))
