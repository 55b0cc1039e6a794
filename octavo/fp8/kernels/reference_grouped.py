"""Grouped operations in plain PyTorch, one expert at a time.

Each operation selects the rows of one expert in the matrix of all rows (:mod:`octavo.fp8.kernels.groups`), applies
:mod:`octavo.fp8.arithmetic.cast` or the GEMMs of the reference to them, and writes the result to the same rows. Padding
rows do not contribute to any amax, block or sum. Their codes and results are zero.

The sizes of the experts are read into Python here. This costs nothing on the CPU but would synchronize a GPU, so the
reference has no grouped operations for GPUs.
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
    """Return why the reference has no grouped operations on this device, or None if it has."""
    if not accelerator.is_gpu(device):  # on other devices no other backend has them: synchronizing beats failing
        return None
    return f"it reads the sizes of the experts on the host, which would synchronize {device.type}"


def quantize_rows(x: Tensor, spec: CastSpec, groups: Groups) -> Quantized:
    """Cast x [R, K], each expert's rows separately. Scales have the shapes of ``Backend.quantize_rows``; blocks without
    rows have the scale 1."""
    rows, cols = x.shape
    _check(rows, groups)
    r, c = spec.block
    if r != -1 and TILE % r:
        raise CastError(
            f"Cannot cast rows grouped by expert under {spec}: a block of {r} rows would span two experts, whose rows "
            f"begin at multiples of {TILE}. Use blocks whose number of rows divides {TILE}, or -1 for all rows."
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
    if not w.shape[0]:  # without experts, the shapes and dtypes come from a cast of zeros
        empty = cast.quantize(w.new_zeros(w.shape[1:]), spec)
        return Quantized(empty.data[None][:0], empty.scale[None][:0], spec)
    if hasattr(w, "fake_mode"):  # a fake tensor: all experts have the sizes of the first
        first = cast.quantize(w[0], spec)
        data, scale = (t.new_empty((w.shape[0], *t.shape)) for t in (first.data, first.scale))
        return Quantized(data, scale, spec)
    parts = [cast.quantize(matrix, spec) for matrix in w.unbind(0)]
    data, scale = (
        torch.stack([as_bytes(t) for t in ts]) for ts in zip(*((q.data, q.scale) for q in parts), strict=True)
    )
    return Quantized(data.view(spec.fmt.dtype), scale.view(parts[0].scale.dtype), spec)


def fwd(
    gemm: Gemm, x_q: Quantized, w_q: Quantized, groups: Groups, out_dtype: torch.dtype, bias: Tensor | None
) -> Tensor:
    """Return y [R, N], each expert's rows of x [R, K] times its w [E, N, K] transposed, plus its bias [E, N]."""
    out = _zeros(x_q, w_q.data.shape[1], groups, out_dtype)
    for expert, span in expert_spans(groups):
        x, w = select_expert(x_q, expert, span), _select_weight(w_q, expert)
        if bias is None:
            out[span] = gemm("fwd", x, 1, w, 1, out_dtype)
        else:
            out[span] = gemm("fwd", x, 1, w, 1, torch.float32) + bias[expert].float()
    return out


def dgrad(gemm: Gemm, dy_q: Quantized, w_q: Quantized, groups: Groups, out_dtype: torch.dtype) -> Tensor:
    """Return dx [R, K], each expert's rows of dy [R, N] times its w [E, N, K]."""
    out = _zeros(dy_q, w_q.data.shape[2], groups, out_dtype)
    for expert, span in expert_spans(groups):
        out[span] = gemm("dgrad", select_expert(dy_q, expert, span), 1, _select_weight(w_q, expert), 0, out_dtype)
    return out


def wgrad(gemm: Gemm, dy_q: Quantized, x_q: Quantized, groups: Groups, out_dtype: torch.dtype) -> Tensor:
    """Return dw [E, N, K], each expert's dy [R, N] transposed times its x [R, K]; zeros for experts without rows."""
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
            f"The matrix of all experts has {rows} rows, but its groups have {groups.rows}. Arrange the rows by the "
            "routing that the groups come from."
        )
