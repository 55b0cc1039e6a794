"""The plan of each step: the plan of the rules that apply to it, with the precision changes of `fp8.adapt`.

The plan of a step follows from the plans of the run and the current recipes of its GEMMs, which checkpoints store. So a
resumed run, and any program that opens a checkpoint, use the plan with which that step was trained.
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
class PrecisionSchedule:
    """The plan of every step of a run.

    schedule  plans of the rules, by spans of steps
    adapt     settings of `fp8.adapt`, or None if it is off
    places    current recipes of the GEMMs whose recipe `fp8.adapt` has changed
    """

    schedule: Schedule
    adapt: AdaptSection | None = None
    places: dict[_Key, GemmState] = field(default_factory=dict)
    _candidates: list[tuple[fp8.Plan, dict[_Key, tuple[str, ...]]]] = field(default_factory=list)
    # Cache of `plan_at`: (plan of the rules, changes, plan with the changes).
    _adapted: tuple[fp8.Plan, dict[_Key, tuple[str, int]], fp8.Plan] | None = None

    @classmethod
    def from_counters(cls, cfg: Config, schedule: Schedule, counters: Mapping[str, Any]) -> PrecisionSchedule:
        """Return the schedule with the recipes that a checkpoint's counters record."""
        saved = counters.get("adapt") or () if cfg.fp8.adapt is not None else ()
        entries = [dict(entry) for entry in saved]
        places = {(entry.pop("layer"), entry.pop("gemm")): GemmState(**entry) for entry in entries}
        return cls(schedule, cfg.fp8.adapt, places)

    def to_json(self) -> list[dict[str, Any]]:
        """Return the state to checkpoint."""
        return [{"layer": layer, "gemm": gemm, **place.to_json()} for (layer, gemm), place in self.places.items()]

    @property
    def varies(self) -> bool:
        """True if steps may have different plans."""
        return self.adapt is not None or bool(self.schedule.spans)

    @property
    def may_use_delayed_scaling(self) -> bool:
        """True if a layer may have amax histories in some step, by a plan or by a change of `fp8.adapt`."""
        rows = [row for plan in self.schedule.plans for row in plan.rows]
        return self.adapt is not None or any(row.recipe is not None and row.recipe.delayed is not None for row in rows)

    def plan_at(self, step: int) -> fp8.Plan:
        """Return the plan of a step: the same object as long as the plan does not change."""
        planned = self.schedule.at(step)
        moves = {key: (place.word, place.step) for key, place in self.places.items() if place.word}
        if not moves:
            return planned
        if self._adapted is None or self._adapted[0] is not planned or self._adapted[1] != moves:
            self._adapted = planned, moves, apply_moves(planned, self._recipe_candidates(planned), self.places)
        return self._adapted[2]

    def recipe_trials(self, step: int) -> RecipeTrials | None:
        """Return the judge that tries recipes in this step, or None if the step tries none or has nothing in FP8."""
        if self.adapt is None or step % self.adapt.every:
            return None
        planned = self.schedule.at(step)
        sites = casts_to_try(planned, self._recipe_candidates(planned), self.places)
        return RecipeTrials(sites) if sites else None

    def decide(self, step: int, judge: RecipeTrials, world: World) -> list[Decision]:
        """Change recipes according to the measurements of a step, and return these decisions. Measurements are averaged
        over ranks, so all ranks decide alike. Collective call."""
        assert self.adapt is not None
        limits = Limits(**self.adapt.model_dump(exclude={"every", "recipes"}))
        planned, figures = self.schedule.at(step), judge.metrics(world.sum)
        candidates = self._recipe_candidates(planned)
        self.places, decisions = decide(step, self.places, figures, candidates, gemm_costs(planned), limits)
        return decisions

    def _recipe_candidates(self, plan: fp8.Plan) -> dict[_Key, tuple[str, ...]]:
        """Return, for each GEMM of a plan, its candidate recipes in order of precision; computed once per plan."""
        assert self.adapt is not None
        candidates = next((cached for key, cached in self._candidates if key is plan), None)
        if candidates is None:
            candidates = build_ladders(plan, self.adapt.recipes)
            self._candidates.append((plan, candidates))
        return candidates
