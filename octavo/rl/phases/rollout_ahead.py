"""Rollouts one step ahead (`rl.stale: 1`): a step trains on completions of the weights before the last update.

With the engine in the trainer's process the next step's completions are generated before a step's update, and the
trainer computes their log-probabilities with the same weights. With replicas they are generated while the step trains:

    trainer    step n: collect | send weights n - 1 | train on the completions for n, of weights n - 2 | step n + 1 ...
    replicas                                        | generate for n + 1 with weights n - 1            |

The trainer has other weights when it gets them, so the log-probabilities to which ratios are relative are those of the
replicas, which have the bits of the trainer's codes, and the gap is not measured. Which weights generate a step's
completions never depends on how long anything takes, so a run repeats bit for bit, also after a resume: a checkpoint
waits for the pending completions and contains them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from octavo.data.tasks.prompts import PromptSample
from octavo.generation.engines import Generation
from octavo.rl.rollout.rollout import begin_completions
from octavo.rl.rollout.stale_queue import VersionedRollout, restore_pending

if TYPE_CHECKING:
    from octavo.rl.phases.rl_step import RlStepper
    from octavo.rl.rollout.experience import Experience


@dataclass(frozen=True)
class _Job:
    """Completions that replicas generate: the prompts, and the version of the weights."""

    prompts: list[PromptSample]
    version: int
    generation: Generation


class RolloutAhead:
    """The completions for the next step. Attributes and methods of the stepper compute them."""

    def __init__(self, stepper: RlStepper) -> None:
        self.stepper = stepper
        self._pending: VersionedRollout | None = None
        self._job: _Job | None = None
        self._restored_tensors: dict[str, Tensor] = {}  # `_pending` as stored in a checkpoint

    @property
    def overlaps(self) -> bool:
        """Whether completions are generated during the update. Replacing groups of equal rewards needs the rewards of
        the first draw before the second, so such rollouts come before the update."""
        shares_weights = self.stepper.roles.engine.capabilities.shares_weights
        return bool(self.stepper.settings.section.stale) and not shares_weights and not self.stepper.settings.refill

    def next(self, prompts: list[PromptSample]) -> VersionedRollout:
        """Return the completions for this step; `prompts` are for the next one. Collective call."""
        stepper = self.stepper
        step, decode = stepper.step_number, stepper.decode
        current = self._collect() or restore_pending(self._restored_tensors, stepper.prompts.at, decode, stepper.world)
        self._restored_tensors, self._pending = {}, None
        if current is None:  # the first step of a run
            self._begin(prompts, step)
            current, self._pending = self._collect(), None
            prompts = [*next(stepper.prompts)]
        assert current is not None
        if step < (stepper.cfg.train.steps or 0):
            self._begin(prompts, step + 1)
        return current

    def state(self) -> dict[str, Tensor]:
        """Return the completions for the next step, for a checkpoint. Collective call, which waits for them."""
        self._pending = self._collect()
        return {} if self._pending is None else self._pending.tensors(self.stepper.world.rank)

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Take the completions of a checkpoint."""
        self._restored_tensors = dict(tensors)

    def _begin(self, prompts: list[PromptSample], step: int) -> None:
        """Begin to generate completions for a step with the current weights, or generate them."""
        if not self.overlaps:
            self._pending = self._sample(prompts, step)
            return
        stepper, version = self.stepper, self.stepper.step_number - 1
        stepper.send_weights(version)
        sampling = replace(stepper.sampling, step=step)
        generation = begin_completions(stepper.roles.engine, version, prompts, sampling, stepper.settings.section.group)
        stepper.weight_check.after_rollout(stepper.step_number)
        self._job = _Job(prompts, version, generation)

    def _collect(self) -> VersionedRollout | None:
        """Return the pending completions, for which replicas may have to be waited."""
        job, self._job = self._job, None
        if job is None:
            return self._pending
        stepper = self.stepper
        stepper.world.set_phase(f"step {stepper.step_number}, rollout")
        completions = job.generation.result(lambda done, total: stepper.on_progress(f"rollout {done}/{total}"))
        stepper.generated_tokens += sum(len(completion.tokens) for completion in completions)
        rollout, figures = stepper.describe_step(stepper.score(job.prompts, completions))
        return VersionedRollout(replace(rollout, old=[c.logps for c in rollout.completions]), figures, job.version)

    def _sample(self, prompts: list[PromptSample], step: int) -> VersionedRollout:
        """Generate completions for a step and compute their log-probabilities with the current weights."""
        stepper = self.stepper
        rollout, figures = stepper.sample_step(prompts, step)
        stepper.rollout = rollout
        batches = [batch for part in stepper.make_micro_batches(rollout) for batch in part]
        stepper.compute_logprobs(batches, old=True, roles=False)
        old: dict[int, np.ndarray] = {}
        for batch in batches:
            experience: Experience = batch["experience"]
            assert experience.old is not None
            old |= {row: experience.old[n, rollout.span(row)].numpy() for n, row in enumerate(experience.rows)}
        version = stepper.step_number - 1
        return VersionedRollout(replace(rollout, old=[old[row] for row in sorted(old)]), figures, version)
