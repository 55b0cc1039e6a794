"""Sums of rows in an order that depends only on the row's length. Norms and softmax take all statistics of a row with
them (``octavo/fp8/invariance/rows.py``). A program holds :data:`WIDE` elements, of one long row or of several short
ones, and adds the pieces of a row element by element before it reduces."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.fp8.kernels.layout import ceil_div
from octavo.fp8.kernels.triton_kernels.bits import widen
from octavo.fp8.kernels.triton_kernels.launch import launch

WIDE = 2048
# Bytes. Triton vectorizes loads by the alignment of the pointer, and the layout of a tile, so the order of its sum,
# follows from that: every call has the same alignment.
_ALIGNED = 16


def sums(x: Tensor) -> Tensor:
    """Return the sum of each row of x [R, N]: fp32 [R], or float64 for float64."""
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
def sums_kernel(
    x,  # [rows, LENGTH] contiguous, any float
    out,  # [rows] fp32, or float64 for float64
    rows,
    LENGTH: tl.constexpr,  # a constant: the loop is compiled for one length and any number of rows
    DOWN: tl.constexpr,  # rows per program
    ACROSS: tl.constexpr,  # columns per step
):
    """Sums of DOWN rows."""
    row = tl.program_id(0) * DOWN + tl.arange(0, DOWN)
    at = x + row.to(tl.int64)[:, None] * LENGTH
    # Add the steps element by element, in order; the ragged tail reads as 0.
    acc = tl.zeros((DOWN, ACROSS), out.dtype.element_ty)
    for start in range(0, LENGTH, ACROSS):
        column = start + tl.arange(0, ACROSS)[None, :]
        part = tl.load(at + column, mask=(row < rows)[:, None] & (column < LENGTH), other=0.0)
        acc += part if x.dtype.element_ty == tl.float64 else widen(part)
    # One reduction of [DOWN, ACROSS] at the end: its order does not depend on which rows are in the tile.
    tl.store(out + row, tl.sum(acc, axis=1), mask=row < rows)
