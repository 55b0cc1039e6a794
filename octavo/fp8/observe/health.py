"""The error of each layer's FP8 operands, taken during ordinary training steps.

``with health() as h:`` around a forward *and* its backward. For that step every layer also keeps x in high precision,
to compute the weight gradient once more and compare: health costs memory and time, so take it every few steps.
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
    """Figures per layer, averaged over the calls of a step (micro-batches, experts)."""

    def __init__(self) -> None:
        self._figures: dict[str, dict[str, list[tuple[float, ...]]]] = defaultdict(lambda: defaultdict(list))
        self._cosines: dict[str, list[float]] = defaultdict(list)
        self._nan: Counter[str] = Counter()

    def table(self) -> dict[str, dict[str, Any]]:
        """``{layer: {"x": {"sqnr", "underflow", "saturation"}, "w", "dy", "x_wgrad", "dy_wgrad", "dw_cosine",
        "nan_codes"}}``.

        sqnr in dB (inf for an operand that FP8 holds exactly), underflow and saturation as shares from 0 to 1.
        ``x``, ``w`` and ``dy`` are the operands of fwd and dgrad, ``*_wgrad`` the operands of wgrad; a role whose GEMM
        did not run in FP8 is absent, and so is ``dw_cosine`` where no weight gradient was computed.
        """
        out: dict[str, dict[str, Any]] = {}
        for layer, roles in self._figures.items():
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
        """Worst and median over the layers, flat and finite: ``x_sqnr_min``, ``x_sqnr_median``, ``x_underflow_max``,
        ``x_underflow_median``, ``x_saturation_max`` (and the other roles), ``dw_cosine_min``, ``dw_cosine_median``,
        ``nan_codes`` (their sum). A figure that no layer has is absent."""
        table = self.table()
        out: dict[str, float] = {}
        for role in ROLES:
            for figure in METRICS:
                values = [row[role][figure] for row in table.values() if role in row]
                values = [v for v in values if math.isfinite(v)]
                if not values:
                    continue
                worst, word = (min(values), "min") if figure == "sqnr" else (max(values), "max")
                out[f"{role}_{figure}_{word}"] = worst
                if figure != "saturation":
                    out[f"{role}_{figure}_median"] = statistics.median(values)
        cosines = [row["dw_cosine"] for row in table.values() if "dw_cosine" in row]
        if cosines:
            out["dw_cosine_min"], out["dw_cosine_median"] = min(cosines), statistics.median(cosines)
        out["nan_codes"] = float(sum(self._nan.values()))
        return out

    # What the recorder calls: see `recorder.Watcher`.

    def on_operand(self, layer: str, role: str, figures: metrics.OperandMetrics) -> None:
        self._nan[layer] += figures.nan_codes
        self._figures[layer][role].append(figures[: len(METRICS)])

    def on_gradient(self, layer: str, cosine: float) -> None:
        if math.isfinite(cosine):
            self._cosines[layer].append(cosine)


@contextmanager
def health() -> Iterator[Health]:
    """Collect health figures from the forwards and backwards that run inside (both must)."""
    collector = Health()
    with recorder.attach(watcher=collector):
        yield collector


def _finite_mean(values: Iterator[float]) -> float:
    all_ = list(values)
    finite = [v for v in all_ if math.isfinite(v)]
    return statistics.fmean(finite) if finite else all_[0]
