"""Measure GEMMs in their own recipe and in alternatives, from their high-precision operands.

Trials are attached to one training step. Each GEMM reports its operands (:mod:`octavo.fp8.observe.recorder`), including
GEMMs in high precision, and the operands are cast with each candidate recipe. The results of the step do not change;
trials cost the time of these casts, and memory for inputs in high precision. Weight gradients are compared with dyT x
in fp32.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from octavo.fp8 import metrics
from octavo.fp8.adapting.deciding import Key, Metric
from octavo.fp8.arithmetic.cast import dequantize, quantize
from octavo.fp8.arithmetic.recipe import Gemm
from octavo.fp8.observe import recorder

OPERANDS = {"fwd": ("x", "w"), "dgrad": ("dy", "w"), "wgrad": ("dy", "x")}
# Sums for one GEMM in one recipe: for each operand the SQNR, the number of finite SQNRs, underflow and saturation; then
# calls, NaN codes, cosines and their number.
_OPERAND, _SUMS = 4, 12


class RecipeTrials:
    """Tries casts on the operands of a step. ``casts``: casts of each GEMM by rung. Calls of a GEMM are averaged."""

    def __init__(self, casts: Mapping[Key, Mapping[int, Gemm]]) -> None:
        self.casts = casts
        self._sums: dict[tuple[Key, int], list[float]] = defaultdict(lambda: [0.0] * _SUMS)

    @contextmanager
    def attach(self) -> Iterator[RecipeTrials]:
        """Measure a forward and its backward inside the context."""
        with recorder.attach(observer=self):
            yield self

    def on_product(self, layer: str, gemm: str, a: Tensor, b: Tensor) -> None:
        exact: Tensor | None = None
        for rung, casts in self.casts.get((layer, gemm), {}).items():
            sums = self._sums[(layer, gemm), rung]
            operands = quantize(a, casts.a), quantize(b, casts.b)
            for i, (x, q) in enumerate(zip((a, b), operands, strict=True)):
                values = metrics.operand_metrics(x, q)
                if math.isfinite(values.sqnr):
                    sums[_OPERAND * i] += values.sqnr
                    sums[_OPERAND * i + 1] += 1
                sums[_OPERAND * i + 2] += values.underflow
                sums[_OPERAND * i + 3] += values.saturation
                sums[9] += values.nan_codes
            sums[8] += 1
            if gemm == "wgrad":
                exact = _wgrad_fp32(a, b) if exact is None else exact
                cosine = metrics.cosine(_wgrad_fp32(*map(dequantize, operands)), exact)
                if math.isfinite(cosine):
                    sums[10] += cosine
                    sums[11] += 1

    def metrics(self, reduce_sum: Callable[[Tensor], Tensor]) -> dict[Key, dict[int, list[Metric]]]:
        """Return the metrics of each GEMM that ran on any rank, by rung. ``reduce_sum`` sums a tensor over all ranks,
        so this is a collective call."""
        tried = [(key, rung) for key, rungs in self.casts.items() for rung in rungs]
        if not tried:
            return {}
        table = reduce_sum(torch.tensor([self._sums[entry] for entry in tried], dtype=torch.float64))
        out: dict[Key, dict[int, list[Metric]]] = defaultdict(dict)
        for (key, rung), sums in zip(tried, table.tolist(), strict=True):
            if sums[8]:
                out[key][rung] = _mean_metrics(key[1], self.casts[key][rung], sums)
        return dict(out)


def _wgrad_fp32(dy: Tensor, x: Tensor) -> Tensor:
    return dy.float().t() @ x.float()


def _mean_metrics(gemm: str, casts: Gemm, sums: list[float]) -> list[Metric]:
    calls, values = sums[8], []
    for i, (of, spec) in enumerate(zip(OPERANDS[gemm], (casts.a, casts.b), strict=True)):
        sqnr, finite, underflow, saturation = sums[_OPERAND * i : _OPERAND * (i + 1)]
        # Exact operands and operands of zeros have no noise; NaN codes are reported separately.
        values.append(Metric("sqnr", of, sqnr / finite if finite else math.inf, spec.format))
        values.append(Metric("underflow", of, underflow / calls, spec.format))
        values.append(Metric("saturation", of, saturation / calls, spec.format))
    values.append(Metric("nan_codes", "its operands", sums[9]))
    if sums[11]:
        values.append(Metric("cosine", "dw", sums[10] / sums[11]))
    return values
