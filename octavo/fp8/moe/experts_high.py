"""Experts in high precision that group rows by expert, as FP8 experts do, if they have adapters or are distributed over
ranks. Otherwise they run the forward of their stock class."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from octavo.fp8.kernels.groups import Groups
from octavo.fp8.moe import grouped_high
from octavo.fp8.moe.exchange import EXCHANGE, local_parameter
from octavo.fp8.moe.experts import ADAPTERS, run_mixture
from octavo.fp8.weights.cache import WeightSlice


class HighExperts(nn.Module):
    """Mixin that :func:`enable_row_forward` adds to the class of a module of experts."""

    _stock: type[nn.Module]

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        if ADAPTERS not in self.__dict__ and EXCHANGE not in self.__dict__:
            return super().forward(hidden_states, top_k_index, top_k_weights)
        return self._forward_rows(hidden_states, top_k_index, top_k_weights)

    @torch._disable_dynamo
    def _forward_rows(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return run_mixture(self, hidden_states, top_k_index, top_k_weights, self._project)

    def _project(self, name: str, x: Tensor, groups: Groups) -> Tensor:
        part = WeightSlice(None, bool(getattr(self, "is_transposed", False)))
        return _Rows.apply(x, local_parameter(self, name), local_parameter(self, f"{name}_bias"), groups, part)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy or pickle by the stock class, because this class is created at runtime."""
        return _rebuild, (self._stock,), self.__dict__.copy()


_classes: dict[type[nn.Module], type[nn.Module]] = {}


def enable_row_forward(module: nn.Module) -> None:
    """Add the grouped forward to a module of experts in high precision, in place; repeated calls have no effect."""
    if not isinstance(module, HighExperts):
        module.__class__ = _high_class(type(module))


def _high_class(stock: type[nn.Module]) -> type[nn.Module]:
    if stock not in _classes:
        names = {"__module__": __name__, "_stock": stock}
        _classes[stock] = type(f"High{stock.__name__}", (HighExperts, stock), names)
    return _classes[stock]


def _rebuild(stock: type[nn.Module]) -> nn.Module:
    high_class = _high_class(stock)
    return high_class.__new__(high_class)


class _Rows(torch.autograd.Function):
    """x [R, K] times each expert's weight, in high precision. Saves the parameter itself, so that dequantized values of
    frozen FP8 codes are freed after the GEMM."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, groups: Groups, part: WeightSlice) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            y = grouped_high.fwd(x, part.of(weight), bias, groups)
        ctx.save_for_backward(*groups[:3], weight, *((x,) if ctx.needs_input_grad[1] else ()))
        ctx.rows, ctx.part, ctx.b_dtype = groups.rows, part, None if bias is None else bias.dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        sizes, starts, tiles, weight, *x = ctx.saved_tensors
        groups = Groups(sizes, starts, tiles, ctx.rows)
        needs_x, needs_w, needs_b = ctx.needs_input_grad[:3]
        dx = dw = db = None
        with torch.autocast(dy.device.type, enabled=False):
            if needs_x:
                dx = grouped_high.dgrad(dy, ctx.part.of(weight), groups)
            if needs_w:
                dw = grouped_high.wgrad(dy, x[0], groups, weight.dtype)
                dw = dw.mT if ctx.part.transposed else dw
            if needs_b:
                db = grouped_high.bias_grad(dy, groups).to(ctx.b_dtype)
        return dx, dw, db, None, None
