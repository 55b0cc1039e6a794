"""The kernel of AdamW: one launch steps many pieces of parameters. ``adamw.py`` builds its tables and launches it.

The arithmetic follows ``octavo/fp8/arithmetic`` (``adamw``, ``moments``, ``master``) operation by operation: IEEE
division and square root, integers for codes and random bits, and no multiplication fused with an addition (the launch
passes ``enable_fp_fusion=False``; a fused one rounds once where the reference rounds twice). The powers of ``coat`` use
the series of ``octavo/fp8/arithmetic/power.py``: a GPU's own logarithm is an approximation.

A tile is GROUPS groups of 128 elements of the whole parameter, [GROUPS, 128]; a program steps TILES of them in turn.
Elements of a tile outside the piece read as 0 and are not written. Random words are made four at a time, [GROUPS, 32]
counters to [GROUPS, 128] words: ten rounds per element would take longer than all other work.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.fp8.arithmetic import power
from octavo.fp8.kernels.triton_kernels.bits import INF_BITS, NAN_BITS, decode_bits, encode_bits, round_to, widen

GROUP = tl.constexpr(128)
COLUMNS = tl.constexpr(13)  # of a piece's row in the table of places, in this order:
WEIGHT = tl.constexpr(0)  # addresses
GRAD = tl.constexpr(1)
LOW = tl.constexpr(2)  # master_low or master; 0 where there is none
M_CODES = tl.constexpr(3)
M_FIGURES = tl.constexpr(4)
V_CODES = tl.constexpr(5)
V_FIGURES = tl.constexpr(6)
COUNT = tl.constexpr(7)  # elements
START = tl.constexpr(8)  # index of the first element in the whole parameter
PROGRAM = tl.constexpr(9)  # the first program that works on it
STEP = tl.constexpr(10)  # optimizer steps, this one included
INDEX = tl.constexpr(11)  # of the parameter, for random bits
SEED = tl.constexpr(12)  # 64 bits

NO_BITS = tl.constexpr(0x7FFFFFFF)  # above every pattern of a magnitude
TINY = tl.constexpr(2.0**-100)
TOP_BITS = tl.constexpr(0x7F000000)  # 2^127
NARROWEST = tl.constexpr(544)  # a pace of 512, as the upper bits of a float
R_TOP = tl.constexpr(5985.0)  # 63 * (63 + 32): the value of the largest code of r, in units of the scale
TARGET = tl.constexpr(16.614709844115207)  # log2(448^2 / 2)
HALF = tl.constexpr(power.HALF)
LEAST, MOST = tl.constexpr(power.LEAST), tl.constexpr(power.MOST)
L9, L7, L5, L3, L1 = (tl.constexpr(x) for x in power.LOG)
E7, E6, E5, E4, E3, E2, E1, E0 = (tl.constexpr(x) for x in power.EXP)


@triton.jit
def philox_words(c0, step, index, seed):
    """Philox4x32-10 of counters (c0 [R, 32] uint32, step, index, 0) with the 64 bits of ``seed`` as key.

    Returns uint32 [R, 128]: the four words of each counter, adjacent, one for each of its four elements.
    """
    k0 = seed.to(tl.uint32)
    k1 = (seed >> 32).to(tl.uint32)
    c1 = tl.zeros_like(c0) + step.to(tl.uint32)
    c2 = tl.zeros_like(c0) + index.to(tl.uint32)
    c3 = tl.zeros_like(c0)
    for _ in tl.static_range(10):
        # High and low halves of 32 x 32 bit products, as in octavo/fp8/arithmetic/philox.py.
        p0 = c0.to(tl.uint64) * 0xD2511F53
        p1 = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (p1 >> 32).to(tl.uint32) ^ c1 ^ k0
        c1 = p1.to(tl.uint32)
        c2 = (p0 >> 32).to(tl.uint32) ^ c3 ^ k1
        c3 = p0.to(tl.uint32)
        k0 = (k0.to(tl.uint64) + 0x9E3779B9).to(tl.uint32)  # modulo 2^32; uint32 would make the interpreter warn
        k1 = (k1.to(tl.uint64) + 0xBB67AE85).to(tl.uint32)
    four = tl.join(tl.join(c0, c2), tl.join(c1, c3))  # [R, 32, 2, 2]: c0, c1, c2, c3
    return tl.reshape(four, [c0.shape[0], 4 * c0.shape[1]])


@triton.jit
def _constant(like, value: tl.constexpr):
    """Return a tensor like ``like``, filled with a number: a division by a literal could become a product with its
    rounded inverse."""
    return tl.zeros_like(like) + value


@triton.jit
def _log2(x):
    """log2 of x > 0, fp32, subnormal numbers included: the series of ``power.log2``."""
    # Subnormal numbers are scaled by 2^24 first.
    small = x < 2.0**-126
    bits = tl.where(small, x * 16777216.0, x).to(tl.int32, bitcast=True)
    # x = m * 2^exponent with m in [sqrt(1/2), sqrt(2)), where the series converges fast.
    exponent = (bits - HALF) >> 23
    m = (bits - (exponent << 23)).to(tl.float32, bitcast=True)
    t = tl.div_rn(m - 1.0, m + 1.0)
    square = t * t
    series = (((square * L9 + L7) * square + L5) * square + L3) * square + L1
    return tl.where(small, exponent - 24, exponent).to(tl.float32) + series * t


@triton.jit
def _power(x, k):
    """x^k for x >= 0, fp32, as ``power.power``; 0 and NaN stay."""
    y = tl.minimum(tl.maximum(_log2(x) * k, LEAST), MOST)
    magic = _constant(y, 12582912.0)
    n = (y + magic) - magic  # to nearest, ties to even
    f = y - n
    series = ((((((f * E7 + E6) * f + E5) * f + E4) * f + E3) * f + E2) * f + E1) * f + E0
    # 2^n by adding n to the exponent field: the bounds on y keep the result normal.
    bits = series.to(tl.int32, bitcast=True) + (n.to(tl.int32) << 23)
    return tl.where(x > 0, bits.to(tl.float32, bitcast=True), x)


@triton.jit
def _extrema(z):
    """(smallest non-zero, largest) magnitude of each row of z [R, 128], as int32 patterns [R, 1]."""
    bits = z.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    low = tl.min(tl.where(bits == 0, NO_BITS, bits), axis=1, keep_dims=True)
    return low, tl.max(bits, axis=1, keep_dims=True)


@triton.jit
def _dither(element, step, index, seed):
    """Return the dither added to second moments before truncation, int32 from 0 to 65535: a Weyl sequence over the
    steps.

    ``element``: the lower 32 bits of the element's index in the parameter, uint32.
    """
    fixed = step * 0x9E3779B9 + seed * 0xD2511F53 + index * 0xCD9E8D57  # int64, modulo 2^64
    return ((element * 0xC13FA9A9 + (fixed & 0xFFFFFFFF).to(tl.uint32)) >> 16).to(tl.int32)


@triton.jit
def _grid(word):
    """(base int32, pace int32, rate fp32), [R, 1] each, of the grid of second moments that a group's word encodes."""
    # Word -1: a group with NaN, infinity or values beyond 2^127. Everything but zeros decodes to NaN.
    bad = word == -1
    pace = tl.where(bad, 1, (((word >> 24) + NARROWEST) << 21).to(tl.float32, bitcast=True).to(tl.int32))
    wide = pace.to(tl.float32)
    rate = tl.where(bad, 0.0, tl.div_rn(_constant(wide, 65536.0), wide))
    base = tl.where(bad, NAN_BITS, tl.maximum((word & 0xFFFFFF) << 7, 1))
    return base, tl.where(bad, 0, pace), rate


@triton.jit
def _word(v):
    """Return the word, int32 [R, 1], that encodes the grid of each row of second moments v [R, 128]."""
    low, high = _extrema(v)
    # A row of zeros has no smallest value, and a bad row no width that fits in int32: their words are fixed below.
    plain = (high == 0) | (high >= TOP_BITS)
    low = tl.where(plain, 0, low)
    # 509 points cover the range; the pace is rounded up to 2 bits of mantissa, four paces per octave.
    width = tl.maximum((tl.where(plain, 0, high) - low + 507) // 508, 512)
    exponent = (width.to(tl.float32).to(tl.int32, bitcast=True) + 0x1FFFFF) >> 21
    pace = (exponent << 21).to(tl.float32, bitcast=True).to(tl.int32)
    word = ((exponent - NARROWEST) << 24) | ((low // pace * pace) >> 7)
    return tl.where(high == 0, 0, tl.where(high >= TOP_BITS, -1, word))


@triton.jit
def _v_decoded(codes, base, pace):
    """Second moments, fp32, of codes 0 to 511 (int32): points of a grid that is even in the fp32 patterns."""
    bits = base + (codes - 1) * pace
    return tl.where(codes == 0, 0, bits).to(tl.float32, bitcast=True)


@triton.jit
def _fp8_decoded(m_bytes, v_bytes, scale, word):
    """(m, v), fp32 [R, 128], of bytes int8 and uint8 under scales and words [R, 1]."""
    byte = m_bytes.to(tl.int32)
    base, pace, _ = _grid(word)
    # The 9 bits of v: 8 in its own byte, the lowest one in m's.
    v = _v_decoded((v_bytes.to(tl.int32) << 1) | (byte & 1), base, pace)
    code = byte >> 1
    size = tl.maximum(code, -code)
    return ((code * (size + 32)).to(tl.float32) * scale) * tl.sqrt_rn(v), v


@triton.jit
def _fp8_encoded(m, v, chance):
    """(bytes of m int8, scales fp32 [R, 1], bytes of v uint8, words int32 [R, 1]) of a tile m, v fp32 [R, 128].

    ``chance``: the dither, int32 [R, 128].
    """
    # v: choose the grid of each group, then cut to it with dither. Zeros keep code 0.
    word = _word(v)
    base, pace, rate = _grid(word)
    bits = v.to(tl.int32, bitcast=True)
    v_codes = ((((bits - base).to(tl.float32) * rate).to(tl.int32) + chance) >> 16) + 1
    v_codes = tl.where(bits == 0, 0, v_codes)

    # r = m / sqrt(v) with v as it will be decoded. Where that is 0 the quotient is not used; 1 keeps it finite.
    v_stored = _v_decoded(v_codes, base, pace)
    r = tl.where(v_stored == 0, 0.0, tl.div_rn(m, tl.sqrt_rn(tl.where(v_stored == 0, 1.0, v_stored))))
    # m: scale by the largest |r| of the group; the maximum is over patterns, where NaN wins.
    top = tl.max(r.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1, keep_dims=True)
    amax = top.to(tl.float32, bitcast=True)
    fits = (top < INF_BITS) & (amax >= TINY)
    safe = tl.where(fits, amax, 1.0)
    grid = tl.where(fits, tl.div_rn(_constant(safe, R_TOP), safe), 0.0)
    scale = tl.where(fits, tl.div_rn(safe, _constant(safe, R_TOP)), 0.0)
    scale = tl.where(top >= INF_BITS, NAN_BITS, scale.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
    # The code is the root of r: finer steps for small r.
    size = tl.sqrt_rn(tl.abs(tl.where(fits, r, 0.0)) * grid + 256.0) - 16.0
    # Adding and subtracting 1.5 * 2^23 rounds to the nearest integer, ties to even.
    magic = _constant(r, 12582912.0)
    code = tl.minimum((size + magic) - magic, 63.0).to(tl.int32)
    code = tl.where(r < 0, -code, code)
    # The lowest bit of v's code is the lowest bit of m's byte.
    return ((code << 1) | (v_codes & 1)).to(tl.int8), scale, (v_codes >> 1).to(tl.uint8), word


@triton.jit
def _coat_figures(z):
    """(scale s, power k, center c), fp32 [R, 1], of each row of z [R, 128], as ``moments.coat_figures``."""
    least, most = _extrema(z)
    bad = most >= INF_BITS
    plain = (most == 0) | bad
    low = tl.where(plain, 1.0, least.to(tl.float32, bitcast=True))
    high = tl.where(plain, 1.0, most.to(tl.float32, bitcast=True))
    octaves = tl.maximum(_log2(high) - _log2(low), 1.0)
    k = tl.floor(tl.div_rn(_constant(octaves, TARGET), octaves) * 16.0)
    k = tl.minimum(tl.maximum(k, 1.0), 256.0) * 0.0625
    c = tl.sqrt_rn(high) * tl.sqrt_rn(low)
    s = tl.div_rn(_power(tl.div_rn(high, c), k), _constant(c, 448.0))
    nan = _constant(s, float("nan"))
    return tl.where(bad, nan, s), tl.where(bad, nan, k), tl.where(bad, nan, c)


@triton.jit
def _coat_decoded(codes, s, k, c):
    """Moments, fp32 [R, 128], of E4M3 codes (uint8) with figures s, k, c [R, 1]."""
    code = decode_bits(codes, False)
    size = _power(tl.abs(code) * s, tl.div_rn(_constant(k, 1.0), k)) * c
    return tl.where(code.to(tl.int32, bitcast=True) < 0, -size, size)


@triton.jit
def _coat_codes(z, s, k, c):
    """E4M3 codes (uint8) of moments z, fp32 [R, 128], with figures s, k, c [R, 1]."""
    y = _power(tl.div_rn(tl.abs(z), tl.broadcast_to(c, z.shape)), k)
    y = tl.div_rn(y, tl.broadcast_to(s, z.shape))
    # The power is of magnitudes; the sign bit is put back.
    sign = z.to(tl.int32, bitcast=True) & -0x80000000
    return encode_bits((y.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True), False)


@triton.jit
def _canonical_nan(w):
    """int32 patterns of fp32 w, every NaN as 0x7FC00000, so that the additions before truncation cannot carry into the
    sign."""
    bits = w.to(tl.int32, bitcast=True)
    return tl.where((bits & 0x7FFFFFFF) > INF_BITS, NAN_BITS, bits)


@triton.jit
def _upper_half(bits):
    """Return the upper 16 bits of int32 patterns, as bf16."""
    return (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _pointer(where, begin, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Return a pointer to element ``begin`` of the tensor of TYPE at the address ``where``, int64."""
    if ALIGNED:
        # The hints let the compiler move 8 to 16 bytes per thread: it knows nothing of loaded addresses.
        where = tl.multiple_of(where, 16)
        begin = tl.multiple_of(begin, 16)
    pointer = where.to(tl.pointer_type(TYPE)) + begin
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit(do_not_specialize=["count", "top"])
def adamw_step(
    places,  # int64 [count, COLUMNS]: the pieces, in the order of their programs
    numbers,  # fp32 [count, 3]: root, decay, pace (arithmetic/adamw.py)
    factor,  # one fp32, by which gradients are multiplied, or None
    count,  # pieces
    top,  # the largest power of two below count, 0 for one piece
    beta1,  # fp32
    rest1,  # fp32, 1 - beta1
    beta2,  # fp32
    rest2,  # fp32, 1 - beta2
    eps,  # fp32
    STATES: tl.constexpr,  # "fp8", "coat", "bf16" or "fp32"
    MASTER: tl.constexpr,  # "fp32" (the weights), "master" (fp32 copies of BF16 weights), "bf16+16" or "bf16+sr"
    W: tl.constexpr,  # dtypes of weights and gradients
    G: tl.constexpr,
    ALIGNED: tl.constexpr,  # addresses, counts and starts of all pieces are multiples of 16
    GROUPS: tl.constexpr,  # groups of 128 per tile
    TILES: tl.constexpr,  # tiles per program
):
    """One AdamW step, in place, of TILES tiles of a piece: the last piece whose PROGRAM is not beyond this program."""
    # Find the piece by bisection: PROGRAM rises from row to row.
    program = tl.program_id(0)
    piece = program * 0
    half = top
    while half > 0:
        candidate = piece + half
        first = tl.load(places + candidate.to(tl.int64) * COLUMNS + PROGRAM, mask=candidate < count, other=NO_BITS)
        piece = tl.where(first <= program, candidate, piece)
        half = half // 2
    # Load the piece's row: where its tensors are, and its scalars.
    row = places + piece.to(tl.int64) * COLUMNS
    n = tl.load(row + COUNT)
    start = tl.load(row + START)
    root = tl.load(numbers + piece * 3)
    decay = tl.load(numbers + piece * 3 + 1)
    pace = tl.load(numbers + piece * 3 + 2)
    lane = start % GROUP
    groups = (lane + n + GROUP - 1) // GROUP
    weight_address, grad_address, low_address = tl.load(row + WEIGHT), tl.load(row + GRAD), tl.load(row + LOW)
    m_codes_address, m_figures_address = tl.load(row + M_CODES), tl.load(row + M_FIGURES)
    v_codes_address, v_figures_address = tl.load(row + V_CODES), tl.load(row + V_FIGURES)
    step, index, seed = tl.load(row + STEP), tl.load(row + INDEX), tl.load(row + SEED)
    if factor is not None:
        times = tl.load(factor)
    # The tiles of this program, fewer at the end of the piece.
    tile = (program - tl.load(row + PROGRAM)) * TILES
    tiles = tl.minimum((groups + GROUPS - 1) // GROUPS - tile, TILES)

    # Offsets inside a tile are int32; addresses and starts are int64.
    at = tl.arange(0, GROUPS)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    line = tl.arange(0, GROUPS)[:, None]
    wide: tl.constexpr = tl.float32 if STATES == "fp32" else tl.bfloat16
    m_type: tl.constexpr = tl.int8 if STATES == "fp8" else (tl.uint8 if STATES == "coat" else wide)
    v_type: tl.constexpr = tl.uint8 if STATES == "fp8" or STATES == "coat" else wide
    for t in range(tiles):
        # Where this tile begins and which of its elements belong to the piece.
        group = (tile + t) * GROUPS
        begin = group * GROUP - lane  # negative where the piece begins inside the first group
        stop = tl.minimum(n - begin, GROUPS * GROUP).to(tl.int32)
        skip = tl.maximum(-begin, 0).to(tl.int32)
        if ALIGNED:
            stop = tl.multiple_of(stop, 16)
            skip = tl.multiple_of(skip, 16)
        inside = (at >= skip) & (at < stop)
        known = group + line < groups

        grad = _pointer(grad_address, begin, G, ALIGNED) + at
        weight = _pointer(weight_address, begin, W, ALIGNED) + at
        m_at = _pointer(m_codes_address, begin, m_type, ALIGNED) + at
        v_at = _pointer(v_codes_address, begin, v_type, ALIGNED) + at

        # Load and decode: gradient, both moments, fp32 weight; 0 outside the piece.
        g = widen(tl.load(grad, mask=inside, other=0.0))
        if factor is not None:
            g = g * times
        if STATES == "fp8":
            # Bytes of both moments under one scale and one word per group.
            scale_at = _pointer(m_figures_address, group, tl.float32, False) + line
            range_at = _pointer(v_figures_address, group, tl.int32, False) + line
            word = tl.load(range_at, mask=known, other=0)
            scale = tl.load(scale_at, mask=known, other=0.0)
            m_bytes, v_bytes = tl.load(m_at, mask=inside, other=0), tl.load(v_at, mask=inside, other=0)
            m, v = _fp8_decoded(m_bytes, v_bytes, scale, word)
        elif STATES == "coat":
            # E4M3 codes of each moment with three figures per group, adjacent in memory.
            m_figures = _pointer(m_figures_address, group * 3, tl.float32, False) + line * 3
            v_figures = _pointer(v_figures_address, group * 3, tl.float32, False) + line * 3
            s = tl.load(m_figures, mask=known, other=1.0)
            k = tl.load(m_figures + 1, mask=known, other=1.0)
            c = tl.load(m_figures + 2, mask=known, other=1.0)
            m = _coat_decoded(tl.load(m_at, mask=inside, other=0), s, k, c)
            s = tl.load(v_figures, mask=known, other=1.0)
            k = tl.load(v_figures + 1, mask=known, other=1.0)
            c = tl.load(v_figures + 2, mask=known, other=1.0)
            v = _coat_decoded(tl.load(v_at, mask=inside, other=0), s, k, c)
        else:
            m = widen(tl.load(m_at, mask=inside, other=0.0))
            v = widen(tl.load(v_at, mask=inside, other=0.0))
        if MASTER == "bf16+16":
            # The weight is the upper half of fp32, the master's int16 the lower half.
            low_at = _pointer(low_address, begin, tl.int16, ALIGNED) + at
            high_half = tl.load(weight, mask=inside, other=0.0).to(tl.int16, bitcast=True).to(tl.int32)
            low_half = tl.load(low_at, mask=inside, other=0).to(tl.int32)
            w = ((high_half << 16) + low_half).to(tl.float32, bitcast=True)
        elif MASTER == "master":
            low_at = _pointer(low_address, begin, tl.float32, ALIGNED) + at
            w = tl.load(low_at, mask=inside, other=0.0)
        else:
            w = widen(tl.load(weight, mask=inside, other=0.0))

        # Step in fp32. Each line is in the order of the reference, so that every rounding is the same.
        m = m * beta1 + g * rest1
        v = v * beta2 + (g * rest2) * g
        d = tl.sqrt_rn(v) * root + eps
        w = w * decay - tl.div_rn(m * pace, d)

        if MASTER == "bf16+sr":
            # Random bits and dither depend on the element, the step and the parameter: not on the tiling.
            counter = (start // GROUP + group + line) * (GROUP // 4) + tl.arange(0, GROUP // 4)[None, :]
            words = philox_words(counter.to(tl.uint32), step, index, seed)
        if STATES == "fp8" or STATES == "bf16":
            chance = _dither((start + begin).to(tl.uint32) + at.to(tl.uint32), step, index, seed)

        if STATES == "fp8":
            # Encode and store the moments; figures of groups only where the piece has the group.
            m_bytes, scale, v_bytes, word = _fp8_encoded(m, v, chance)
            tl.store(m_at, m_bytes, mask=inside)
            tl.store(v_at, v_bytes, mask=inside)
            tl.store(scale_at, scale, mask=known)
            tl.store(range_at, word, mask=known)
        elif STATES == "coat":
            # Figures and codes of the new moments, m and then v: fewer registers than both at once.
            s, k, c = _coat_figures(m)
            tl.store(m_at, _coat_codes(m, s, k, c), mask=inside)
            tl.store(m_figures, s, mask=known)
            tl.store(m_figures + 1, k, mask=known)
            tl.store(m_figures + 2, c, mask=known)
            s, k, c = _coat_figures(v)
            tl.store(v_at, _coat_codes(v, s, k, c), mask=inside)
            tl.store(v_figures, s, mask=known)
            tl.store(v_figures + 1, k, mask=known)
            tl.store(v_figures + 2, c, mask=known)
        elif STATES == "bf16":
            # The first moment is rounded to nearest; the second is dithered, or small updates would be lost.
            bits = v.to(tl.int32, bitcast=True)
            tl.store(m_at, round_to(m, tl.bfloat16), mask=inside)
            tl.store(v_at, _upper_half(tl.where(bits < INF_BITS, bits + chance, NAN_BITS)), mask=inside)
        else:
            tl.store(m_at, m, mask=inside)
            tl.store(v_at, v, mask=inside)

        if MASTER == "bf16+16":
            # Split into halves: the upper one rounded to nearest, the lower one int16, together exactly w.
            bits = _canonical_nan(w)
            tl.store(weight, _upper_half(bits + 0x8000), mask=inside)
            tl.store(low_at, bits.to(tl.int16), mask=inside)
        elif MASTER == "bf16+sr":
            # Stochastic rounding: add 16 random bits below the last kept bit and truncate.
            tl.store(weight, _upper_half(_canonical_nan(w) + (words & 0xFFFF).to(tl.int32)), mask=inside)
        else:
            # fp32 weights are stored as they are; BF16 weights with a master are rounded to nearest.
            tl.store(weight, round_to(w, W), mask=inside)
            if MASTER == "master":
                tl.store(low_at, w, mask=inside)
