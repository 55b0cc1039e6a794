"""Grouped operations in plain PyTorch: each expert separately.

Each operation takes the rows of one expert from the matrix of all rows (:mod:`octavo.fp8.kernels.groups`), applies
:mod:`octavo.fp8.arithmetic.cast` or the reference's GEMMs to them, and writes the result back to the same rows. Padding
rows are part of no amax, block or sum. Their codes and results are zero.

The sizes of the experts are read into Python here. That is free on the CPU and would make a GPU wait, so the reference
has no grouped operations for GPUs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from octavo.base import accelerator
from octavo.fp8.arithmetic import cast
from octavo.fp8.arithmetic.cast import CastError, CastSpec, Quantized
from octavo.fp8.arithmetic.formats import E8M0
from octavo.fp8.kernels.groups import TILE, Groups, expert_spans, select_expert
from octavo.fp8.kernels.layout import as_bytes, ceil_div

OPS = ("grouped_fwd", "grouped_dgrad", "grouped_wgrad")

Gemm = Callable[[str, Quantized, int, Quantized, int, torch.dtype], Tensor]  # as reference._gemm


def why_not(device: torch.device) -> str | None:
    """Why the reference has no grouped operations on this device; None if it has."""
    if not accelerator.is_gpu(device):  # no other backend has them elsewhere: waiting is better than failing
        return None
    return f"it reads the sizes of the experts, for which {device.type} would have to be waited for"


def quantize_rows(x: Tensor, spec: CastSpec, groups: Groups) -> Quantized:
    """Cast x [R, K], each expert's rows separately. Scales as ``Backend.quantize_rows``; 1 for blocks without rows."""
    rows, cols = x.shape
    _check(rows, groups)
    r, c = spec.block
    if r != -1 and TILE % r:
        raise CastError(
            f"Cannot cast rows grouped by expert under {spec}: a block of {r} rows would span two experts, whose rows "
            f"begin at multiples of {TILE}. Use blocks of a divisor of {TILE} rows, or of all (-1)."
        )
    data = x.new_zeros((rows, cols), dtype=torch.uint8).view(spec.fmt.dtype)
    grid = (groups.experts if r == -1 else rows // r, 1 if c == -1 else ceil_div(cols, c))
    scale = torch.ones(grid, dtype=torch.float32, device=x.device)
    if spec.scale == "e8m0":
        scale = scale.to(E8M0)
    out = Quantized(data, scale, spec)
    for expert, span in expert_spans(groups):
        q, rows_out = cast.quantize(x[span], spec), select_expert(out, expert, span)
        as_bytes(rows_out.data).copy_(as_bytes(q.data))
        as_bytes(rows_out.scale).copy_(as_bytes(q.scale))
    return out


def quantize_experts(w: Tensor, spec: CastSpec) -> Quantized:
    """Cast w [E, N, K], each expert separately; scale [E, N / r, K / c]."""
    if not w.shape[0]:  # no experts: shapes and dtypes of the cast of one, cut to none
        none = cast.quantize(w.new_zeros(w.shape[1:]), spec)
        return Quantized(none.data[None][:0], none.scale[None][:0], spec)
    if hasattr(w, "fake_mode"):  # a fake tensor: the cast of one expert gives the sizes for all
        one = cast.quantize(w[0], spec)
        data, scale = (t.new_empty((w.shape[0], *t.shape)) for t in (one.data, one.scale))
        return Quantized(data, scale, spec)
    parts = [cast.quantize(matrix, spec) for matrix in w.unbind(0)]
    data, scale = (
        torch.stack([as_bytes(t) for t in ts]) for ts in zip(*((q.data, q.scale) for q in parts), strict=True)
    )
    return Quantized(data.view(spec.fmt.dtype), scale.view(parts[0].scale.dtype), spec)


def fwd(
    gemm: Gemm, x_q: Quantized, w_q: Quantized, groups: Groups, out_dtype: torch.dtype, bias: Tensor | None
) -> Tensor:
    """y [R, N] = x [R, K] times each expert's w [E, N, K] transposed, plus its bias [E, N]."""
    out = _zeros(x_q, w_q.data.shape[1], groups, out_dtype)
    for expert, span in expert_spans(groups):
        x, w = select_expert(x_q, expert, span), _select_weight(w_q, expert)
        if bias is None:
            out[span] = gemm("fwd", x, 1, w, 1, out_dtype)
        else:
            out[span] = gemm("fwd", x, 1, w, 1, torch.float32) + bias[expert].float()
    return out


def dgrad(gemm: Gemm, dy_q: Quantized, w_q: Quantized, groups: Groups, out_dtype: torch.dtype) -> Tensor:
    """dx [R, K] = dy [R, N] times each expert's w [E, N, K]."""
    out = _zeros(dy_q, w_q.data.shape[2], groups, out_dtype)
    for expert, span in expert_spans(groups):
        out[span] = gemm("dgrad", select_expert(dy_q, expert, span), 1, _select_weight(w_q, expert), 0, out_dtype)
    return out


def wgrad(gemm: Gemm, dy_q: Quantized, x_q: Quantized, groups: Groups, out_dtype: torch.dtype) -> Tensor:
    """dw [E, N, K]: each expert's dy [R, N] transposed times its x [R, K]; zeros for an expert without rows."""
    _check(x_q.data.shape[0], groups)
    shape = (groups.experts, dy_q.data.shape[1], x_q.data.shape[1])
    out = torch.zeros(shape, dtype=out_dtype, device=x_q.data.device)
    for expert, span in expert_spans(groups):
        out[expert] = gemm(
            "wgrad", select_expert(dy_q, expert, span), 0, select_expert(x_q, expert, span), 0, out_dtype
        )
    return out


def _select_weight(q: Quantized, expert: int) -> Quantized:
    return Quantized(q.data[expert], q.scale[expert], q.spec)


def _zeros(q: Quantized, cols: int, groups: Groups, dtype: torch.dtype) -> Tensor:
    _check(q.data.shape[0], groups)
    return q.data.new_zeros((q.data.shape[0], cols), dtype=dtype)  # fake if q is fake


def _check(rows: int, groups: Groups) -> None:
    if rows != groups.rows:
        raise CastError(
            f"The matrix of all experts' rows has {rows} rows where the groups say {groups.rows}. Lay it out by the "
            "routing that made the groups."
        )
