"""Batch-invariant products in high precision: out [M, N] = alpha a [M, K] @ b [K, N] + beta start.

One form per dtype, whatever the sizes: tiles of :data:`TILES`, the whole contraction in one program, step by step in
order, in fp32 (fp32 operands with fp32 multiplications, never TF32). So the sum of an element depends only on its row
of a and its column of b, and neither on the number of rows nor on their positions. Libraries are faster: they split the
contraction for few rows and take larger tiles for many, which changes sums.

Experts: the rows of a are sorted by expert, and a tile has rows of one expert. :func:`_places` computes on the device
which expert and which rows a tile has, so that the host does not wait; the grid has the largest possible number of
tiles.
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
"""Bytes of a number -> rows, columns and steps of a tile, warps, stages. Tensor cores do not multiply fp32."""


def product(a: Tensor, b: Tensor, start: Tensor | None, beta: float, alpha: float, dtype: torch.dtype) -> Tensor:
    """alpha a [M, K] @ b [K, N] + beta start (broadcasts to [M, N], or None), rounded once to ``dtype``."""
    (rows, inner), cols = a.shape, b.shape[1]
    out = torch.empty(rows, cols, dtype=dtype, device=a.device)
    m, n, *_ = TILES[a.itemsize]
    added = out if start is None else start.expand(rows, cols)
    _launch((ceil_div(rows, m), ceil_div(cols, n)), a, b, out, added, None, (rows, inner, cols), start, beta, alpha)
    return out


def grouped_product(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """Rows of a [R, K], where expert e's end at ``ends[e]``, times b [E, K, N]: [R, N]; zeros after the last."""
    (rows, inner), (experts, _, cols) = a.shape, b.shape
    out = torch.zeros(rows, cols, dtype=a.dtype, device=a.device)
    m, n, *_ = TILES[a.itemsize]
    tiles = ceil_div(rows, m) + min(experts, rows)
    places = _places(ends.long(), tiles, m)
    _launch((tiles, ceil_div(cols, n)), a, b, out, out, places, (rows, inner, cols), None, 1.0, 1.0)
    return out


def _places(ends: Tensor, tiles: int, height: int) -> Tensor:
    """int32 [3, tiles]: expert, first row and end of the rows of each tile; surplus tiles have no rows."""
    starts = torch.cat([ends.new_zeros(1), ends[:-1]])
    last_tiles = ((ends - starts + height - 1) // height).cumsum(0)  # tiles up to and including each expert
    tile = torch.arange(tiles, device=ends.device)
    expert = torch.searchsorted(last_tiles, tile, right=True)
    used, expert = expert < len(ends), expert.clamp(max=len(ends) - 1)
    nth = tile - torch.where(expert > 0, last_tiles[expert - 1], 0)
    return torch.stack([expert, starts[expert] + nth * height, torch.where(used, ends[expert], 0)]).int()


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
    a,  # [rows, inner] bf16, fp16 or fp32, last stride 1
    b,  # [inner, cols], or [E, inner, cols] if GROUPED, in a's dtype
    out,  # [rows, cols] contiguous, any float
    start,  # [rows, cols] any float, by its strides, if START
    places,  # int32 [3, tiles]: expert, first row, end of the rows of each tile, if GROUPED
    beta,  # fp32 factors of start and of the product
    alpha,
    rows,  # M of the product
    inner,  # K of the product
    cols,  # N of the product
    tiles,  # row tiles of the grid
    a_row,  # strides in elements
    b_expert,
    b_step,
    b_col,
    start_row,
    start_col,
    M: tl.constexpr,  # rows, columns and contraction of a tile
    N: tl.constexpr,
    K: tl.constexpr,
    START: tl.constexpr,
    GROUPED: tl.constexpr,
):
    """One tile [M, N] of out = alpha a @ b + beta start."""
    # rows and tiles are not specialized: a kernel compiled for other row counts could sum in another order.
    tile = tl.program_id(0)
    if GROUPED:
        first = tl.load(places + tiles + tile)
        rows = tl.load(places + 2 * tiles + tile)
        if first >= rows:  # a surplus tile
            return
        b += tl.load(places + tile).to(tl.int64) * b_expert
    else:
        first = tile * M
    row = first + tl.arange(0, M)
    col = tl.program_id(1) * N + tl.arange(0, N)
    step = tl.arange(0, K)
    # Rows beyond the edge read the last row again, so that the loop needs no mask of rows.
    a_at = a + tl.minimum(row, rows - 1).to(tl.int64)[:, None] * a_row + step[None, :]
    b_at = b + col.to(tl.int64)[None, :] * b_col + step.to(tl.int64)[:, None] * b_step
    # The whole contraction in this program, step by step: no split whose number depends on the grid.
    acc = tl.zeros((M, N), tl.float32)
    for k in range(0, inner, K):
        inside_k = k + step < inner
        x = tl.load(a_at + k, mask=inside_k[None, :], other=0.0)
        w = tl.load(b_at + tl.cast(k, tl.int64) * b_step, mask=inside_k[:, None] & (col < cols)[None, :], other=0.0)
        acc += dot(x, w)
    # Epilogue in fp32: alpha, start, one rounding, masked store.
    inside = (row < rows)[:, None] & (col < cols)[None, :]
    acc *= alpha
    if START:
        at = start + row.to(tl.int64)[:, None] * start_row + col.to(tl.int64)[None, :] * start_col
        acc += beta * widen(tl.load(at, mask=inside, other=0.0))
    at = out + row.to(tl.int64)[:, None] * cols + col[None, :]
    tl.store(at, round_to(acc, out.dtype.element_ty), mask=inside)
