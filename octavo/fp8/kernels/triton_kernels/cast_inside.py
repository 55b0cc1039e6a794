"""A tile that lies within the matrix, in contiguous rows: nothing is masked, and bytes move by fours.

Codes down the columns are the tile transposed, and bytes are a bad thing to transpose: each is stored to shared memory
alone, and packed again with its neighbours. So a tile is loaded as four: its rows 0, 4, 8 ..., rows 1, 5, 9 ... and so
on. A thread then holds four rows below one another, whose codes make one word, and words are transposed::

    x0, x1, x2, x3 [TR / 4, TC]  ->  row codes: four stores, of every fourth row each
                                 ->  words: int32 [TR / 4, TC], transposed, stored as [TC, TR / 4]

What is executed for a value, and what it was before: ``docs/lab/kernels.md``; a test holds it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.fp8.kernels.triton_kernels.bits import (
    encode_bits,
    encode_words,
    larger,
    quotient,
    short_division,
    widen,
)
from octavo.fp8.kernels.triton_kernels.cast_blocks import (
    block_tops,
    in_units,
    indices,
    scales_at,
    store_scales,
    tile_tops,
)


@triton.jit
def cast_inside(
    x_ptr, stride_b, stride_r, place, M, K, out1, out0,
    CAST1: tl.constexpr, CAST0: tl.constexpr, EVEN: tl.constexpr, TR: tl.constexpr, TC: tl.constexpr,
):  # fmt: skip
    """Cast the tile at ``place`` for a contraction of dimension 1 (CAST1), of dimension 0 (CAST0), or both; None
    leaves one out."""
    batch, pid_r, pid_c, _ = place
    step = stride_r // EVEN * EVEN
    x_ptr += batch * (stride_b // EVEN * EVEN) + (pid_r * TR).to(tl.int64) * step + pid_c * TC
    at = x_ptr + (tl.arange(0, TR // 4)[:, None] * 4 * step + tl.arange(0, TC)[None, :])
    x = (tl.load(at), tl.load(at + step), tl.load(at + 2 * step), tl.load(at + 3 * step))
    x = (widen(x[0]), widen(x[1]), widen(x[2]), widen(x[3]))
    if CAST1 is not None and CAST0 is not None and not _one_cast(CAST1, CAST0):
        _store_rows(_in_units(x, _scales(x, place, M, K, out1, CAST1, TR, TC), CAST1), place, M, out1, CAST1, TR, TC)
        s = _scales(x, place, M, K, out0, CAST0, TR, TC)
        _store_columns(_in_units(x, s, CAST0), place, K, out0, CAST0, TR, TC)
    else:  # codes that are the same in both layouts are computed once
        CAST: tl.constexpr = CAST0 if CAST1 is None else CAST1
        s = _scales(x, place, M, K, out0 if CAST1 is None else out1, CAST, TR, TC)
        if CAST1 is not None and CAST0 is not None:
            rows, cols = indices(place, CAST0, TR, TC)
            store_scales(s[0][0], rows, cols, place, M, K, out0, CAST0)
        if CAST.pow2 or CAST.rows != -1 or CAST.cols != -1 or x_ptr.dtype.element_ty == tl.float32:
            _store(_in_units(x, s, CAST), place, M, K, out1, out0, CAST1, CAST0, TR, TC)
        else:
            scale, _, top = s[0]
            short, inverse = short_division(scale, top)
            if short:
                q0 = quotient(x[0], scale, inverse)
                q1 = quotient(x[1], scale, inverse)
                q2 = quotient(x[2], scale, inverse)
                q3 = quotient(x[3], scale, inverse)
                _store((q0, q1, q2, q3), place, M, K, out1, out0, CAST1, CAST0, TR, TC)
            else:
                _store(_in_units(x, s, CAST), place, M, K, out1, out0, CAST1, CAST0, TR, TC)


@triton.constexpr_function
def _one_cast(a, b):
    """Whether two casts give the same codes."""
    return (a.rows, a.cols, a.pow2, a.e5m2) == (b.rows, b.cols, b.pow2, b.e5m2)


@triton.jit
def _scales(x, place, M, K, out, CAST: tl.constexpr, TR: tl.constexpr, TC: tl.constexpr):
    """Store the scales of the blocks; returns (scales, which are bad, amax patterns) as each of the four tiles has
    them, [blocks down, blocks across], or scalars where all share one."""
    rows, cols = indices(place, CAST, TR, TC)
    if CAST.rows == 1:
        NQ: tl.constexpr = TR // 4
        NC: tl.constexpr = 1 if CAST.cols == -1 else TC // CAST.cols
        t = (0, 0, 0, 0)
        top = 0
        if CAST.from_tile:
            t = (
                block_tops(tl.abs(x[0]), NQ, NC),
                block_tops(tl.abs(x[1]), NQ, NC),
                block_tops(tl.abs(x[2]), NQ, NC),
                block_tops(tl.abs(x[3]), NQ, NC),
            )
            joined = tl.join(tl.join(t[0], t[2]), tl.join(t[1], t[3]))  # [NQ, NC, 2, 2]
            top = tl.reshape(tl.permute(joined, (0, 2, 3, 1)), [TR, NC])
        store_scales(scales_at(top, rows, cols, place, M, K, out, CAST)[0], rows, cols, place, M, K, out, CAST)
        rows = place[1] * TR + 4 * tl.arange(0, NQ)[:, None]
        return (
            scales_at(t[0], rows, cols, place, M, K, out, CAST),
            scales_at(t[1], rows + 1, cols, place, M, K, out, CAST),
            scales_at(t[2], rows + 2, cols, place, M, K, out, CAST),
            scales_at(t[3], rows + 3, cols, place, M, K, out, CAST),
        )
    else:
        top = 0
        if CAST.from_tile:
            m = larger(larger(tl.abs(x[0]), tl.abs(x[1])), larger(tl.abs(x[2]), tl.abs(x[3])))
            top = tile_tops(m, CAST, TR, TC)
        s = scales_at(top, rows, cols, place, M, K, out, CAST)
        store_scales(s[0], rows, cols, place, M, K, out, CAST)
        return (s, s, s, s)


@triton.jit
def _in_units(x, s, CAST: tl.constexpr):
    """The four tiles in units of their scales."""
    return (
        in_units(x[0], s[0], CAST),
        in_units(x[1], s[1], CAST),
        in_units(x[2], s[2], CAST),
        in_units(x[3], s[3], CAST),
    )


@triton.jit
def _store(v, place, M, K, out1, out0, CAST1: tl.constexpr, CAST0: tl.constexpr, TR: tl.constexpr, TC: tl.constexpr):
    if CAST1 is not None:
        _store_rows(v, place, M, out1, CAST1, TR, TC)
    if CAST0 is not None:
        _store_columns(v, place, K, out0, CAST0, TR, TC)


@triton.jit
def _store_rows(v, place, M, out, CAST: tl.constexpr, TR: tl.constexpr, TC: tl.constexpr):
    batch, pid_r, pid_c, _ = place
    pitch = out[1] // 16 * 16
    # 8 bytes a thread, as its loads have 8 values: more would move codes between threads.
    c = tl.max_contiguous(tl.arange(0, TC), 8)
    at = tl.arange(0, TR // 4)[:, None] * 4 * pitch + c[None, :]
    at = out[0] + (batch * (tl.cdiv(M, 16) * 16) + pid_r * TR) * pitch + pid_c * TC + at
    tl.store(at, encode_bits(v[0], CAST.e5m2))
    tl.store(at + pitch, encode_bits(v[1], CAST.e5m2))
    tl.store(at + 2 * pitch, encode_bits(v[2], CAST.e5m2))
    tl.store(at + 3 * pitch, encode_bits(v[3], CAST.e5m2))


@triton.jit
def _store_columns(v, place, K, out, CAST: tl.constexpr, TR: tl.constexpr, TC: tl.constexpr):
    batch, pid_r, pid_c, _ = place
    pitch = out[1] // 16 * 4  # in words
    at = tl.arange(0, TC)[:, None] * pitch + tl.arange(0, TR // 4)[None, :]
    at += (batch * (tl.cdiv(K, 16) * 16) + pid_c * TC) * pitch + pid_r * (TR // 4)
    words = encode_words(v[0], v[1], v[2], v[3], CAST.e5m2)
    tl.store(out[0].to(tl.pointer_type(tl.int32)) + at, tl.trans(words))
