"""The figures of GEMMs in recipes that they run in, or might: taken from their operands in high precision.

A judge is attached to one training step. Every GEMM shows it what it multiplies (:mod:`octavo.fp8.observe.recorder`),
also one in high precision, and the judge casts those operands by each recipe in question. The step itself computes what
it computes without; a judge costs the time of these casts, and the memory of inputs that are kept in high precision.
Weight gradients are held against dyT x in fp32.
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
# What is added up of one GEMM in one recipe: of either operand the SQNR, how many were finite, underflow and
# saturation; then calls, NaN codes, cosines and their number.
_OPERAND, _SUMS = 4, 12


class RecipeTrials:
    """``wanted``: of each GEMM the casts to try, by rung. Several calls (micro-batches, experts) are averaged."""

    def __init__(self, wanted: Mapping[Key, Mapping[int, Gemm]]) -> None:
        self.wanted = wanted
        self._sums: dict[tuple[Key, int], list[float]] = defaultdict(lambda: [0.0] * _SUMS)

    @contextmanager
    def attach(self) -> Iterator[RecipeTrials]:
        """Judge what runs inside, a forward and its backward."""
        with recorder.attach(observer=self):
            yield self

    def on_product(self, layer: str, gemm: str, a: Tensor, b: Tensor) -> None:
        exact: Tensor | None = None
        for rung, casts in self.wanted.get((layer, gemm), {}).items():
            sums = self._sums[(layer, gemm), rung]
            operands = quantize(a, casts.a), quantize(b, casts.b)
            for place, (x, q) in enumerate(zip((a, b), operands, strict=True)):
                figures = metrics.operand_metrics(x, q)
                if math.isfinite(figures.sqnr):
                    sums[_OPERAND * place] += figures.sqnr
                    sums[_OPERAND * place + 1] += 1
                sums[_OPERAND * place + 2] += figures.underflow
                sums[_OPERAND * place + 3] += figures.saturation
                sums[9] += figures.nan_codes
            sums[8] += 1
            if gemm == "wgrad":
                exact = _wgrad_fp32(a, b) if exact is None else exact
                cosine = metrics.cosine(_wgrad_fp32(*map(dequantize, operands)), exact)
                if math.isfinite(cosine):
                    sums[10] += cosine
                    sums[11] += 1

    def figures(self, summed: Callable[[Tensor], Tensor]) -> dict[Key, dict[int, list[Metric]]]:
        """What was found of each GEMM that ran on any rank, by rung. ``summed`` adds a tensor up over all ranks, which
        ask in one order: a collective."""
        tried = [(key, rung) for key, rungs in self.wanted.items() for rung in rungs]
        if not tried:
            return {}
        table = summed(torch.tensor([self._sums[one] for one in tried], dtype=torch.float64))
        out: dict[Key, dict[int, list[Metric]]] = defaultdict(dict)
        for (key, rung), sums in zip(tried, table.tolist(), strict=True):
            if sums[8]:
                out[key][rung] = _mean_metrics(key[1], self.wanted[key][rung], sums)
        return dict(out)


def _wgrad_fp32(dy: Tensor, x: Tensor) -> Tensor:
    return dy.float().t() @ x.float()


def _mean_metrics(gemm: str, casts: Gemm, sums: list[float]) -> list[Metric]:
    calls, figures = sums[8], []
    for place, (of, spec) in enumerate(zip(OPERANDS[gemm], (casts.a, casts.b), strict=True)):
        sqnr, finite, underflow, saturation = sums[_OPERAND * place : _OPERAND * (place + 1)]
        # Exact operands, and operands of zeros, have no noise to measure; NaN codes count for themselves.
        figures.append(Metric("sqnr", of, sqnr / finite if finite else math.inf, spec.format))
        figures.append(Metric("underflow", of, underflow / calls, spec.format))
        figures.append(Metric("saturation", of, saturation / calls, spec.format))
    figures.append(Metric("nan_codes", "its operands", sums[9]))
    if sums[11]:
        figures.append(Metric("cosine", "dw", sums[10] / sums[11]))
    return figures
