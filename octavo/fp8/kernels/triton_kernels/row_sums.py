"""Sums of rows, each in an order that follows from its length alone: every statistic of a row that a norm or a softmax
takes is one (``octavo/fp8/invariance/rows.py``). A program has :data:`WIDE` elements, of one long row or of several
short ones, and adds up a row's pieces element by element first."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.fp8.kernels.layout import ceil_div
from octavo.fp8.kernels.triton_kernels.bits import widen
from octavo.fp8.kernels.triton_kernels.launch import launch

WIDE = 2048
_ALIGNED = 16  # bytes: who loads how many numbers at once follows from it, and so do sums


def sums(x: Tensor) -> Tensor:
    """[R]: the sum of each row of x [R, N], in fp32; in float64 of float64."""
    rows, length = x.shape
    x = x.contiguous()
    if x.data_ptr() % _ALIGNED:
        x = x.clone()
    out = torch.empty(rows, dtype=torch.float64 if x.dtype == torch.float64 else torch.float32, device=x.device)
    across = min(WIDE, triton.next_power_of_2(max(length, 1)))
    down = WIDE // across
    launch(
        sums_kernel, (ceil_div(rows, down),),
        x, out, rows, LENGTH=length, DOWN=down, ACROSS=across, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["rows"])
def sums_kernel(x, out, rows, LENGTH: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr):
    row = tl.program_id(0) * DOWN + tl.arange(0, DOWN)
    at = x + row.to(tl.int64)[:, None] * LENGTH
    acc = tl.zeros((DOWN, ACROSS), out.dtype.element_ty)
    for start in range(0, LENGTH, ACROSS):
        column = start + tl.arange(0, ACROSS)[None, :]
        part = tl.load(at + column, mask=(row < rows)[:, None] & (column < LENGTH), other=0.0)
        acc += part if x.dtype.element_ty == tl.float64 else widen(part)
    tl.store(out + row, tl.sum(acc, axis=1), mask=row < rows)
