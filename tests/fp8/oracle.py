"""The arithmetic once more, in numpy: no torch, no FP8 dtype, one plain Python loop over the blocks.

Codes are decoded by the textbook formula and found by searching the table of all values in float64; scales come from
``frexp`` and from exact comparisons. Nothing here shares a line with the code under test.
"""

from __future__ import annotations

import math

import numpy as np

FACTS = {"e4m3": (4, 3, 7, 448.0), "e5m2": (5, 2, 15, 57344.0)}  # exponent bits, mantissa bits, bias, largest value


def decode_byte(code: int, fmt: str) -> float:
    """The value of one code."""
    exponent_bits, mantissa_bits, bias, _ = FACTS[fmt]
    sign = -1.0 if code & 0x80 else 1.0
    exponent = (code & 0x7F) >> mantissa_bits
    mantissa = code & ((1 << mantissa_bits) - 1)
    if fmt == "e4m3" and code & 0x7F == 0x7F:
        return math.nan
    if fmt == "e5m2" and exponent == (1 << exponent_bits) - 1:
        return sign * math.inf if mantissa == 0 else math.nan
    if exponent == 0:
        return sign * mantissa * 2.0 ** (1 - bias - mantissa_bits)
    return sign * (1 + mantissa / 2**mantissa_bits) * 2.0 ** (exponent - bias)


TABLE = {fmt: np.array([decode_byte(c, fmt) for c in range(256)]) for fmt in FACTS}
FINITE = {fmt: TABLE[fmt][:128][np.isfinite(TABLE[fmt][:128])] for fmt in FACTS}  # ascending; the index is the code


def decode(codes: np.ndarray, fmt: str) -> np.ndarray:
    """The values of an array of bytes, float64."""
    return TABLE[fmt][codes]


def encode(values: np.ndarray, fmt: str) -> np.ndarray:
    """The nearest code of each finite value, ties to the even code, beyond the largest value the largest value."""
    finite = FINITE[fmt]
    magnitude = np.minimum(np.abs(values.astype(np.float64)), finite[-1])
    low = np.clip(np.searchsorted(finite, magnitude, side="right") - 1, 0, len(finite) - 1)
    high = np.minimum(low + 1, len(finite) - 1)
    to_low, to_high = magnitude - finite[low], finite[high] - magnitude
    up = (to_high < to_low) | ((to_high == to_low) & (low % 2 == 1))
    code = np.where(up, high, low).astype(np.uint8)
    return code | (np.signbit(values).astype(np.uint8) << 7)


def scale_of(amax: float, fmt: str, kind: str) -> float:
    """The dequant multiplier of a block with this (fp32) amax."""
    largest = FACTS[fmt][3]
    if not math.isfinite(amax):
        return math.nan
    if amax < 2.0**-100:
        return 1.0
    if kind == "fp32":
        return float(np.float32(amax) / np.float32(largest))
    guess = 2.0 ** (math.frexp(amax)[1] - math.frexp(largest)[1] - 2)
    while amax > largest * guess:
        guess *= 2
    assert amax > largest * guess / 2
    return guess


def quantize(x: np.ndarray, fmt: str, block: tuple[int, int], kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Codes (uint8) and scales (float64) of an fp32 matrix."""
    rows, cols = x.shape
    r, c = (max(size, 1) if b == -1 else b for b, size in zip(block, x.shape, strict=True))
    m = 1 if block[0] == -1 else math.ceil(rows / r)
    k = 1 if block[1] == -1 else math.ceil(cols / c)
    quotients, bad, scales = np.zeros((rows, cols), np.float32), np.zeros((rows, cols), bool), np.ones((m, k))
    for i in range(m):
        for j in range(k):
            where = (slice(i * r, (i + 1) * r), slice(j * c, (j + 1) * c))
            with np.errstate(invalid="ignore"):  # a signaling NaN
                part = x[where].astype(np.float64)
            amax = float(np.max(np.abs(part))) if part.size else 0.0
            scales[i, j] = scale = scale_of(amax, fmt, kind)
            if math.isnan(scale):
                bad[where] = True
            else:
                # float64 has more than twice the digits of fp32: its rounded quotient is the IEEE fp32 division.
                quotients[where] = (part / scale).astype(np.float32)
    return np.where(bad, np.uint8(0x7F), encode(quotients, fmt)), scales


def dequantize(codes: np.ndarray, scales: np.ndarray, fmt: str, block: tuple[int, int]) -> np.ndarray:
    """code * scale in float64."""
    rows, cols = codes.shape
    r, c = (max(size, 1) if b == -1 else b for b, size in zip(block, codes.shape, strict=True))
    spread = scales.repeat(r, 0)[:rows].repeat(c, 1)[:, :cols]
    return decode(codes, fmt) * spread
