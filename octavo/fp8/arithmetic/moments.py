"""AdamW's two moments in one byte each: groups of 128 values that share a range.

A group is 128 consecutive elements of the flattened, unsharded parameter, a row of a [G, 128] tensor; elements outside
the parameter (in a ragged last group) are zero, and zeros change nothing. A format computes a group's extrema first and
its codes second, so that ranks that share a group can agree on the extrema in between.

**fp8** (2.0625 bytes per parameter for both moments). The second moment has 9 bits: 0 is zero, and 1 to 511 are points
of a grid that is even *in the fp32 bit pattern*. Bit patterns of positive floats are a piecewise linear logarithm, so
that the codes resolve every v of the group with the same relative error, however different they are. A nonzero v never
becomes zero. The first moment is stored as r = m / sqrt(v), the quantity that the weight steps by, in 7 bits, finer for
small r, with one fp32 scale per group.

A step changes v by a thousandth, a tenth of a code: rounded to nearest the code would never change, and rounded at
random it would wander. Two things prevent this. The grid is stable: its pace is one of four per octave, and its points
are the multiples of the pace, for any extrema of the group. And the dither u, which is added before truncation, is
not random but a Weyl sequence: over the steps it visits all fractions evenly, so that a fraction p rounds up in a share
p of the steps, within one step.

    u     = ((element * 0xC13FA9A9 + step * 0x9E3779B9 + seed * 0xD2511F53 + parameter * 0xCD9E8D57) mod 2^32) >> 16

    lo, hi = smallest non-zero, largest of bits(v)                            int32
    width  = max((hi - lo + 507) // 508, 512)
    p      = (bits(float(width)) + 0x1FFFFF) >> 21                            up to 1, 1.25, 1.5 or 1.75 times 2^e
    pace   = int(float of bits p << 21)
    range  = ((p - 544) << 24) | ((lo // pace * pace) >> 7)                   0 where hi = 0

    base   = max((range & 0xFFFFFF) << 7, 1)       rate = 65536 / float(pace)
    code   = ((int(float(bits(v) - base) * rate) + u) >> 16) + 1, 0 for v = 0
    bits(v') = base + (code - 1) * pace, 0 for code 0
    r      = m / sqrt(v'), 0 where v' = 0
    amax   = largest |r|
    scale  = amax / 5985       grid = 5985 / amax                             both 0 where amax < 2^-100
    c      = min(rint(sqrt(|r| * grid + 256) - 16), 63), with the sign of r   ties to even
    m'     = (float(c * (|c| + 32)) * scale) * sqrt(v')

    bytes: (c << 1) | (code & 1) of m, code >> 1 of v

int() truncates towards zero, float() rounds to nearest even; every operation is a single int32 or IEEE fp32 one and
none is fused, so that every backend has the same bits. (Divisors are never Python numbers: on CUDA torch would multiply
by the inverse.) A group with a v of 2^127 or more, Inf or NaN has range -1: base = 0x7FC00000, pace = rate = 0,
scale = NaN, c = 0. It decodes to NaN, all but the second moments that are 0.

**coat** (2.19 bytes per parameter; Xi et al., "COAT: Compressing Optimizer states and Activation for Memory-Efficient
FP8 Training", ICLR 2025, arXiv 2410.19313). Both moments in E4M3 after |z|^k, with k such that the group fills E4M3's
range, truncated to a multiple of 1/16 as in COAT's own kernel. The truncation matters: with an exact k the smallest
magnitude falls between the codes 2 and 3 and is rounded down at every step, so that small values shrink without end.
Three faults of COAT's kernel are fixed: zeros do not count as the smallest magnitude, nothing is added to magnitudes
(which would swamp magnitudes near 1e-30), k is bounded. :mod:`octavo.fp8.arithmetic.power` computes the powers.

    lo, hi = smallest non-zero, largest |z|                        1 and 1 of a group of zeros
    q      = log2(448^2 / 2) / max(log2(hi) - log2(lo), 1)
    k      = min(max(floor(16 q), 1), 256) / 16
    c      = sqrt(hi) * sqrt(lo)       s = (hi / c)^k / 448        code = e4m3(sign(z) * (|z| / c)^k / s), to nearest
    z'     = sign(code) * (|code| * s)^(1/k) * c

Codes of versions up to 0.4.0, whose k was exact, decode by the same rule, because k is stored with them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.fp8.arithmetic.power import log2, power
from octavo.fp8.arithmetic.root import sqrt

GROUP = 128
"""Consecutive elements of a flattened parameter that share a range."""

STATES = ("fp8", "coat", "bf16", "fp32")
"""The formats of AdamW's moments."""


class StateSpec(NamedTuple):
    """One state tensor of a format: one value per element (`row` None), or `row` values per group."""

    name: str
    dtype: torch.dtype
    row: tuple[int, ...] | None = None


LAYOUT: dict[str, tuple[StateSpec, ...]] = {
    "fp8": (
        StateSpec("exp_avg_codes", torch.int8),
        StateSpec("exp_avg_scale", torch.float32, ()),
        StateSpec("exp_avg_sq_codes", torch.uint8),
        StateSpec("exp_avg_sq_range", torch.int32, ()),
    ),
    "coat": (
        StateSpec("exp_avg_codes", torch.float8_e4m3fn),
        StateSpec("exp_avg_figures", torch.float32, (3,)),
        StateSpec("exp_avg_sq_codes", torch.float8_e4m3fn),
        StateSpec("exp_avg_sq_figures", torch.float32, (3,)),
    ),
    "bf16": (StateSpec("exp_avg", torch.bfloat16), StateSpec("exp_avg_sq", torch.bfloat16)),
    "fp32": (StateSpec("exp_avg", torch.float32), StateSpec("exp_avg_sq", torch.float32)),
}
"""The state tensors of each format. In every format, all zeros mean that both moments are zero."""

MaxOverRanks = Callable[[Tensor], Tensor]
"""Takes int32 [K, G] and returns the elementwise maximum over the ranks that share each of the G groups."""

_NONE = 0x7FFFFFFF  # no non-zero value: above every bit pattern
_INF = 0x7F800000
_NAN = 0x7FC00000
TOP = 0x7F000000  # 2^127: a grid point above any v below it is still finite
LEAST = 544  # the narrowest pace, 512, as the upper bits of a float: (9 + 127) * 4
R_TOP = 5985.0  # 63 * (63 + 32): the value of the largest code of r, in units of the scale
TINY = 2.0**-100
_TARGET = 16.614709844115207  # log2(448^2 / 2): the smallest magnitude of a group becomes 448 / 100352


def extrema(z: Tensor) -> tuple[Tensor, Tensor]:
    """Return bit patterns (int32 [G]) of the smallest non-zero and largest magnitudes in each row of `z` fp32 [G, 128].

    A row of zeros has (0x7FFFFFFF, 0); with a NaN or an Inf `hi` is at least 0x7F800000. Over the ranks that
    share a group, the minimum of lo and the maximum of hi are the group's extrema.
    """
    bits = z.view(torch.int32) & 0x7FFFFFFF
    return torch.where(bits == 0, _NONE, bits).amin(1), bits.amax(1)


def v_range(lo: Tensor, hi: Tensor) -> Tensor:
    """Return the grid of each group's v as a word, int32 [G], from its :func:`extrema`."""
    width = ((hi - lo + 507) // 508).clamp(min=512)
    exponent = (width.float().view(torch.int32) + 0x1FFFFF) >> 21
    pace = _pace(exponent)
    word = ((exponent - LEAST) << 24) | ((lo // pace * pace) >> 7)
    return torch.where(hi == 0, 0, torch.where(hi >= TOP, -1, word))


def grid(range_: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (base, pace) int32 [G, 1] and rate fp32 [G, 1] of the grids in words int32 [G]."""
    bad = range_ == -1
    pace = torch.where(bad, 1, _pace((range_ >> 24) + LEAST))
    rate = torch.full_like(pace, 65536.0, dtype=torch.float32) / pace.float()
    base = torch.where(bad, _NAN, ((range_ & 0xFFFFFF) << 7).clamp(min=1))
    pace, rate = torch.where(bad, 0, pace), torch.where(bad, 0.0, rate)
    return base[:, None], pace[:, None], rate[:, None]


def _pace(exponent: Tensor) -> Tensor:
    return (exponent << 21).view(torch.float32).to(torch.int32)


def dither(seed: int, start: int, count: int, *, step: int, parameter: int, device: torch.device | str) -> Tensor:
    """Return the dither of elements `start` to `start + count`, added before truncation: int32 [count], 0 to 65535."""
    element = torch.arange(count, dtype=torch.int64, device=device)
    first = dither_start(seed, start, step=step, parameter=parameter)
    return (((element * 0xC13FA9A9 + first) >> 16) & 0xFFFF).to(torch.int32)


def dither_start(seed: int, start: int, *, step: int, parameter: int) -> int:
    """Return the 32 bits whose upper half is the dither of element `start`; each next element adds 0xC13FA9A9."""
    return (start * 0xC13FA9A9 + step * 0x9E3779B9 + seed * 0xD2511F53 + parameter * 0xCD9E8D57) & 0xFFFFFFFF


def encode_v(v: Tensor, range_: Tensor, dither: Tensor) -> Tensor:
    """Return codes 0 to 511 (int32 [G, 128]) of `v` (fp32) on the grids of `range_` (int32 [G])."""
    base, _, rate = grid(range_)
    bits = v.view(torch.int32)
    code = (((bits - base).float() * rate).to(torch.int32) + dither) >> 16
    return torch.where(bits == 0, 0, code + 1)


def decode_v(code: Tensor, range_: Tensor) -> Tensor:
    """Return the second moments (fp32 [G, 128]) of codes 0 to 511 (int32)."""
    base, pace, _ = grid(range_)
    return torch.where(code == 0, 0, base + (code - 1) * pace).view(torch.float32)


def ratio(m: Tensor, v: Tensor) -> Tensor:
    """Return r = m / sqrt(v) for decoded v (fp32 [G, 128]), 0 where v is 0."""
    return torch.where(v == 0, torch.zeros_like(m), m / sqrt(v))


def r_amax(r: Tensor) -> Tensor:
    """Return bit patterns (int32 [G]) of the largest magnitude in each row of `r`; NaN is larger than all."""
    return (r.view(torch.int32) & 0x7FFFFFFF).amax(1)


def r_scale(amax: Tensor) -> Tensor:
    """Return the scale of r (fp32 [G]) from bit patterns of amax, int32 [G]: amax / 5985, 0 for amax < 2^-100."""
    value = amax.view(torch.float32)
    scale = torch.where(value < TINY, 0.0, value / torch.full_like(value, R_TOP))
    return torch.where(amax >= _INF, torch.nan, scale)


def r_grid(amax: Tensor) -> Tensor:
    """Return the factor of r before encoding (fp32 [G]): 5985 / amax, 0 for amax < 2^-100."""
    value = amax.view(torch.float32)
    return torch.where(value < TINY, 0.0, torch.full_like(value, R_TOP) / value)


def encode_r(r: Tensor, amax: Tensor) -> Tensor:
    """Return codes -63 to 63 (int32 [G, 128]) of `r` (fp32) in groups whose largest magnitudes have bit patterns
    `amax`."""
    code = (sqrt(r.abs() * r_grid(amax)[:, None] + 256.0) - 16.0).round().clamp(max=63.0)
    return torch.where((amax >= _INF)[:, None], 0.0, torch.copysign(code, r)).to(torch.int32)


def decode_m(code: Tensor, scale: Tensor, v: Tensor) -> Tensor:
    """Return the first moments (fp32 [G, 128]) of codes -63 to 63, `scale` fp32 [G] and decoded second moments `v`."""
    return ((code * (code.abs() + 32)).float() * scale[:, None]) * sqrt(v)


def pack(m_code: Tensor, v_code: Tensor) -> tuple[Tensor, Tensor]:
    """Pack codes of m and v into (int8, uint8); the lowest bit of v is stored in the byte of m."""
    return ((m_code << 1) | (v_code & 1)).to(torch.int8), (v_code >> 1).to(torch.uint8)


def unpack(m_byte: Tensor, v_byte: Tensor) -> tuple[Tensor, Tensor]:
    """Unpack bytes (int8, uint8) into codes (int32) of m and v: the inverse of :func:`pack`."""
    byte = m_byte.to(torch.int32)
    return byte >> 1, (v_byte.to(torch.int32) << 1) | (byte & 1)


def coat_figures(lo: Tensor, hi: Tensor) -> Tensor:
    """Return (s, k, c) of each group, fp32 [G, 3], from :func:`extrema`; NaN if the group has a NaN or an Inf."""
    low, high = (torch.where(hi == 0, 1.0, x.view(torch.float32)) for x in (lo, hi))
    octaves = (log2(high) - log2(low)).clamp(min=1.0)
    k = ((torch.full_like(octaves, _TARGET) / octaves) * 16.0).floor().clamp(1.0, 256.0) * 0.0625
    c = sqrt(high) * sqrt(low)
    s = power(high / c, k) / torch.full_like(c, 448.0)
    return torch.where((hi >= _INF)[:, None], torch.nan, torch.stack([s, k, c], 1))


def coat_encode(z: Tensor, figures: Tensor) -> Tensor:
    """Return E4M3 codes [G, 128] of `z` by `figures` [G, 3], rounded to nearest.

    Only zeros become zero: the smallest magnitude is at least 2.2 of E4M3's smallest steps, or 1.4 if a k of 1/16 is
    too large for the group.
    """
    s, k, c = figures[:, :, None].unbind(1)
    y = power(z.abs() / c, k) / s
    return torch.where(y.isnan(), y, torch.copysign(y, z)).to(torch.float8_e4m3fn)


def coat_decode(codes: Tensor, figures: Tensor) -> Tensor:
    """Return the moments (fp32 [G, 128]) of E4M3 `codes` by `figures` [G, 3]."""
    s, k, c = figures[:, :, None].unbind(1)
    code = codes.float()
    return torch.copysign(power(code.abs() * s, torch.ones_like(k) / k) * c, code)


def decode(states: str, state: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return (m, v), fp32 [G, 128], from the state tensors of format `states`: codes [G, 128] and values per group
    [G, ...]."""
    if states == "fp8":
        m_code, v_code = unpack(state["exp_avg_codes"], state["exp_avg_sq_codes"])
        v = decode_v(v_code, state["exp_avg_sq_range"])
        return decode_m(m_code, state["exp_avg_scale"], v), v
    if states == "coat":
        return (
            coat_decode(state["exp_avg_codes"], state["exp_avg_figures"]),
            coat_decode(state["exp_avg_sq_codes"], state["exp_avg_sq_figures"]),
        )
    return state["exp_avg"].float(), state["exp_avg_sq"].float()


def encode(
    states: str, m: Tensor, v: Tensor, dither_bits: Tensor | None, agree: MaxOverRanks | None = None
) -> dict[str, Tensor]:
    """Return the state tensors of format `states` for `m` and `v` (fp32 [G, 128]).

    Args:
        states: one of :data:`STATES`.
        m, v: the moments; elements on other ranks must be zero.
        dither_bits: :func:`dither`, int32 [G, 128] from 0 to 65535, for fp8 and bf16; the other formats ignore it.
        agree: reduces extrema over the ranks that share a group. It is called once with the extrema (minima negated,
            so that all are maxima), and for fp8 again with the largest |r|.
    """
    if states == "fp32":
        return {"exp_avg": m, "exp_avg_sq": v}
    share = agree or (lambda marks: marks)
    if states == "coat":
        (m_lo, m_hi), (v_lo, v_hi) = extrema(m), extrema(v)
        marks = share(torch.stack([-m_lo, m_hi, -v_lo, v_hi]))
        m_figures, v_figures = coat_figures(-marks[0], marks[1]), coat_figures(-marks[2], marks[3])
        return {
            "exp_avg_codes": coat_encode(m, m_figures),
            "exp_avg_figures": m_figures,
            "exp_avg_sq_codes": coat_encode(v, v_figures),
            "exp_avg_sq_figures": v_figures,
        }
    assert dither_bits is not None
    if states == "fp8":
        # Two rounds of agreement: r divides by v as it will be decoded, so its amax needs the codes of v.
        lo, hi = extrema(v)
        marks = share(torch.stack([-lo, hi]))
        range_ = v_range(-marks[0], marks[1])
        v_code = encode_v(v, range_, dither_bits)
        r = ratio(m, decode_v(v_code, range_))
        amax = share(r_amax(r)[None])[0]
        m_byte, v_byte = pack(encode_r(r, amax), v_code)
        return {
            "exp_avg_codes": m_byte,
            "exp_avg_scale": r_scale(amax),
            "exp_avg_sq_codes": v_byte,
            "exp_avg_sq_range": range_,
        }
    bits = v.view(torch.int32)
    cut = torch.where(bits & 0x7FFFFFFF < _INF, bits + dither_bits, _NAN) >> 16
    return {"exp_avg": m.to(torch.bfloat16), "exp_avg_sq": cut.to(torch.int16).view(torch.bfloat16)}
