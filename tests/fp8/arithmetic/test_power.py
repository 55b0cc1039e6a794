"""Powers by series: accurate, and independent of the position in the array."""

import torch

from octavo.fp8.arithmetic.power import exp2, log2, power


def test_log2_and_exp2_are_accurate():
    x = torch.cat([torch.rand(10_000) * 4, torch.logspace(-44, 38, 1000, dtype=torch.float64).float()])
    x = x[x > 0]
    exact = x.double().log2()
    assert ((log2(x) - exact).abs() <= 4 * 2.0**-24 * exact.abs().clamp(min=0.1)).all()
    y = torch.linspace(-125, 127, 10_001)
    assert ((exp2(y).double() / y.double().exp2() - 1).abs() < 2.0**-22).all()
    assert exp2(torch.tensor([-1e9, 1e9])).tolist() == [2.0**-125, 2.0**127]


def test_zero_and_nan_are_kept_and_position_does_not_matter():
    x = torch.rand(301)
    x[7], x[9] = 0.0, torch.nan
    full = power(x, torch.tensor(3.1875))
    assert full[7] == 0 and full.isnan().nonzero().tolist() == [[9]]
    for cut in (slice(1, None), slice(10, 77), slice(300, 301)):
        assert torch.equal(power(x[cut].clone(), torch.tensor(3.1875)).nan_to_num(-1), full[cut].nan_to_num(-1))
