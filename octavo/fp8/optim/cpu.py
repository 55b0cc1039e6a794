"""The step on the CPU: the reference's arithmetic, bit for bit, in place and in a core's cache.

`reference` in :mod:`octavo.fp8.optim.update` reads as the formulas do and makes a new array in every line, of which
most of its time goes into fetching memory. Here a chunk of 128 groups goes through all its operations in a few arrays
that stay in the cache, and threads take chunks in turn (an operation on so few elements runs on one core). Formats
whose work is elsewhere (coat) and groups that a piece cuts take the reference's way.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from octavo.fp8.optim import master, moments, philox
from octavo.fp8.optim.moments import GROUP

if TYPE_CHECKING:
    from octavo.fp8.optim.update import Hyper, Piece, Scalars

__all__ = ["CHUNK", "Job", "run"]

CHUNK = 1 << 14
"""Elements worked on at a time: few enough that torch gives an operation to one thread, and all arrays stay close."""

_NAN = 0x7FC00000
_MAGNITUDE = 0x7FFFFFFF

Job = tuple["Piece", "Scalars", int, int]
"""A piece, the numbers of its step, and the range of its elements: whole groups, at most `CHUNK` elements."""


def run(jobs: Sequence[Job], hyper: Hyper, factor: float | Tensor | None) -> None:
    """Step every job, on as many threads as torch has."""
    workers = min(torch.get_num_threads(), len(jobs) // 4)
    if workers < 2:
        _work(jobs, hyper, factor)
        return
    with ThreadPoolExecutor(workers) as pool:
        for done in [pool.submit(_work, jobs[i::workers], hyper, factor) for i in range(workers)]:
            done.result()


def _work(jobs: Sequence[Job], hyper: Hyper, factor: float | Tensor | None) -> None:
    scratch = _Scratch()
    with torch.no_grad():  # the mode belongs to a thread
        for piece, scalars, first, last in jobs:
            scratch.step(piece, scalars, first, last, hyper, factor)


class _Scratch:
    """The arrays of one thread: four of fp32 and three of int32, and where an element's dither begins."""

    def __init__(self) -> None:
        self._floats = [torch.empty(CHUNK) for _ in range(5)]
        self._ints = [torch.empty(CHUNK, dtype=torch.int32) for _ in range(4)]
        self._mask = torch.empty(CHUNK, dtype=torch.bool)
        self._ramp = _int32(torch.arange(CHUNK, dtype=torch.int64) * 0xC13FA9A9)

    def step(
        self, piece: Piece, s: Scalars, first: int, last: int, hyper: Hyper, factor: float | Tensor | None
    ) -> None:
        n = last - first
        own, m, v, g, t = (x[:n] for x in self._floats)
        state = {name: x[first:last] for name, x in piece.state.items() if x.numel() == piece.weight.numel()}
        offset = piece.start % GROUP
        rows = slice((offset + first) // GROUP, (offset + last) // GROUP)
        weight = piece.weight[first:last]
        if "master" in state:
            w = state["master"]
        elif weight.dtype == torch.float32:
            w = weight
        else:
            w = self._joined(own, weight, state["master_low"]) if hyper.master == "bf16+16" else own.copy_(weight)

        fp8, kept = hyper.states == "fp8", hyper.states == "fp32"
        if fp8:
            scale, range_ = piece.state["exp_avg_scale"][rows], piece.state["exp_avg_sq_range"][rows]
            codes, sq_codes = state["exp_avg_codes"], state["exp_avg_sq_codes"]
            self._decode(m, v, t, codes, scale, sq_codes, range_)
        elif kept:
            m, v = state["exp_avg"], state["exp_avg_sq"]
        else:
            m.copy_(state["exp_avg"])
            v.copy_(state["exp_avg_sq"])

        g.copy_(piece.grad[first:last])
        if factor is not None:
            g.mul_(factor)
        m.mul_(s.beta1).add_(torch.mul(g, s.rest1, out=t))
        v.mul_(s.beta2).add_(torch.mul(g, s.rest2, out=t).mul_(g))
        torch.sqrt(v, out=t).mul_(s.root).add_(s.eps)
        w.mul_(s.decay).sub_(torch.mul(m, s.pace, out=g).div_(t))

        if not kept:
            u = self._dither(hyper, piece, piece.start + first, n)
            if fp8:
                self._encode(m, v, g, t, u, codes, scale, sq_codes, range_)
            else:
                state["exp_avg"].copy_(m)
                self._cut(state["exp_avg_sq"], v, u)
        self._write(piece, hyper, first, last, w, weight, state)

    def _decode(
        self, m: Tensor, v: Tensor, root: Tensor, codes: Tensor, scale: Tensor, sq_codes: Tensor, range_: Tensor
    ) -> None:
        """m, v and the root of v from their bytes."""
        a, b, c, _ = (x[: m.numel()] for x in self._ints)
        b.copy_(sq_codes).bitwise_left_shift_(1)
        a.copy_(codes)
        b.bitwise_or_(torch.bitwise_and(a, 1, out=c))
        self._points(v, b, c, *moments.grid(range_)[:2])
        torch.sqrt(v, out=root)
        a.bitwise_right_shift_(1)
        m.copy_(torch.abs(a, out=c).add_(32).mul_(a))
        _rows(m).mul_(scale[:, None])
        m.mul_(root)

    @staticmethod
    def _points(v: Tensor, code: Tensor, spare: Tensor, base: Tensor, pace: Tensor) -> None:
        """The second moments of codes 0 to 511."""
        bits = v.view(torch.int32)
        torch.sub(code, 1, out=bits)
        _rows(bits).mul_(pace).add_(base)
        bits.mul_(torch.clamp(code, max=1, out=spare))

    def _encode(
        self,
        m: Tensor,
        v: Tensor,
        r: Tensor,
        t: Tensor,
        u: Tensor,
        codes: Tensor,
        scale: Tensor,
        sq_codes: Tensor,
        range_: Tensor,
    ) -> None:
        a, b, c = (x[: m.numel()] for x in self._ints[:3])
        torch.bitwise_and(v.view(torch.int32), _MAGNITUDE, out=a)
        torch.sub(a, 1, out=b).bitwise_and_(_MAGNITUDE)  # a zero is the largest
        range_.copy_(moments.v_range(_rows(b).amin(1).add_(1), _rows(a).amax(1)))
        base, pace, rate = moments.grid(range_)
        torch.sub(_rows(a), base, out=_rows(b))
        t.copy_(b)
        _rows(t).mul_(rate)
        b.copy_(t).add_(u).bitwise_right_shift_(16).add_(1).mul_(a.clamp_(max=1))
        self._points(t, b, c, base, pace)
        torch.div(m, t.sqrt_(), out=r).masked_fill_(torch.eq(b, 0, out=self._mask[: m.numel()]), 0.0)
        torch.bitwise_and(r.view(torch.int32), _MAGNITUDE, out=a)
        amax = _rows(a).amax(1)
        scale.copy_(moments.r_scale(amax))
        torch.mul(_rows(a.view(torch.float32)), moments.r_grid(amax)[:, None], out=_rows(t))
        t.add_(256.0).sqrt_().sub_(16.0).round_().clamp_(max=63.0)
        torch.copysign(t, r, out=t)
        bad = amax >= 0x7F800000
        if bad.any():
            _rows(t).masked_fill_(bad[:, None], 0.0)
        codes.copy_(a.copy_(t).bitwise_left_shift_(1).bitwise_or_(torch.bitwise_and(b, 1, out=c)))
        sq_codes.copy_(b.bitwise_right_shift_(1))

    def _dither(self, hyper: Hyper, piece: Piece, start: int, n: int) -> Tensor:
        begin = moments.dither_start(hyper.seed, start, step=piece.step, parameter=piece.index)
        begin = begin - (1 << 32) if begin >= 1 << 31 else begin
        u = self._ints[3][:n]
        return torch.add(self._ramp[:n], begin, out=u).bitwise_right_shift_(16).bitwise_and_(0xFFFF)

    def _cut(self, out: Tensor, v: Tensor, u: Tensor) -> None:
        """v to bfloat16, what is cut off rounded by u."""
        a, mask = self._ints[0][: v.numel()], self._mask[: v.numel()]
        torch.add(torch.bitwise_and(v.view(torch.int32), _MAGNITUDE, out=a), u, out=u)
        u.masked_fill_(torch.ge(a, 0x7F800000, out=mask), _NAN).bitwise_right_shift_(16)
        out.view(torch.int16).copy_(u)

    def _joined(self, out: Tensor, high: Tensor, low: Tensor) -> Tensor:
        bits, low32 = out.view(torch.int32), self._ints[0][: out.numel()]
        bits.copy_(high.view(torch.int16)).bitwise_left_shift_(16).add_(low32.copy_(low))
        return out

    def _write(
        self, piece: Piece, hyper: Hyper, first: int, last: int, w: Tensor, weight: Tensor, state: dict[str, Tensor]
    ) -> None:
        if hyper.master == "fp32":
            if w.data_ptr() != weight.data_ptr():
                weight.copy_(w)
            return
        if hyper.master == "bf16+sr":
            words = philox.words(hyper.seed, piece.start + first, last - first, step=piece.step, parameter=piece.index)
            weight.copy_(master.stochastic(w, words))
            return
        bits, a, mask = w.view(torch.int32), self._ints[0][: w.numel()], self._mask[: w.numel()]
        bits.masked_fill_(torch.ne(w, w, out=mask), _NAN)
        weight.view(torch.int16).copy_(torch.add(bits, 0x8000, out=a).bitwise_right_shift_(16))
        state["master_low"].copy_(bits)


def _rows(x: Tensor) -> Tensor:
    return x.view(-1, GROUP)


def _int32(x: Tensor) -> Tensor:
    """int64 modulo 2^32, as signed."""
    x = x & 0xFFFFFFFF
    return torch.where(x >= 1 << 31, x - (1 << 32), x).to(torch.int32)
