"""The error of an FP8 base relative to the stock model on which its adapters will be loaded.

An adapter is trained on dequantized FP8 codes, and PEFT loads it on the BF16 model: it may correct errors of the one
that the other does not have. The adapter is the same for both, so only the weights differ. For each weight W and
its dequantized codes W'::

    relative   |W - W'| / |W|, norms over the whole weight          E4M3 leaves about 2.5 %
    sqnr       the mean over blocks of 10 log10 (|w|^2 / |w - w'|^2), in dB (:mod:`octavo.fp8.metrics`)
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from octavo.adapters.errors import AdapterError
from octavo.adapters.experts import stock_name
from octavo.base.wording import count_noun
from octavo.fp8 import metrics
from octavo.fp8.policy import template
from octavo.fp8.weights import Fp8Weight, codes_of_frozen, frozen_weights


@dataclass(frozen=True)
class WeightError:
    """One weight: its stock name, parameters, relative error and SQNR in dB."""

    name: str
    params: int
    relative: float
    sqnr: float


@dataclass(frozen=True)
class BaseErrors:
    """The error of each frozen weight of a model compared with its stock value."""

    rows: tuple[WeightError, ...]

    @property
    def worst(self) -> WeightError:
        return max(self.rows, key=lambda row: row.relative)

    @property
    def relative(self) -> float:
        """The mean relative error, weighted by the number of parameters."""
        return sum(r.relative * r.params for r in self.rows) / sum(r.params for r in self.rows)

    @property
    def sqnr(self) -> float:
        """The median SQNR, which exact weights (infinite SQNR) do not distort."""
        return statistics.median(row.sqnr for row in self.rows)

    def summary(self) -> str:
        """Return the summary as one sentence."""
        return (
            f"{len(self.rows)} FP8 weights differ from the stock ones by {self.relative:.2%} on average "
            f"({self.sqnr:.1f} dB), at most by {self.worst.relative:.2%} ({self.worst.name})"
        )

    def __str__(self) -> str:
        """Return the summary, and one line for each kind of layer."""
        kinds: dict[str, list[WeightError]] = {}
        for row in self.rows:
            kinds.setdefault(template(row.name), []).append(row)
        width = max(len(kind) for kind in kinds)
        lines = []
        for kind, rows in kinds.items():
            errors = BaseErrors(tuple(rows))
            lines.append(f"{kind:{width}}  {len(rows):4}  {errors.relative:7.2%}  {errors.sqnr:5.1f} dB")
        return "\n".join([self.summary(), *lines])


def base_errors(model: nn.Module, stock: nn.Module | Iterable[tuple[str, Tensor]]) -> BaseErrors:
    """Compare each frozen FP8 weight of a model, adapted or not, with the weight of the stock model.

    stock: the stock model, or its parameters by name, which may be produced one at a time; others are ignored.

    Raises AdapterError for a model without frozen weights, and for weights that are missing in ``stock`` or have
    another shape there.
    """
    frozen = {stock_name(name): weight for name, weight in frozen_weights(model)}
    if not frozen:
        raise AdapterError("the model has no FP8 weights, so its base is the stock model.")
    rows: dict[str, WeightError] = {}
    for name, value in stock.named_parameters() if isinstance(stock, nn.Module) else stock:
        if name in frozen and name not in rows:
            rows[name] = _weight_error(name, value, frozen[name])
    missing = [name for name in frozen if name not in rows]
    if missing:
        raise AdapterError(
            f"the stock model has no values for {count_noun(len(missing), 'weight')} of this one, first {missing[0]}. "
            "It belongs to another model."
        )
    return BaseErrors(tuple(rows[name] for name in frozen))


@torch.no_grad()
def _weight_error(name: str, value: Tensor, weight: Tensor) -> WeightError:
    if value.shape != weight.shape:
        raise AdapterError(f"{name} is {list(value.shape)} in the stock model and {list(weight.shape)} in this one.")
    assert isinstance(weight, Fp8Weight)
    q = codes_of_frozen(weight)
    block = q.spec.block
    power = noise = 0.0
    decibels: list[float] = []
    matrices = zip(value.reshape(-1, *value.shape[-2:]), weight.values().reshape(-1, *value.shape[-2:]), strict=True)
    for stock, dequantized in matrices:
        if weight.is_transposed:
            stock, dequantized = stock.mT, dequantized.mT
        stock = stock.to(dequantized.device)
        power += float(stock.double().square().sum())
        noise += float((stock.double() - dequantized.double()).square().sum())
        decibels.append(metrics.sqnr(stock, dequantized, block))
    return WeightError(name, value.numel(), (noise / power) ** 0.5 if power else 0.0, statistics.fmean(decibels))
