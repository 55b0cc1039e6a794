"""Products in high precision whose rows stand for themselves: out [M, N] = alpha a [M, K] @ b [K, N] + beta start.

One form for a dtype, whatever the sizes: tiles of :data:`TILES`, the whole contraction by one program, in steps and in
order, in fp32 (fp32 operands by fp32 multiplications, never TF32). So an element's sum depends on its row of a and its
column of b alone, and on neither how many rows there are nor where they stand. A library does better: it cuts the
contraction where there are few rows, and takes larger tiles where there are many.

Experts: the rows of a lie expert behind expert, and a tile has rows of one. Which expert a tile has, and which rows, is
worked out on the device (:func:`_places`), so that nobody waits for it; there are as many programs as tiles could be.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.fp8.kernels.layout import ceil_div
from octavo.fp8.kernels.triton_kernels.bits import round_to, widen
from octavo.fp8.kernels.triton_kernels.launch import launch
from octavo.fp8.kernels.triton_kernels.tile_products import dot

TILES = {2: (64, 128, 64, 4, 3), 4: (32, 64, 32, 4, 2)}
"""Bytes of a number -> rows, columns and steps of a tile, warps, stages. fp32 is not for tensor cores."""


def product(a: Tensor, b: Tensor, start: Tensor | None, beta: float, alpha: float, dtype: torch.dtype) -> Tensor:
    """alpha a [M, K] @ b [K, N] + beta start (what broadcasts to [M, N], or None), rounded once to ``dtype``."""
    (rows, inner), cols = a.shape, b.shape[1]
    out = torch.empty(rows, cols, dtype=dtype, device=a.device)
    m, n, *_ = TILES[a.itemsize]
    added = out if start is None else start.expand(rows, cols)
    _launch((ceil_div(rows, m), ceil_div(cols, n)), a, b, out, added, None, (rows, inner, cols), start, beta, alpha)
    return out


def grouped_product(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """Rows of a [R, K], those of expert e ending at ``ends`` [E], times b [E, K, N]: [R, N]; zeros behind the last."""
    (rows, inner), (experts, _, cols) = a.shape, b.shape
    out = torch.zeros(rows, cols, dtype=a.dtype, device=a.device)
    m, n, *_ = TILES[a.itemsize]
    tiles = ceil_div(rows, m) + min(experts, rows)
    places = _places(ends.long(), tiles, m)
    _launch((tiles, ceil_div(cols, n)), a, b, out, out, places, (rows, inner, cols), None, 1.0, 1.0)
    return out


def _places(ends: Tensor, tiles: int, height: int) -> Tensor:
    """int32 [3, tiles]: expert, first row and the row behind the last of each tile; no row of tiles left over."""
    starts = torch.cat([ends.new_zeros(1), ends[:-1]])
    behind = ((ends - starts + height - 1) // height).cumsum(0)  # tiles up to and with each expert
    tile = torch.arange(tiles, device=ends.device)
    expert = torch.searchsorted(behind, tile, right=True)
    there, expert = expert < len(ends), expert.clamp(max=len(ends) - 1)
    nth = tile - torch.where(expert > 0, behind[expert - 1], 0)
    return torch.stack([expert, starts[expert] + nth * height, torch.where(there, ends[expert], 0)]).int()


def _launch(
    grid: tuple[int, int], a: Tensor, b: Tensor, out: Tensor, added: Tensor, places: Tensor | None,
    sizes: tuple[int, int, int], start: Tensor | None, beta: float, alpha: float,
) -> None:  # fmt: skip
    a = a if a.stride(1) == 1 else a.contiguous()
    m, n, k, warps, stages = TILES[a.itemsize]
    launch(
        product_kernel, grid,
        a, b, out, added, out if places is None else places, float(beta), float(alpha),
        *sizes, grid[0], a.stride(0), b.stride(0) if b.dim() == 3 else 0, *b.stride()[-2:], *added.stride(),
        M=m, N=n, K=k, START=start is not None, GROUPED=places is not None, num_warps=warps, num_stages=stages,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "tiles"])
def product_kernel(
    a, b, out, start, places, beta, alpha, rows, inner, cols, tiles,
    a_row, b_expert, b_step, b_col, start_row, start_col,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, START: tl.constexpr, GROUPED: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    if GROUPED:
        first = tl.load(places + tiles + tile)
        rows = tl.load(places + 2 * tiles + tile)
        if first >= rows:
            return
        b += tl.load(places + tile).to(tl.int64) * b_expert
    else:
        first = tile * M
    row = first + tl.arange(0, M)
    col = tl.program_id(1) * N + tl.arange(0, N)
    step = tl.arange(0, K)
    a_at = a + tl.minimum(row, rows - 1).to(tl.int64)[:, None] * a_row + step[None, :]
    b_at = b + col.to(tl.int64)[None, :] * b_col + step.to(tl.int64)[:, None] * b_step
    acc = tl.zeros((M, N), tl.float32)
    for k in range(0, inner, K):
        there = k + step < inner
        x = tl.load(a_at + k, mask=there[None, :], other=0.0)
        w = tl.load(b_at + tl.cast(k, tl.int64) * b_step, mask=there[:, None] & (col < cols)[None, :], other=0.0)
        acc += dot(x, w)
    inside = (row < rows)[:, None] & (col < cols)[None, :]
    acc *= alpha
    if START:
        at = start + row.to(tl.int64)[:, None] * start_row + col.to(tl.int64)[None, :] * start_col
        acc += beta * widen(tl.load(at, mask=inside, other=0.0))
    at = out + row.to(tl.int64)[:, None] * cols + col[None, :]
    tl.store(at, round_to(acc, out.dtype.element_ty), mask=inside)
