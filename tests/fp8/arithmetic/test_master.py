"""Splitting and joining of master weights, and stochastic rounding."""

import pytest
import torch

from octavo.fp8.arithmetic import master, philox


def patterns():
    """Every exponent with mantissas at, beside and between BF16 values, of both signs."""
    tops = torch.arange(0, 1 << 16, 7, dtype=torch.int64) << 16
    lows = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    bits = (tops[:, None] | lows).flatten()
    return torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32).view(torch.float32)


def test_halves_join_to_exact_weight():
    w = patterns()
    full = master.join(*master.split(w))
    number = ~w.isnan()
    assert torch.equal(full[number].view(torch.int32), w[number].view(torch.int32))
    assert full[~number].isnan().all()


def test_upper_half_rounds_to_nearest_away_from_zero():
    w = patterns()
    w = w[w.abs() < 3e38]
    high, _ = master.split(w)
    nearest = w.to(torch.bfloat16)
    assert torch.equal((high.double() - w.double()).abs(), (nearest.double() - w.double()).abs())
    tie = torch.tensor([1 + 2**-8, -1 - 2**-8])
    assert master.split(tie)[0].tolist() == [1 + 2**-7, -1 - 2**-7]


@pytest.mark.parametrize("bits", [0x7FFFFFFF, -1, 0x7FC00000, 0x7F800001])
def test_nan_stays_nan(bits):
    w = torch.tensor([bits], dtype=torch.int32).view(torch.float32)
    assert master.split(w)[0].isnan()
    assert master.stochastic(w, torch.tensor([0xFFFF], dtype=torch.int32)).isnan()


def test_infinities_are_kept():
    w = torch.tensor([float("inf"), -float("inf")])
    assert torch.equal(master.split(w)[0].float(), w)
    assert torch.equal(master.stochastic(w, torch.full((2,), 0xFFFF, dtype=torch.int32)).float(), w)


def test_stochastic_rounding_keeps_mean():
    count = 1 << 18
    for value in (1.0 + 2**-10, -3.0 - 2**-8, 1e-20):
        w = torch.full((count,), value)
        rounded = master.stochastic(w, philox.words(3, 0, count, step=1, parameter=0)).double()
        both = rounded.unique()
        assert len(both) == 2 and both[0] < float(w[0]) < both[1]
        width = float(both[1] - both[0])
        # the mean of `count` draws from two values is off by width / 2 / sqrt(count) as one standard deviation at most
        assert abs(float(rounded.mean()) - float(w[0])) < 4 * width / 2 / count**0.5
        assert abs(float(w[0].to(torch.bfloat16)) - float(w[0])) > 4 * width / 2 / count**0.5  # nearest would fail
