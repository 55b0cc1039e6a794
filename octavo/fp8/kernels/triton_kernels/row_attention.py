"""Attention whose result for a query depends only on its own sequence: one kernel for
``octavo/fp8/invariance/attention.py``, which has the formulas.

A program attends for up to ``M`` queries of the heads that share a head of keys (all heads of a query, then all heads
of the next), over keys in tiles of a fixed size, by position and in order, with a running maximum and sum. The same
tiles serve whole sequences and single new tokens. Tiles that no query of a program sees are skipped: they would change
no bit (p = 0, a = 1).

Only products and maxima combine several elements: the sum of p is a product with ones, so that a tensor core defines
its order, not the registers in which the compiler places p, which a mask might change. p is multiplied as two numbers
of 16 bits (:func:`tile_products.weighted`), as in the kernels of the paged cache.
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
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, positions: Tensor | None, real: Tensor | None,
    window: int | None, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(softmax(q k^T scale + mask) v [B, H, T, D_v] in q's dtype, lse fp32 [B, H, T], inf for queries without keys).

    q [B, H, T, D], k and v [B, H_kv, S, D], [B, H_kv, S, D_v] in one dtype · mask [B or 1, H or 1, T or 1, S], bool or
    additive, or None · positions int64 [B, T]: a query sees keys up to its position, and only the last ``window`` of
    them · real bool [B, S]: which columns are keys
    """
    batch, heads, queries, size = q.shape
    kv, keys, wide = k.shape[1], k.shape[2], v.shape[3]
    q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k, v))
    out = torch.empty(batch, heads, queries, wide, dtype=q.dtype, device=q.device)
    lse = torch.empty(batch, heads, queries, dtype=torch.float32, device=q.device)
    if not keys:
        return out.zero_(), lse.fill_(torch.inf)
    kind, bias, seen = NOTHING, lse, real  # lse: a placeholder
    if mask is not None:
        kind, bias = (SEEN, mask.view(torch.uint8)) if mask.dtype == torch.bool else (ADDED, mask)
        bias = bias.expand(batch, heads, queries, keys)
    seen = None if real is None else real.expand(batch, keys).view(torch.uint8)
    across, across_v = (max(16, triton.next_power_of_2(n)) for n in (size, wide))
    rows, tile, warps = form(max(across, across_v), q.dtype, gpu_of(q.device).sm)
    strides = [n for x in (q, k, v) for n in x.stride()[:3]]
    unit = gcd(16, *strides)  # Triton checks only "divides by 16": heads of 72 would be read one by one
    launch(
        attend_kernel, (ceil_div(queries * (heads // kv), rows), kv, batch),
        q, k, v, out, lse, bias, out if positions is None else positions, out if seen is None else seen,
        float(scale), queries, keys, window or 0,
        *(n // unit for n in strides), *(bias.stride() if kind else (0, 0, 0, 0)),
        *((0, 0) if positions is None else positions.stride()), *((0, 0) if seen is None else seen.stride()),
        HEADS=heads // kv, D=size, D_V=wide, MASK=kind, PLACED=positions is not None, REAL=seen is not None,
        WINDOW=window is not None, UNIT=unit, M=rows, TILE=tile, ACROSS=across, ACROSS_V=across_v,
        num_warps=warps, num_stages=2,
    )  # fmt: skip
    return out, lse


def form(across: int, dtype: torch.dtype, sm: int) -> tuple[int, int, int]:
    """(queries, keys, warps) of a program for heads of ``across`` numbers. fp32, without tensor cores, needs more
    registers.

    On Hopper no warp-group instruction serves 32 queries of 256 numbers, and compiled with a mask they had other last
    bits than by positions (on an H200, 13 of 266,240); 64 queries have the same bits, and take less time, although some
    registers spill.
    """
    if dtype == torch.float32:
        return 16, max(16, min(32, 2048 // across)), 4
    if across <= 64:
        return 64, 64, 4
    return (64, 32, 8) if across <= 128 or sm // 10 == 9 else (32, 32, 8)


@triton.jit(do_not_specialize=["scale", "queries", "keys", "window"])
def attend_kernel(
    q,  # [B, H, queries, D] bf16, fp16 or fp32
    k,  # [B, H / HEADS, keys, D] in q's dtype
    v,  # [B, H / HEADS, keys, D_V] in q's dtype
    out,  # [B, H, queries, D_V] in q's dtype, contiguous
    lse,  # fp32 [B, H, queries]: log of the sum of exp(score), in natural units
    mask,  # uint8 (MASK 1) or any float (MASK 2) [B, H, queries, keys], by its strides
    positions,  # int64 [B, queries] if PLACED
    real,  # uint8 [B, keys] if REAL: which columns are keys
    scale,  # of the scores, fp32
    queries,
    keys,
    window,  # keys that a query sees, if WINDOW
    q_batch,  # strides: of q, k and v divided by UNIT, of the others in elements
    q_head,
    q_row,
    k_batch,
    k_head,
    k_row,
    v_batch,
    v_head,
    v_row,
    mask_batch,
    mask_head,
    mask_row,
    mask_col,
    at_batch,
    at_row,
    real_batch,
    real_col,
    HEADS: tl.constexpr,  # heads of queries per head of keys
    D: tl.constexpr,
    D_V: tl.constexpr,
    MASK: tl.constexpr,  # 0: none, 1: bool, 2: additive
    PLACED: tl.constexpr,
    REAL: tl.constexpr,
    WINDOW: tl.constexpr,
    UNIT: tl.constexpr,
    M: tl.constexpr,  # queries per program
    TILE: tl.constexpr,  # keys per step
    ACROSS: tl.constexpr,  # D and D_V up to powers of two
    ACROSS_V: tl.constexpr,
):
    """Attention of M queries of one head of keys over all keys that they see."""
    batch = tl.program_id(2).to(tl.int64)
    shared = tl.program_id(1)
    # All heads of a query, then of the next: queries that share keys also share most of a mask by position.
    mine = tl.program_id(0) * M + tl.arange(0, M)
    valid = mine < queries * HEADS
    row = tl.minimum(mine // HEADS, queries - 1).to(tl.int64)
    head = (shared * HEADS + mine % HEADS).to(tl.int64)
    across = tl.arange(0, ACROSS)
    across_v = tl.arange(0, ACROSS_V)
    # Load the queries once; rows beyond the last query repeat it and are not stored.
    q_at = q + (batch * q_batch + head * q_head + row * q_row) * UNIT
    x = tl.load(q_at[:, None] + across[None, :], mask=valid[:, None] & (across < D)[None, :], other=0.0)
    # The keys that these queries can see: up to the largest position, from the start of the window, in whole
    # tiles, so that a key is always in the same place of its tile.
    first = 0
    last = keys
    place = row.to(tl.int32)
    if PLACED:
        place = tl.load(positions + batch * at_batch + row * at_row).to(tl.int32)
        place = tl.where(valid, place, -1)
        last = tl.minimum(keys, tl.max(place, axis=0) + 1)
        if WINDOW:
            lowest = tl.min(tl.where(valid, place, 2147483647), axis=0) - window + 1
            first = tl.maximum(lowest, 0) // TILE * TILE
    # Running maximum, sum and output, in fp32. The sum has 16 columns: the least that tensor cores multiply.
    top = tl.full((M,), float("-inf"), tl.float32)
    total = tl.zeros((M, 16), tl.float32)
    o = tl.zeros((M, ACROSS_V), tl.float32)
    ones = round_to(tl.full((TILE, 16), 1.0, tl.float32), v.dtype.element_ty)
    for start in range(first, last, TILE):
        # Load one tile of keys and values; columns beyond the last key repeat it and are masked below.
        column = start + tl.arange(0, TILE)
        inside = column < keys
        at = tl.minimum(column, keys - 1).to(tl.int64)
        # int64 addresses: batch times heads times keys may exceed 2^31 numbers.
        k_at = k + (batch * k_batch + shared.to(tl.int64) * k_head + at * k_row) * UNIT
        v_at = v + (batch * v_batch + shared.to(tl.int64) * v_head + at * v_row) * UNIT
        key = tl.load(k_at[None, :] + across[:, None], mask=inside[None, :] & (across < D)[:, None], other=0.0)
        value = tl.load(v_at[:, None] + across_v[None, :], mask=inside[:, None] & (across_v < D_V)[None, :], other=0.0)
        # Scores in fp32, then what each query sees: inside, by position, real keys, by the mask.
        s = dot(x, key) * scale
        sees = valid[:, None] & inside[None, :]
        if PLACED:
            sees = sees & (column[None, :] <= place[:, None])
            if WINDOW:
                sees = sees & (column[None, :] > (place - window)[:, None])
        # Columns that are not keys: padding of a batch.
        if REAL:
            sees = sees & (tl.load(real + batch * real_batch + at * real_col) != 0)[None, :]
        if MASK > 0:
            mask_at = (
                mask + batch * mask_batch + (head * mask_head + row * mask_row)[:, None] + (at * mask_col)[None, :]
            )
            # An additive mask joins the scores after the scale, as in the reference.
            entry = tl.load(mask_at, mask=sees, other=0)
            if MASK == 1:
                sees = sees & (entry != 0)
            else:
                s += widen(entry)
        s = tl.where(sees, s, float("-inf"))
        # Online softmax. A query that has seen nothing yet has the maximum -inf; with 0 in its place exp is not NaN.
        above = tl.maximum(top, tl.max(s, axis=1))
        safe = tl.where(above == float("-inf"), 0.0, above)
        fade = tl.exp(top - safe)
        p = tl.exp(s - safe[:, None])
        total = total * fade[:, None] + weighted(p, ones)
        o = o * fade[:, None] + weighted(p, value)
        top = above
    # Epilogue: normalize, round once, store. All 16 columns of the sum are the same number.
    sums = tl.max(total, axis=1)
    empty = sums == 0.0
    sums = tl.where(empty, 1.0, sums)
    place_out = (batch * tl.num_programs(1) * HEADS + head) * queries + row
    y = round_to(o / sums[:, None], out.dtype.element_ty)
    tl.store(out + place_out[:, None] * D_V + across_v[None, :], y, mask=valid[:, None] & (across_v < D_V)[None, :])
    tl.store(lse + place_out, tl.where(empty, float("inf"), top + tl.log(sums)), mask=valid)
