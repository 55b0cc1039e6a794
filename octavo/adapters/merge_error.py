"""Measures how much of an adapter survives the rounding of a merged weight.

With W the base's weight, D the adapter's change (s B A; for DoRA the whole change), and V the written value of W + D::

    D' = V - W                     the applied change
    kept   = <D', D> / <D, D>      the adapter's strength in the merged weight: 1 complete, 0 rounded away
    error  = |D' - D| / |D|        the relative error of the applied change
    cosine = <D', D> / |D'| |D|
    changed                        share of elements that differ from the written value of W without the adapter

A small change has one of two effects. If W is on the grid of the codes (it is frozen FP8 itself), an element changes
only where the change exceeds half a step, |d| > |w| / 32 .. / 16; all others stay the same, systematically: ``kept``
falls, and the error never exceeds 1. For changes of 1 % of the weights most of D is lost. If W is between codes (high
precision), every change moves some elements to another code, and a larger change moves more: ``kept`` stays near 1, and
the noise of every cast to FP8 is added, 2 to 3 % of W, several times the change.

So a merge is judged by two figures, in which each weight counts by its relative energy |D|^2 / |W|^2:

- ``kept`` of at least :data:`MIN_KEPT`. Around a trained optimum the loss is quadratic along D: at strength t the
  merged model loses (1 - t)^2 of the gain of training. 0.9 loses 1 %, 0.75 6 %, 0.5 a quarter.
- ``noise_ratio`` of at most 1 ("drowned" in reports): error * sqrt(r / K). For an input along its directions, a D of
  rank r has the output
  |D| / sqrt(r), and the rounding noise, spread over all K directions, has |D' - D| / sqrt(K). Above 1 the noise is
  larger than the adapter's output even for the inputs with the largest output.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo import fp8
from octavo.adapters.merge import AdaptedWeight
from octavo.fp8.weights import is_frozen

MIN_KEPT = 0.9
MAX_NOISE_RATIO = 1.0


@dataclass
class WeightErrors:
    """The sums of one weight over all its written pieces, in fp64.

    fp8    whether it was written as codes
    rank, inputs   r and K
    """

    name: str
    rank: int
    inputs: int
    fp8: bool = False
    base: float = 0.0  # |W|^2
    delta: float = 0.0  # |D|^2
    applied: float = 0.0  # |D'|^2
    inner: float = 0.0  # <D', D>
    difference: float = 0.0  # |D' - D|^2
    moved: int = 0
    elements: int = 0

    @property
    def relative(self) -> float:
        """|D| / |W|"""
        return math.sqrt(self.delta / self.base) if self.base else 0.0

    @property
    def kept(self) -> float:
        return self.inner / self.delta if self.delta else 1.0

    @property
    def error(self) -> float:
        return math.sqrt(self.difference / self.delta) if self.delta else 0.0

    @property
    def cosine(self) -> float:
        return self.inner / math.sqrt(self.applied * self.delta) if self.applied and self.delta else 0.0

    @property
    def changed(self) -> float:
        return self.moved / self.elements if self.elements else 0.0

    @property
    def noise_ratio(self) -> float:
        return self.error * math.sqrt(self.rank / self.inputs)

    def to_json(self) -> dict[str, object]:
        metrics = ("relative", "kept", "error", "cosine", "changed")
        values = {metric: getattr(self, metric) for metric in metrics}
        return {"name": self.name, "fp8": self.fp8, **values, "drowned": self.noise_ratio}


class MergeErrors:
    """Accumulates the sums of each adapted weight from the values that are written, piece by piece."""

    def __init__(self, folds: Mapping[str, AdaptedWeight]) -> None:
        self._folds = folds
        self.weights = {name: WeightErrors(name, fold.rank, fold.shape[1]) for name, fold in folds.items()}
        # A cache of the last matrix, W and D: its pieces are written one after the other.
        self._last: tuple[tuple[str, int | None], Tensor, Tensor] | None = None

    @torch.no_grad()
    def add(self, name: str, slot: int | None, rows: tuple[int, int] | None, value: Tensor | fp8.Quantized) -> None:
        """Add the value that is written for the parameter ``name``; weights without adapters are ignored.

        slot, rows  the expert and its rows: ``value`` is that piece [n, K]. Both None: the whole parameter as the stock
                    model stores it
        """
        fold = self._folds.get(name)
        if fold is None:
            return
        if slot is None and fold.count is not None:
            assert isinstance(value, Tensor)  # codes of experts are written one by one
            for expert in range(fold.count):
                matrix = value[expert]
                self._accumulate(fold, expert, None, matrix.mT if fold.transposed else matrix)
        else:
            self._accumulate(fold, slot, rows, value)

    def _accumulate(
        self, fold: AdaptedWeight, slot: int | None, rows: tuple[int, int] | None, value: Tensor | fp8.Quantized
    ) -> None:
        sums = self.weights[fold.name]
        span = slice(*(rows or (0, fold.shape[0])))
        if self._last is None or self._last[0] != (fold.name, slot):
            base = fold.base_values(slot)
            self._last = (fold.name, slot), base, fold.merged(slot, base) - base
        w, d = self._last[1][span], self._last[2][span]
        if isinstance(value, Tensor):
            v, unchanged = value.float(), w.to(value.dtype).float()
        else:
            sums.fp8 = True
            v = fp8.dequantize(value, torch.float32)
            frozen = is_frozen(fold.weight)
            unchanged = w if frozen else fp8.dequantize(fp8.quantize(w, value.spec), torch.float32)
        w, d, unchanged = w.to(v.device), d.to(v.device), unchanged.to(v.device)
        applied = v - w
        sums.base += _sum_of_squares(w)
        sums.delta += _sum_of_squares(d)
        sums.applied += _sum_of_squares(applied)
        sums.inner += float((applied.double() * d).sum())
        sums.difference += _sum_of_squares(applied - d)
        sums.moved += int((v != unchanged).sum())
        sums.elements += v.numel()

    # Results ---------------------------------------------------------------------------------------------------------

    def fp8_weights(self) -> list[WeightErrors]:
        """Return the weights that were written as codes and that the adapter changes."""
        return [w for w in self.weights.values() if w.fp8 and w.delta]

    @property
    def kept(self) -> float:
        """The mean over all weights in FP8, weighted by relative energy; 1 if there are none."""
        return _weighted_mean([(w.relative**2, w.kept) for w in self.fp8_weights()], 1.0)

    @property
    def noise_ratio(self) -> float:
        return math.sqrt(_weighted_mean([(w.relative**2, w.noise_ratio**2) for w in self.fp8_weights()], 0.0))

    @property
    def error(self) -> float:
        return math.sqrt(_weighted_mean([(w.relative**2, w.error**2) for w in self.fp8_weights()], 0.0))

    @property
    def relative(self) -> float:
        """|D| / |W| over all adapted weights, in the root mean square."""
        return math.sqrt(_weighted_mean([(1.0, w.relative**2) for w in self.weights.values()], 0.0))

    @property
    def is_lost(self) -> bool:
        return self.kept < MIN_KEPT or self.noise_ratio > MAX_NOISE_RATIO

    def worst(self, count: int = 3) -> list[WeightErrors]:
        """Return the weights with the smallest ``kept``, or if that is above the limit, with the largest
        ``noise_ratio``."""
        if self.kept < MIN_KEPT:
            return sorted(self.fp8_weights(), key=lambda w: w.kept)[:count]
        return sorted(self.fp8_weights(), key=lambda w: -w.noise_ratio)[:count]

    def rounded_weights(self) -> list[WeightErrors]:
        """Return weights in high precision with ``kept`` below :data:`MIN_KEPT`: BF16 rounds, too."""
        return [w for w in self.weights.values() if not w.fp8 and w.delta and w.elements and w.kept < MIN_KEPT]

    def to_json(self) -> dict[str, object]:
        return {
            "relative": self.relative,
            "kept": self.kept,
            "error": self.error,
            "drowned": self.noise_ratio,
            "limits": {"kept": MIN_KEPT, "drowned": MAX_NOISE_RATIO},
            "lost": self.is_lost,
            "weights": [w.to_json() for w in self.weights.values()],
        }


def _sum_of_squares(x: Tensor) -> float:
    return float(x.double().square().sum())


def _weighted_mean(pairs: Iterable[tuple[float, float]], default: float) -> float:
    pairs = list(pairs)
    weight = sum(w for w, _ in pairs)
    return sum(w * v for w, v in pairs) / weight if weight else default
