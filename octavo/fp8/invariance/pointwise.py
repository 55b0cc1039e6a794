"""Elementwise functions whose value does not depend on the position of the element.

On a CPU torch computes sigmoid, and functions that contain it, eight or sixteen elements at a time, and the remaining
elements at the end of a tensor, or of a thread's part of it, one by one with another exponential: the last features of
the last row then differ from the same row in a larger batch. ``exp``, ``tanh``, ``erf`` and ``log1p`` use the same code
for remaining elements, and additions, products and quotients are rounded exactly anywhere. So::

    sigmoid = 1 / (1 + exp(-x))        silu = x / (1 + exp(-x))        softplus = log1p(exp(beta x)) / beta
    gelu    = x / 2 (1 + erf(x / sqrt 2)),    or    x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))

in fp32, rounded once to x's dtype. Gradients come from torch's own functions. Other devices use the same code for each
element anyway, and torch's functions are used there.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

Function = Callable[[Tensor], Tensor]


def sigmoid(x: Tensor) -> Tensor:
    return _apply(x, lambda x: 1 / (1 + torch.exp(-x)), torch.sigmoid)


def silu(x: Tensor, inplace: bool = False) -> Tensor:
    y = _apply(x, lambda x: x / (1 + torch.exp(-x)), F.silu)
    return x.copy_(y) if inplace else y


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    def by_erf(x: Tensor) -> Tensor:
        return 0.5 * x * (1 + torch.erf(x * math.sqrt(0.5)))

    def by_tanh(x: Tensor) -> Tensor:
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * (x * x * x))))

    formula = by_erf if approximate == "none" else by_tanh
    return _apply(x, formula, partial(F.gelu, approximate=approximate))


def softplus(x: Tensor, beta: float = 1, threshold: float = 20) -> Tensor:
    def formula(x: Tensor) -> Tensor:
        return torch.where(x * beta > threshold, x, torch.log1p(torch.exp(x * beta)) / beta)

    return _apply(x, formula, partial(F.softplus, beta=beta, threshold=threshold))


def rsqrt(x: Tensor) -> Tensor:
    return _apply(x, lambda x: 1 / torch.sqrt(x), torch.rsqrt)


def exp2(x: Tensor) -> Tensor:
    return _apply(x, lambda x: torch.exp(x * math.log(2)), torch.exp2)


def _apply(x: Tensor, formula: Function, stock: Function) -> Tensor:
    if x.device.type != "cpu" or not x.is_floating_point():
        return stock(x)
    y: Tensor = _Pointwise.apply(x, formula, stock)
    return y


class _Pointwise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, formula: Function, stock: Function) -> Tensor:
        ctx.save_for_backward(x)
        ctx.stock = stock
        return formula(x if x.dtype == torch.float64 else x.float()).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.stock(x)
        return *torch.autograd.grad(y, x, dy), None, None
