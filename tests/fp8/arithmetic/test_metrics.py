"""FP8 metrics against values that are computed by hand."""

from __future__ import annotations

import math

import pytest
import torch

from octavo.fp8.arithmetic import cast
from octavo.fp8.arithmetic.cast import CastError, CastSpec
from octavo.fp8.metrics import calc_diff, cosine, saturation, sqnr, underflow


def test_sqnr_is_the_mean_of_decibels_over_blocks() -> None:
    x = torch.tensor([[10.0, 0.0], [1000.0, 0.0]])
    approx = torch.tensor([[9.0, 0.0], [999.0, 0.0]])
    assert sqnr(x, approx, block=(1, -1)) == pytest.approx((20 + 60) / 2)
    assert sqnr(x, approx) == pytest.approx(10 * math.log10((100 + 1e6) / 2))


def test_sqnr_leaves_out_zero_exact_and_bad_blocks() -> None:
    x = torch.tensor([[0.0, 0.0], [1.0, 2.0], [math.nan, 1.0], [10.0, 0.0]])
    approx = torch.tensor([[0.0, 0.0], [1.0, 2.0], [1.0, 1.0], [9.0, 0.0]])
    assert sqnr(x, approx, block=(1, -1)) == pytest.approx(20)
    assert sqnr(x[:2], approx[:2], block=(1, -1)) == math.inf
    assert math.isnan(sqnr(x[2:3], approx[2:3], block=(1, -1)))
    assert sqnr(torch.zeros(0, 4), torch.zeros(0, 4)) == math.inf


def test_sqnr_takes_the_blocks_of_a_cast_ragged_or_not() -> None:
    x = torch.randn(130, 320) * torch.logspace(-20, 15, 130).unsqueeze(1)
    q = cast.quantize(x, CastSpec("e4m3", (1, 128), "fp32"))
    assert sqnr(x, q) == pytest.approx(sqnr(x, cast.dequantize(q), (1, 128)))
    assert 30 < sqnr(x, q) < 34
    assert 24 < sqnr(x, cast.quantize(x, CastSpec("e5m2", (1, 128), "fp32"))) < 28


def test_sqnr_does_not_lose_tiny_values() -> None:
    x = torch.full((1, 8), 1e-30)
    assert sqnr(x, x * 0.9) == pytest.approx(20, abs=0.01)


def test_underflow_counts_what_became_zero() -> None:
    x = torch.tensor([[448.0, 9e-4, -9e-4, 0.0, -0.0, 1.0]])
    q = cast.quantize(x, CastSpec("e4m3", (1, -1), "pow2"))
    assert underflow(x, q) == pytest.approx(2 / 4)
    assert underflow(x, cast.dequantize(q)) == pytest.approx(2 / 4)
    assert underflow(torch.zeros(3, 3), torch.zeros(3, 3)) == 0.0
    assert underflow(torch.zeros(0, 3), torch.zeros(0, 3)) == 0.0


def test_current_scaling_never_saturates() -> None:
    x = torch.randn(64, 200) * torch.logspace(-8, 8, 64).unsqueeze(1)
    for kind in ("fp32", "pow2", "e8m0"):
        for fmt in ("e4m3", "e5m2"):
            assert saturation(x, cast.quantize(x, CastSpec(fmt, (1, 32), kind))) == 0.0
    assert saturation(torch.zeros(0, 3), cast.quantize(torch.zeros(0, 3), CastSpec())) == 0.0


def test_saturation_counts_what_the_clamp_changed() -> None:
    # Half a step above 448 lies 464: up to there rounding alone gives 448.
    x = torch.tensor([[448.0, 464.0, 464.1, -1000.0]])
    q = cast.quantize_with_scale(x, torch.tensor(1.0), CastSpec("e4m3", (-1, -1), "fp32"))
    assert saturation(x, q) == pytest.approx(2 / 4)
    x = torch.tensor([[math.nan, 1.0]])
    q = cast.quantize_with_scale(x, torch.tensor(1.0), CastSpec("e4m3", (-1, -1), "fp32"))
    assert saturation(x, q) == 0.0


def test_cosine() -> None:
    a = torch.tensor([[3.0, 4.0]])
    assert cosine(a, a * 1e-30) == pytest.approx(1)
    assert cosine(a, -a) == pytest.approx(-1)
    assert cosine(a, torch.tensor([[-4.0, 3.0]])) == pytest.approx(0)
    assert cosine(a * 0, a * 0) == 1.0 and cosine(a, a * 0) == 0.0


def test_calc_diff() -> None:
    a = torch.randn(50, 50)
    assert calc_diff(a, a) == 0.0
    assert calc_diff(a, -a) == pytest.approx(2)
    b = a + 1e-3 * torch.randn(50, 50)
    x, y = a.double(), b.double()
    assert calc_diff(a, b) == pytest.approx(float(1 - 2 * (x * y).sum() / (x.square() + y.square()).sum()), rel=1e-6)
    assert 1e-6 < calc_diff(a, a.bfloat16()) < 3e-6
    assert calc_diff(a * 0, a * 0) == 0.0 and calc_diff(a[:0], a[:0]) == 0.0


@pytest.mark.parametrize("measure", [sqnr, underflow, cosine, calc_diff])
def test_shapes_must_agree(measure) -> None:
    with pytest.raises(CastError, match=rf"{measure.__name__} needs tensors of equal shape, got \(2, 3\) and \(3, 2\)"):
        measure(torch.zeros(2, 3), torch.zeros(3, 2))
