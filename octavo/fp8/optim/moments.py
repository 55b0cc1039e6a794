"""AdamW's two moments in one byte each: groups of 128 values that share a range.

A group is 128 consecutive elements of the flattened, unsharded parameter, given as a row of a [G, 128] tensor; what
lies outside the parameter (a ragged last group) is zero, and a zero changes nothing. A format takes a group's extrema
first and its codes after, so that ranks that share a group can agree on the extrema in between.

**fp8** (2.0625 bytes per parameter for both moments). The second moment is one byte: 0 is zero, and 1 to 255 lie evenly
*in the fp32 bit pattern* between the group's smallest and largest non-zero v, each kept as its upper 16 bits, rounded
outward. Bit patterns of positive floats are a logarithm drawn with straight lines, so that 255 codes resolve every v
of the group to the same relative error, however far apart they are. It is rounded stochastically: v moves by a
thousandth a step, which a rounding to nearest would undo each time. A v that is not zero never becomes zero. The first
moment is kept as r = m / sqrt(v), the quantity that the weight steps by, in int8 with one fp32 scale a group.

    lo, hi   = smallest non-zero, largest of bits(v)                          int32
    lo16     = max(lo >> 16, 1)       hi16 = min((hi + 0xFFFF) >> 16, 0x7F7F) range: the two as bfloat16
    span     = hi16 - lo16
    rate     = 254 / max(span, 1)                                             IEEE fp32 division
    d        = min(max(bits(v) - (lo16 << 16), 0), span << 16)                int32
    code     = min(1 + ((int(float(d) * rate) + u) >> 16), 255), 0 for v = 0  u: high 16 bits of the element's word
    pace     = (span * 65536) / 254                                           IEEE fp32 division
    bits(v') = (lo16 << 16) + int(float(code - 1) * pace), 0 for code 0
    r        = m / sqrt(v'), 0 where v' = 0                                   IEEE fp32 square root and division
    amax     = largest |r|
    scale    = amax / 127, grid = 127 / amax; both 0 where amax < 2^-100      IEEE fp32 divisions
    code     = min(max(rint(r * grid), -127), 127)                            ties to even
    m'       = (code * scale) * sqrt(v')

int() cuts towards zero, float() rounds to nearest even; every operation is a single fp32 or int32 one, none fused, so
that every backend has the same bits. (Hence no division by a Python number: on CUDA torch would multiply by its
inverse.) A group with a NaN or an Inf in v has lo16 = hi16 = 0x7FC0, scale = NaN and codes of m that are 0: it decodes
to NaN, all but the second moments that are 0. A v beyond 3.39e38 is kept as 3.39e38.

**coat** (2.19 bytes per parameter; Xi et al., "COAT: Compressing Optimizer states and Activation for Memory-Efficient
FP8 Training", ICLR 2025, arXiv 2410.19313). Both moments in E4M3 after |z|^k, with k such that the group fills E4M3's
range. Its published faults are mended: zeros do not count as the smallest magnitude, k is bounded, v is rounded
stochastically, and its non-zero codes never fall below the smallest. Here `pow`, `exp2` and `log2` are a library's, so
that backends agree to a few units in the last place only.

    lo, hi = smallest non-zero, largest |z|
    k      = log2(448^2 / 2) / (log2(hi) - log2(lo)), within [1, 16] for m and [1/16, 16] for v; 1 where hi = lo
    c      = sqrt(hi) * sqrt(lo)       s = (hi / c)^k / 448       code = e4m3(sign(z) * (|z| / c)^k / s)
    z'     = sign(code) * (|code| * s)^(1/k) * c
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = [
    "GROUP",
    "LAYOUT",
    "STATES",
    "Agree",
    "Kept",
    "coat_decode",
    "coat_encode",
    "coat_figures",
    "decode",
    "decode_m",
    "decode_v",
    "encode",
    "encode_r",
    "encode_v",
    "extrema",
    "r_amax",
    "r_scale",
    "ratio",
    "v_range",
]

GROUP = 128
"""Consecutive elements of a flattened parameter that share a range."""

STATES = ("fp8", "coat", "bf16", "fp32")
"""The formats of AdamW's moments."""


class Kept(NamedTuple):
    """One tensor of a format: one value an element (`row` None), or `row` values a group."""

    name: str
    dtype: torch.dtype
    row: tuple[int, ...] | None = None


LAYOUT: dict[str, tuple[Kept, ...]] = {
    "fp8": (
        Kept("exp_avg_codes", torch.int8),
        Kept("exp_avg_scale", torch.float32, ()),
        Kept("exp_avg_sq_codes", torch.uint8),
        Kept("exp_avg_sq_range", torch.bfloat16, (2,)),
    ),
    "coat": (
        Kept("exp_avg_codes", torch.float8_e4m3fn),
        Kept("exp_avg_figures", torch.float32, (3,)),
        Kept("exp_avg_sq_codes", torch.float8_e4m3fn),
        Kept("exp_avg_sq_figures", torch.float32, (3,)),
    ),
    "bf16": (Kept("exp_avg", torch.bfloat16), Kept("exp_avg_sq", torch.bfloat16)),
    "fp32": (Kept("exp_avg", torch.float32), Kept("exp_avg_sq", torch.float32)),
}
"""What each format keeps. Zero everywhere means that both moments are zero, in every format."""

Agree = Callable[[Tensor], Tensor]
"""Takes int32 [K, G] and returns the elementwise maximum over the ranks that share each of the G groups."""

_NONE = 0x7FFFFFFF  # no non-zero value: above every bit pattern
_INF = 0x7F800000
_NAN16 = 0x7FC0
_TINY = 2.0**-100
_TARGET = 16.614709844115207  # log2(448^2 / 2): the smallest magnitude of a group lands at 448 / 100352


def extrema(z: Tensor) -> tuple[Tensor, Tensor]:
    """Bit patterns (int32 [G]) of the smallest non-zero and of the largest magnitude in each row of `z` fp32 [G, 128].

    A row of zeros has (0x7FFFFFFF, 0); a NaN or an Inf shows as a `hi` of at least 0x7F800000. Over the ranks that
    share a group, the minimum of lo and the maximum of hi are the group's.
    """
    bits = z.view(torch.int32) & 0x7FFFFFFF
    return torch.where(bits == 0, _NONE, bits).amin(1), bits.amax(1)


def v_range(lo: Tensor, hi: Tensor) -> Tensor:
    """The range of v as it is kept: bfloat16 [G, 2], the upper halves of `lo` and `hi` (int32 [G]) rounded outward."""
    low = torch.where(hi == 0, 0, (lo >> 16).clamp(min=1))
    high = ((hi + 0xFFFF) >> 16).clamp(max=0x7F7F)
    both = torch.stack([low, high], 1)
    return torch.where((hi >= _INF)[:, None], _NAN16, both).to(torch.int16).view(torch.bfloat16)


def encode_v(v: Tensor, range_: Tensor, words: Tensor) -> Tensor:
    """uint8 codes [G, 128] of `v` (fp32) in ranges bfloat16 [G, 2], rounded by the high 16 bits of `words` (int32)."""
    low, span = _bounds(range_)
    rate = torch.full_like(span, 254.0, dtype=torch.float32) / span.clamp(min=1).float()
    bits = v.view(torch.int32)
    d = torch.minimum((bits - (low << 16)).clamp(min=0), span << 16)
    code = ((d.float() * rate).to(torch.int32) + ((words >> 16) & 0xFFFF)) >> 16
    return torch.where(bits == 0, 0, (code + 1).clamp(max=255)).to(torch.uint8)


def decode_v(codes: Tensor, range_: Tensor) -> Tensor:
    """The second moments (fp32 [G, 128]) that uint8 `codes` stand for in ranges bfloat16 [G, 2]."""
    low, span = _bounds(range_)
    pace = (span << 16).float() / torch.full_like(span, 254.0, dtype=torch.float32)
    codes = codes.to(torch.int32)
    bits = (low << 16) + ((codes - 1).float() * pace).to(torch.int32)
    return torch.where(codes == 0, 0, bits).view(torch.float32)


def _bounds(range_: Tensor) -> tuple[Tensor, Tensor]:
    low, high = range_.view(torch.int16).to(torch.int32).unbind(1)
    return low[:, None], (high - low)[:, None]


def ratio(m: Tensor, v: Tensor) -> Tensor:
    """r = m / sqrt(v) of decoded v (fp32 [G, 128]); 0 where v is 0, and never NaN for a finite m."""
    return torch.where(v == 0, torch.zeros_like(m), m / v.sqrt())


def r_amax(r: Tensor) -> Tensor:
    """Bit patterns (int32 [G]) of the largest magnitude of each row of `r`; a NaN has the largest of all."""
    return (r.view(torch.int32) & 0x7FFFFFFF).amax(1)


def r_scale(amax: Tensor) -> Tensor:
    """What a step of r's code stands for (fp32 [G]), from bit patterns int32 [G]: amax / 127, 0 for amax < 2^-100."""
    value = amax.view(torch.float32)
    scale = torch.where(value < _TINY, 0.0, value / torch.full_like(value, 127.0))
    return torch.where(amax >= _INF, torch.nan, scale)


def encode_r(r: Tensor, amax: Tensor) -> Tensor:
    """int8 codes [G, 128] of `r` (fp32) in groups whose largest magnitude has the bit patterns `amax` (int32 [G])."""
    value = amax.view(torch.float32)
    fits = (value >= _TINY) & (amax < _INF)
    grid = torch.where(fits, torch.full_like(value, 127.0) / value, 0.0)[:, None]
    codes = (r * grid).round().clamp(-127, 127)
    return torch.where(fits[:, None], codes, 0.0).to(torch.int8)


def decode_m(codes: Tensor, scale: Tensor, v: Tensor) -> Tensor:
    """The first moments (fp32 [G, 128]) of int8 `codes`, `scale` fp32 [G] and decoded second moments `v`."""
    return (codes.float() * scale[:, None]) * v.sqrt()


def coat_figures(lo: Tensor, hi: Tensor, *, least: float) -> Tensor:
    """(s, k, c) of each group, fp32 [G, 3], from :func:`extrema`; k within [`least`, 16]. Rows of zeros: (1, 1, 1)."""
    empty, bad = hi == 0, hi >= _INF
    one = torch.ones_like(hi, dtype=torch.float32)
    low, high = (torch.where(empty, one, x.view(torch.float32)) for x in (lo, hi))
    octaves = high.log2() - low.log2()
    k = torch.where(lo == hi, one, (_TARGET / octaves).clamp(least, 16.0))
    c = high.sqrt() * low.sqrt()
    s = (high / c).pow(k) / 448.0
    figures = torch.stack([s, k, c], 1)
    figures = torch.where(empty[:, None], 1.0, figures)
    return torch.where(bad[:, None], torch.nan, figures)


def coat_encode(z: Tensor, figures: Tensor, words: Tensor | None = None) -> Tensor:
    """E4M3 codes [G, 128] of `z` by `figures` [G, 3]; with `words`, stochastically (z >= 0) and never to zero from
    a z that is not."""
    s, k, c = figures[:, :, None].unbind(1)
    y = (z.abs() / c).pow(k) / s
    if words is None:
        return torch.copysign(y.clamp(max=448.0), z).to(torch.float8_e4m3fn)
    chance = (words >> 16) & 0xFFFF
    # normal numbers drop 20 bits of an fp32 mantissa, subnormal ones are multiples of 2^-9
    bits = (y.view(torch.int32) + (chance << 4)) & ~0xFFFFF
    fine = ((y * 2.0**9) + chance.float() * 2.0**-16).floor() * 2.0**-9
    rounded = torch.where(y < 2.0**-6, fine, bits.view(torch.float32)).clamp(2.0**-9, 448.0)
    return torch.where(z == 0, torch.zeros_like(z), rounded).to(torch.float8_e4m3fn)


def coat_decode(codes: Tensor, figures: Tensor) -> Tensor:
    """The moments (fp32 [G, 128]) of E4M3 `codes` by `figures` [G, 3]."""
    s, k, c = figures[:, :, None].unbind(1)
    code = codes.float()
    return torch.copysign((code.abs() * s).pow(1.0 / k) * c, code)


def decode(states: str, kept: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """(m, v), fp32 [G, 128], from what format `states` keeps of them: [G, 128] a code, [G, ...] a group's figures."""
    if states == "fp8":
        v = decode_v(kept["exp_avg_sq_codes"], kept["exp_avg_sq_range"])
        return decode_m(kept["exp_avg_codes"], kept["exp_avg_scale"], v), v
    if states == "coat":
        return (
            coat_decode(kept["exp_avg_codes"], kept["exp_avg_figures"]),
            coat_decode(kept["exp_avg_sq_codes"], kept["exp_avg_sq_figures"]),
        )
    return kept["exp_avg"].float(), kept["exp_avg_sq"].float()


def encode(states: str, m: Tensor, v: Tensor, words: Tensor | None, agree: Agree | None = None) -> dict[str, Tensor]:
    """What format `states` keeps of `m` and `v` (fp32 [G, 128]), rounded by `words` (int32 [G, 128], fp8 and coat).

    `agree` is for groups of which other ranks hold a part: it is called once with the extrema (minima negated, so that
    all of them are maxima), and for fp8 once more with the largest |r|. Rows hold zero where an element lies elsewhere.
    """
    share = agree or (lambda marks: marks)
    if states == "fp8":
        assert words is not None
        lo, hi = extrema(v)
        marks = share(torch.stack([-lo, hi]))
        range_ = v_range(-marks[0], marks[1])
        codes = encode_v(v, range_, words)
        r = ratio(m, decode_v(codes, range_))
        amax = share(r_amax(r)[None])[0]
        return {
            "exp_avg_codes": encode_r(r, amax),
            "exp_avg_scale": r_scale(amax),
            "exp_avg_sq_codes": codes,
            "exp_avg_sq_range": range_,
        }
    if states == "coat":
        (m_lo, m_hi), (v_lo, v_hi) = extrema(m), extrema(v)
        marks = share(torch.stack([-m_lo, m_hi, -v_lo, v_hi]))
        figures_m = coat_figures(-marks[0], marks[1], least=1.0)
        figures_v = coat_figures(-marks[2], marks[3], least=1 / 16)
        return {
            "exp_avg_codes": coat_encode(m, figures_m),
            "exp_avg_figures": figures_m,
            "exp_avg_sq_codes": coat_encode(v, figures_v, words),
            "exp_avg_sq_figures": figures_v,
        }
    dtype = torch.bfloat16 if states == "bf16" else torch.float32
    return {"exp_avg": m.to(dtype), "exp_avg_sq": v.to(dtype)}
