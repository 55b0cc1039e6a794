"""Decisions on artificial metrics: thresholds, hysteresis, the budget and reports."""

from __future__ import annotations

import math
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.fp8.adapting import Decision, GemmState, Limits, decide
from octavo.fp8.adapting.deciding import GemmCost, Metric

KEY, OTHER, THIRD = ("a", "fwd"), ("b", "fwd"), ("c", "fwd")
LADDER = ("tensorwise", "blockwise", "bf16")


def sqnr(value: float) -> list[Metric]:
    return [Metric("sqnr", "x", value)]


class Run:
    """Runs a sequence of checks; ``level``: (key, rung) -> SQNR of the next check."""

    def __init__(self, *keys, ladder=LADDER, share=0.04, **limits) -> None:
        self.ladders = dict.fromkeys(keys or (KEY,), ladder)
        self.work = dict.fromkeys(self.ladders, GemmCost(share))
        self.limits, self.places, self.step, self.log = Limits(**limits), {}, 0, []

    def check(self, level) -> list[Decision]:
        self.step += 10
        read = {}
        for key, ladder in self.ladders.items():
            rung = self.places.get(key, GemmState()).rung
            read[key] = {r: sqnr(level(key, r)) for r in (rung - 1, rung) if 0 <= r < len(ladder) - 1}
        self.places, found = decide(self.step, self.places, read, self.ladders, self.work, self.limits)
        self.log += found
        return found

    def rung(self, key=KEY) -> int:
        return self.places.get(key, GemmState()).rung


def test_healthy_gemms_do_not_move() -> None:
    run = Run(KEY, OTHER)
    for _ in range(5):
        assert run.check(lambda key, rung: 30.0) == []
    assert run.places == {}


def test_gemm_moves_up_as_needed_and_returns_when_healthy() -> None:
    run = Run()
    bad = {0: 10.0, 1: 24.9}
    (first,) = run.check(lambda key, rung: bad[rung])
    assert (first.kind, first.before, first.after, first.step) == ("leaves", "tensorwise", "blockwise", 10)
    assert (first.metric, first.value, first.threshold) == ("sqnr of x", 10.0, 25.0)
    (second,) = run.check(lambda key, rung: bad[rung])
    assert (second.before, second.after) == ("blockwise", "bf16") and run.rung() == 2
    assert run.check(lambda key, rung: bad[rung]) == []  # in high precision, and the rung below is still bad
    healed = [run.check(lambda key, rung: 31.0) for _ in range(6)]
    assert [[(d.kind, d.after) for d in found] for found in healed] == [
        [], [], [("returns", "blockwise")], [], [], [("returns", "tensorwise")]
    ]  # fmt: skip
    assert run.places == {}


def test_metric_near_threshold_moves_once() -> None:
    run = Run(ladder=("blockwise", "bf16"))
    for n in range(20):
        run.check(lambda key, rung, n=n: 25.3 if n % 2 else 24.7)
    assert [d.kind for d in run.log] == ["leaves"]  # 25.3 dB is above the threshold, but not enough to return
    for n in range(20):  # two consecutive healthy checks are not enough
        run.check(lambda key, rung, n=n: 24.9 if n % 3 == 2 else 35.0)
    assert len(run.log) == 1


def test_largest_errors_get_budget_and_refusal_is_reported_once() -> None:
    run = Run(KEY, OTHER, THIRD, ladder=("blockwise", "bf16"), budget=0.09)
    level = {KEY: 24.0, OTHER: 10.0, THIRD: 22.0}
    found = run.check(lambda key, rung: level[key])
    assert [(d.layer, d.kind) for d in found] == [("b", "leaves"), ("c", "leaves"), ("a", "refused")]
    assert "the budget is spent" in str(found[-1])
    for _ in range(4):
        assert run.check(lambda key, rung: level[key]) == []
    level[OTHER] = 40.0
    later = [d for _ in range(4) for d in run.check(lambda key, rung: level[key])]
    assert [(d.layer, d.kind) for d in later] == [
        ("b", "yields"),
        ("a", "leaves"),
    ]  # as soon as the budget is not needed


def test_much_worse_gemm_replaces_smallest_error() -> None:
    run = Run(KEY, OTHER, THIRD, ladder=("blockwise", "bf16"), budget=0.09)
    level = {KEY: 24.0, OTHER: 23.0, THIRD: 30.0}
    run.check(lambda key, rung: level[key])
    level[THIRD] = 22.5  # worse, but not by enough for a replacement
    assert [d.kind for d in run.check(lambda key, rung: level[key])] == ["refused"]
    level[THIRD] = 12.0
    found = run.check(lambda key, rung: level[key])
    assert [(d.layer, d.kind) for d in found] == [("a", "yields"), ("c", "leaves")]
    assert run.check(lambda key, rung: level[key]) == []  # the replaced GEMM is not refused again


def test_time_budget_is_separate() -> None:
    run = Run(KEY, OTHER, ladder=("blockwise", "bf16"), budget=1.0, time=0.05)
    run.work = {KEY: GemmCost(0.01, 0.2), OTHER: GemmCost(0.4, 0.01)}
    found = run.check(lambda key, rung: 10.0)
    assert {d.layer: d.kind for d in found} == {"a": "refused", "b": "leaves"}


@pytest.mark.parametrize(
    ("metric", "moves"),
    [
        (Metric("sqnr", "dy", 21.0, "e5m2"), False),
        (Metric("sqnr", "dy", 19.9, "e5m2"), True),
        (Metric("sqnr", "x", math.inf), False),
        (Metric("sqnr", "x", math.nan), True),
        (Metric("underflow", "x", 0.009), False),
        (Metric("underflow", "x", 0.011), True),
        (Metric("cosine", "dw", 0.96), False),
        (Metric("cosine", "dw", 0.94), True),
        (Metric("cosine", "dw", math.nan), True),
        (Metric("saturation", "x", 1e-6), True),
        (Metric("nan_codes", "its operands", 0.0), False),
        (Metric("nan_codes", "its operands", 3.0), True),
    ],
)
def test_thresholds_match_trust_table(metric: Metric, moves: bool) -> None:
    _, decisions = decide(1, {}, {KEY: {0: [metric]}}, {KEY: LADDER}, {KEY: GemmCost(0.1)}, Limits())
    assert bool(decisions) is moves
    if moves:
        assert decisions[0].metric == str(metric) and metric.name in decisions[0].cause


def test_wgrad_allows_more_underflow() -> None:
    key = ("a", "wgrad")
    for share, moves in ((0.15, False), (0.25, True)):
        read = {key: {0: [Metric("underflow", "dy", share)]}}
        assert bool(decide(1, {}, read, {key: LADDER}, {key: GemmCost(0.1)}, Limits())[1]) is moves


def test_gemm_without_metrics_does_not_move() -> None:
    places = {KEY: GemmState(1, "blockwise", healthy=2, step=10, why="so")}
    assert decide(20, places, {}, {KEY: LADDER}, {KEY: GemmCost(0.1)}, Limits()) == (places, [])


@pytest.mark.parametrize(("word", "level"), [("bf16", 10.0), ("rowwise", 30.0)])
def test_rung_is_found_by_recipe_on_shorter_ladder(word, level) -> None:
    long_ladder, short_ladder = (*("tensorwise", "rowwise"), *LADDER[1:]), LADDER[1:]
    places = {KEY: GemmState(long_ladder.index(word), word, step=10)}
    states, decisions = decide(20, places, {KEY: {0: sqnr(level)}}, {KEY: short_ladder}, {KEY: GemmCost(0.1)}, Limits())
    assert decisions == [] and states[KEY].rung == (
        word == "bf16"
    )  # nothing moves to high precision without a decision
    restored, decisions = decide(30, states, {}, {KEY: long_ladder}, {KEY: GemmCost(0.1)}, Limits())
    assert decisions == [] and restored == places


LEVELS = st.lists(st.lists(st.floats(0, 50), min_size=6, max_size=6), min_size=1, max_size=25)


@settings(deadline=None, max_examples=60)
@given(LEVELS, st.floats(0.0, 0.15), st.integers(1, 4))
def test_invariants_hold_for_random_metrics(levels: list[list[float]], budget: float, patience: int) -> None:
    """The budget holds, moves are single rungs, each move up has a metric beyond its threshold, each return has enough
    healthy checks, and decisions depend on earlier ones only through the state."""
    keys = (KEY, OTHER, THIRD)
    run = Run(*keys, budget=budget, patience=patience)
    for check in levels:
        before = dict(run.places)
        found = run.check(lambda key, rung, c=check: c[2 * keys.index(key) + min(rung, 1)])
        high = [key for key in keys if run.rung(key) == 2]
        assert sum(run.work[key].flops for key in high) <= budget + 1e-9
        for d in found:
            key, rungs = (d.layer, d.gemm), (LADDER.index(d.before), LADDER.index(d.after))
            assert rungs[1] - rungs[0] == (-1 if d.kind in ("returns", "yields") else 1)
            if d.kind == "leaves":
                assert d.value < d.threshold
            if d.kind == "returns":
                assert d.value > d.threshold and before[key].healthy == patience - 1
        moved = {(d.layer, d.gemm) for d in found if d.kind != "refused"}
        assert all(run.rung(k) == before.get(k, GemmState()).rung for k in keys if k not in moved)
        assert len(moved) == len([d for d in found if d.kind != "refused"])


def test_check_with_all_gemms_failing_is_fast() -> None:
    keys = [(f"layers.{n}", gemm) for n in range(500) for gemm in ("fwd", "dgrad", "wgrad")]
    run = Run(*keys, ladder=("blockwise", "bf16"), share=1 / len(keys), budget=0.1)
    began = time.process_time()
    first = run.check(lambda key, rung: 20.0)
    then = run.check(lambda key, rung: 20.0 if run.rung(key) else 5.0)
    assert time.process_time() - began < 2
    assert sum(d.kind == "leaves" for d in first) == 150 == sum(d.kind == "yields" for d in then)
