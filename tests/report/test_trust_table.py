"""Every row of the trust table, provoked to pass, warn and fail at its thresholds."""

from __future__ import annotations

import math

import numpy as np
import pytest

from octavo.report.evidence import trust_table
from octavo.report.evidence.trust_table import FAIL, PASS, WARN

NAN = math.nan


def test_loss_gap_compares_means() -> None:
    reference = np.array([4.0, 2.0, 2.0])
    assert trust_table.loss_gap(reference * 1.01, reference) == pytest.approx(0.01)
    assert trust_table.loss_gap(reference - np.array([0.4, 0, 0]), reference) == pytest.approx(-0.05)


def test_loss_gap_ignores_skipped_steps_of_either_run() -> None:
    assert trust_table.loss_gap(np.array([1.0, NAN, 3.0]), np.array([1.0, 100.0, 3.0])) == 0.0
    assert math.isnan(trust_table.loss_gap(np.array([NAN]), np.array([1.0])))
    assert math.isnan(trust_table.loss_gap(np.array([]), np.array([])))


def test_seed_noise_covers_gaps_of_simulated_seeds() -> None:
    """Of pairs of runs that differ by noise alone, nearly all lie within the noise estimated from one other pair."""
    rng = np.random.default_rng(0)
    base = 3 * np.exp(-np.arange(400) / 80) + 0.5

    def run() -> np.ndarray:
        drift = np.repeat(rng.normal(0, 0.02, 40), 10)  # runs wander for a while, as training does
        return base * (1 + drift + rng.normal(0, 0.05, 400))

    within = 0
    for _ in range(300):
        reference, seed, other = run(), run(), run()
        within += abs(trust_table.loss_gap(other, reference)) <= trust_table.seed_noise(seed, reference)
    assert within >= 0.85 * 300
    lucky = base + np.where(np.arange(400) < 200, 0.01, -0.01)  # two curves that cross: equal means, not equal runs
    assert abs(trust_table.loss_gap(lucky, base)) < 1e-9 and trust_table.seed_noise(lucky, base) > 0.001


def test_seed_noise_is_at_least_the_gap_of_the_pair() -> None:
    base = np.full(100, 2.0)
    assert trust_table.seed_noise(base * 1.1, base) == pytest.approx(0.1, rel=0.01)
    assert trust_table.seed_noise(base, base) == 0.0
    assert trust_table.seed_noise(np.array([1.0, NAN]), np.array([1.0, 1.0])) == 0.0
    assert math.isnan(trust_table.seed_noise(np.array([NAN]), np.array([1.0])))


@pytest.mark.parametrize(
    ("share", "wgrad", "status"),
    [
        (0.0, False, PASS), (0.01, False, PASS), (0.011, False, WARN), (0.05, False, WARN), (0.051, False, FAIL),
        (0.19, True, PASS), (0.21, True, WARN), (0.9, True, WARN),
    ],
)  # fmt: skip
def test_underflow(share: float, wgrad: bool, status: str) -> None:
    check = trust_table.check_underflow("FP8", {"x of a": 0.0, "dy of b": share}, wgrad)
    assert check.status == status
    assert check.figure == share
    if share:
        assert "dy of b" in check.sentence


@pytest.mark.parametrize(
    ("fmt", "level", "status"), [("e4m3", 25.0, PASS), ("e4m3", 24.9, WARN), ("e5m2", 20.0, PASS), ("e5m2", 19.9, WARN)]
)
def test_sqnr(fmt: str, level: float, status: str) -> None:
    check = trust_table.check_sqnr("FP8", fmt, {"x of a": 31.0, "w of b": level})
    assert check.status == status
    assert "w of b" in check.sentence and fmt.upper() in check.title


@pytest.mark.parametrize(
    ("values", "status"),
    [
        ((0.999, 0.998, 0.96), PASS),
        ((0.999, 0.999, 0.94), WARN),
        ((0.98, 0.98, 0.999), WARN),
        ((0.99,), PASS),
        ((0.9, 0.0, 0.0), FAIL),
    ],
)
def test_cosine(values: tuple[float, ...], status: str) -> None:
    check = trust_table.check_cosine("FP8", {f"layer{i}": v for i, v in enumerate(values)})
    assert check.status == status
    assert check.figure == min(values)


def test_nan_codes() -> None:
    assert trust_table.check_nan_codes("FP8", {"a": 0, "b": 0}).status == PASS
    check = trust_table.check_nan_codes("FP8", {"a": 0, "b": 3})
    assert check.status == FAIL
    assert "3 NaN codes" in check.sentence and "b" in check.sentence


@pytest.mark.parametrize(
    "check",
    [
        trust_table.check_underflow("FP8", {}, wgrad=False),
        trust_table.check_underflow("FP8", {}, wgrad=True),
        trust_table.check_sqnr("FP8", "e4m3", {}),
        trust_table.check_cosine("FP8", {}),
        trust_table.check_nan_codes("FP8", {}),
    ],
    ids=lambda c: c.name,
)
def test_unmeasured_checks_do_not_pass(check: trust_table.Check) -> None:
    assert check.status == WARN
    assert "run.health_every" in check.sentence


def test_skipped_steps() -> None:
    assert trust_table.check_skipped("FP8", (), 100, 100).status == PASS
    some = trust_table.check_skipped("FP8", (7, 9), 200, 200)
    assert some.status == WARN and "7, 9" in some.sentence
    assert trust_table.check_skipped("FP8", (7, 9, 11), 200, 200).status == FAIL
    assert trust_table.check_skipped("FP8", range(1, 101, 2), 100, 100).status == FAIL
    scaled = trust_table.check_skipped("FP8", (), 200, 200, overflowed=(1, 2))
    assert scaled.status == PASS and "except 2, whose gradients overflowed FP16" in scaled.sentence
    assert trust_table.check_skipped("FP8", (), 200, 200, overflowed=(1, 2, 3)).status == FAIL
    short = trust_table.check_skipped("FP8", (), 41, 100)
    assert short.status == FAIL and "step 41 of 100" in short.sentence


def test_recorded_steps() -> None:
    steps = np.arange(1, 101)
    assert trust_table.check_recorded("FP8", steps, 1, 100).status == PASS
    assert trust_table.check_recorded("FP8", np.array([1, 10, 20, 25, 30]), 10, 30).status == PASS
    cut = trust_table.check_recorded("FP8", np.delete(steps, slice(39, 89)), 1, 100)
    assert cut.status == FAIL and "is missing 50 steps (40, 41, 42, 43, 44 ...)" in cut.sentence


def test_optimizer_states() -> None:
    assert trust_table.check_states("FP8", "fp32", None).status == PASS
    assert trust_table.check_states("FP8", "fp8", None).status == WARN
    assert trust_table.check_states("FP8", "fp8", 0).status == PASS
    assert trust_table.check_states("FP8", "coat", 5).status == FAIL


def test_same_data() -> None:
    tokens = np.array([10.0, 12.0, 11.0])
    assert trust_table.check_same_data("FP8", tokens, tokens).status == PASS
    assert trust_table.check_same_data("FP8", tokens + [0, 1, 0], tokens).status == FAIL
    assert trust_table.check_same_data("FP8", tokens * NAN, tokens).status == WARN


def test_worst_and_percent() -> None:
    assert trust_table.worst_status([]) == PASS
    assert trust_table.worst_status([PASS, FAIL, WARN]) == FAIL
    assert trust_table.percent(0.0) == "0.00 %"
    assert trust_table.percent(0.012345) == "1.23 %"
    assert trust_table.percent(0.00001) == "0.0010 %"  # what is not zero never reads as zero
