"""The paged key-value cache: writes to it, and attention of one new token of each sequence over it, in place.

The cache of a layer is ``codes`` [2 * heads, tokens, dim], keys then values, one page after the other, with ``scales``
[2 * heads, tokens] if codes are E4M3 (amax / 448 of a token's head, bit for bit the cast of ``arithmetic/cast.py``). A
row of ``table`` has the numbers of the pages of a sequence, in order.

One program attends for the queries that share a head of keys, over :data:`CHUNK` tokens of one sequence, tile by tile
in order, with a running maximum m and sum l (Milakov and Gimelshein 2018, arXiv:1805.02867), in fp32::

    s = scale * k_scale * (q . k)      m' = max(m, s)     p = exp(s - m')     a = exp(m - m')
    l = a l + sum p                    o = a o + (p * v_scale) . v

For sequences longer than a chunk the kernel stores m, l and o of each chunk, and a second kernel adds them up in order
(as in Flash-Decoding). Chunks begin at multiples of CHUNK in the sequence's own tokens, so that the result for a
sequence depends neither on its neighbours, nor on its row, nor on the width of the table: bit for bit.

Every E4M3 code is exact in bf16, so that tensor cores multiply codes, and scales multiply the scores and p. p is
multiplied as the sum of two numbers of 16 bits (16 bits of significand in bf16, 22 in fp16): rounding it to one would
be the largest error of all, and these tensor cores wait for memory anyway. A cache in fp32 is multiplied in fp32.

Bytes read per step and layer: each sequence's tokens * heads * 2 * (dim * bytes of a number [+ 4]). Each sample reads
the pages that samples share, from the L2 cache where they are still cached.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.fp8.kernels.layout import PAGED_CHUNK, ceil_div
from octavo.fp8.kernels.triton_kernels.bits import (
    INTERPRETED,
    amax_bits,
    decode_bits,
    encode,
    round_to,
    scale_of,
    widen,
)
from octavo.fp8.kernels.triton_kernels.launch import launch
from octavo.fp8.kernels.triton_kernels.tile_products import dot, weighted

CHUNK = PAGED_CHUNK
"""Tokens per program. 64 sequences with 8 heads of keys are 512 programs with one chunk each; o of a chunk has 1.6 % of
the bytes of its keys and values in bf16 (4 queries per head)."""

_TL = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def write(k: Tensor, v: Tensor, where: Tensor, codes: Tensor, scales: Tensor | None, dtype: torch.dtype) -> None:
    """Write keys and values [T, heads, dim], rounded to ``dtype``, to the tokens ``where`` [T] of a layer's cache.

    Tokens with -1 (padding) are skipped. With ``scales``, the cache holds E4M3 codes and their scales.
    """
    tokens, heads, dim = k.shape
    k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (k, v))
    down, across = _sides(heads, dim)
    launch(
        write_kernel, (tokens,),
        k, v, where, _plain(codes), codes if scales is None else scales,
        *k.stride()[:2], *v.stride()[:2], codes.shape[1],
        HEADS=heads, DIM=dim, DTYPE=_TL[dtype], CODED=scales is not None, ROWS=down, COLS=across,
        num_warps=min(8, max(1, down * across // 1024)),
    )  # fmt: skip


def attend(
    q: Tensor, codes: Tensor, scales: Tensor | None, table: Tensor, lengths: Tensor, scale: float, page: int
) -> Tensor:
    """softmax(q k^T * scale) v [R, H, dim] for one query of each of R sequences over its ``lengths`` [R] tokens; zeros
    for a sequence without tokens.

    q [R, H, dim] in bf16, fp16 or fp32; H a multiple of the heads of keys · codes, scales: a layer's cache, codes in
    q's dtype unless there are scales · table int32 [R, pages] · page: tokens per page
    """
    rows, queries, dim = q.shape
    heads = codes.shape[0] // 2
    q = q if q.stride(2) == 1 else q.contiguous()
    out = torch.empty(rows, queries, dim, dtype=q.dtype, device=q.device)
    chunks = ceil_div(table.shape[1] * page, CHUNK)
    sums, tops = out, out  # placeholders: a single chunk stores its result in out
    if chunks > 1:
        sums = torch.empty(rows, queries, chunks, dim, dtype=torch.float32, device=q.device)
        tops = torch.empty(rows, queries, chunks, 2, dtype=torch.float32, device=q.device)
    across = max(16, triton.next_power_of_2(dim))
    launch(
        attend_kernel, (chunks, heads, rows),
        q, _plain(codes), codes if scales is None else scales, table, lengths, out, sums, tops,
        scale * math.log2(math.e), *q.stride()[:2], table.stride(0), codes.shape[1],
        QUERIES=queries // heads, HEADS=heads, DIM=dim, PAGE=page, LENGTH=CHUNK, CODED=scales is not None,
        CHUNKS=chunks, ROWS=max(16, triton.next_power_of_2(queries // heads)), COLS=across,
        TILE=_tile(across, q.dtype, scales is not None), num_warps=8 if q.dtype == torch.float32 else 4, num_stages=2,
    )  # fmt: skip
    if chunks > 1:
        launch(
            join_kernel, (rows, queries), sums, tops, lengths, out,
            DIM=dim, LENGTH=CHUNK, CHUNKS=chunks, COLS=across, num_warps=1,
        )  # fmt: skip
    return out


def _plain(codes: Tensor) -> Tensor:
    """FP8 codes as bytes, which the kernels decode; other dtypes unchanged."""
    return codes.view(torch.uint8) if codes.element_size() == 1 else codes


def _tile(across: int, dtype: torch.dtype, coded: bool) -> int:
    """Tokens per tile. Products without tensor cores (fp32) need more registers, so that fewer tokens fit."""
    most = 64 if dtype != torch.float32 else 16 if coded else 32
    return max(16, min(most, most * 128 // across))


def _sides(heads: int, dim: int) -> tuple[int, int]:
    return triton.next_power_of_2(heads), triton.next_power_of_2(dim)


@triton.jit(do_not_specialize=["held"])  # specialized, a value of 1 would be a constant without .to()
def write_kernel(
    k,  # [T, HEADS, DIM] bf16, fp16 or fp32, last stride 1
    v,  # [T, HEADS, DIM] likewise
    where,  # int64 [T]: the token of the cache, or -1
    codes,  # [2 * HEADS, held, DIM] in DTYPE, or uint8 E4M3 codes if CODED
    scales,  # fp32 [2 * HEADS, held] if CODED
    k_token,  # strides of k and v, in elements
    k_head,
    v_token,
    v_head,
    held,  # tokens of the cache
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DTYPE: tl.constexpr,
    CODED: tl.constexpr,
    ROWS: tl.constexpr,  # HEADS and DIM up to powers of two
    COLS: tl.constexpr,
):
    """Write keys and values of all heads of one token."""
    token = tl.program_id(0).to(tl.int64)
    place = tl.load(where + token)
    if place < 0:  # padding
        return
    head = tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, COLS)[None, :]
    inside = (head < HEADS) & (column < DIM)
    x = tl.load(k + token * k_token + head * k_head + column, mask=inside, other=0.0)
    _write_heads(x, place, head, held, codes, scales, HEADS, DIM, DTYPE, CODED, COLS)
    x = tl.load(v + token * v_token + head * v_head + column, mask=inside, other=0.0)
    # Values follow the keys of all heads; int64, since a cache may have more than 2^31 numbers.
    beyond = HEADS * held.to(tl.int64)
    _write_heads(x, place, head, held, codes + beyond * DIM, scales + beyond, HEADS, DIM, DTYPE, CODED, COLS)


@triton.jit
def _write_heads(
    x,
    place,
    head,
    held,
    codes,
    scales,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DTYPE: tl.constexpr,
    CODED: tl.constexpr,
    COLS: tl.constexpr,
):
    """Write the heads x [ROWS, COLS] of one token at ``place``; arguments as in :func:`write_kernel`."""
    column = tl.arange(0, COLS)[None, :]
    # Round to the model's dtype first: attention without a cache would read the same keys.
    x = round_to(widen(x), DTYPE)
    at = head * held.to(tl.int64) + place
    if CODED:
        # Reduce, scale, cast: one scale per head of the token, fp32 and not a power of two.
        x = widen(x)
        scale, bad = scale_of(tl.max(amax_bits(x), axis=1, keep_dims=True), False, False)
        tl.store(scales + at, scale, mask=head < HEADS)
        x = encode(x, scale, bad, False, False)
    tl.store(codes + at * DIM + column, x, mask=(head < HEADS) & (column < DIM))


@triton.jit(do_not_specialize=["held"])
def attend_kernel(
    q,  # [R, HEADS * QUERIES, DIM] bf16, fp16 or fp32, last stride 1
    codes,  # [2 * HEADS, held, DIM] in q's dtype, or uint8 E4M3 codes if CODED
    scales,  # fp32 [2 * HEADS, held] if CODED
    table,  # int32 [R, pages]: the pages of each sequence
    lengths,  # int [R]: tokens of each sequence
    out,  # [R, HEADS * QUERIES, DIM] in q's dtype, contiguous
    sums,  # CHUNKS > 1: fp32 [R, HEADS * QUERIES, CHUNKS, DIM], o of each chunk
    tops,  # CHUNKS > 1: fp32 [R, HEADS * QUERIES, CHUNKS, 2], m and l of each chunk
    scale,  # of the scores, times log2(e): a GPU has exp2, not exp
    q_row,  # strides of q and of the table, in elements
    q_head,
    t_row,
    held,  # tokens of the cache
    QUERIES: tl.constexpr,  # heads of queries per head of keys
    HEADS: tl.constexpr,  # heads of keys
    DIM: tl.constexpr,
    PAGE: tl.constexpr,  # tokens per page
    LENGTH: tl.constexpr,  # tokens per chunk
    CODED: tl.constexpr,
    CHUNKS: tl.constexpr,
    ROWS: tl.constexpr,  # QUERIES up to a power of two, at least 16: the least that tensor cores multiply
    COLS: tl.constexpr,  # DIM likewise
    TILE: tl.constexpr,  # tokens per step
):
    """Attention of the queries of one head of keys over a chunk of one sequence."""
    chunk = tl.program_id(0)
    head = tl.program_id(1)
    row = tl.program_id(2)
    count = tl.load(lengths + row)
    first = chunk * LENGTH
    last = tl.minimum(count, first + LENGTH)
    # The grid covers the longest sequence that the table can hold; chunks beyond this one's tokens have no work.
    if CHUNKS > 1:  # noqa: SIM102 (a constant, then a value that the program reads)
        if first >= count:
            return
    # Load the queries once; rows of padding read as 0 and are not stored.
    mine = tl.arange(0, ROWS)
    column = tl.arange(0, COLS)[None, :]
    valid = (mine[:, None] < QUERIES) & (column < DIM)
    query = head * QUERIES + mine
    x = tl.load(q + row.to(tl.int64) * q_row + query[:, None] * q_head + column, mask=valid, other=0.0)
    # This head's keys, values and scales; int64, since a cache may have more than 2^31 numbers.
    keys = codes + head * held.to(tl.int64) * DIM
    values = keys + HEADS * held.to(tl.int64) * DIM
    k_scales = scales + head * held.to(tl.int64)
    v_scales = k_scales + HEADS * held.to(tl.int64)
    table += row.to(tl.int64) * t_row
    # Running m (top), l (total) and o, one per query, in fp32.
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    o = tl.zeros((ROWS, COLS), tl.float32)
    LOW: tl.constexpr = tl.bfloat16 if CODED and x.dtype != tl.float32 else x.dtype  # codes are exact in bf16
    for start in range(first, last, TILE):
        # Load: the table gives the page of each token. Tokens beyond the chunk read page 0 and are masked.
        token = start + tl.arange(0, TILE)
        seen = token < last
        place = tl.load(table + token // PAGE, mask=seen, other=0).to(tl.int64) * PAGE + token % PAGE
        at = place[:, None] * DIM + column
        inside = seen[:, None] & (column < DIM)
        k = _numbers(tl.load(keys + at, mask=inside, other=0), x.dtype, CODED)
        v = tl.load(values + at, mask=inside, other=0)
        # Scores. A scale per token is a factor of its column, so that codes need no decoding to real values.
        s = dot(x, tl.trans(k)) * scale
        if CODED:
            s *= tl.load(k_scales + place, mask=seen, other=0.0)[None, :]
        s = tl.where(seen[None, :], s, float("-inf"))
        # Online softmax: rescale what was summed to the new maximum. The first token of a chunk makes it finite.
        above = tl.maximum(top, tl.max(s, axis=1))
        fade = tl.exp2(top - above)
        p = tl.exp2(s - above[:, None])
        total = total * fade + tl.sum(p, axis=1)
        # Scales of the values multiply p, which has the tokens as columns; total is without them.
        if CODED:
            p *= tl.load(v_scales + place, mask=seen, other=0.0)[None, :]
        o = o * fade[:, None] + weighted(p, _numbers(v, LOW, CODED))
        top = above
    if CHUNKS > 1:
        # Store the chunk unnormalized; join_kernel combines the chunks.
        part = (row.to(tl.int64) * HEADS * QUERIES + query) * CHUNKS + chunk
        tl.store(sums + part[:, None] * DIM + column, o, mask=valid)
        tl.store(tops + part * 2, top, mask=mine < QUERIES)
        tl.store(tops + part * 2 + 1, total, mask=mine < QUERIES)
    else:
        # Normalize, round once, store. A sequence without tokens has a total of 0 and gets zeros.
        y = round_to(o / tl.where(total == 0.0, 1.0, total)[:, None], out.dtype.element_ty)
        at_out = (row.to(tl.int64) * HEADS * QUERIES + query)[:, None] * DIM + column
        tl.store(out + at_out, y, mask=valid)


@triton.jit
def join_kernel(
    sums, tops, lengths, out, DIM: tl.constexpr, LENGTH: tl.constexpr, CHUNKS: tl.constexpr, COLS: tl.constexpr
):
    """Combine the chunks of one query of one sequence, in order; arguments as in :func:`attend_kernel`.

    The first chunk is multiplied by 1 and added to 0, so that a sequence of one chunk gets the bits that it would get
    without this kernel.
    """
    row = tl.program_id(0)
    at = row.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    chunks = tl.cdiv(tl.load(lengths + row), LENGTH)
    column = tl.arange(0, COLS)
    top = tl.full((COLS,), float("-inf"), tl.float32)
    total = tl.zeros((COLS,), tl.float32)
    o = tl.zeros((COLS,), tl.float32)
    for chunk in range(chunks):
        part = at * CHUNKS + chunk
        # Both sides are rescaled to the larger maximum, as in the loop over tiles.
        chunk_top = tl.load(tops + part * 2)
        above = tl.maximum(top, chunk_top)
        fade = tl.exp2(top - above)
        weight = tl.exp2(chunk_top - above)
        total = total * fade + weight * tl.load(tops + part * 2 + 1)
        o = o * fade + weight * tl.load(sums + part * DIM + column, mask=column < DIM, other=0.0)
        top = above
    y = round_to(o / tl.where(total == 0.0, 1.0, total), out.dtype.element_ty)
    tl.store(out + at * DIM + column, y, mask=column < DIM)


@triton.jit
def _numbers(x, DTYPE: tl.constexpr, CODED: tl.constexpr):
    """Return a tile of the cache in DTYPE, exactly, because every DTYPE has more bits than E4M3."""
    if not CODED:
        return x
    elif INTERPRETED:
        return decode_bits(x, False)
    else:
        return x.to(tl.float8e4nv, bitcast=True).to(DTYPE)
