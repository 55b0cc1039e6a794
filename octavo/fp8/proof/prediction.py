"""Predict the time of a step and the gain over high precision from a measured plan.

Linear layers are measured. Other matrix products (lm_head, patch embedding, and attention if its FLOPs are given) are
estimated from their FLOPs at the measured rate of high precision. Norms, activations, optimizer, data and communication
are not included, so a real step takes longer and gains less than predicted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from octavo.fp8.planning.plan import Plan
from octavo.fp8.planning.rows import Times

WORTH = 0.03  # gain below which a plan warns
_UNMEASURED = " in FP8"  # GEMMs of a head are assumed to be as fast as in high precision
_LARGE = 0.3  # minimum share of the step for a cause


@dataclass(frozen=True)
class Prediction:
    """Seconds of one optimizer step. ``linear_high`` and ``linear_planned``: measured layers in high precision and as
    planned; ``estimated``: other products, equal in both. ``warnings``: reasons if the gain is small."""

    linear_high: float
    linear_planned: float
    estimated: Mapping[str, float]
    micro_steps: int
    warnings: tuple[str, ...] = ()

    @property
    def high(self) -> float:
        return self.linear_high + sum(self.estimated.values())

    @property
    def planned(self) -> float:
        return self.linear_planned + sum(self.estimated.values())

    @property
    def linear_gain(self) -> float:
        """Gain of the linear layers alone: 0.5 means 1.5 times as fast."""
        return self.linear_high / self.linear_planned - 1 if self.linear_planned else 0.0

    @property
    def gain(self) -> float:
        """Gain of all counted parts of the step."""
        return self.high / self.planned - 1 if self.planned else 0.0

    def sentences(self) -> list[str]:
        """Return the prediction as text: times, what is not counted, and warnings."""
        what = ", ".join(f"{name} {_ms(seconds)}" for name, seconds in self.estimated.items())
        rest = f" Estimated by FLOPs at the measured BF16 rate: {what}." if what else ""
        return [
            f"predicted linear layers: {_ms(self.linear_high)} per step in BF16, {_ms(self.linear_planned)} as planned "
            f"({_percent(self.linear_gain)}), measured",
            f"predicted step: {_ms(self.high)} in BF16, {_ms(self.planned)} as planned ({_percent(self.gain)}).{rest} "
            "Norms, activations, optimizer, data and communication are not counted: the true gain is smaller",
            *(f"warning: {w}" for w in self.warnings),
        ]

    def to_json(self) -> dict[str, Any]:
        return {
            "linear_bf16_ms": 1e3 * self.linear_high,
            "linear_planned_ms": 1e3 * self.linear_planned,
            "linear_gain": self.linear_gain,
            "estimated_ms": {name: 1e3 * seconds for name, seconds in self.estimated.items()},
            "step_bf16_ms": 1e3 * self.high,
            "step_planned_ms": 1e3 * self.planned,
            "gain": self.gain,
            "micro_steps": self.micro_steps,
            "warnings": list(self.warnings),
        }


def predict(plan: Plan, more_flops: Mapping[str, float] | None = None) -> Prediction | None:
    """Predict a step of a measured plan, or return None if nothing was measured.

    ``more_flops``: FLOPs of other products in one micro-step (forward and backward) by name, such as attention.
    """
    times: dict[str, Times] = {}  # by module: both rows of experts have the time of the whole module
    flops = 0.0
    others: dict[str, float] = {}
    for row in plan.rows:
        if row.times is not None:
            times[row.row.module] = row.times
            flops += row.flops
        elif row.flops:
            name = row.kind if row.kind != "linear" else "other linear layers"
            name += _UNMEASURED if row.fp8 and row.kind == "lm_head" else ""
            others[name] = others.get(name, 0.0) + row.flops
    high = sum(t.high for t in times.values())
    if not times or not high or not flops:
        return None
    rate = flops / high
    estimated = {n: plan.micro_steps * f / rate for n, f in {**others, **(more_flops or {})}.items() if f}
    prediction = Prediction(
        plan.micro_steps * high, plan.micro_steps * sum(t.planned for t in times.values()), estimated, plan.micro_steps
    )
    if prediction.gain >= WORTH:
        return prediction
    causes = _explain_small_gain(prediction, times, plan)
    warning = f"FP8 is predicted to gain {_percent(prediction.gain)}, less than {WORTH:.0%}: {'; '.join(causes)}"
    return Prediction(prediction.linear_high, prediction.linear_planned, estimated, plan.micro_steps, (warning,))


def _explain_small_gain(prediction: Prediction, times: Mapping[str, Times], plan: Plan) -> list[str]:
    total = sum(t.high for t in times.values())
    lost = [t for t in times.values() if t.planned >= t.high]
    host = [t for t in lost if t.best is not None and _is_host_bound(t, plan.micro_steps)]
    small = sum(t.high for t in lost if t not in host) / total
    causes = []
    if small >= _LARGE:
        sizes = max((t.case for t in lost if t not in host), key=lambda c: c.m * c.n * c.k)
        causes.append(
            f"small GEMMs: layers with {small:.0%} of the linear time are no faster in FP8 (the largest has "
            f"M={sizes.m} N={sizes.n} K={sizes.k}); more tokens a micro-batch help"
        )
    launches = sum(t.high for t in host) / total
    if launches >= _LARGE:
        causes.append(
            f"no compile: in layers with {launches:.0%} of the linear time the host takes longer to launch FP8's "
            "kernels than they run; more tokens a micro-batch help"
        )
    for name, seconds in prediction.estimated.items():
        if prediction.high and seconds / prediction.high >= _LARGE:
            why = "is not measured" if name.endswith(_UNMEASURED) else "stays in high precision"
            causes.append(f"{name} is about {seconds / prediction.high:.0%} of the step and {why}")
    return causes or ["the layers that win are a small part of the step"]


def _is_host_bound(times: Times, micro_steps: int) -> bool:
    """Return True if the best FP8 candidate is slower only because of its launches."""
    assert times.best is not None
    entry = times.measured.entries[times.best]
    return entry.seconds + entry.weights / micro_steps < times.high


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"


def _percent(gain: float) -> str:
    return f"{100 * gain:+.1f} %"
