"""The fp32 value of a BF16 weight: its lower half is stored, or rounded away at random.

Three ways to store the weights that the optimizer steps (bytes per parameter in addition to the weight):

    fp32     the parameter is fp32, or a BF16 parameter has an fp32 `master` (4 B) and is its nearest BF16
    bf16+16  the parameter is the upper half, `master_low` the other 16 bits (2 B): together exactly the fp32 weight
    bf16+sr  only the parameter (0 B): every step rounds it up or down at random, such that its mean is unbiased

The split of 32 bits rounds the upper half to nearest, ties away from zero, so that it is a good BF16 weight:

    hi = (bits(w) + 0x8000) >> 16        lo = the int16 with bits(w) = (hi << 16) + lo modulo 2^32

Rounding ties to even could not be undone, and truncation would double the error of the BF16 weight. Every NaN becomes
0x7FC00000 first: with the bits of other NaNs, the sum could carry into the sign and become a zero.
"""

from __future__ import annotations

import torch
from torch import Tensor

_NAN = 0x7FC00000


def split(w: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 `w` -> (bfloat16, int16) of its shape, whose :func:`join` has w's bits (any NaN: those of 0x7FC00000)."""
    bits = _canonical_bits(w)
    high = ((bits + 0x8000) >> 16).to(torch.int16)
    return high.view(torch.bfloat16), bits.to(torch.int16)  # the lower 16 bits, read as signed


def join(high: Tensor, low: Tensor) -> Tensor:
    """The fp32 weight of halves (bfloat16, int16): bits = (hi << 16) + lo, modulo 2^32."""
    return ((high.view(torch.int16).to(torch.int32) << 16) + low.to(torch.int32)).view(torch.float32)


def stochastic(w: Tensor, words: Tensor) -> Tensor:
    """fp32 `w` rounded to bfloat16 by the low 16 bits of `words` (int32, same shape): hi = (bits(w) + r) >> 16.

    The result is one of w's two neighbours, the upper one in magnitude with probability (distance to the lower one) /
    (distance between them): its mean is w.
    """
    return ((_canonical_bits(w) + (words & 0xFFFF)) >> 16).to(torch.int16).view(torch.bfloat16)


def _canonical_bits(w: Tensor) -> Tensor:
    bits = w.contiguous().view(torch.int32)
    return torch.where(torch.isnan(w), torch.full_like(bits, _NAN), bits)
