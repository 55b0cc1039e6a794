"""What a BF16 weight forgets: the lower half of an fp32 weight beside its BF16 half, or rounded away by chance.

Three ways to keep the weights that the optimizer steps (bytes per parameter beyond the weight itself):

    fp32     the parameter is fp32, or a BF16 parameter has an fp32 `master` (4 B); the parameter is its nearest BF16
    bf16+16  the parameter is the upper half, `master_low` the other 16 bits (2 B): together exactly the fp32 weight
    bf16+sr  the parameter alone (0 B): every step rounds it up or down with the chance that leaves its mean alone

A split of 32 bits into halves that are both useful: the upper half rounds to nearest, ties away from zero,

    hi = (bits(w) + 0x8000) >> 16        lo = the int16 with bits(w) = (hi << 16) + lo modulo 2^32

Rounding ties to even could not be undone, and cutting the bits off would double the error of the BF16 weight. A NaN is
made 0x7FC00000 first: of another NaN's bits, the sum could carry into the sign and leave a zero.
"""

from __future__ import annotations

import torch
from torch import Tensor

_NAN = 0x7FC00000


def split(w: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 `w` -> (bfloat16, int16) of its shape, whose :func:`join` has w's bits (any NaN: those of 0x7FC00000)."""
    bits = _clean(w)
    high = ((bits + 0x8000) >> 16).to(torch.int16)
    return high.view(torch.bfloat16), bits.to(torch.int16)  # the lower 16 bits, read as signed


def join(high: Tensor, low: Tensor) -> Tensor:
    """The fp32 weight behind (bfloat16, int16): bits = (hi << 16) + lo, modulo 2^32."""
    return ((high.view(torch.int16).to(torch.int32) << 16) + low.to(torch.int32)).view(torch.float32)


def stochastic(w: Tensor, words: Tensor) -> Tensor:
    """fp32 `w` rounded to bfloat16 by the low 16 bits of `words` (int32, same shape): hi = (bits(w) + r) >> 16.

    The result is one of w's two neighbours, the upper one in magnitude with probability (distance to the lower one) /
    (distance between them): its mean is w.
    """
    return ((_clean(w) + (words & 0xFFFF)) >> 16).to(torch.int16).view(torch.bfloat16)


def _clean(w: Tensor) -> Tensor:
    bits = w.contiguous().view(torch.int32)
    return torch.where(torch.isnan(w), torch.full_like(bits, _NAN), bits)
