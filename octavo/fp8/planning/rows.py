"""The entries of a plan: layers and blocks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from octavo.fp8.arithmetic.recipe import GEMMS, Recipe
from octavo.fp8.kernels.registry import Selection
from octavo.fp8.measuring.cases import Case, Measured
from octavo.fp8.policy.decisions import OUTSIDE
from octavo.fp8.policy.topology import Row


class Times(NamedTuple):
    """Measurements of a row's case: all candidates, the name of the best FP8 candidate, and seconds per micro-step in
    high precision, with that candidate and as planned. Both rows of a module of experts have the time of the module."""

    case: Case
    measured: Measured
    best: str | None
    high: float
    fp8: float | None
    planned: float

    def to_json(self) -> dict[str, object]:
        fp8 = None if self.fp8 is None else 1e3 * self.fp8
        return {
            "case": str(self.case),
            "best": self.best,
            "bf16_ms": 1e3 * self.high,
            "fp8_ms": fp8,
            "planned_ms": 1e3 * self.planned,
            "candidates": self.measured.to_json(),
        }


@dataclass(frozen=True)
class PlanRow:
    """One layer of a plan.

    ``recipe`` is None in high precision; ``reason`` explains the choice; ``selections`` has the backend of each FP8
    GEMM; ``flops`` counts the three GEMMs of a step (two if frozen). ``times`` are measurements; ``automatic`` is True
    if a measurement or the table chose the recipe, and False if the policy did.
    """

    row: Row
    recipe: Recipe | None
    reason: str
    selections: Mapping[str, Selection]
    flops: float
    share: float = 0.0
    times: Times | None = None
    automatic: bool = False

    @property
    def name(self) -> str:
        return self.row.name

    @property
    def component(self) -> str:
        return self.row.component

    @property
    def kind(self) -> str:
        return self.row.kind

    @property
    def shape(self) -> tuple[int, int]:
        return self.row.shape

    @property
    def fp8(self) -> bool:
        return self.recipe is not None

    @property
    def backend(self) -> Selection | None:
        """Backend of the first FP8 GEMM, with the reason and rejected backends; None in high precision."""
        return next(iter(self.selections.values()), None)

    def __repr__(self) -> str:
        chosen = self.backend
        runs = "high precision" if self.recipe is None else self.recipe.summary()
        where = "" if chosen is None else f" on {chosen.backend.name}"
        return f"PlanRow({self.name or 'the model'}: {runs}{where}; {self.reason})"

    @property
    def fp8_flops(self) -> float:
        """The FLOPs that run in FP8."""
        gemms = GEMMS[:2] if self.row.frozen else GEMMS
        return self.flops * sum(g in self.selections for g in gemms) / len(gemms)

    def to_json(self) -> dict[str, object]:
        recipe: dict[str, str] | None = None
        if (casts := self.recipe) is not None:
            recipe = {"name": casts.name, "format": casts.format, **casts.gemm_precisions()}
        return {
            **self.row.to_json(),
            "recipe": recipe,
            "backend": {g: s.backend.name for g, s in self.selections.items()},
            "reason": self.reason,
            "flops": self.flops,
            "share": self.share,
            **({} if self.times is None else {"measured": self.times.to_json()}),
        }


@dataclass(frozen=True)
class PlanBlock:
    """A norm, an MLP or an attention module.

    ``fused``: whether it is fused with its FP8 layers; ``reason``: why or why not, or "" if not requested. ``saves``:
    whether it saves FP8 for its backward, or None if not requested; ``why``: the reason.
    """

    name: str
    kind: str
    fused: bool
    reason: str
    saves: bool | None = None
    why: str = ""

    def to_json(self) -> dict[str, object]:
        out = {"name": self.name, "kind": self.kind, "fused": self.fused, "reason": self.reason}
        return out if self.saves is None else {**out, "saves": self.saves, "why": self.why}


def share(rows: Iterable[PlanRow]) -> float:
    """Return the share of linear FLOPs in FP8, 0 to 1, without lm_head and patch embedding."""
    inside = [r for r in rows if r.kind not in OUTSIDE]
    total = sum(r.flops for r in inside)
    return sum(r.fp8_flops for r in inside) / total if total else 0.0


def components(rows: Iterable[PlanRow]) -> tuple[str, ...]:
    """Return the components of the rows in the order of the model."""
    return tuple(dict.fromkeys(r.component for r in rows))
