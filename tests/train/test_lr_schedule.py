"""Schedules at their corners."""

from __future__ import annotations

import pytest

from octavo.train.step.lr_schedule import SCHEDULES, lr_at


def curve(name: str, steps: int = 20, **more: float) -> list[float]:
    return [lr_at(s, schedule=name, lr=2.0, steps=steps, **more) for s in range(1, steps + 1)]


@pytest.mark.parametrize("name", ["cosine", "linear", "constant"])
def test_warm_up_is_linear_and_ends_at_the_peak(name: str):
    rates = curve(name, warmup=4)
    assert rates[:4] == pytest.approx([0.5, 1.0, 1.5, 2.0])
    assert rates[4] == pytest.approx(2.0)


@pytest.mark.parametrize("name", list(SCHEDULES))
def test_every_step_has_a_positive_rate_up_to_the_peak(name: str):
    for warmup in (0, 1, 19):
        rates = curve(name, warmup=warmup)
        assert all(0 < rate <= 2.0 for rate in rates)
        assert max(rates) == pytest.approx(2.0)


@pytest.mark.parametrize("name", ["cosine", "linear", "onecycle"])
def test_rate_falls_to_min_lr_after_the_peak(name: str):
    rates = curve(name, warmup=5, min_lr=0.2)
    assert all(a > b for a, b in zip(rates[5:], rates[6:], strict=False))
    assert 0.2 < rates[-1] < 0.4


def test_cosine_is_half_way_in_the_middle():
    assert lr_at(11, schedule="cosine", lr=1.0, steps=20) == pytest.approx(0.5)


def test_linear_is_a_line():
    assert curve("linear", steps=4) == pytest.approx([2.0, 1.5, 1.0, 0.5])


def test_onecycle_rises_for_three_tenths_where_no_warm_up_is_given():
    rates = curve("onecycle")
    assert rates.index(max(rates)) == 5  # step 6 of 20
    assert rates[0] < 0.3


def test_constant_rate_is_constant():
    assert curve("constant") == [2.0] * 20


def test_one_step_trains_at_the_peak():
    for name in SCHEDULES:
        assert lr_at(1, schedule=name, lr=3.0, steps=1) == pytest.approx(3.0)


@pytest.mark.parametrize("step", [0, 21])
def test_a_step_outside_the_run_is_refused(step: int):
    with pytest.raises(ValueError, match=f"step {step} is outside 1..20"):
        lr_at(step, schedule="cosine", lr=1.0, steps=20)
