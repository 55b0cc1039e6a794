"""What moves, on figures that are made up: thresholds, hysteresis, the budget, and what is said of it."""

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
    """GEMMs on their ladders, check after check; ``level``: (key, rung) -> SQNR of the next check."""

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


def test_what_is_healthy_stays_and_leaves_no_trace() -> None:
    run = Run(KEY, OTHER)
    for _ in range(5):
        assert run.check(lambda key, rung: 30.0) == []
    assert run.places == {}


def test_a_gemm_climbs_as_far_as_it_must_and_comes_back_when_the_fault_has_left() -> None:
    run = Run()
    bad = {0: 10.0, 1: 24.9}
    (first,) = run.check(lambda key, rung: bad[rung])
    assert (first.kind, first.before, first.after, first.step) == ("leaves", "tensorwise", "blockwise", 10)
    assert (first.figure, first.value, first.threshold) == ("sqnr of x", 10.0, 25.0)
    (second,) = run.check(lambda key, rung: bad[rung])
    assert (second.before, second.after) == ("blockwise", "bf16") and run.rung() == 2
    assert run.check(lambda key, rung: bad[rung]) == []  # high precision, and the rung below is still bad
    healed = [run.check(lambda key, rung: 31.0) for _ in range(6)]
    assert [[(d.kind, d.after) for d in found] for found in healed] == [
        [], [], [("returns", "blockwise")], [], [], [("returns", "tensorwise")]
    ]  # fmt: skip
    assert run.places == {}


def test_a_figure_that_hovers_at_the_threshold_moves_once() -> None:
    run = Run(ladder=("blockwise", "bf16"))
    for n in range(20):
        run.check(lambda key, rung, n=n: 25.3 if n % 2 else 24.7)
    assert [d.kind for d in run.log] == ["leaves"]  # 25.3 dB is above the threshold, and not by the room of coming back
    for n in range(20):  # two good checks in a row are none of three
        run.check(lambda key, rung, n=n: 24.9 if n % 3 == 2 else 35.0)
    assert len(run.log) == 1


def test_the_worst_get_the_budget_and_a_refusal_is_said_once() -> None:
    run = Run(KEY, OTHER, THIRD, ladder=("blockwise", "bf16"), budget=0.09)
    level = {KEY: 24.0, OTHER: 10.0, THIRD: 22.0}
    found = run.check(lambda key, rung: level[key])
    assert [(d.layer, d.kind) for d in found] == [("b", "leaves"), ("c", "leaves"), ("a", "refused")]
    assert "the budget is spent" in str(found[-1])
    for _ in range(4):
        assert run.check(lambda key, rung: level[key]) == []
    level[OTHER] = 40.0
    later = [d for _ in range(4) for d in run.check(lambda key, rung: level[key])]
    assert [(d.layer, d.kind) for d in later] == [("b", "yields"), ("a", "leaves")]  # the first thing it needs not


def test_one_that_is_much_worse_takes_the_place_of_the_mildest() -> None:
    run = Run(KEY, OTHER, THIRD, ladder=("blockwise", "bf16"), budget=0.09)
    level = {KEY: 24.0, OTHER: 23.0, THIRD: 30.0}
    run.check(lambda key, rung: level[key])
    level[THIRD] = 22.5  # worse, but not by the room that moves need
    assert [d.kind for d in run.check(lambda key, rung: level[key])] == ["refused"]
    level[THIRD] = 12.0
    found = run.check(lambda key, rung: level[key])
    assert [(d.layer, d.kind) for d in found] == [("a", "yields"), ("c", "leaves")]
    assert run.check(lambda key, rung: level[key]) == []  # the one that gave way is not refused again


def test_time_is_a_budget_of_its_own() -> None:
    run = Run(KEY, OTHER, ladder=("blockwise", "bf16"), budget=1.0, time=0.05)
    run.work = {KEY: GemmCost(0.01, 0.2), OTHER: GemmCost(0.4, 0.01)}
    found = run.check(lambda key, rung: 10.0)
    assert {d.layer: d.kind for d in found} == {"a": "refused", "b": "leaves"}


@pytest.mark.parametrize(
    ("figure", "moves"),
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
def test_the_thresholds_are_those_of_the_trust_table(figure: Metric, moves: bool) -> None:
    _, found = decide(1, {}, {KEY: {0: [figure]}}, {KEY: LADDER}, {KEY: GemmCost(0.1)}, Limits())
    assert bool(found) is moves
    if moves:
        assert found[0].figure == str(figure) and figure.name in found[0].cause


def test_operands_of_wgrad_may_lose_more() -> None:
    key = ("a", "wgrad")
    for share, moves in ((0.15, False), (0.25, True)):
        read = {key: {0: [Metric("underflow", "dy", share)]}}
        assert bool(decide(1, {}, read, {key: LADDER}, {key: GemmCost(0.1)}, Limits())[1]) is moves


def test_a_gemm_without_figures_stays_where_it_is() -> None:
    places = {KEY: GemmState(1, "blockwise", healthy=2, step=10, why="so")}
    assert decide(20, places, {}, {KEY: LADDER}, {KEY: GemmCost(0.1)}, Limits()) == (places, [])


@pytest.mark.parametrize(("word", "level"), [("bf16", 10.0), ("rowwise", 30.0)])
def test_where_rules_begin_with_a_finer_recipe_no_gemm_takes_the_rung_of_another(word, level) -> None:
    whole, shorter = (*("tensorwise", "rowwise"), *LADDER[1:]), LADDER[1:]
    places = {KEY: GemmState(whole.index(word), word, step=10)}
    found, said = decide(20, places, {KEY: {0: sqnr(level)}}, {KEY: shorter}, {KEY: GemmCost(0.1)}, Limits())
    assert said == [] and found[KEY].rung == (word == "bf16")  # and nothing into high precision without a decision
    again, said = decide(30, found, {}, {KEY: whole}, {KEY: GemmCost(0.1)}, Limits())
    assert said == [] and again == places


LEVELS = st.lists(st.lists(st.floats(0, 50), min_size=6, max_size=6), min_size=1, max_size=25)


@settings(deadline=None, max_examples=60)
@given(LEVELS, st.floats(0.0, 0.15), st.integers(1, 4))
def test_whatever_is_measured(levels: list[list[float]], budget: float, patience: int) -> None:
    """The budget holds, moves are single steps up the ladder, each has a figure beyond its threshold, each return a
    patience behind it, and the answer does not depend on what was answered before but through the state."""
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


def test_a_check_in_which_all_of_a_large_model_fails_is_quick() -> None:
    keys = [(f"layers.{n}", gemm) for n in range(500) for gemm in ("fwd", "dgrad", "wgrad")]
    run = Run(*keys, ladder=("blockwise", "bf16"), share=1 / len(keys), budget=0.1)
    began = time.process_time()
    first = run.check(lambda key, rung: 20.0)
    then = run.check(lambda key, rung: 20.0 if run.rung(key) else 5.0)
    assert time.process_time() - began < 2
    assert sum(d.kind == "leaves" for d in first) == 150 == sum(d.kind == "yields" for d in then)
