"""Which plan holds in a step: that of the rules with spans, with the moves that GEMMs have made by their figures.

Everything follows from the plans of the run and from where its GEMMs stand, which checkpoints keep: a run that is
continued, and whoever opens a checkpoint, find the plan that its step was trained by.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from octavo import fp8
from octavo.config import Config
from octavo.config.sections.fp8_adapt import AdaptSection
from octavo.fp8.adapting import Decision, Judge, Limits, Place, climbed, decide, ladders, wanted, work_of
from octavo.fp8.planning import Schedule
from octavo.parallel import World

_Key = tuple[str, str]  # (layer, GEMM)


@dataclass
class Course:
    """``places``: where those GEMMs stand that are not where the plan of their step has them."""

    schedule: Schedule
    adapt: AdaptSection | None = None
    places: dict[_Key, Place] = field(default_factory=dict)
    _ladders: list[tuple[fp8.Plan, dict[_Key, tuple[str, ...]]]] = field(default_factory=list)
    _newest: tuple[fp8.Plan, dict[_Key, tuple[str, int]], fp8.Plan] | None = None  # plan, moves, the plan with them

    @classmethod
    def of(cls, cfg: Config, schedule: Schedule, counters: Mapping[str, Any]) -> Course:
        """With the places that a checkpoint's counters hold."""
        saved = counters.get("adapt") or () if cfg.fp8.adapt is not None else ()
        entries = [dict(one) for one in saved]
        return cls(schedule, cfg.fp8.adapt, {(one.pop("layer"), one.pop("gemm")): Place(**one) for one in entries})

    def to_json(self) -> list[dict[str, Any]]:
        """What a checkpoint keeps."""
        return [{"layer": layer, "gemm": gemm, **place.to_json()} for (layer, gemm), place in self.places.items()]

    @property
    def varies(self) -> bool:
        """Whether steps may have different plans."""
        return self.adapt is not None or bool(self.schedule.spans)

    @property
    def may_delay(self) -> bool:
        """Whether a layer may have amax histories in some step: by a plan, or by a move."""
        rows = [row for plan in self.schedule.plans for row in plan.rows]
        return self.adapt is not None or any(row.recipe is not None and row.recipe.delayed is not None for row in rows)

    def at(self, step: int) -> fp8.Plan:
        """The plan of a step; the very same object as long as nothing in it changes."""
        planned = self.schedule.at(step)
        moves = {key: (place.word, place.step) for key, place in self.places.items() if place.word}
        if not moves:
            return planned
        if self._newest is None or self._newest[0] is not planned or self._newest[1] != moves:
            self._newest = planned, moves, climbed(planned, self._ladder(planned), self.places)
        return self._newest[2]

    def judge(self, step: int) -> Judge | None:
        """Who tries recipes in this step; None where it is no check, or nothing in it is in FP8."""
        if self.adapt is None or step % self.adapt.every:
            return None
        planned = self.schedule.at(step)
        sites = wanted(planned, self._ladder(planned), self.places)
        return Judge(sites) if sites else None

    def decide(self, step: int, judge: Judge, world: World) -> list[Decision]:
        """What follows from the figures of a step, equal on all ranks, whose figures are averaged. A collective."""
        assert self.adapt is not None
        limits = Limits(**self.adapt.model_dump(exclude={"every", "recipes"}))
        planned, figures = self.schedule.at(step), judge.figures(world.sum)
        self.places, decisions = decide(step, self.places, figures, self._ladder(planned), work_of(planned), limits)
        return decisions

    def _ladder(self, plan: fp8.Plan) -> dict[_Key, tuple[str, ...]]:
        """The ladders of a plan of the schedule, made once."""
        assert self.adapt is not None
        of_plan = next((known for of, known in self._ladders if of is plan), None)
        if of_plan is None:
            of_plan = ladders(plan, self.adapt.recipes)
            self._ladders.append((plan, of_plan))
        return of_plan
