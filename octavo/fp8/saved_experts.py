"""Experts that keep FP8 between their projections and behind them.

With the rows of all experts, g [R, 2I] the output of gate_up_proj, g^ its value as decoded from E4M3 codes in blocks of
1 x 128, and p [P, H] what the experts answer to each (token, choice) pair::

    forward    h = gate(g^)      y = h @ w_down.T      out = sum over a token's choices of p * weight
    backward   h again from the same codes, cast for wgrad then; dg by the family's own gate on g^
               dp = d(out) * weight      dweight = sum over features of d(out) * p^

What is kept: the codes of g, once for the gate and down_proj, and those of p, where a router is trained. p itself is
what the output is computed from. Experts that run one by one keep the codes of each one's h besides.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from octavo.fp8 import saved, saved_attention, saved_mlp
from octavo.fp8.cast import Quantized

__all__ = ["MARK", "gated", "mark", "weighted"]

MARK = saved_attention.EXPERTS
"""In the __dict__ of a module of experts that keeps FP8."""


def mark(experts: nn.Module) -> None:
    experts.__dict__[MARK] = True


def gated(gate: Callable[[Tensor], Tensor], gate_up: Tensor, down: Callable[[Tensor], Tensor]) -> Tensor:
    """down(gate(gate_up)), on what FP8 holds of gate_up [R, 2I]."""
    if gate_up.dtype not in saved.DTYPES or not gate_up.numel():
        return down(gate(gate_up))
    h, source = saved_mlp.product(gate, gate_up)
    if source is None:
        return down(h)
    with saved.behind(h, source):
        return down(h)


def weighted(pairs: Tensor, weights: Tensor) -> Tensor:
    """pairs [P, H] * weights [P, 1]; what the gradient of the weights needs of the pairs is kept in FP8."""
    if pairs.dtype not in saved.DTYPES or not pairs.numel():
        return pairs * weights
    return _Weighted.apply(pairs, weights)


class _Weighted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pairs: Tensor, weights: Tensor) -> Tensor:
        kept = saved.keep(pairs) if ctx.needs_input_grad[1] else None
        ctx.spec, ctx.dtypes = None if kept is None else kept.spec, (pairs.dtype, weights.dtype)
        ctx.save_for_backward(weights, *(() if kept is None else (kept.data, kept.scale)))
        return pairs * weights

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        weights, *codes = ctx.saved_tensors
        dpairs = (dy * weights).to(ctx.dtypes[0]) if ctx.needs_input_grad[0] else None
        dweights = None
        if codes:
            pairs = saved.value(Quantized(codes[0], codes[1], ctx.spec), ctx.dtypes[0])
            dweights = (dy * pairs).sum(1, keepdim=True).to(ctx.dtypes[1])
        return dpairs, dweights
