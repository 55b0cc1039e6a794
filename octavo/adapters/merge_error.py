"""What of an adapter survives the rounding of a merged weight.

With W the base's weight, D the adapter's change (s B A; of DoRA all that changes), and V what is written for W + D::

    D' = V - W                     the change that was applied
    kept   = <D', D> / <D, D>      the adapter's strength in the merged weight: 1 whole, 0 rounded away
    error  = |D' - D| / |D|        how far the applied change is from the intended one
    cosine = <D', D> / |D'| |D|
    changed                        share of elements that differ from what is written for W alone

Two things can become of a small change. If W lies on the grid of the codes (it is frozen FP8 itself) an element moves
only where the change exceeds half a step, |d| > |w| / 32 .. / 16; all others stay, and always the same way: ``kept``
falls, and the error with it never exceeds 1. For changes of 1 % of the weights most of D is lost so. If W lies between
codes (high precision) some elements are pushed over an edge by any change, more of them by a larger one: ``kept`` stays
near 1, and what comes on top is the noise that every cast to FP8 has, 2 to 3 % of W, several times the change.

So a merge is judged by two figures, each weight counting by its relative energy |D|^2 / |W|^2:

- ``kept`` of at least :data:`KEPT`. Around a trained optimum the loss is quadratic along D: at strength t the merged
  model misses (1 - t)^2 of what training gained. 0.9 misses 1 %, 0.75 6 %, 0.5 a quarter.
- ``drowned`` of at most 1: error * sqrt(r / K). A D of rank r answers an input along its own directions with
  |D| / sqrt(r), the rounding noise, spread over all K directions, with |D' - D| / sqrt(K). Above 1 the noise is louder
  than the adapter even on the inputs that it answers to most.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from octavo import fp8
from octavo.adapters.merge import Fold
from octavo.fp8.weights import is_frozen

KEPT = 0.9
DROWNED = 1.0


@dataclass
class Weight:
    """The sums of one weight, of all its pieces that were written: squares in fp64.

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
    def drowned(self) -> float:
        return self.error * math.sqrt(self.rank / self.inputs)

    def to_json(self) -> dict[str, Any]:
        figures = ("relative", "kept", "error", "cosine", "changed", "drowned")
        return {"name": self.name, "fp8": self.fp8, **{figure: getattr(self, figure) for figure in figures}}


class MergeErrors:
    """Takes what is written for each adapted weight, piece by piece, and sums up what survived."""

    def __init__(self, folds: Mapping[str, Fold]) -> None:
        self._folds = folds
        self.weights = {name: Weight(name, fold.rank, fold.shape[1]) for name, fold in folds.items()}
        self._last: tuple[tuple[str, int | None], Tensor, Tensor] | None = None  # pieces of one matrix come in a row

    @torch.no_grad()
    def written(self, name: str, slot: int | None, rows: tuple[int, int] | None, value: Tensor | fp8.Quantized) -> None:
        """Take what a file gets for the parameter ``name``; weights without adapters are passed by.

        slot, rows  the expert, and which of its rows: ``value`` is that piece [n, K]. Both None: the whole parameter as
                    the stock model stores it
        """
        fold = self._folds.get(name)
        if fold is None:
            return
        if slot is None and fold.count is not None:
            assert isinstance(value, Tensor)  # codes of experts are written one by one
            for each in range(fold.count):
                own = value[each]
                self._take(fold, each, None, own.mT if fold.transposed else own)
        else:
            self._take(fold, slot, rows, value)

    def _take(self, fold: Fold, slot: int | None, rows: tuple[int, int] | None, value: Tensor | fp8.Quantized) -> None:
        found = self.weights[fold.name]
        span = slice(*(rows or (0, fold.shape[0])))
        if self._last is None or self._last[0] != (fold.name, slot):
            base = fold.base(slot)
            self._last = (fold.name, slot), base, fold.folded(slot, base) - base
        w, d = self._last[1][span], self._last[2][span]
        if isinstance(value, Tensor):
            v, unchanged = value.float(), w.to(value.dtype).float()
        else:
            found.fp8 = True
            v = fp8.dequantize(value, torch.float32)
            frozen = is_frozen(fold.weight)
            unchanged = w if frozen else fp8.dequantize(fp8.quantize(w, value.spec), torch.float32)
        w, d, unchanged = w.to(v.device), d.to(v.device), unchanged.to(v.device)
        applied = v - w
        found.base += _square(w)
        found.delta += _square(d)
        found.applied += _square(applied)
        found.inner += float((applied.double() * d).sum())
        found.difference += _square(applied - d)
        found.moved += int((v != unchanged).sum())
        found.elements += v.numel()

    # What it comes to ------------------------------------------------------------------------------------------------

    def counted(self) -> list[Weight]:
        """The weights that were written as codes and that the adapter changes."""
        return [w for w in self.weights.values() if w.fp8 and w.delta]

    @property
    def kept(self) -> float:
        """Over all weights in FP8, each by its relative energy; 1 where there are none."""
        return _mean([(w.relative**2, w.kept) for w in self.counted()], 1.0)

    @property
    def drowned(self) -> float:
        return math.sqrt(_mean([(w.relative**2, w.drowned**2) for w in self.counted()], 0.0))

    @property
    def error(self) -> float:
        return math.sqrt(_mean([(w.relative**2, w.error**2) for w in self.counted()], 0.0))

    @property
    def relative(self) -> float:
        """|D| / |W| over all adapted weights, in the root mean square."""
        return math.sqrt(_mean([(1.0, w.relative**2) for w in self.weights.values()], 0.0))

    @property
    def lost(self) -> bool:
        return self.kept < KEPT or self.drowned > DROWNED

    def worst(self, count: int = 3) -> list[Weight]:
        """The weights of which least survived; those that are drowned, where nothing else is wrong."""
        if self.kept < KEPT:
            return sorted(self.counted(), key=lambda w: w.kept)[:count]
        return sorted(self.counted(), key=lambda w: -w.drowned)[:count]

    def rounded(self) -> list[Weight]:
        """Weights in high precision of which less than :data:`KEPT` survived: BF16 has a grid as well."""
        return [w for w in self.weights.values() if not w.fp8 and w.delta and w.elements and w.kept < KEPT]

    def to_json(self) -> dict[str, Any]:
        return {
            "relative": self.relative,
            "kept": self.kept,
            "error": self.error,
            "drowned": self.drowned,
            "limits": {"kept": KEPT, "drowned": DROWNED},
            "lost": self.lost,
            "weights": [w.to_json() for w in self.weights.values()],
        }


def _square(x: Tensor) -> float:
    return float(x.double().square().sum())


def _mean(pairs: Iterable[tuple[float, float]], none: float) -> float:
    pairs = list(pairs)
    weight = sum(w for w, _ in pairs)
    return sum(w * v for w, v in pairs) / weight if weight else none
