"""Philox4x32-10: random bits that depend only on the seed, the step, the parameter and the index of an element.

A counter-based generator (Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011): ten
rounds of multiplications turn a counter of four words and a key of two into four random words. Here

    key = (seed's low 32 bits, seed's high 32 bits)
    counter = (element // 4, step, parameter, 0)        word element % 4 of the output belongs to the element

so that the bits of an element are the same on every backend and for every split of a parameter into shards, chunks or
thread blocks. The low 16 bits of its word round a "bf16+sr" weight (:func:`octavo.fp8.arithmetic.master.stochastic`).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch import Tensor

LIMIT = 1 << 34
"""The maximum number of elements of a parameter: the first word of a counter has 32 bits, for four elements each."""

_TOO_LONG = f"A parameter of {{}} elements is too large for stochastic rounding (at most {LIMIT}); split it in two."
_MASK = 0xFFFFFFFF
_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_K0, _K1 = 0x9E3779B9, 0xBB67AE85


def words(
    seed: int, start: int, count: int, *, step: int, parameter: int, device: torch.device | str = "cpu"
) -> Tensor:
    """Return the random words of elements `start` to `start + count`, as bit patterns, int32 [count].

    Raises ValueError for elements at or beyond `LIMIT`.
    """
    if start + count > LIMIT:
        raise ValueError(_TOO_LONG.format(start + count))
    first, last = start // 4, -(-(start + count) // 4)
    counter = torch.arange(first, last, dtype=torch.int64, device=device)
    output = torch.stack(rounds(counter, step & _MASK, parameter & _MASK, seed), dim=1).view(-1)
    return output[start - 4 * first :][:count]


def rounds(c0: Tensor, step: int, parameter: int, seed: int) -> list[Tensor]:
    """Return the four output words of counters (c0, step, parameter, 0), int32 tensors of the shape of c0, which is
    int64 and < 2^32."""
    c = [c0.clone(), *(torch.full_like(c0, x) for x in (step, parameter, 0))]
    return [word.to(torch.int32) for word in _mix(c, torch.empty_like(c0), seed)]


def blocks(counter: Sequence[Tensor], seed: int) -> list[Tensor]:
    """Return the four output words of counters of four words, int64 tensors with values from 0 to 2^32 - 1."""
    c = [word.clone() for word in counter]
    return [word.bitwise_and_(_MASK) for word in _mix(c, torch.empty_like(c[0]), seed)]


def _mix(c: list[Tensor], spare: Tensor, seed: int) -> list[Tensor]:
    """Run ten rounds in place, in int64. The words are the lower 32 bits; the upper bits are undefined."""
    k0, k1 = seed & _MASK, (seed >> 32) & _MASK
    a, b, x, y = c
    for _ in range(10):
        # (a, b, x, y) becomes (high(x M1) ^ b ^ k0, low(x M1), high(a M0) ^ y ^ k1, low(a M0)), modulo 2^64. b and y
        # are masked before they are multiplied, so that the upper bits of words never matter.
        a.mul_(_M0)
        x.mul_(_M1)
        b.bitwise_xor_(torch.bitwise_right_shift(x, 32, out=spare)).bitwise_and_(_MASK).bitwise_xor_(k0)
        y.bitwise_xor_(torch.bitwise_right_shift(a, 32, out=spare)).bitwise_and_(_MASK).bitwise_xor_(k1)
        a, b, x, y = b, x, y, a
        k0, k1 = (k0 + _K0) & _MASK, (k1 + _K1) & _MASK
    return [a, b, x, y]


class Scratch:
    """Buffers for the words of up to 4 * `counters` elements on the CPU, allocated once."""

    def __init__(self, counters: int) -> None:
        self._ramp = torch.arange(counters, dtype=torch.int64)
        self._arrays: list[Tensor] = []

    def words16(self, seed: int, start: int, count: int, *, step: int, parameter: int) -> Tensor:
        """Return the low 16 bits of :func:`words`, int16 [count], valid until the next call. `start` must be a multiple
        of 4."""
        if start + count > LIMIT:
            raise ValueError(_TOO_LONG.format(start + count))
        if not self._arrays:
            self._arrays = [torch.empty_like(self._ramp) for _ in range(5)]
        *c, spare = (x[: -(-count // 4)] for x in self._arrays)
        torch.add(self._ramp[: len(spare)], start // 4, out=c[0])
        for tensor, value in zip(c[1:], (step & _MASK, parameter & _MASK, 0), strict=True):
            tensor.fill_(value)
        output = _mix(c, spare, seed)
        # Four 16-bit words, in memory order, are one 64-bit word.
        first, *rest = output if sys.byteorder == "little" else output[::-1]
        packed = first.bitwise_and_(0xFFFF)
        for i, word in enumerate(rest, 1):
            packed.bitwise_or_(word.bitwise_and_(0xFFFF).bitwise_left_shift_(16 * i))
        return packed.view(torch.int16)[:count]
