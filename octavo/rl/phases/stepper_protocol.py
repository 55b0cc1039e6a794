"""What critic and limit ask of the stepper (:class:`octavo.rl.phases.rl_step.RlStepper`) that they are a part of."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor, nn

from octavo.config import Config
from octavo.generation import Engine
from octavo.parallel import World
from octavo.rl.objectives.metrics import Figures
from octavo.rl.objectives.policy import Counts
from octavo.rl.phases.settings import Settings
from octavo.rl.rollout.experience import Rollout
from octavo.train.forward.forward import Forward


class Learner(Protocol):
    cfg: Config
    number: int
    model: nn.Module
    world: World
    forward: Forward
    settings: Settings
    engine: Engine | None
    rollout: Rollout | None
    pad_id: int
    counts: Counts | None
    told: list[Figures]

    def rows(self) -> AbstractContextManager[object]: ...
    def mask(self, batch: dict[str, Any], target: Tensor) -> Tensor: ...
    def judged(self, batch: dict[str, Any], denominator: float) -> tuple[Tensor, Tensor, Tensor]: ...
