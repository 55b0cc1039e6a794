"""The plan of each step: the plan of the rules that apply to it, with the precision changes of `fp8.adapt`.

It follows from the plans of the run and the current recipes of its GEMMs, which checkpoints keep. So a resumed run, and
any program that opens a checkpoint, get the plan with which its step was trained.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from octavo import fp8
from octavo.config import Config
from octavo.config.sections.fp8_adapt import AdaptSection
from octavo.fp8.adapting import (
    Decision,
    GemmState,
    Limits,
    RecipeTrials,
    apply_moves,
    build_ladders,
    casts_to_try,
    decide,
    gemm_costs,
)
from octavo.fp8.planning import Schedule
from octavo.parallel import World

_Key = tuple[str, str]  # (layer, GEMM)


@dataclass
class Course:
    """``places``: the current recipes of GEMMs that differ from the plan of their step."""

    schedule: Schedule
    adapt: AdaptSection | None = None
    places: dict[_Key, GemmState] = field(default_factory=dict)
    _ladders: list[tuple[fp8.Plan, dict[_Key, tuple[str, ...]]]] = field(default_factory=list)
    _newest: tuple[fp8.Plan, dict[_Key, tuple[str, int]], fp8.Plan] | None = (
        None  # (plan, changes, the plan with them), cached
    )

    @classmethod
    def of(cls, cfg: Config, schedule: Schedule, counters: Mapping[str, Any]) -> Course:
        """With the places from a checkpoint's counters."""
        saved = counters.get("adapt") or () if cfg.fp8.adapt is not None else ()
        entries = [dict(one) for one in saved]
        return cls(schedule, cfg.fp8.adapt, {(one.pop("layer"), one.pop("gemm")): GemmState(**one) for one in entries})

    def to_json(self) -> list[dict[str, Any]]:
        """The state for a checkpoint."""
        return [{"layer": layer, "gemm": gemm, **place.to_json()} for (layer, gemm), place in self.places.items()]

    @property
    def varies(self) -> bool:
        """Whether steps may have different plans."""
        return self.adapt is not None or bool(self.schedule.spans)

    @property
    def may_delay(self) -> bool:
        """Whether a layer may have amax histories in some step, by a plan or by a change."""
        rows = [row for plan in self.schedule.plans for row in plan.rows]
        return self.adapt is not None or any(row.recipe is not None and row.recipe.delayed is not None for row in rows)

    def at(self, step: int) -> fp8.Plan:
        """The plan of a step; the identical object while nothing in it changes."""
        planned = self.schedule.at(step)
        moves = {key: (place.word, place.step) for key, place in self.places.items() if place.word}
        if not moves:
            return planned
        if self._newest is None or self._newest[0] is not planned or self._newest[1] != moves:
            self._newest = planned, moves, apply_moves(planned, self._ladder(planned), self.places)
        return self._newest[2]

    def judge(self, step: int) -> RecipeTrials | None:
        """The judge that tries recipes in this step; None if it is not a check, or has nothing in FP8."""
        if self.adapt is None or step % self.adapt.every:
            return None
        planned = self.schedule.at(step)
        sites = casts_to_try(planned, self._ladder(planned), self.places)
        return RecipeTrials(sites) if sites else None

    def decide(self, step: int, judge: RecipeTrials, world: World) -> list[Decision]:
        """The decisions from a step's measurements; these are averaged over ranks, so all agree. A collective."""
        assert self.adapt is not None
        limits = Limits(**self.adapt.model_dump(exclude={"every", "recipes"}))
        planned, figures = self.schedule.at(step), judge.metrics(world.sum)
        self.places, decisions = decide(step, self.places, figures, self._ladder(planned), gemm_costs(planned), limits)
        return decisions

    def _ladder(self, plan: fp8.Plan) -> dict[_Key, tuple[str, ...]]:
        """The ladders of recipes for a plan of the schedule, computed once."""
        assert self.adapt is not None
        of_plan = next((known for of, known in self._ladders if of is plan), None)
        if of_plan is None:
            of_plan = build_ladders(plan, self.adapt.recipes)
            self._ladders.append((plan, of_plan))
        return of_plan
