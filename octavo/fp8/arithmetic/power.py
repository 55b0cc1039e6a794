"""Compute x^k by IEEE 754 operations that round once, so that all backends give the same bits.

The last places of a library's power depend on the processor and the library, on a CPU even on the alignment of a value,
and the logarithm of a GPU is an approximation. Here logarithm and exponential are series of single fp32 or int32
operations, none of them fused. Exponents are accurate to a few units in the last place, which is a relative error of
10^-6 for the x^k of an FP8 code.

    x = m * 2^e, m in [sqrt(1/2), sqrt(2))      t = (m - 1) / (m + 1)
    log2(x) = e + (2 / ln 2) * (t + t^3/3 + t^5/5 + t^7/7 + t^9/9)
    n = rint(y), f = (y - n) * ln 2             exp2(y) = 2^n * (1 + f + f^2/2! + ... + f^7/7!)
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

HALF = 0x3F3504F3  # the pattern of sqrt(1/2)
LEAST, MOST = -125.0, 127.0  # exponents y for which 2^y is a normal number
LOG = tuple(2.0 / math.log(2.0) / n for n in (9, 7, 5, 3, 1))
EXP = tuple(math.log(2.0) ** n / math.factorial(n) for n in (7, 6, 5, 4, 3, 2, 1, 0))
"""The coefficients of the series in t^2 and in y - n, the highest power first."""


def log2(x: Tensor) -> Tensor:
    """Return log2 of each element of fp32 `x`, which must be finite and positive; subnormal numbers are supported."""
    small = x < 2.0**-126
    bits = torch.where(small, x * 2.0**24, x).view(torch.int32)
    exponent = (bits - HALF) >> 23
    m = (bits - (exponent << 23)).view(torch.float32)
    t = (m - 1.0) / (m + 1.0)
    return torch.where(small, exponent - 24, exponent).float() + _polynomial(LOG, t * t) * t


def exp2(y: Tensor) -> Tensor:
    """Return 2^y of fp32 `y`, clamped to [-125, 127]."""
    y = y.clamp(LEAST, MOST)
    n = y.round()
    p = _polynomial(EXP, y - n)
    return (p.view(torch.int32) + (n.to(torch.int32) << 23)).view(torch.float32)


def power(x: Tensor, k: Tensor) -> Tensor:
    """Return x^k of fp32 `x` (>= 0 or NaN) and a `k` that broadcasts to it, clamped to [2^-125, 2^127]; 0 and NaN are
    unchanged."""
    return torch.where(x > 0, exp2(log2(x) * k), x)


def _polynomial(coefficients: tuple[float, ...], x: Tensor) -> Tensor:
    total = torch.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        total = total * x + coefficient
    return total
