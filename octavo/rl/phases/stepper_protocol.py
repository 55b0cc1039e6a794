"""The attributes of :class:`octavo.rl.phases.rl_step.RlStepper` that the critic and the mismatch limit use, and the
participants of a step in addition to the policy."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from octavo.config import Config
from octavo.generation import Engine
from octavo.generation.engines import RolloutEngine
from octavo.parallel import World
from octavo.rl.objectives.metrics import Figures
from octavo.rl.objectives.policy_losses import Counts
from octavo.rl.phases.reference import Reference
from octavo.rl.phases.settings import Settings
from octavo.rl.rewards import Rewards
from octavo.rl.rollout.experience import Rollout
from octavo.train.forward.forward import Forward

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Roles:
    """The participants of a step in addition to the policy.

    engine     generates completions with the policy's weights
    local      the engine in this process, which is also used to find where rollout and trainer differ
    rewards    score completions
    reference  computes the log-probabilities for the objective's KL, or None if it has no KL
    tokenizer  decodes completions
    """

    engine: RolloutEngine
    local: Engine
    rewards: Rewards
    reference: Reference | None
    tokenizer: Any


class StepperProtocol(Protocol):
    cfg: Config
    step_number: int
    model: PreTrainedModel
    world: World
    forward: Forward
    settings: Settings
    roles: Roles
    pad_id: int
    rollout: Rollout
    counts: Counts
    part_figures: list[Figures]

    def batch_invariant_context(self) -> AbstractContextManager[object]: ...
    def mask(self, batch: dict[str, Any], target: Tensor) -> Tensor: ...
    def loss_positions(self, batch: dict[str, Any], denominator: float) -> tuple[Tensor, Tensor, Tensor]: ...
