"""Map tokens to rows grouped by expert and back, within a rank; :mod:`octavo.fp8.kernels.groups` has the layout."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class ToRows(torch.autograd.Function):
    """hidden [M, H] -> [R, H] in ``dtype``: the token of each row. Padding rows have arbitrary tokens."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, pair_of: Tensor, row_of: Tensor, top_k: int, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(row_of)
        ctx.top_k, ctx.dtype = top_k, hidden.dtype
        return gather_rows(hidden, pair_of, top_k, dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (row_of,) = ctx.saved_tensors
        pairs = _select_rows(dy, row_of).masked_fill_((row_of >= dy.shape[0]).unsqueeze(1), 0)
        tokens = row_of.shape[0] // ctx.top_k
        return pairs.view(tokens, ctx.top_k, dy.shape[1]).sum(1, dtype=ctx.dtype), None, None, None, None


class ToPairs(torch.autograd.Function):
    """rows [R, H] -> [P, H]: the row of each pair. Rows of pairs without an expert, and gradients of padding rows, are
    arbitrary."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, pair_of: Tensor, row_of: Tensor) -> Tensor:
        ctx.save_for_backward(pair_of)
        return _select_rows(rows, row_of)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (pair_of,) = ctx.saved_tensors
        return _select_rows(dy, pair_of), None, None


def gather_rows(hidden: Tensor, pair_of: Tensor, top_k: int, dtype: torch.dtype) -> Tensor:
    """Return the token of the pair in each row: hidden [M, H] -> [R, H]."""
    return _select_rows(hidden.to(dtype), pair_of.div(top_k, rounding_mode="floor"))


def _select_rows(source: Tensor, index: Tensor) -> Tensor:
    """Select rows of ``source``. Indices past the end select the last row; an empty source gives zeros."""
    if not source.shape[0]:
        return source.new_zeros(index.shape[0], source.shape[1])
    return source.index_select(0, index.clamp(max=source.shape[0] - 1))
