"""Master weights: the fp32 value of a BF16 weight, whose lower half is stored or stochastically rounded.

Three ways to store the master weights of the optimizer (bytes per parameter in addition to the weight):

    fp32     the parameter is fp32, or a BF16 parameter has an fp32 `master` (4 B) and is its nearest BF16
    bf16+16  the parameter is the upper half, `master_low` the other 16 bits (2 B): together exactly the fp32 weight
    bf16+sr  only the parameter (0 B): every step rounds it stochastically, so that its mean is unbiased

The split of 32 bits rounds the upper half to nearest, ties away from zero, so that it is a good BF16 weight:

    hi = (bits(w) + 0x8000) >> 16        lo = the int16 with bits(w) = (hi << 16) + lo modulo 2^32

Rounding ties to even could not be inverted, and truncation would double the error of the BF16 weight. Every NaN is
first replaced by 0x7FC00000: with the bits of other NaNs, the sum could carry into the sign and become zero.
"""

from __future__ import annotations

import torch
from torch import Tensor

_NAN = 0x7FC00000


def split(w: Tensor) -> tuple[Tensor, Tensor]:
    """Split fp32 `w` into (bfloat16, int16), for which :func:`join` returns the bits of w (0x7FC00000 for any NaN)."""
    bits = _canonical_bits(w)
    high = ((bits + 0x8000) >> 16).to(torch.int16)
    return high.view(torch.bfloat16), bits.to(torch.int16)  # the lower 16 bits, read as signed


def join(high: Tensor, low: Tensor) -> Tensor:
    """Join halves (bfloat16, int16) to the fp32 weight: bits = (hi << 16) + lo, modulo 2^32."""
    return ((high.view(torch.int16).to(torch.int32) << 16) + low.to(torch.int32)).view(torch.float32)


def stochastic(w: Tensor, words: Tensor) -> Tensor:
    """Round fp32 `w` stochastically to bfloat16, by the low 16 bits of `words` (int32, same shape): hi = (bits(w) + r)
    >> 16.

    The result is one of the two neighbors of w, the one of larger magnitude with probability (distance to the smaller
    one) / (distance between them), so that the mean is w.
    """
    return ((_canonical_bits(w) + (words & 0xFFFF)) >> 16).to(torch.int16).view(torch.bfloat16)


def _canonical_bits(w: Tensor) -> Tensor:
    bits = w.contiguous().view(torch.int32)
    return torch.where(torch.isnan(w), torch.full_like(bits, _NAN), bits)
