"""Linear layers of which only some operands are rounded to FP8: weights, activations or gradients.

A recipe casts both operands of a GEMM. To find which operand costs what, the layers of the decoder round each to the
blocks of a recipe and back, and multiply in high precision: y = Q(x) Q(w)^T, dx = Q(dy) Q(w), dw = Q(dy)^T Q(x), each Q
for itself on or off. With all of them on, this is the emulation that Octavo's reference backend computes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from octavo import fp8, train
from octavo.fp8.arithmetic.recipe import Gemm

#: what is rounded -> operands, as (GEMM, a or b)
OPERANDS = {
    "weights": {("fwd", "b"), ("dgrad", "b")},
    "activations": {("fwd", "a"), ("wgrad", "b")},
    "gradients": {("dgrad", "a"), ("wgrad", "a")},
    "everything": {(gemm, side) for gemm in ("fwd", "dgrad", "wgrad") for side in "ab"},
}
ON = "_rounded_operands"


def plant(run: train.Run, recipe: str, what: str) -> None:
    """Round these operands in the linear layers of all decoder layers; the output head stays as it is."""
    apply(run.model, fp8.recipe(recipe), what)


def one_cast() -> fp8.Recipe:
    """Return blockwise with one cast of x, in 128x128 blocks, for fwd and for wgrad. No recipe of Octavo has it: in fwd
    it couples the tokens of a block, also of different sequences, and a server casts each token for itself."""
    casts = fp8.recipe("blockwise")
    assert casts.fwd is not None and casts.wgrad is not None
    return replace(casts, fwd=Gemm(casts.wgrad.b, casts.fwd.b))


def apply(model: nn.Module, casts: fp8.Recipe, what: str) -> None:
    chosen = OPERANDS[what]
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and ".layers." in name:
            module.__dict__[ON] = True
            module.forward = partial(_forward, module, casts, chosen)  # type: ignore[method-assign]


@contextmanager
def off(model: nn.Module) -> Iterator[None]:
    """Multiply in high precision inside the context."""
    rounded = [module for module in model.modules() if ON in module.__dict__]
    for module in rounded:
        module.__dict__[ON] = False
    try:
        yield
    finally:
        for module in rounded:
            module.__dict__[ON] = True


def _forward(module: nn.Linear, casts: fp8.Recipe, chosen: set[tuple[str, str]], x: Tensor) -> Tensor:
    if not module.__dict__[ON]:
        return nn.functional.linear(x, module.weight, module.bias)
    y: Tensor = _Product.apply(x.flatten(0, -2), module.weight, casts, chosen)
    return y.view(*x.shape[:-1], -1)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, w: Tensor, casts: fp8.Recipe, chosen: set[tuple[str, str]]) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.casts, ctx.chosen = casts, chosen
        a, b = _round_chosen(ctx, "fwd", x, w)
        return a @ b.t()

    @staticmethod
    def backward(ctx: FunctionCtx, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, w = ctx.saved_tensors
        dy_row, w_row = _round_chosen(ctx, "dgrad", dy, w)
        dy_col, x_col = _round_chosen(ctx, "wgrad", dy, x)
        return dy_row @ w_row, dy_col.t() @ x_col, None, None


def _round_chosen(ctx: FunctionCtx, gemm: str, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Both operands of a GEMM, each rounded if it is one of the chosen."""
    pair = ctx.casts.gemm(gemm)

    def one(side: str, value: Tensor, spec: fp8.CastSpec) -> Tensor:
        if (gemm, side) not in ctx.chosen:
            return value
        return fp8.dequantize(fp8.quantize(value.contiguous(), spec), value.dtype)

    return one("a", a, pair.a), one("b", b, pair.b)
