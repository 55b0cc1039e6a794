"""Decide which GEMM leaves its recipe and which comes back, from the measured figures. Needs no torch.

Every GEMM is on a ladder: the recipe of the plan, finer ones, high precision. At a check each figure becomes an
*error*, what is wrong with it over what is allowed, so that 1 is the threshold whatever the figure::

    SQNR        10 ^ ((threshold - SQNR) / 10)      the power of the noise
    underflow   share / threshold
    cosine      (1 - cosine) / (1 - threshold)      of a weight gradient, to that in high precision
    saturated values, NaN codes                     infinite if there is any

The largest error of a GEMM counts. Above 1 on its rung, it takes a step up. It comes back a step when the recipe
below, which is tried on the same operands, has had an error of at most ``back`` in ``patience`` checks in a row: the
room between ``back`` and 1 is what a figure may hover in without a move.

High precision has a budget. The worst get it first; one that is worse than a holder by the same room takes its place.
What is left over is refused, which is said once.
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
    """What is allowed: the thresholds of the trust table (docs/numerics.md). ``budget``: largest share of the linear
    FLOPs of a step in high precision by moves; ``time``: largest share of the measured layers' time that moves into
    high precision may cost (None: any)."""

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
    """A figure of a GEMM: sqnr, underflow, saturation, nan_codes or cosine, of an operand (x, w, dy) or of dw;
    ``format``: the format of its codes."""

    name: str
    of: str
    value: float
    format: str = "e4m3"

    def __str__(self) -> str:
        return f"{self.name} of {self.of}"


class GemmCost(NamedTuple):
    """Shares of a GEMM: of a step's linear FLOPs, and of the measured time that it costs to have it in high precision
    (None: not measured)."""

    flops: float
    time: float | None = None


@dataclass(frozen=True)
class GemmState:
    """The place of a GEMM: ``rung`` 0 is the recipe of the plan, ``word`` what it moved to ("": nothing), by which it
    is found again on the ladder of other steps. ``healthy``: checks in a row in which the rung below would do;
    ``refused``: it wanted high precision and the budget was spent. ``step`` and ``why``: its last move."""

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
    """A move, or one that was refused: ``kind`` is leaves, returns, yields (its budget to one that is worse) or
    refused. ``figure`` caused it, with ``value`` and ``threshold``."""

    step: int
    layer: str
    gemm: str
    before: str
    after: str
    kind: str
    figure: str
    value: float
    threshold: float

    def to_json(self) -> dict[str, Any]:
        """As adapt.jsonl has it; a value that is not finite is None."""
        value = self.value if math.isfinite(self.value) else None
        return {
            "step": self.step, "layer": self.layer, "gemm": self.gemm, "from": self.before, "to": self.after,
            "kind": self.kind, "figure": self.figure, "value": value, "threshold": self.threshold,
        }  # fmt: skip

    @property
    def cause(self) -> str:
        """The figure in words."""
        name = self.figure.partition(" ")[0]
        most = "at least" if name in ("sqnr", "cosine") else "at most"
        return f"{self.figure} {_format_value(name, self.value)}, {most} {_format_value(name, self.threshold)}"

    def __str__(self) -> str:
        prefixes = {"yields": "gives its budget to one that is worse; ", "refused": "wanted, the budget is spent; "}
        return f"{self.layer} {self.gemm}: {self.before} to {self.after}: {prefixes.get(self.kind, '')}{self.cause}"


def _format_value(name: str, value: float) -> str:
    if name == "sqnr":
        return f"{value:.1f} dB"
    return f"{100 * value:.3g} %" if name in ("underflow", "saturation") else f"{value:.4g}"


class _Worst(NamedTuple):
    error: float
    figure: Metric
    threshold: float


class _Holder(NamedTuple):
    """A GEMM in high precision by a move: the error of the rung below, its number in the model."""

    error: float
    number: int
    key: Key


def _cost_shares(work: GemmCost) -> tuple[float, float]:
    return work.flops, work.time or 0.0


def _find_worst(figures: Sequence[Metric], gemm: str, limits: Limits) -> _Worst | None:
    """The figure with the largest error; None of nothing."""
    errors = [_Worst(*_relative_error(figure, gemm, limits)) for figure in figures]
    return max(errors, key=lambda one: one.error, default=None)


def _relative_error(figure: Metric, gemm: str, limits: Limits) -> tuple[float, Metric, float]:
    value, error = figure.value, math.inf
    if figure.name == "sqnr":
        allowed = limits.sqnr_e5m2 if figure.format == "e5m2" else limits.sqnr_e4m3
        error = error if math.isnan(value) else 10 ** min((allowed - value) / 10, 300)
    elif figure.name == "underflow":
        allowed = limits.underflow_wgrad if gemm == "wgrad" else limits.underflow
        error = value / allowed
    elif figure.name == "cosine":
        allowed = limits.cosine
        error = (1 - value) / (1 - allowed)
    else:
        allowed = 0.0
        error = error if value else 0.0
    return (math.inf if math.isnan(error) else error), figure, allowed


def decide(
    step: int,
    places: Mapping[Key, GemmState],
    read: Mapping[Key, Mapping[int, Sequence[Metric]]],
    ladders: Mapping[Key, Sequence[str]],
    work: Mapping[Key, GemmCost],
    limits: Limits,
) -> tuple[dict[Key, GemmState], list[Decision]]:
    """(places of GEMMs from the next step on, decisions). ``read``: figures of a GEMM by rung, of its own rung, unless
    that is high precision, and of the one below. GEMMs without figures do not move."""
    now = {key: place_on_ladder(place, ladders[key]) if key in ladders else place for key, place in places.items()}
    check = _Check(step, now, read, ladders, work, limits)
    climbing = [key for key in ladders if read.get(key) and check.look(key)]
    climbing.sort(key=lambda key: -check.error(key))  # stable: equal errors in the order of the model
    check.count()
    for key in climbing:
        check.climb(key)
    return {key: place for key, place in check.places.items() if place != GemmState()}, check.decisions


def place_on_ladder(place: GemmState, ladder: Sequence[str]) -> GemmState:
    """A place on a ladder, which rules may make another one: on the rung of its word, or the first without such."""
    return replace(place, rung=ladder.index(place.word) if place.word in ladder else 0)


@dataclass
class _Check:
    """One check under way: ``places`` as they become."""

    step: int
    places: dict[Key, GemmState]
    read: Mapping[Key, Mapping[int, Sequence[Metric]]]
    ladders: Mapping[Key, Sequence[str]]
    work: Mapping[Key, GemmCost]
    limits: Limits

    def __post_init__(self) -> None:
        self.decisions: list[Decision] = []
        self._worst: dict[tuple[Key, int], _Worst | None] = {}
        self.holders: list[_Holder] = []
        self.used = 0.0, 0.0  # shares of FLOPs and of time

    def at(self, key: Key) -> GemmState:
        return self.places.get(key, GemmState())

    def worst(self, key: Key, rung: int) -> _Worst | None:
        if (key, rung) not in self._worst:
            self._worst[key, rung] = _find_worst(self.read.get(key, {}).get(rung, ()), key[1], self.limits)
        return self._worst[key, rung]

    def error(self, key: Key) -> float:
        worst = self.worst(key, self.at(key).rung)
        return 0.0 if worst is None else worst.error

    def count(self) -> None:
        """What is in high precision by moves, those that need it least first: what makes room goes from the front."""
        high = [(number, key) for number, key in enumerate(self.ladders) if self.is_high(key)]
        below = [(self.worst(key, self.at(key).rung - 1), number, key) for number, key in high]
        self.holders = sorted(_Holder(one.error, number, key) for one, number, key in below if one is not None)
        works = [_cost_shares(self.work[key]) for _, key in high]
        self.used = sum(flops for flops, _ in works), sum(time for _, time in works)

    def look(self, key: Key) -> bool:
        """Whether a GEMM wants a step up; one that may come back does, or has counted that it might."""
        place = self.at(key)
        here, below = self.worst(key, place.rung), self.worst(key, place.rung - 1)
        if here is not None and here.error > 1 and place.rung + 1 < len(self.ladders[key]):
            return True
        refused = place.refused and here is not None and here.error > self.limits.back
        healthy = place.healthy + 1 if below is not None and below.error <= self.limits.back else 0
        self.places[key] = replace(place, healthy=healthy, refused=refused)
        if below is not None and healthy >= self.limits.patience:
            self.move(key, place.rung - 1, "returns", below)
        return False

    def climb(self, key: Key) -> None:
        """A step up. Into high precision as far as there is budget, or where a holder is so much better off."""
        place = self.at(key)
        worst = self.worst(key, place.rung)
        assert worst is not None
        if self.ladders[key][place.rung + 1] != HIGH or self.make_room(key, worst.error):
            self.move(key, place.rung + 1, "leaves", worst)
            return
        self.places[key] = replace(place, healthy=0, refused=True)
        if not place.refused:
            self.decisions.append(self.decision(key, place.rung + 1, "refused", worst))

    def make_room(self, key: Key, error: float) -> bool:
        """Whether a GEMM fits into the budget, maybe in place of those that need it least."""
        flops, time = (sum(part) for part in zip(self.used, _cost_shares(self.work[key]), strict=True))
        gone: list[_Holder] = []
        for holder in self.holders:
            if self.fits(flops, time) or holder.error >= self.limits.back * error:
                break
            gone.append(holder)
            flops, time = (
                had - part for had, part in zip((flops, time), _cost_shares(self.work[holder.key]), strict=True)
            )
        if not self.fits(flops, time):
            return False
        self.used, self.holders = (flops, time), self.holders[len(gone) :]
        for _, _, other in gone:
            below = self.worst(other, self.at(other).rung - 1)
            assert below is not None
            self.move(other, self.at(other).rung - 1, "yields", below)
            self.places[other] = replace(self.at(other), refused=True)
        return True

    def is_high(self, key: Key) -> bool:
        """Whether a move has it in high precision."""
        return self.ladders[key][self.at(key).rung] == HIGH

    def fits(self, flops: float, time: float) -> bool:
        """Whether the budget holds so much in high precision."""
        room = 1e-9  # of sums of shares
        return flops <= self.limits.budget + room and (self.limits.time is None or time <= self.limits.time + room)

    def move(self, key: Key, rung: int, kind: str, worst: _Worst) -> None:
        decision = self.decision(key, rung, kind, worst)
        self.decisions.append(decision)
        self.places[key] = GemmState(rung, decision.after, step=self.step, why=decision.cause) if rung else GemmState()

    def decision(self, key: Key, rung: int, kind: str, worst: _Worst) -> Decision:
        ladder = self.ladders[key]
        figure, value = str(worst.figure), worst.figure.value
        words = ladder[self.at(key).rung], ladder[rung]
        return Decision(self.step, *key, *words, kind, figure, value, worst.threshold)
