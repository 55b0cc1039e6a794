"""Keys and values in pages: written there, and looked at by one new token of each sequence, where they lie.

The cache of a layer is ``codes`` [2 * heads, tokens, dim], keys then values, page behind page, with ``scales``
[2 * heads, tokens] if codes are E4M3 (amax / 448 of a token's head, the cast of ``arithmetic/cast.py`` bit for bit). A
sequence has a row of ``table``: the numbers of its pages, in order.

One program attends for the queries of the heads that share one of keys, over :data:`CHUNK` tokens of one sequence, in
tiles and in order, with a running maximum m and sum l (Milakov and Gimelshein 2018, arXiv:1805.02867), in fp32::

    s = scale * k_scale * (q . k)      m' = max(m, s)     p = exp(s - m')     a = exp(m - m')
    l = a l + sum p                    o = a o + (p * v_scale) . v

Sequences longer than a chunk leave m, l and o of each, which a second kernel adds up in order (as in Flash-Decoding).
Chunks begin at multiples of CHUNK of the sequence's own tokens, so that the result for a sequence depends on neither
its neighbours, nor its place, nor how wide the table is: bit for bit.

Codes are numbers of bf16 as they are, so that tensor cores multiply them, and scales join the scores and p. p is
multiplied as the sum of two numbers of 16 bits (16 bits of significand in bf16, 22 in fp16): rounded to one, it would
be the largest error of all, and these tensor cores wait for memory anyway. A cache in fp32 is multiplied in fp32.

Bytes read a step and layer: each sequence's tokens * heads * 2 * (dim * bytes of a number [+ 4]); of pages that samples
share once for each, from the L2 cache where they still lie there.
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
"""Tokens of a program. 64 sequences with 8 heads of keys are 512 programs without a second chunk; o of a chunk is 1.6 %
of its keys and values in bf16 (4 queries a head)."""

_TL = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def write(k: Tensor, v: Tensor, where: Tensor, codes: Tensor, scales: Tensor | None, dtype: torch.dtype) -> None:
    """Keep keys and values [T, heads, dim], rounded to ``dtype``, at the tokens ``where`` [T] of a layer's cache;
    those at -1 are nobody's, and left out. With ``scales``, their codes and scales."""
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
    """softmax(q k^T * scale) v [R, H, dim] of one query of each of R sequences over its ``lengths`` [R] tokens; zeros
    of a sequence of none.

    q [R, H, dim] in bf16, fp16 or fp32; H a multiple of the heads of keys · codes, scales: a layer's cache, the former
    in q's dtype unless there are scales · table int32 [R, pages] · page: tokens of one
    """
    rows, queries, dim = q.shape
    heads = codes.shape[0] // 2
    q = q if q.stride(2) == 1 else q.contiguous()
    out = torch.empty(rows, queries, dim, dtype=q.dtype, device=q.device)
    chunks = ceil_div(table.shape[1] * page, CHUNK)
    sums, tops = out, out  # a single chunk leaves nothing behind
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
    """FP8 as bytes, which the kernels decode."""
    return codes.view(torch.uint8) if codes.element_size() == 1 else codes


def _tile(across: int, dtype: torch.dtype, coded: bool) -> int:
    """Tokens that a program looks at at once: of what is not multiplied by tensor cores fewer fit into registers."""
    most = 64 if dtype != torch.float32 else 16 if coded else 32
    return max(16, min(most, most * 128 // across))


def _sides(heads: int, dim: int) -> tuple[int, int]:
    return triton.next_power_of_2(heads), triton.next_power_of_2(dim)


@triton.jit(do_not_specialize=["held"])  # 1 would be no tensor
def write_kernel(
    k, v, where, codes, scales, k_token, k_head, v_token, v_head, held,
    HEADS: tl.constexpr, DIM: tl.constexpr, DTYPE: tl.constexpr, CODED: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """All heads of one token; ``held``: tokens of the cache."""
    token = tl.program_id(0).to(tl.int64)
    place = tl.load(where + token)
    if place < 0:
        return
    head = tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, COLS)[None, :]
    inside = (head < HEADS) & (column < DIM)
    x = tl.load(k + token * k_token + head * k_head + column, mask=inside, other=0.0)
    _keep(x, place, head, held, codes, scales, HEADS, DIM, DTYPE, CODED, COLS)
    x = tl.load(v + token * v_token + head * v_head + column, mask=inside, other=0.0)
    beyond = HEADS * held.to(tl.int64)
    _keep(x, place, head, held, codes + beyond * DIM, scales + beyond, HEADS, DIM, DTYPE, CODED, COLS)


@triton.jit
def _keep(
    x, place, head, held, codes, scales,
    HEADS: tl.constexpr, DIM: tl.constexpr, DTYPE: tl.constexpr, CODED: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, COLS)[None, :]
    x = round_to(widen(x), DTYPE)
    at = head * held.to(tl.int64) + place
    if CODED:
        x = widen(x)
        scale, bad = scale_of(tl.max(amax_bits(x), axis=1, keep_dims=True), False, False)
        tl.store(scales + at, scale, mask=head < HEADS)
        x = encode(x, scale, bad, False, False)
    tl.store(codes + at * DIM + column, x, mask=(head < HEADS) & (column < DIM))


@triton.jit(do_not_specialize=["held"])
def attend_kernel(
    q, codes, scales, table, lengths, out, sums, tops, scale, q_row, q_head, t_row, held,
    QUERIES: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, LENGTH: tl.constexpr,
    CODED: tl.constexpr, CHUNKS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """A chunk of LENGTH tokens of one sequence, for the QUERIES queries of one head of keys, filled up to ROWS;
    ``scale`` is in units of log 2, since exp2 is what a GPU has."""
    chunk = tl.program_id(0)
    head = tl.program_id(1)
    row = tl.program_id(2)
    count = tl.load(lengths + row)
    first = chunk * LENGTH
    last = tl.minimum(count, first + LENGTH)
    if CHUNKS > 1:  # noqa: SIM102 (a constant, and what a program reads)
        if first >= count:
            return
    mine = tl.arange(0, ROWS)
    column = tl.arange(0, COLS)[None, :]
    asked = (mine[:, None] < QUERIES) & (column < DIM)
    query = head * QUERIES + mine
    x = tl.load(q + row.to(tl.int64) * q_row + query[:, None] * q_head + column, mask=asked, other=0.0)
    keys = codes + head * held.to(tl.int64) * DIM
    values = keys + HEADS * held.to(tl.int64) * DIM
    k_scales = scales + head * held.to(tl.int64)
    v_scales = k_scales + HEADS * held.to(tl.int64)
    table += row.to(tl.int64) * t_row
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    found = tl.zeros((ROWS, COLS), tl.float32)
    LOW: tl.constexpr = tl.bfloat16 if CODED and x.dtype != tl.float32 else x.dtype  # codes are numbers of bf16
    for start in range(first, last, TILE):
        token = start + tl.arange(0, TILE)
        seen = token < last
        place = tl.load(table + token // PAGE, mask=seen, other=0).to(tl.int64) * PAGE + token % PAGE
        at = place[:, None] * DIM + column
        inside = seen[:, None] & (column < DIM)
        k = _numbers(tl.load(keys + at, mask=inside, other=0), x.dtype, CODED)
        v = tl.load(values + at, mask=inside, other=0)
        s = dot(x, tl.trans(k)) * scale
        if CODED:
            s *= tl.load(k_scales + place, mask=seen, other=0.0)[None, :]
        s = tl.where(seen[None, :], s, float("-inf"))
        above = tl.maximum(top, tl.max(s, axis=1))
        fade = tl.exp2(top - above)
        p = tl.exp2(s - above[:, None])
        total = total * fade + tl.sum(p, axis=1)
        if CODED:
            p *= tl.load(v_scales + place, mask=seen, other=0.0)[None, :]
        found = found * fade[:, None] + weighted(p, _numbers(v, LOW, CODED))
        top = above
    if CHUNKS > 1:
        part = (row.to(tl.int64) * HEADS * QUERIES + query) * CHUNKS + chunk
        tl.store(sums + part[:, None] * DIM + column, found, mask=asked)
        tl.store(tops + part * 2, top, mask=mine < QUERIES)
        tl.store(tops + part * 2 + 1, total, mask=mine < QUERIES)
    else:
        y = round_to(found / tl.where(total == 0.0, 1.0, total)[:, None], out.dtype.element_ty)
        at_out = (row.to(tl.int64) * HEADS * QUERIES + query)[:, None] * DIM + column
        tl.store(out + at_out, y, mask=asked)


@triton.jit
def join_kernel(
    sums, tops, lengths, out, DIM: tl.constexpr, LENGTH: tl.constexpr, CHUNKS: tl.constexpr, COLS: tl.constexpr
):
    """Add up the chunks of one query, in order. The first is taken as it is (times 1, plus 0), so that a sequence of
    one chunk gets the bits that it would get alone."""
    row = tl.program_id(0)
    at = row.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    chunks = tl.cdiv(tl.load(lengths + row), LENGTH)
    column = tl.arange(0, COLS)
    top = tl.full((COLS,), float("-inf"), tl.float32)
    total = tl.zeros((COLS,), tl.float32)
    found = tl.zeros((COLS,), tl.float32)
    for chunk in range(chunks):
        part = at * CHUNKS + chunk
        own = tl.load(tops + part * 2)
        above = tl.maximum(top, own)
        fade = tl.exp2(top - above)
        weight = tl.exp2(own - above)
        total = total * fade + weight * tl.load(tops + part * 2 + 1)
        found = found * fade + weight * tl.load(sums + part * DIM + column, mask=column < DIM, other=0.0)
        top = above
    y = round_to(found / tl.where(total == 0.0, 1.0, total), out.dtype.element_ty)
    tl.store(out + at * DIM + column, y, mask=column < DIM)


@triton.jit
def _numbers(x, DTYPE: tl.constexpr, CODED: tl.constexpr):
    """A tile of the cache as numbers of DTYPE, exactly: E4M3 has fewer bits than any."""
    if not CODED:
        return x
    elif INTERPRETED:
        return decode_bits(x, False)
    else:
        return x.to(tl.float8e4nv, bitcast=True).to(DTYPE)
