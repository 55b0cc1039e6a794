"""Grouped GEMMs in high precision, for the projections and GEMMs of experts that do not run in FP8.

Rows have the layout of :mod:`octavo.fp8.kernels.groups`. Padding rows are undefined, so they are set to zero first.
BF16 on CUDA uses torch's grouped product, which does not synchronize; otherwise a loop over the experts reads their
sizes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.base import accelerator
from octavo.fp8.dense import gemms
from octavo.fp8.kernels.groups import TILE, Groups, expert_spans, real_rows

_WIDTH = 8  # torch's grouped product loads 16 bytes at a time, so rows must begin at multiples of 16 bytes


def fwd(x: Tensor, w: Tensor, bias: Tensor | None, groups: Groups) -> Tensor:
    """Return y [R, N] in x's dtype: rows x [R, K] times the transposed w [E, N, K] of their expert, plus bias [E, N].

    Padding rows are undefined.
    """
    w, bias = w.to(x.dtype), None if bias is None else bias.to(x.dtype)
    if _is_native(x, w):
        y = _grouped_mm(x, w.mT, groups)
        return y if bias is None else y + expand_to_rows(bias, groups)
    return _run_each_expert(
        x, w.shape[1], groups, lambda e, rows: gemms.high_linear(rows, w[e], None if bias is None else bias[e])
    )


def dgrad(dy: Tensor, w: Tensor, groups: Groups) -> Tensor:
    """Return dx [R, K]: rows dy [R, N] times w [E, N, K] of their expert."""
    w = w.to(dy.dtype)
    if _is_native(dy, w):
        return _grouped_mm(dy, w, groups)
    return _run_each_expert(dy, w.shape[2], groups, lambda e, rows: gemms.high_mm(rows, w[e]))


def wgrad(dy: Tensor, x: Tensor, groups: Groups, out_dtype: torch.dtype) -> Tensor:
    """Return dw [E, N, K]: the transposed dy [R, N] times x [R, K] of each expert; zero for experts without rows."""
    dy, x = without_padding(dy, groups), without_padding(x, groups)
    if _is_native(dy, x):
        dw = F.grouped_mm(dy.t(), x, offs=groups.starts[1:])
        # Nothing is written for an expert without rows.
        return torch.where((groups.sizes > 0).view(-1, 1, 1), dw, 0).to(out_dtype)
    dw = dy.new_zeros(groups.experts, dy.shape[1], x.shape[1], dtype=out_dtype)
    for expert, span in expert_spans(groups):
        dw[expert] = gemms.high_mm(dy[span].t(), x[span])
    return dw


def bias_grad(dy: Tensor, groups: Groups) -> Tensor:
    """Return db [E, N] in fp32: the sum of the rows dy [R, N] of each expert, in a fixed order."""
    tiles = without_padding(dy, groups).view(-1, TILE, dy.shape[1]).sum(1, dtype=torch.float32)
    is_of_expert = groups.tiles == torch.arange(groups.experts, device=dy.device).unsqueeze(1)
    return (is_of_expert.double() @ tiles.double()).float()


def expand_to_rows(values: Tensor, groups: Groups) -> Tensor:
    """Expand [E, N] to [R, N]: the values of each row's expert. Unused rows at the end get the values of the first
    expert."""
    return values.index_select(0, groups.tiles.clamp(min=0).repeat_interleave(TILE))


def without_padding(x: Tensor, groups: Groups) -> Tensor:
    """Return x [R, N] with zeros in padding rows."""
    return torch.where(real_rows(groups).unsqueeze(1), x, 0)


def _run_each_expert(x: Tensor, cols: int, groups: Groups, run: Callable[[int, Tensor], Tensor]) -> Tensor:
    """Return [R, cols] with ``run(expert, rows)`` for each expert, and zeros in padding rows."""
    y = x.new_zeros(x.shape[0], cols)
    for expert, span in expert_spans(groups):
        y[span] = run(expert, x[span])
    return y


def _grouped_mm(x: Tensor, w: Tensor, groups: Groups) -> Tensor:
    """Return rows x [R, A] times w [E, A, B] of their expert, by torch's grouped product."""
    return F.grouped_mm(without_padding(x, groups), w, offs=groups.starts[1:])


def _is_native(a: Tensor, b: Tensor) -> bool:
    """Return True if torch's grouped product supports these operands without synchronizing."""
    return (
        a.dtype is torch.bfloat16
        and hasattr(F, "grouped_mm")
        and (accelerator.compute_capability(a.device) or (0, 0)) >= (8, 0)
        and all(size % _WIDTH == 0 for t in (a, b) for size in t.shape[-2:])
    )
