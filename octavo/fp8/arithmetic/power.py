"""x^k in operations with one rounding in IEEE 754, so that every backend has the same bits.

A library's power differs in its last places between processors and libraries, on a CPU even with the alignment of a
value, and a GPU's logarithm is an approximation. Here logarithm and exponential are series, one fp32 or int32 operation
at a time and none fused, accurate to a few units in the last place of an exponent: to a part in a million of x^k for
the x^k of an FP8 code.

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
    """log2 of each element of fp32 `x`, finite and above 0, also subnormal; undefined for other values."""
    small = x < 2.0**-126
    bits = torch.where(small, x * 2.0**24, x).view(torch.int32)
    exponent = (bits - HALF) >> 23
    m = (bits - (exponent << 23)).view(torch.float32)
    t = (m - 1.0) / (m + 1.0)
    return torch.where(small, exponent - 24, exponent).float() + _polynomial(LOG, t * t) * t


def exp2(y: Tensor) -> Tensor:
    """2^y of fp32 `y` cut to [-125, 127]."""
    y = y.clamp(LEAST, MOST)
    n = y.round()
    p = _polynomial(EXP, y - n)
    return (p.view(torch.int32) + (n.to(torch.int32) << 23)).view(torch.float32)


def power(x: Tensor, k: Tensor) -> Tensor:
    """x^k of fp32 `x` (0 or more, or NaN) and `k` that broadcasts to it, within [2^-125, 2^127]; 0 and NaN stay."""
    return torch.where(x > 0, exp2(log2(x) * k), x)


def _polynomial(coefficients: tuple[float, ...], x: Tensor) -> Tensor:
    total = torch.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        total = total * x + coefficient
    return total
