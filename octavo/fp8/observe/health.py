"""The error of each layer's FP8 operands, taken during ordinary training steps.

Put ``with health() as h:`` around a forward *and* its backward. In that step each layer also keeps x in high precision,
to compute the weight gradient again and compare. This costs memory and time, so collect health only every few steps.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from octavo.fp8 import metrics
from octavo.fp8.observe import recorder

ROLES = ("x", "w", "dy", "x_wgrad", "dy_wgrad")
METRICS = ("sqnr", "underflow", "saturation")


class Health:
    """Metrics per layer, averaged over the calls of a step (micro-batches, experts)."""

    def __init__(self) -> None:
        self._metrics: dict[str, dict[str, list[tuple[float, ...]]]] = defaultdict(lambda: defaultdict(list))
        self._cosines: dict[str, list[float]] = defaultdict(list)
        self._nan: Counter[str] = Counter()

    def table(self) -> dict[str, dict[str, Any]]:
        """``{layer: {"x": {"sqnr", "underflow", "saturation"}, "w", "dy", "x_wgrad", "dy_wgrad", "dw_cosine",
        "nan_codes"}}``.

        sqnr is in dB (inf if FP8 represents the operand exactly), underflow and saturation are shares from 0 to 1.
        ``x``, ``w`` and ``dy`` are the operands of fwd and dgrad, ``*_wgrad`` the operands of wgrad. A role is absent
        if its GEMM did not run in FP8, and ``dw_cosine`` is absent if no weight gradient was computed.
        """
        out: dict[str, dict[str, Any]] = {}
        for layer, roles in self._metrics.items():
            row: dict[str, Any] = {
                role: {f: _finite_mean(v[i] for v in roles[role]) for i, f in enumerate(METRICS)}
                for role in ROLES
                if role in roles
            }
            if self._cosines[layer]:
                row["dw_cosine"] = statistics.fmean(self._cosines[layer])
            row["nan_codes"] = self._nan[layer]
            out[layer] = row
        return out

    def summary(self) -> dict[str, float]:
        """Return the worst value and the median over the layers as finite numbers: ``x_sqnr_min``, ``x_sqnr_median``,
        ``x_underflow_max``, ``x_underflow_median``, ``x_saturation_max`` (likewise for the other roles),
        ``dw_cosine_min``, ``dw_cosine_median``, and the sum ``nan_codes``. Metrics that no layer has are absent."""
        table = self.table()
        out: dict[str, float] = {}
        for role in ROLES:
            for metric in METRICS:
                values = [row[role][metric] for row in table.values() if role in row]
                values = [v for v in values if math.isfinite(v)]
                if not values:
                    continue
                worst, word = (min(values), "min") if metric == "sqnr" else (max(values), "max")
                out[f"{role}_{metric}_{word}"] = worst
                if metric != "saturation":
                    out[f"{role}_{metric}_median"] = statistics.median(values)
        cosines = [row["dw_cosine"] for row in table.values() if "dw_cosine" in row]
        if cosines:
            out["dw_cosine_min"], out["dw_cosine_median"] = min(cosines), statistics.median(cosines)
        out["nan_codes"] = float(sum(self._nan.values()))
        return out

    # Called by the recorder: see `recorder.Watcher`.

    def on_operand(self, layer: str, role: str, values: metrics.OperandMetrics) -> None:
        self._nan[layer] += values.nan_codes
        self._metrics[layer][role].append(values[: len(METRICS)])

    def on_gradient(self, layer: str, cosine: float) -> None:
        if math.isfinite(cosine):
            self._cosines[layer].append(cosine)


@contextmanager
def health() -> Iterator[Health]:
    """Collect health metrics from forwards and backwards; both must run inside the context."""
    collector = Health()
    with recorder.attach(watcher=collector):
        yield collector


def _finite_mean(values: Iterator[float]) -> float:
    """Return the mean of the finite values, or the first value if none is finite."""
    all_values = list(values)
    finite = [v for v in all_values if math.isfinite(v)]
    return statistics.fmean(finite) if finite else all_values[0]
