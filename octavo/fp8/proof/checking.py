"""Whether a device computes what it should: some FP8 GEMMs of a training step, computed again as soon as they have run.

A check is attached to one step and receives GEMMs from the recorder, as every watcher does
(:mod:`octavo.fp8.observe.recorder`); what is compared, and how closely, says :mod:`octavo.fp8.proof.comparing`. It
keeps what differs and raises nothing: a backward is no place to stop a run of several ranks. The step computes what it
computes without. Which GEMMs a step checks follows only from a seed and a number, and all of them take their turn.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from octavo.fp8.arithmetic.recipe import GEMMS
from octavo.fp8.observe import recorder
from octavo.fp8.observe.recorder import Result
from octavo.fp8.planning.plan import Plan
from octavo.fp8.proof.comparing import ComparisonCounts, Difference, compare
from octavo.fp8.weights.sums import stale_codes

ROUND = 32  # number of checks that cover all GEMMs, if there are enough
LEAST = 4  # minimum GEMMs per check
FAULTS = 8  # maximum faults that a check records


class CheckedGemm(NamedTuple):
    """A GEMM of a layer; ``gemm`` is fwd, dgrad or wgrad."""

    layer: str
    gemm: str


@dataclass(frozen=True)
class Fault:
    """A GEMM with a wrong result."""

    site: CheckedGemm
    backend: str
    difference: Difference

    def __str__(self) -> str:
        return f"{self.site.gemm} of {self.site.layer} ({self.backend}): {self.difference}"

    def to_json(self) -> dict[str, Any]:
        return {**self.site._asdict(), "backend": self.backend, **self.difference.to_json(), "said": str(self)}


def fp8_gemms(plan: Plan) -> tuple[CheckedGemm, ...]:
    """Return the FP8 GEMMs of a plan. All experts of a layer count as one; frozen weights have no wgrad."""
    return tuple(
        CheckedGemm(row.name, gemm)
        for row in plan.rows
        for gemm in GEMMS
        if row.recipe is not None and row.recipe.gemm(gemm) is not None and not (gemm == "wgrad" and row.row.frozen)
    )


def check_size(count: int) -> int:
    """Return the number of GEMMs per check, so that :data:`ROUND` checks cover ``count``; at least :data:`LEAST`."""
    return min(count, max(LEAST, -(-count // ROUND)))


def select_gemms(candidates: Sequence[CheckedGemm], seed: int, number: int) -> tuple[CheckedGemm, ...]:
    """Return the GEMMs of check ``number``, counted from 0. Each round covers all of them in an order from the seed."""
    if not candidates:
        return ()
    size, chosen = check_size(len(candidates)), []
    for i in range(number * size, (number + 1) * size):
        order = list(candidates)
        random.Random(f"{seed} {i // len(candidates)}").shuffle(order)
        chosen.append(order[i % len(candidates)])
    return tuple(dict.fromkeys(chosen))


class CorruptionChecker:
    """The checks of one step. ``draw``: seed for the tile of a product, the expert and the weight rows.

    ``faults``: wrong results in the order of the step; ``done``: how much was compared; ``stale``: layers whose codes
    are from an earlier value of the weight.
    """

    def __init__(self, chosen: Iterable[CheckedGemm], draw: int = 0) -> None:
        self.gemms = tuple(chosen)
        self.faults: list[Fault] = []
        self.done = ComparisonCounts()
        self.stale: list[str] = []
        self._draw, self._random = draw, random.Random(draw)
        self._gemms_by_layer: dict[str, set[str]] = {}
        for gemm in self.gemms:
            self._gemms_by_layer.setdefault(gemm.layer, set()).add(gemm.gemm)

    @contextmanager
    def attach(self) -> Iterator[CorruptionChecker]:
        """Check a forward and its backward inside the context."""
        with recorder.attach(checker=self):
            yield self

    def check_weight_codes(self, model: nn.Module) -> None:
        """Compare the codes that the step used with the weights, before the optimizer step."""
        self.stale += stale_codes(model, self._draw)

    # Called by the recorder: see `recorder.Checker`.

    def gemms_of(self, layer: str) -> Collection[str]:
        return self._gemms_by_layer.get(layer, ())

    def pick(self, count: int) -> int:
        return self._random.randrange(count)

    def on_result(self, layer: str, result: Result) -> None:
        if len(self.faults) == FAULTS:
            return
        # These operations are not part of the model: hide them from selective checkpointing and memory accounting.
        with torch.no_grad(), _disable_current_modes():
            difference = compare(result, self._random, self.done)
        if difference is not None:
            self.faults.append(Fault(CheckedGemm(layer, result.gemm), result.backend, difference))
