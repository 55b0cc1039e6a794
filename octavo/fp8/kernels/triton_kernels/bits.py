"""Bit patterns: the arithmetic of ``octavo/fp8/arithmetic/cast.py`` for use inside Triton kernels.

Every decision about a scale or a code is integer arithmetic on fp32 patterns (int32), because a GPU, the compiler and
the interpreter agree on its results::

    amax     magnitudes order as their patterns do, and NaN and infinity win every maximum (``tl.max`` drops NaN)
    bad      pattern >= 0x7F800000
    tiny     pattern <  0x0D800000 (2^-100)
    pow2     e = (pattern + 0x1FFFFF) >> 23 carries exactly when the mantissa exceeds 1.75; scale = (e - p) << 23

A cast in three lines, for a tile x [rows, 128] of blocks (1, 128)::

    top = tl.max(amax_bits(x), axis=1, keep_dims=True)
    scale, bad = scale_of(top, POW2, E5M2)
    codes = encode(x, scale, bad, POW2, E5M2)

Compiled kernels make codes with the ``cvt.rn.satfinite`` instruction; the interpreter, which has no instructions, makes
them with integers; the two agree on every fp32 pattern. Triton's own ``.to(tl.float8e4nv)`` is not used: for compute
capability 8.9 it converts to fp16 first, which rounds twice and gives other codes, and in the interpreter it is wrong
for one code in eight. ``.to(tl.bfloat16)`` truncates in the interpreter; :func:`round_to` rounds.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.fp8.kernels.triton_kernels.launch import INTERPRETED as _INTERPRETED

INTERPRETED = tl.constexpr(_INTERPRETED)
INF_BITS = tl.constexpr(0x7F800000)  # the pattern of infinity; every NaN is above it
NAN_BITS = tl.constexpr(0x7FC00000)
ONE_BITS = tl.constexpr(0x3F800000)
FLOOR_BITS = tl.constexpr(0x0D800000)  # 2^-100
NAN_CODE = tl.constexpr(0x7F)

# Four values of a thread become one 32-bit register of codes, the first value in the lowest byte. Each instruction
# converts two values and takes the one for the upper byte first.
_E4M3_ASM = tl.constexpr(
    "{ .reg .b16 lo, hi; cvt.rn.satfinite.e4m3x2.f32 lo, $2, $1; cvt.rn.satfinite.e4m3x2.f32 hi, $4, $3; "
    "mov.b32 $0, {lo, hi}; }"
)
_E5M2_ASM = tl.constexpr(
    "{ .reg .b16 lo, hi; cvt.rn.satfinite.e5m2x2.f32 lo, $2, $1; cvt.rn.satfinite.e5m2x2.f32 hi, $4, $3; "
    "mov.b32 $0, {lo, hi}; }"
)


@triton.jit
def widen(x):
    """bf16, fp16 or fp32 as fp32, exactly. A bf16 is the upper half of an fp32."""
    if x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def amax_bits(x):
    """fp32 -> int32 patterns of |x|: take ``tl.max`` of these, never of the floats."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def larger(a, b):
    """Return the larger of two floats, or NaN if either is NaN."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def top_bits(magnitude, AXIS: tl.constexpr):
    """fp32 |x| -> int32 patterns of the largest along an axis; NaN and infinity win.

    An instruction takes |x| and keeps NaN, so that compiled kernels need no integer operation per value.
    """
    if INTERPRETED:  # its reductions are fast on integers only
        return tl.max(amax_bits(magnitude), axis=AXIS)
    return tl.reduce(magnitude, AXIS, larger).to(tl.int32, bitcast=True)


@triton.jit
def scale_of(bits, POW2: tl.constexpr, E5M2: tl.constexpr):
    """(scale fp32, bad int1) of blocks with these amax patterns: NaN where bad, 1 below 2^-100.

    POW2: the smallest power of two s with amax <= FMAX * s; else amax / FMAX, one IEEE division.
    """
    if POW2:
        P: tl.constexpr = 15 if E5M2 else 8  # FMAX = 1.75 * 2^P
        # Add what carries into the exponent beyond a mantissa of 1.75, subtract P, clear the mantissa.
        scale = (bits + (0x1FFFFF - (P << 23))) & -0x800000
    else:
        FMAX: tl.constexpr = 57344.0 if E5M2 else 448.0
        amax = bits.to(tl.float32, bitcast=True)
        # A tensor divisor: a constant one could become a multiplication by its rounded reciprocal.
        scale = tl.div_rn(amax, tl.zeros_like(amax) + FMAX).to(tl.int32, bitcast=True)
    bad = bits >= INF_BITS
    # Blocks below 2^-100, zeros among them, take the scale 1: every code is 0 there.
    scale = tl.where(bits < FLOOR_BITS, ONE_BITS, scale)
    scale = tl.where(bad, NAN_BITS, scale)
    return scale.to(tl.float32, bitcast=True), bad


@triton.jit
def encode(x, scale, bad, POW2: tl.constexpr, E5M2: tl.constexpr, GIVEN: tl.constexpr = True):
    """Codes (uint8) of fp32 x under scales and ``bad`` marks that broadcast to it; values beyond FMAX * scale saturate.

    Bad blocks need no select per code: their marks make the scale NaN, and the code of NaN is 0x7F.
    """
    return encode_bits(scaled(x, scale, bad, POW2, GIVEN), E5M2)


@triton.jit
def scaled(x, scale, bad, POW2: tl.constexpr, GIVEN: tl.constexpr):
    """x / scale, NaN where bad.

    Powers of two have exact reciprocals, so that the division becomes one multiplication per value. Scales that are not
    GIVEN come from :func:`scale_of`, which keeps away from the ends where reciprocals are subnormal.
    """
    if POW2:
        return x * _reciprocal(scale, bad, GIVEN)
    # IEEE division: a product with a rounded reciprocal would give other codes than the reference.
    return tl.div_rn(x, tl.broadcast_to(tl.where(bad, float("nan"), scale), x.shape))


@triton.jit
def _reciprocal(scale, bad, GIVEN: tl.constexpr):
    """1 / scale for powers of two, exactly, including subnormal scales and results; NaN where bad."""
    bits = scale.to(tl.int32, bitcast=True)
    inverse = 0x7F000000 - bits  # exponent fields that sum to 2 * 127
    if GIVEN:
        inverse = tl.where(bits == 0x7F000000, 0x00400000, inverse)  # 2^127 -> 2^-127
        below = tl.where(bits == 0x00400000, 0x7F000000, INF_BITS)  # 2^-127 -> 2^127; smaller ones overflow
        inverse = tl.where(bits < 0x00800000, below, inverse)
    return tl.where(bad, NAN_BITS, inverse).to(tl.float32, bitcast=True)


@triton.jit
def short_division(scale, top):
    """(whether :func:`quotient` is exact for values of 16 bits up to the amax of pattern ``top``, 1 / scale): scalars.

    All pairs of the 2^10 significands of fp16, which include every bf16 significand, and the 2^23 of scales were
    tested: ``docs/lab/kernels.md``.

    The bounds keep 1 / scale normal and products finite, and, where a code is not zero, the remainder
    (a multiple of 2^-47 of the value and so of 2^-64 of the scale) a multiple of 2^-149. NaN is within no bound.
    """
    inverse = tl.div_rn(1.0, scale)
    fits = (scale >= 2.0**-80) & (scale <= 2.0**100) & (top.to(tl.float32, bitcast=True) * inverse <= 2.0**100)
    return fits, inverse


@triton.jit
def quotient(x, scale, inverse):
    """x / scale as IEEE rounds it, in three operations; exact where :func:`short_division` says so."""
    q = x * inverse
    # One Newton step: the remainder q * scale - x corrects q. With these signs -0 stays -0.
    return fma(fma(q, scale, x * -1.0), inverse * -1.0, q)


@triton.jit
def fma(a, b, c):
    """a * b + c, rounded once."""
    if INTERPRETED:  # its own fma rounds the product; in fp64 the product is exact and the sum nearly so
        return (a.to(tl.float64) * b + c).to(tl.float32)
    return tl.fma(a, tl.broadcast_to(b, a.shape), c)


@triton.jit
def encode_bits(v, E5M2: tl.constexpr):
    """fp32 -> the nearest code (uint8), ties to even; beyond FMAX and infinity -> FMAX; NaN -> 0x7F; sign kept."""
    if INTERPRETED:
        return encode_integers(v, E5M2)
    if E5M2:
        return tl.inline_asm_elementwise(_E5M2_ASM, "=r,r,r,r,r", [v], dtype=tl.uint8, is_pure=True, pack=4)
    else:
        return tl.inline_asm_elementwise(_E4M3_ASM, "=r,r,r,r,r", [v], dtype=tl.uint8, is_pure=True, pack=4)


@triton.jit
def encode_words(v0, v1, v2, v3, E5M2: tl.constexpr):
    """Four fp32 tiles -> int32 tile: the codes of all four in each word, the code of v0 in the lowest byte."""
    if INTERPRETED:
        low = encode_integers(v0, E5M2).to(tl.int32) | (encode_integers(v1, E5M2).to(tl.int32) << 8)
        return low | (encode_integers(v2, E5M2).to(tl.int32) << 16) | (encode_integers(v3, E5M2).to(tl.int32) << 24)
    if E5M2:
        return tl.inline_asm_elementwise(_E5M2_ASM, "=r,r,r,r,r", [v0, v1, v2, v3], tl.int32, is_pure=True, pack=1)
    else:
        return tl.inline_asm_elementwise(_E4M3_ASM, "=r,r,r,r,r", [v0, v1, v2, v3], tl.int32, is_pure=True, pack=1)


@triton.jit
def encode_integers(v, E5M2: tl.constexpr):
    """:func:`encode_bits` with integers only, about 15 operations per value: for the interpreter, and for tests of the
    instruction.

    Normal codes: round the mantissa to nearest even on the pattern itself (a carry into the exponent is correct), then
    change the exponent's bias. Subnormal codes: adding 2^(23 + emin - M) leaves the code in the last bits of the sum.
    """
    M: tl.constexpr = 2 if E5M2 else 3  # mantissa bits
    BIAS: tl.constexpr = 15 if E5M2 else 7
    SHIFT: tl.constexpr = 23 - M
    TOP: tl.constexpr = 0x47600000 if E5M2 else 0x43E00000  # the pattern of FMAX
    NORMAL: tl.constexpr = (128 - BIAS) << 23  # the pattern of the smallest normal value, 2^(1 - BIAS)
    MAGIC: tl.constexpr = (127 + 23 + 1 - BIAS - M) << 23
    bits = v.to(tl.int32, bitcast=True)
    mag = bits & 0x7FFFFFFF
    # Saturate before rounding: no carry beyond FMAX.
    low = tl.minimum(mag, TOP)
    rounded = ((low + ((1 << (SHIFT - 1)) - 1) + ((low >> SHIFT) & 1)) >> SHIFT) - ((127 - BIAS) << M)
    shifter = (tl.zeros_like(low) + MAGIC).to(tl.float32, bitcast=True)
    sub = (low.to(tl.float32, bitcast=True) + shifter).to(tl.int32, bitcast=True) - MAGIC
    # The sign moves from bit 31 to bit 7. NaN (above infinity) has one code for both signs.
    code = tl.where(low < NORMAL, sub, rounded) | ((bits >> 24) & 0x80)
    return tl.where(mag > INF_BITS, NAN_CODE, code).to(tl.uint8)


@triton.jit
def decode_bits(codes, E5M2: tl.constexpr):
    """uint8 codes -> fp32, exactly; NaN codes (and E5M2's infinities) stay what they are."""
    M: tl.constexpr = 2 if E5M2 else 3
    BIAS: tl.constexpr = 15 if E5M2 else 7
    c = codes.to(tl.int32)
    mag = c & 0x7F
    normal = (mag << (23 - M)) + ((127 - BIAS) << 23)
    # The value of a subnormal code is mag * 2^(1 - BIAS - M); ``step`` is this power of two, built from its pattern.
    step = (tl.zeros_like(c) + ((128 - BIAS - M) << 23)).to(tl.float32, bitcast=True)
    sub = (mag.to(tl.float32) * step).to(tl.int32, bitcast=True)
    bits = tl.where(mag < (1 << M), sub, normal)
    if E5M2:
        bits = tl.where(mag >= 0x7C, INF_BITS | ((mag & 3) << 21), bits)
    else:
        bits = tl.where(mag == 0x7F, NAN_BITS, bits)
    return (bits | ((c & 0x80) << 24)).to(tl.float32, bitcast=True)


@triton.jit
def round_to(x, DTYPE: tl.constexpr):
    """fp32 -> ``DTYPE`` (fp32, fp16 or bf16), to nearest, ties to even; NaN stays NaN."""
    if INTERPRETED and DTYPE == tl.bfloat16:  # noqa: SIM300 (a constexpr on the left, or == is not Triton's)
        # Add half of the last kept bit, minus one unless it is odd: ties to even. NaN would carry away.
        bits = x.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = tl.where((bits & 0x7FFFFFFF) > INF_BITS, 0x7FC0, rounded)
        return rounded.to(tl.int16).to(tl.bfloat16, bitcast=True)
    # Compiled conversions round to nearest even; fp16 does so in the interpreter too.
    return x.to(DTYPE)
