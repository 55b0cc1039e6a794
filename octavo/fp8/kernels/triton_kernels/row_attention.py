"""Attention whose result for a query depends on its own sequence alone: ``octavo/fp8/invariance/attention.py``, which
has the formulas, in one kernel.

A program attends for up to ``M`` queries of the heads that share one of keys (all heads of a query, then those of the
next), over keys in tiles of a fixed size, by position and in order, with a running maximum and sum. The same tiles
serve whole sequences and one new token each. Tiles of which no query of a program sees anything are left out: they
would change no bit (p = 0, a = 1).

Only products and maxima look at more than one element: the sum of p is a product with ones, so that its order is that
of a tensor core's sums and not of the registers in which a compiler lays p out, which a mask might change. p is
multiplied as two numbers of 16 bits (:func:`tile_products.weighted`), as in the kernels of the paged cache.
"""

from __future__ import annotations

from math import gcd

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.fp8.kernels.layout import ceil_div
from octavo.fp8.kernels.triton_kernels.bits import round_to, widen
from octavo.fp8.kernels.triton_kernels.launch import launch
from octavo.fp8.kernels.triton_kernels.tile_products import dot, weighted
from octavo.fp8.kernels.triton_kernels.tiles import gpu_of

NOTHING, SEEN, ADDED = 0, 1, 2  # kinds of mask


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, positions: Tensor | None, own: Tensor | None,
    window: int | None, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(softmax(q k^T scale + mask) v [B, H, T, D_v] in q's dtype, lse fp32 [B, H, T], infinite of who sees nothing).

    q [B, H, T, D], k and v [B, H_kv, S, D], [B, H_kv, S, D_v] in one dtype · mask [B or 1, H or 1, T or 1, S], bool or
    added, or None · positions int64 [B, T]: a query sees keys up to there, and the last ``window`` of them · own bool
    [B, S]: which columns are keys
    """
    batch, heads, queries, size = q.shape
    kv, keys, wide = k.shape[1], k.shape[2], v.shape[3]
    q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k, v))
    out = torch.empty(batch, heads, queries, wide, dtype=q.dtype, device=q.device)
    lse = torch.empty(batch, heads, queries, dtype=torch.float32, device=q.device)
    if not keys:
        return out.zero_(), lse.fill_(torch.inf)
    kind, bias, seen = NOTHING, lse, own
    if mask is not None:
        kind, bias = (SEEN, mask.view(torch.uint8)) if mask.dtype == torch.bool else (ADDED, mask)
        bias = bias.expand(batch, heads, queries, keys)
    seen = None if own is None else own.expand(batch, keys).view(torch.uint8)
    across, beside = (max(16, triton.next_power_of_2(n)) for n in (size, wide))
    rows, tile, warps = form(max(across, beside), q.dtype, gpu_of(q.device).sm)
    strides = [n for x in (q, k, v) for n in x.stride()[:3]]
    unit = gcd(16, *strides)  # Triton looks no further than "divides by 16": heads of 72 would be read one by one
    launch(
        attend_kernel, (ceil_div(queries * (heads // kv), rows), kv, batch),
        q, k, v, out, lse, bias, out if positions is None else positions, out if seen is None else seen,
        float(scale), queries, keys, window or 0,
        *(n // unit for n in strides), *(bias.stride() if kind else (0, 0, 0, 0)),
        *((0, 0) if positions is None else positions.stride()), *((0, 0) if seen is None else seen.stride()),
        HEADS=heads // kv, D=size, D_V=wide, MASK=kind, PLACED=positions is not None, OWN=seen is not None,
        WINDOW=window is not None, UNIT=unit, M=rows, TILE=tile, ACROSS=across, BESIDE=beside,
        num_warps=warps, num_stages=2,
    )  # fmt: skip
    return out, lse


def form(across: int, dtype: torch.dtype, sm: int) -> tuple[int, int, int]:
    """(queries, keys, warps) of a program; numbers of fp32, which no tensor core multiplies, take more registers.

    On Hopper 32 queries of 256 numbers have no instruction of a whole warp group, and compiled under a mask they had
    other last bits than by positions (an H200, 13 of 266,240); 64 have the same, and take less time, though some
    registers are spilled.
    """
    if dtype == torch.float32:
        return 16, max(16, min(32, 2048 // across)), 4
    if across <= 64:
        return 64, 64, 4
    return (64, 32, 8) if across <= 128 or sm // 10 == 9 else (32, 32, 8)


@triton.jit(do_not_specialize=["scale", "queries", "keys", "window"])
def attend_kernel(
    q, k, v, out, lse, mask, positions, own, scale, queries, keys, window,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    mask_batch, mask_head, mask_row, mask_col, at_batch, at_row, own_batch, own_col,
    HEADS: tl.constexpr, D: tl.constexpr, D_V: tl.constexpr, MASK: tl.constexpr, PLACED: tl.constexpr,
    OWN: tl.constexpr, WINDOW: tl.constexpr, UNIT: tl.constexpr,
    M: tl.constexpr, TILE: tl.constexpr, ACROSS: tl.constexpr, BESIDE: tl.constexpr,
):  # fmt: skip
    batch = tl.program_id(2).to(tl.int64)
    shared = tl.program_id(1)
    mine = tl.program_id(0) * M + tl.arange(0, M)
    asked = mine < queries * HEADS
    row = tl.minimum(mine // HEADS, queries - 1).to(tl.int64)
    head = (shared * HEADS + mine % HEADS).to(tl.int64)
    across = tl.arange(0, ACROSS)
    beside = tl.arange(0, BESIDE)
    q_at = q + (batch * q_batch + head * q_head + row * q_row) * UNIT
    x = tl.load(q_at[:, None] + across[None, :], mask=asked[:, None] & (across < D)[None, :], other=0.0)
    first = 0
    last = keys
    place = row.to(tl.int32)
    if PLACED:
        place = tl.load(positions + batch * at_batch + row * at_row).to(tl.int32)
        place = tl.where(asked, place, -1)
        last = tl.minimum(keys, tl.max(place, axis=0) + 1)
        if WINDOW:
            lowest = tl.min(tl.where(asked, place, 2147483647), axis=0) - window + 1
            first = tl.maximum(lowest, 0) // TILE * TILE
    top = tl.full((M,), float("-inf"), tl.float32)
    total = tl.zeros((M, 16), tl.float32)
    found = tl.zeros((M, BESIDE), tl.float32)
    ones = round_to(tl.full((TILE, 16), 1.0, tl.float32), v.dtype.element_ty)
    for start in range(first, last, TILE):
        column = start + tl.arange(0, TILE)
        there = column < keys
        at = tl.minimum(column, keys - 1).to(tl.int64)
        k_at = k + (batch * k_batch + shared.to(tl.int64) * k_head + at * k_row) * UNIT
        v_at = v + (batch * v_batch + shared.to(tl.int64) * v_head + at * v_row) * UNIT
        key = tl.load(k_at[None, :] + across[:, None], mask=there[None, :] & (across < D)[:, None], other=0.0)
        value = tl.load(v_at[:, None] + beside[None, :], mask=there[:, None] & (beside < D_V)[None, :], other=0.0)
        s = dot(x, key) * scale
        sees = asked[:, None] & there[None, :]
        if PLACED:
            sees = sees & (column[None, :] <= place[:, None])
            if WINDOW:
                sees = sees & (column[None, :] > (place - window)[:, None])
        if OWN:
            sees = sees & (tl.load(own + batch * own_batch + at * own_col) != 0)[None, :]
        if MASK > 0:
            mask_at = (
                mask + batch * mask_batch + (head * mask_head + row * mask_row)[:, None] + (at * mask_col)[None, :]
            )
            given = tl.load(mask_at, mask=sees, other=0)
            if MASK == 1:
                sees = sees & (given != 0)
            else:
                s += widen(given)
        s = tl.where(sees, s, float("-inf"))
        above = tl.maximum(top, tl.max(s, axis=1))
        safe = tl.where(above == float("-inf"), 0.0, above)
        fade = tl.exp(top - safe)
        p = tl.exp(s - safe[:, None])
        total = total * fade[:, None] + weighted(p, ones)
        found = found * fade[:, None] + weighted(p, value)
        top = above
    sums = tl.max(total, axis=1)  # all 16 columns are one number
    nobody = sums == 0.0
    sums = tl.where(nobody, 1.0, sums)
    place_out = (batch * tl.num_programs(1) * HEADS + head) * queries + row
    y = round_to(found / sums[:, None], out.dtype.element_ty)
    tl.store(out + place_out[:, None] * D_V + beside[None, :], y, mask=asked[:, None] & (beside < D_V)[None, :])
    tl.store(lse + place_out, tl.where(nobody, float("inf"), top + tl.log(sums)), mask=asked)
