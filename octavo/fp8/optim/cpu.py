"""The AdamW step on the CPU: bit for bit the results of the reference, in place, with arrays that fit in a core's
cache.

`reference` in :mod:`octavo.fp8.arithmetic.adamw` follows the formulas and allocates an array per line, so it spends
most of its time on memory access. Here all operations on a chunk of 248 groups use a few arrays that stay in the cache,
and threads share the chunks (an operation on so few elements runs on one core). Rare cases (second moments of 0, a
non-finite group, a NaN weight) are detected once per chunk and handled only in that chunk. Formats with other costs
(coat), and groups that are cut by a piece, use the reference.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.fp8.arithmetic import moments, philox
from octavo.fp8.arithmetic.adamw import CPU_CHUNK as CHUNK
from octavo.fp8.arithmetic.adamw import Hyper, Piece, Scalars
from octavo.fp8.arithmetic.moments import GROUP
from octavo.fp8.arithmetic.root import sqrt

_INF = math.inf
_NAN = 0x7FC00000
_MAGNITUDE = 0x7FFFFFFF

Job = tuple[Piece, Scalars, int, int]
"""A piece, the scalars of its step, and a range of its elements: whole groups, at most `CHUNK` elements."""


def run(jobs: Sequence[Job], hyper: Hyper, factor: float | Tensor | None) -> None:
    """Run all jobs, on at most as many threads as torch uses."""
    workers = min(torch.get_num_threads(), len(jobs) // 4)
    if workers < 2:
        _run_jobs(jobs, hyper, factor)
        return
    with ThreadPoolExecutor(workers) as pool:
        futures = [pool.submit(_run_jobs, jobs[i::workers], hyper, factor) for i in range(workers)]
        for future in futures:
            future.result()


def _run_jobs(jobs: Sequence[Job], hyper: Hyper, factor: float | Tensor | None) -> None:
    scratch = _Scratch()
    with torch.no_grad():  # the mode is per thread
        for piece, scalars, first, last in jobs:
            scratch.step(piece, scalars, first, last, hyper, factor)


class _StoredMoments(NamedTuple):
    """Both moments of a chunk in FP8: see :mod:`octavo.fp8.arithmetic.moments`."""

    codes: Tensor
    scale: Tensor
    sq_codes: Tensor
    range: Tensor


class _Scratch:
    """The arrays of one thread: five of fp32 (one of them for weights in another dtype), three of int32, two of bytes,
    and the dither offset of each element."""

    def __init__(self) -> None:
        self._floats = [torch.empty(CHUNK) for _ in range(5)]
        self._ints = [torch.empty(CHUNK, dtype=torch.int32) for _ in range(3)]
        self._bytes = [torch.empty(CHUNK, dtype=torch.int8) for _ in range(2)]
        self._ramp = _int32(torch.arange(CHUNK, dtype=torch.int64) * 0xC13FA9A9)
        self._wide, self._top = (torch.full((CHUNK // GROUP,), x) for x in (65536.0, moments.R_TOP))
        self._philox = philox.Scratch(CHUNK // 4)

    def step(
        self, piece: Piece, s: Scalars, first: int, last: int, hyper: Hyper, factor: float | Tensor | None
    ) -> None:
        n = last - first
        w32, m, v, g, t = (x[:n] for x in self._floats)
        state = {name: x[first:last] for name, x in piece.state.items() if x.numel() == piece.weight.numel()}
        offset = piece.start % GROUP
        rows = slice((offset + first) // GROUP, (offset + last) // GROUP)
        weight = piece.weight[first:last]
        if "master" in state:
            w = state["master"]
        elif weight.dtype == torch.float32:
            w = weight
        else:
            w = self._join_halves(w32, weight, state["master_low"]) if hyper.master == "bf16+16" else w32.copy_(weight)

        fp8, exact = hyper.states == "fp8", hyper.states == "fp32"
        if fp8:
            scale, range_ = piece.state["exp_avg_scale"][rows], piece.state["exp_avg_sq_range"][rows]
            stored = _StoredMoments(state["exp_avg_codes"], scale, state["exp_avg_sq_codes"], range_)
            self._decode(m, v, t, stored)
        elif exact:
            m, v = state["exp_avg"], state["exp_avg_sq"]
        else:
            m.copy_(state["exp_avg"])
            v.copy_(state["exp_avg_sq"])

        grad = piece.grad[first:last]
        if grad.dtype != torch.float32:
            grad = g.copy_(grad)
        if factor is not None:
            grad = torch.mul(grad, factor, out=g)
        # add_(..., alpha=) would round once, but the formula rounds twice.
        m.mul_(s.beta1).add_(torch.mul(grad, s.rest1, out=t))
        v.mul_(s.beta2).add_(torch.mul(grad, s.rest2, out=t).mul_(grad))
        sqrt(v, t).mul_(s.root).add_(s.eps)
        w.mul_(s.decay).sub_(torch.mul(m, s.pace, out=g).div_(t))

        if not exact:
            u = self._dither(hyper, piece, piece.start + first, n)
            if fp8:
                self._encode(m, v, g, t, u, stored)
            else:
                state["exp_avg"].copy_(m)
                self._round_to_bf16(state["exp_avg_sq"], v, u)
        self._write_weight(piece, hyper, first, last, w, weight, state)

    def _decode(self, m: Tensor, v: Tensor, t: Tensor, stored: _StoredMoments) -> None:
        """Decode m and v from their bytes; overwrites t."""
        codes, scale, sq_codes, range_ = stored
        a, b, _ = (x[: m.numel()] for x in self._ints)
        byte = self._bytes[0][: m.numel()]
        a.copy_(sq_codes)
        b.copy_(torch.bitwise_and(codes, 1, out=byte)).add_(a, alpha=2)
        base, pace, _ = self._grid(range_)
        bits = v.view(torch.int32)
        torch.mul(_rows(b), pace, out=_rows(bits)).add_(base - pace)
        if int(b.amin()) == 0:
            bits.mul_(b.clamp_(max=1))
        m.copy_(torch.bitwise_right_shift(codes, 1, out=byte))
        m.mul_(torch.abs(m, out=t).add_(32.0))  # small integers, exact in fp32
        _rows(m).mul_(scale[:, None])
        m.mul_(sqrt(v, t))

    def _encode(self, m: Tensor, v: Tensor, r: Tensor, t: Tensor, u: Tensor, stored: _StoredMoments) -> None:
        """Encode m and v as bytes; overwrites r, t and u."""
        codes, scale, sq_codes, range_ = stored
        a, b, _ = (x[: m.numel()] for x in self._ints)
        bits = v.view(torch.int32)
        low, high = _rows(v).amin(1), _rows(v).amax(1)  # both are NaN if any element is
        zeros = not float(low.amin()) > 0  # also for a NaN, which may hide zeros
        if zeros:  # (bits - 1) mod 2^31: a zero is the largest
            low = _rows(torch.sub(bits, 1, out=b).bitwise_and_(_MAGNITUDE)).amin(1).add_(1).view(torch.float32)
        low, high = (x.view(torch.int32).bitwise_and_(_MAGNITUDE) for x in (low, high))
        range_.copy_(moments.v_range(low, high) if zeros else _range(low, high))
        base, pace, rate = self._grid(range_)
        torch.sub(_rows(bits), base, out=_rows(b))
        t.copy_(b)
        _rows(t).mul_(rate)
        b.copy_(t).add_(u).bitwise_right_shift_(16)  # the code less 1
        torch.mul(_rows(b), pace, out=_rows(t.view(torch.int32))).add_(base)
        b.add_(1)
        if zeros:
            torch.ne(bits, 0, out=a)  # 1 or 0
            b.mul_(a)
            t.view(torch.int32).mul_(a)
        torch.div(m, sqrt(t, t), out=r)
        if zeros:
            r.masked_fill_(a == 0, 0.0)
        torch.abs(r, out=t)
        amax = _rows(t).amax(1)
        least, most = torch.aminmax(amax)
        plain = float(least) >= moments.TINY and float(most) < _INF  # no tiny or non-finite group
        if plain:
            top = self._top[: len(amax)]
            torch.div(amax, top, out=scale)
            _rows(t).mul_(torch.div(top, amax)[:, None])
        else:
            bound = amax.view(torch.int32) & _MAGNITUDE
            scale.copy_(moments.r_scale(bound))
            _rows(t).mul_(moments.r_grid(bound)[:, None])
        sqrt(t.add_(256.0), t).sub_(16.0).round_().clamp_(max=63.0)
        if not plain:
            _rows(t).masked_fill_((bound >= 0x7F800000)[:, None], 0.0)
        byte, lowest = (x[: m.numel()] for x in self._bytes)
        byte.copy_(torch.copysign(t, r, out=t)).bitwise_left_shift_(1)
        lowest.copy_(torch.bitwise_and(b, 1, out=a))
        torch.bitwise_or(byte, lowest, out=codes)
        sq_codes.copy_(b.bitwise_right_shift_(1))

    def _grid(self, word: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute `moments.grid`, faster if all groups are finite."""
        if int(word.amin()) < 0:
            return moments.grid(word)
        pace = torch.bitwise_right_shift(word, 24).add_(moments.LEAST).bitwise_left_shift_(21).view(torch.float32)
        base = torch.bitwise_and(word, 0xFFFFFF).bitwise_left_shift_(7).clamp_(min=1)
        rate = torch.div(self._wide[: len(word)], pace)
        return base[:, None], pace.to(torch.int32)[:, None], rate[:, None]

    def _dither(self, hyper: Hyper, piece: Piece, start: int, n: int) -> Tensor:
        begin = moments.dither_start(hyper.seed, start, step=piece.step, parameter=piece.index)
        begin = begin - (1 << 32) if begin >= 1 << 31 else begin
        u = self._ints[2][:n]
        return torch.add(self._ramp[:n], begin, out=u).bitwise_right_shift_(16).bitwise_and_(0xFFFF)

    def _round_to_bf16(self, out: Tensor, v: Tensor, u: Tensor) -> None:
        """Round v to bfloat16 stochastically, with the random bits u."""
        bits = v.view(torch.int32)
        u.add_(bits)
        if not float(v.amax()) < _INF:
            u.masked_fill_(torch.bitwise_and(bits, _MAGNITUDE) >= 0x7F800000, _NAN)
        out.view(torch.int16).copy_(u.bitwise_right_shift_(16))

    def _join_halves(self, out: Tensor, high: Tensor, low: Tensor) -> Tensor:
        bits, low32 = out.view(torch.int32), self._ints[0][: out.numel()]
        bits.copy_(high.view(torch.int16)).bitwise_left_shift_(16).add_(low32.copy_(low))
        return out

    def _write_weight(
        self, piece: Piece, hyper: Hyper, first: int, last: int, w: Tensor, weight: Tensor, state: dict[str, Tensor]
    ) -> None:
        if hyper.master == "fp32":
            if w.data_ptr() != weight.data_ptr():
                weight.copy_(w)
            return
        bits, a = w.view(torch.int32), self._ints[0][: w.numel()]
        if not math.isfinite(float(w.sum())):
            bits.masked_fill_(torch.ne(w, w), _NAN)
        if hyper.master == "bf16+sr":
            words = self._philox.words16(
                hyper.seed, piece.start + first, last - first, step=piece.step, parameter=piece.index
            )
            a.copy_(words).bitwise_and_(0xFFFF).add_(bits)
        else:
            torch.add(bits, 0x8000, out=a)
            state["master_low"].copy_(bits)
        weight.view(torch.int16).copy_(a.bitwise_right_shift_(16))


def _range(low: Tensor, high: Tensor) -> Tensor:
    """Compute `moments.v_range` for groups without zeros; a NaN is in both `low` and `high`."""
    if int(high.amax()) >= moments.TOP:
        return moments.v_range(low, high)
    width = torch.sub(high, low).add_(507).floor_divide_(508).clamp_(min=512)
    exponent = width.float().view(torch.int32).add_(0x1FFFFF).bitwise_right_shift_(21)
    pace = torch.bitwise_left_shift(exponent, 21).view(torch.float32).to(torch.int32)
    upper = exponent.sub_(moments.LEAST).bitwise_left_shift_(24)
    return torch.floor_divide(low, pace).mul_(pace).bitwise_right_shift_(7).bitwise_or_(upper)


def _rows(x: Tensor) -> Tensor:
    return x.view(-1, GROUP)


def _int32(x: Tensor) -> Tensor:
    """Convert int64 modulo 2^32 to int32."""
    x = x & 0xFFFFFFFF
    return torch.where(x >= 1 << 31, x - (1 << 32), x).to(torch.int32)
