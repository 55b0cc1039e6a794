"""One-byte moments: nonzero values stay nonzero, and small updates accumulate over many steps."""

import pytest
import torch

from octavo.fp8.arithmetic import moments


def make_dither(shape, step=1):
    return moments.dither(0, 0, shape[0] * shape[1], step=step, parameter=0, device="cpu").view(shape)


def round_trip(m, v, states="fp8", step=1):
    return moments.decode(states, moments.encode(states, m, v, make_dither(v.shape, step)))


def rows(**named):
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(128, generator=generator)
    one = torch.zeros(128)
    one[77] = 3e-9
    spread = torch.logspace(-38, 38, 128, dtype=torch.float64).float()
    return {
        "one element": one,
        "zeros": torch.zeros(128),
        "all equal": torch.full((128,), 2.5e-7),
        "chi squared": normal.square() * 1e-10,
        "wide": (normal * 8).exp(),
        "1e-38 to 1e38": spread,
        "denormal": torch.arange(128).to(torch.int32).view(torch.float32),
        "denormal and large": torch.where(torch.arange(128) % 2 == 0, 1e-45, 1e37),
        "smallest normal": torch.full((128,), 2.0**-126),
    }


@pytest.mark.parametrize("name", rows())
@pytest.mark.parametrize("states", ["fp8", "coat"])
def test_nonzero_second_moment_never_becomes_zero(name, states):
    v = rows()[name][None]
    for step in range(1, 40):
        back = round_trip(torch.zeros_like(v), v, states, step)[1]
        assert torch.equal(back == 0, v == 0)
        assert back.isfinite().all()


@pytest.mark.parametrize("name", rows())
def test_fp8_decodes_to_adjacent_grid_point(name):
    v = rows()[name][None]
    lo, hi = moments.extrema(v)
    range_ = moments.v_range(lo, hi)
    base, pace, _ = moments.grid(range_)
    back = round_trip(torch.zeros_like(v), v)[1]
    off = (back.view(torch.int32).long() - v.view(torch.int32).long()).abs()
    assert (off[v != 0] <= pace.long().expand_as(v)[v != 0]).all()
    if (v != 0).any():
        low, high = v[v != 0].view(torch.int32).aminmax()
        # 509 steps of the pace hold the group, and the next smaller pace would not (but for the smallest one)
        assert int(pace) * 508 >= int(high - low)
        assert int(pace) == 512 or int(pace) * 4 / 5 * 508 < int(high - low) + 508


def test_grid_is_finest_that_covers_group():
    paces = torch.tensor([quarters << octave for octave in range(7, 20) for quarters in (4, 5, 6, 7)])
    for extra, want in ((0, paces[:-1]), (1, paces[1:])):  # bit patterns as far apart as 508 steps are, and one more
        lo = torch.ones(len(want), dtype=torch.int32)
        range_ = moments.v_range(lo, lo + 508 * paces[:-1].int() + extra)
        assert torch.equal(moments.grid(range_)[1][:, 0], want.int())


def test_grid_is_stable_while_group_changes():
    v = rows()["chi squared"][None]
    grids = [moments.grid(moments.v_range(*moments.extrema(v * 0.999**t))) for t in range(99)]
    bases, paces = ({int(g[i]) for g in grids} for i in (0, 1))
    pace = paces.pop()
    assert not paces and len(bases) > 1 and all(base % pace == 0 for base in bases)


def test_small_updates_accumulate_over_steps():
    """v decays by a thousandth per step. Rounded to nearest it would never change; 500 steps must give 0.999^500."""
    v = rows()["chi squared"].expand(8, 128).contiguous()
    start, nearest, random = v.clone(), v.clone(), v.clone()
    generator = torch.Generator().manual_seed(1)
    half = torch.full(v.shape, 32768, dtype=torch.int32)
    for step in range(1, 501):
        v = round_trip(torch.zeros_like(v), v * 0.999, step=step)[1]
        nearest = moments.decode("fp8", moments.encode("fp8", nearest, nearest * 0.999, half))[1]
        u = torch.randint(0, 65536, v.shape, generator=generator, dtype=torch.int32)
        random = moments.decode("fp8", moments.encode("fp8", random, random * 0.999, u))[1]
    want = 0.999**500
    ratio = (v / start).double()
    assert abs(float(ratio.log().mean()) - torch.tensor(want).log().item()) < 0.01
    off, off_random = (float((x / start / want).log().std()) for x in (v, random))
    assert off < 0.75 * off_random  # what an even sequence is for
    assert float((nearest / start).mean()) > 0.9  # and what a dither is for


def test_bf16_second_moments_decay_too():
    v = rows()["chi squared"].expand(8, 128).contiguous()
    start = v.clone()
    for step in range(1, 501):
        v = round_trip(v, v * 0.999, "bf16", step)[1]
    assert abs(float((v / start).double().log().mean()) - 500 * torch.tensor(0.999).log().item()) < 0.01


def test_coat_does_not_shrink_reencoded_values():
    """With an exact power, the smallest magnitude of a group would be rounded down at every encoding."""
    v = rows()["chi squared"].expand(1, 128).contiguous()
    m = v.sqrt() * torch.randn(1, 128, generator=torch.Generator().manual_seed(1))
    before = m, v
    for _ in range(200):
        m, v = round_trip(m, v, "coat")
    for old, new in zip(before, (m, v), strict=True):
        assert ((new / old).log2().abs() < 0.5).all()


def test_first_moment_error_is_bounded_by_largest():
    generator = torch.Generator().manual_seed(2)
    v = torch.rand(64, 128, generator=generator) * 1e-6 + 1e-9
    m = torch.randn(64, 128, generator=generator) * v.sqrt()
    back_m, back_v = round_trip(m, v)
    r, back = m / back_v.sqrt(), back_m / back_v.sqrt()
    step = r.abs().amax(1, keepdim=True) / 5985
    code = moments.encode_r(r, moments.r_amax(r)).abs()
    assert ((back - r).abs() <= step * (code + 17.5)).all()  # half of (c + 1)(c + 33) - c(c + 32), and a half more
    assert ((back == 0) == (code == 0)).all()
    assert torch.equal(torch.sign(back)[code > 0], torch.sign(r)[code > 0])


def test_codes_use_all_bits_and_round_trip():
    m_code = torch.arange(-63, 64, dtype=torch.int32)[:, None].expand(127, 512)
    v_code = torch.arange(512, dtype=torch.int32)[None].expand(127, 512)
    m_byte, v_byte = moments.pack(m_code, v_code)
    assert (m_byte.dtype, v_byte.dtype) == (torch.int8, torch.uint8)
    back = moments.unpack(m_byte, v_byte)
    assert torch.equal(back[0], m_code) and torch.equal(back[1], v_code)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 2.0**127])
def test_group_with_nan_decodes_to_nan_alone(bad):
    v = torch.rand(2, 128) + 0.1
    v[0, 5], v[0, 9] = bad, 0.0
    m, v = round_trip(torch.ones(2, 128), v)
    assert m[0].isnan().all() and v[0, 9] == 0 and v[0, :9].isnan().all()
    assert m[1].isfinite().all() and v[1].isfinite().all()


def test_vanished_first_moment_becomes_zero():
    v = torch.full((1, 128), 1e-8)
    m = torch.full((1, 128), 1e-37)
    state = moments.encode("fp8", m, v, make_dither(v.shape))
    assert state["exp_avg_scale"].item() == 0 and moments.decode("fp8", state)[0].eq(0).all()


def test_extrema_of_parts_equal_extrema_of_group():
    generator = torch.Generator().manual_seed(3)
    m, v = torch.randn(4, 128, generator=generator), torch.rand(4, 128, generator=generator)
    here = torch.arange(128) < 50
    for states in ("fp8", "coat"):
        full = moments.encode(states, m, v, make_dither(v.shape))
        recorded = []
        for actual in (here, ~here):  # what each rank would say, gathered
            agreed = []
            moments.encode(
                states, m * actual, v * actual, make_dither(v.shape), lambda x, agreed=agreed: agreed.append(x) or x
            )
            recorded.append(agreed)
        first = torch.maximum(recorded[0][0], recorded[1][0])
        for actual in (here, ~here):
            answers = iter([first])
            second = []

            def agree(x, answers=answers, second=second):
                known = next(answers, None)
                second.append(x)
                return x if known is None else known

            part = moments.encode(states, m * actual, v * actual, make_dither(v.shape), agree)
            name = "exp_avg_sq_range" if states == "fp8" else "exp_avg_sq_figures"
            assert torch.equal(part[name], full[name])
            if states == "coat":
                codes = part["exp_avg_sq_codes"].float()[:, actual]
                assert torch.equal(codes, full["exp_avg_sq_codes"].float()[:, actual])


def test_coat_truncates_power_to_sixteenths_and_ignores_zeros():
    v = torch.rand(64, 128, generator=torch.Generator().manual_seed(4)) * 1e-8
    v[:, 0] = 0.0
    v[1] = 7e-9
    v[2, 1:] = torch.tensor(1e-40).nextafter(torch.tensor(1.0))
    figures = moments.coat_figures(*moments.extrema(v))
    k, low = figures[:, 1], v.where(v > 0, torch.inf).amin(1)
    exact = moments._TARGET / (v.amax(1).double() / low.double()).log2().clamp(min=1e-9)
    assert torch.equal(k * 16, (exact * 16 + 1e-5).floor().clamp(max=256).float()) and k[1] == k[2] == 16
    back = moments.coat_decode(moments.coat_encode(v, figures), figures)
    saved = v > 0
    off = (back[saved] / v[saved]).log2().abs()
    assert (off < 0.5 / k[:, None].expand_as(v)[saved]).all() and (
        back[~saved] == 0
    ).all()  # code 2.2 may become 2 or 3


@pytest.mark.parametrize("bits", [0x7FC00000, 0x7FFFFFFF, -0x400000, -1])
def test_coat_keeps_nan(bits):
    v = torch.rand(1, 128) + 0.1
    v.view(torch.int32)[0, 5] = bits
    figures = torch.ones(1, 3)  # as of a group that is finite: the code alone must tell
    assert moments.coat_encode(v, figures).float().isnan().nonzero().tolist() == [[0, 5]]
    assert moments.coat_figures(*moments.extrema(v)).isnan().all()
