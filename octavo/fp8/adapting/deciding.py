"""Decide which GEMMs move to a finer recipe and which move back, from measured metrics. Does not import torch.

Each GEMM has a ladder of recipes: the recipe of the plan, finer ones, and high precision. At a check each metric is
converted to an *error* relative to its threshold, so that 1 is the threshold for all metrics::

    SQNR        10 ^ ((threshold - SQNR) / 10)      the power of the noise
    underflow   share / threshold
    cosine      (1 - cosine) / (1 - threshold)      between a weight gradient and its high-precision value
    saturated values, NaN codes                     infinite if there are any

The largest error of a GEMM decides. If it exceeds 1, the GEMM moves up one rung. It moves down one rung when the recipe
below, tried on the same operands, has had an error of at most ``back`` in ``patience`` consecutive checks. Errors
between ``back`` and 1 cause no move (hysteresis).

High precision has a budget. The GEMMs with the largest errors get it first. A GEMM whose error exceeds the error of a
GEMM in high precision by a factor of 1 / ``back`` replaces it. Other requests are refused, which is reported once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

Key = tuple[str, str]
"""(layer, GEMM)"""
HIGH = "bf16"
"""The word of a plan for a GEMM in high precision."""


@dataclass(frozen=True)
class Limits:
    """Thresholds, as in the trust table (docs/numerics.md), and budgets of moves to high precision. ``budget``: largest
    share of the linear FLOPs of a step; ``time``: largest share of the measured time of layers, or None for no
    limit."""

    sqnr_e4m3: float = 25.0
    sqnr_e5m2: float = 20.0
    underflow: float = 0.01
    underflow_wgrad: float = 0.20
    cosine: float = 0.95
    back: float = 0.5
    patience: int = 3
    budget: float = 0.1
    time: float | None = None


class Metric(NamedTuple):
    """A metric of a GEMM: sqnr, underflow, saturation, nan_codes or cosine, of an operand (x, w, dy) or of dw.
    ``format``: the format of the codes."""

    name: str
    of: str
    value: float
    format: str = "e4m3"

    def __str__(self) -> str:
        return f"{self.name} of {self.of}"


class GemmCost(NamedTuple):
    """Cost of a GEMM in high precision: its share of the linear FLOPs of a step, and the additional time as a share of
    the measured time, or None if not measured."""

    flops: float
    time: float | None = None


@dataclass(frozen=True)
class GemmState:
    """The position of a GEMM on its ladder.

    ``rung``: 0 is the recipe of the plan; ``word``: the recipe of the rung, or "", which identifies it on the ladders
    of other steps. ``healthy``: consecutive checks in which the rung below was good enough; ``refused``: high precision
    was refused because the budget is spent. ``step`` and ``why``: its last move.
    """

    rung: int = 0
    word: str = ""
    healthy: int = 0
    refused: bool = False
    step: int = 0
    why: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Decision:
    """A move or a refusal. ``kind`` is leaves, returns, yields (gives its budget to a worse GEMM) or refused.
    ``metric`` caused it, with ``value`` and ``threshold``."""

    step: int
    layer: str
    gemm: str
    before: str
    after: str
    kind: str
    metric: str
    value: float
    threshold: float

    def to_json(self) -> dict[str, Any]:
        """Return the line of adapt.jsonl; a value that is not finite is None."""
        value = self.value if math.isfinite(self.value) else None
        return {
            "step": self.step, "layer": self.layer, "gemm": self.gemm, "from": self.before, "to": self.after,
            "kind": self.kind, "figure": self.metric, "value": value, "threshold": self.threshold,
        }  # fmt: skip

    @property
    def cause(self) -> str:
        """Text of the metric and its threshold."""
        name = self.metric.partition(" ")[0]
        bound = "at least" if name in ("sqnr", "cosine") else "at most"
        return f"{self.metric} {_format_value(name, self.value)}, {bound} {_format_value(name, self.threshold)}"

    def __str__(self) -> str:
        prefixes = {"yields": "gives its budget to a worse GEMM; ", "refused": "refused, the budget is spent; "}
        return f"{self.layer} {self.gemm}: {self.before} to {self.after}: {prefixes.get(self.kind, '')}{self.cause}"


def _format_value(name: str, value: float) -> str:
    if name == "sqnr":
        return f"{value:.1f} dB"
    return f"{100 * value:.3g} %" if name in ("underflow", "saturation") else f"{value:.4g}"


class _MetricError(NamedTuple):
    error: float
    metric: Metric
    threshold: float


class _Holder(NamedTuple):
    """A GEMM that a move put into high precision: its error on the rung below, and its index in the model."""

    error: float
    number: int
    key: Key


def _cost_shares(work: GemmCost) -> tuple[float, float]:
    return work.flops, work.time or 0.0


def _find_worst(metrics: Sequence[Metric], gemm: str, limits: Limits) -> _MetricError | None:
    """Return the metric with the largest error, or None if there are no metrics."""
    errors = [_MetricError(*_relative_error(metric, gemm, limits)) for metric in metrics]
    return max(errors, key=lambda item: item.error, default=None)


def _relative_error(metric: Metric, gemm: str, limits: Limits) -> tuple[float, Metric, float]:
    value, error = metric.value, math.inf
    if metric.name == "sqnr":
        allowed = limits.sqnr_e5m2 if metric.format == "e5m2" else limits.sqnr_e4m3
        error = error if math.isnan(value) else 10 ** min((allowed - value) / 10, 300)
    elif metric.name == "underflow":
        allowed = limits.underflow_wgrad if gemm == "wgrad" else limits.underflow
        error = value / allowed
    elif metric.name == "cosine":
        allowed = limits.cosine
        error = (1 - value) / (1 - allowed)
    else:
        allowed = 0.0
        error = error if value else 0.0
    return (math.inf if math.isnan(error) else error), metric, allowed


def decide(
    step: int,
    states: Mapping[Key, GemmState],
    measured: Mapping[Key, Mapping[int, Sequence[Metric]]],
    ladders: Mapping[Key, Sequence[str]],
    work: Mapping[Key, GemmCost],
    limits: Limits,
) -> tuple[dict[Key, GemmState], list[Decision]]:
    """Return (states of GEMMs from the next step on, decisions). ``measured``: metrics of each GEMM by rung, for its
    own rung, unless that is high precision, and for the one below. GEMMs without metrics do not move."""
    current = {key: place_on_ladder(state, ladders[key]) if key in ladders else state for key, state in states.items()}
    check = _Check(step, current, measured, ladders, work, limits)
    unhealthy = [key for key in ladders if measured.get(key) and check.needs_finer_recipe(key)]
    unhealthy.sort(key=lambda key: -check.error(key))  # stable: equal errors in the order of the model
    check.compute_budget_use()
    for key in unhealthy:
        check.move_up(key)
    return {key: state for key, state in check.states.items() if state != GemmState()}, check.decisions


def place_on_ladder(state: GemmState, ladder: Sequence[str]) -> GemmState:
    """Return the state with the rung of its word on ``ladder``, or rung 0 if the ladder does not have it."""
    return replace(state, rung=ladder.index(state.word) if state.word in ladder else 0)


@dataclass
class _Check:
    """The evaluation of one check; ``states`` are updated in place."""

    step: int
    states: dict[Key, GemmState]
    measured: Mapping[Key, Mapping[int, Sequence[Metric]]]
    ladders: Mapping[Key, Sequence[str]]
    work: Mapping[Key, GemmCost]
    limits: Limits

    def __post_init__(self) -> None:
        self.decisions: list[Decision] = []
        self._worst: dict[tuple[Key, int], _MetricError | None] = {}
        self.holders: list[_Holder] = []
        self.used = 0.0, 0.0  # shares of FLOPs and of time

    def state(self, key: Key) -> GemmState:
        return self.states.get(key, GemmState())

    def worst(self, key: Key, rung: int) -> _MetricError | None:
        if (key, rung) not in self._worst:
            self._worst[key, rung] = _find_worst(self.measured.get(key, {}).get(rung, ()), key[1], self.limits)
        return self._worst[key, rung]

    def error(self, key: Key) -> float:
        worst = self.worst(key, self.state(key).rung)
        return 0.0 if worst is None else worst.error

    def compute_budget_use(self) -> None:
        """Collect the GEMMs that moves put into high precision, smallest error first, and their total cost."""
        high = [(number, key) for number, key in enumerate(self.ladders) if self.is_high(key)]
        below = [(self.worst(key, self.state(key).rung - 1), number, key) for number, key in high]
        self.holders = sorted(_Holder(item.error, number, key) for item, number, key in below if item is not None)
        works = [_cost_shares(self.work[key]) for _, key in high]
        self.used = sum(flops for flops, _ in works), sum(time for _, time in works)

    def needs_finer_recipe(self, key: Key) -> bool:
        """Return True if a GEMM must move up. Otherwise update its count of healthy checks, and move it down if due."""
        state = self.state(key)
        own, below = self.worst(key, state.rung), self.worst(key, state.rung - 1)
        if own is not None and own.error > 1 and state.rung + 1 < len(self.ladders[key]):
            return True
        refused = state.refused and own is not None and own.error > self.limits.back
        healthy = state.healthy + 1 if below is not None and below.error <= self.limits.back else 0
        self.states[key] = replace(state, healthy=healthy, refused=refused)
        if below is not None and healthy >= self.limits.patience:
            self.move(key, state.rung - 1, "returns", below)
        return False

    def move_up(self, key: Key) -> None:
        """Move a GEMM up one rung; into high precision only within the budget, or in place of a better GEMM."""
        state = self.state(key)
        worst = self.worst(key, state.rung)
        assert worst is not None
        if self.ladders[key][state.rung + 1] != HIGH or self.free_budget(key, worst.error):
            self.move(key, state.rung + 1, "leaves", worst)
            return
        self.states[key] = replace(state, healthy=0, refused=True)
        if not state.refused:
            self.decisions.append(self.make_decision(key, state.rung + 1, "refused", worst))

    def free_budget(self, key: Key, error: float) -> bool:
        """Return True if a GEMM fits into the budget, after removing GEMMs with much smaller errors if necessary."""
        flops, time = (sum(part) for part in zip(self.used, _cost_shares(self.work[key]), strict=True))
        removed: list[_Holder] = []
        for holder in self.holders:
            if self.fits(flops, time) or holder.error >= self.limits.back * error:
                break
            removed.append(holder)
            flops, time = (
                had - part for had, part in zip((flops, time), _cost_shares(self.work[holder.key]), strict=True)
            )
        if not self.fits(flops, time):
            return False
        self.used, self.holders = (flops, time), self.holders[len(removed) :]
        for _, _, other in removed:
            below = self.worst(other, self.state(other).rung - 1)
            assert below is not None
            self.move(other, self.state(other).rung - 1, "yields", below)
            self.states[other] = replace(self.state(other), refused=True)
        return True

    def is_high(self, key: Key) -> bool:
        """Return True if a move put the GEMM into high precision."""
        return self.ladders[key][self.state(key).rung] == HIGH

    def fits(self, flops: float, time: float) -> bool:
        """Return True if these shares are within the budget."""
        tolerance = 1e-9  # rounding of sums
        return flops <= self.limits.budget + tolerance and (
            self.limits.time is None or time <= self.limits.time + tolerance
        )

    def move(self, key: Key, rung: int, kind: str, worst: _MetricError) -> None:
        decision = self.make_decision(key, rung, kind, worst)
        self.decisions.append(decision)
        self.states[key] = GemmState(rung, decision.after, step=self.step, why=decision.cause) if rung else GemmState()

    def make_decision(self, key: Key, rung: int, kind: str, worst: _MetricError) -> Decision:
        ladder = self.ladders[key]
        metric, value = str(worst.metric), worst.metric.value
        words = ladder[self.state(key).rung], ladder[rung]
        return Decision(self.step, *key, *words, kind, metric, value, worst.threshold)
