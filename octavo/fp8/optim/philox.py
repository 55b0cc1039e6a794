"""Philox4x32-10: random bits that depend on an element's place and on nothing else.

A counter-based generator (Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011): ten
rounds of multiplications turn a counter of four words and a key of two into four random words. Here

    key = (seed's low 32 bits, seed's high 32 bits)
    counter = (element // 4, step, parameter, 0)        word element % 4 of the output belongs to the element

so that the bits of an element are the same on every backend, however a parameter is cut into shards, chunks or thread
blocks. The word's low 16 bits round a "bf16+sr" weight (:func:`octavo.fp8.optim.master.stochastic`), its high 16 bits
a "coat" second moment (:mod:`octavo.fp8.optim.moments`).
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["LIMIT", "words"]

LIMIT = 1 << 34
"""Elements of one parameter that have bits of their own: the counter's first word has 32 bits and serves four."""

_MASK = 0xFFFFFFFF
_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_K0, _K1 = 0x9E3779B9, 0xBB67AE85


def words(
    seed: int, start: int, count: int, *, step: int, parameter: int, device: torch.device | str = "cpu"
) -> Tensor:
    """The random words of elements `start` to `start + count`: int32 [count], each the bit pattern of one word.

    Raises ValueError for elements at or beyond `LIMIT`.
    """
    if start + count > LIMIT:
        raise ValueError(f"A parameter of {start + count} elements has no random bits beyond {LIMIT}: split it in two.")
    first, last = start // 4, -(-(start + count) // 4)
    counter = torch.arange(first, last, dtype=torch.int64, device=device)
    four = torch.stack(rounds(counter, step & _MASK, parameter & _MASK, seed), dim=1).view(-1)
    return four[start - 4 * first :][:count]


def rounds(c0: Tensor, step: int, parameter: int, seed: int) -> list[Tensor]:
    """The four output words of counters (c0, step, parameter, 0): int32 tensors of c0's shape; c0 is int64, < 2^32."""
    k0, k1 = seed & _MASK, (seed >> 32) & _MASK
    c: list[Tensor | int] = [c0, step, parameter, 0]
    for _ in range(10):
        p0, p1 = c[0] * _M0, c[2] * _M1  # 64-bit products modulo 2^64: a tensor's sign bit is masked below
        c = [((p1 >> 32) & _MASK) ^ c[1] ^ k0, p1 & _MASK, ((p0 >> 32) & _MASK) ^ c[3] ^ k1, p0 & _MASK]
        k0, k1 = (k0 + _K0) & _MASK, (k1 + _K1) & _MASK
    return [word.to(torch.int32) for word in c]  # type: ignore[union-attr]
