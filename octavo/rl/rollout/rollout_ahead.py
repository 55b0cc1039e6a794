"""Rollouts one step ahead (`rl.stale: 1`): a step trains on completions of the weights before the last update.

With the engine in the trainer's process the next step's completions are generated before a step's update, and the
trainer computes their log-probabilities with the same weights. With replicas they are generated while the step trains:

    trainer    step n: collect | send weights n - 1 | train on the completions for n, of weights n - 2 | step n + 1 ...
    replicas                                        | generate for n + 1 with weights n - 1            |

The trainer has other weights when it gets them, so ratios are relative to the log-probabilities of the replicas, which
have the bits of the trainer's codes, and the gap is not measured. Which weights generate a step's
completions never depends on how long anything takes, so a run repeats bit for bit, also after a resume: a checkpoint
waits for the pending completions and contains them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from octavo.data.loaders.loader import Loader
from octavo.data.tasks.prompts import PromptSample
from octavo.generation import Completion, Sampling
from octavo.generation.engines import Generation, RolloutEngine
from octavo.parallel import World
from octavo.rl.rollout.experience import Experience, Rollout, engine_prompt
from octavo.rl.rollout.same_weights import SameWeights
from octavo.rl.rollout.stale_queue import VersionedRollout, restore_pending

Named = dict[str, Any]
"""A micro-batch, or figures, by name."""


class Steps(Protocol):
    """What computes rollouts and log-probabilities: :class:`octavo.rl.phases.rl_step.RlStepper`."""

    step_number: int
    sampling: Sampling
    generated_tokens: int
    rollout: Rollout
    world: World
    prompts: Loader
    weight_check: SameWeights

    @property
    def on_progress(self) -> Callable[[str], None]: ...
    def decode(self, tokens: np.ndarray) -> str: ...
    def send_weights(self, version: int) -> None: ...
    def sample_step(self, prompts: list[PromptSample], step: int) -> tuple[Rollout, Named]: ...
    def describe_step(self, first_draw: Rollout) -> tuple[Rollout, Named]: ...
    def score(self, prompts: list[PromptSample], completions: list[Completion]) -> Rollout: ...
    def make_micro_batches(self, rollout: Rollout) -> list[list[Named]]: ...
    def compute_logprobs(self, batches: Sequence[Named], old: bool, roles: bool = True) -> None: ...


@dataclass(frozen=True)
class _Job:
    """Completions that replicas generate: the prompts, and the version of the weights."""

    prompts: list[PromptSample]
    version: int
    generation: Generation


class RolloutAhead:
    """The completions for the next step.

    overlaps  whether they are generated during the update, by an engine in other processes. Replacing groups of equal
              rewards needs the rewards of the first draw before the second, so such rollouts come before the update
    group     completions of each prompt
    last      the last step, which needs no further completions
    """

    def __init__(self, steps: Steps, engine: RolloutEngine, overlaps: bool, group: int, last: int) -> None:
        self.steps, self.engine, self.overlaps, self.group, self.last = steps, engine, overlaps, group, last
        self._pending: VersionedRollout | None = None
        self._job: _Job | None = None
        self._restored_tensors: dict[str, Tensor] = {}  # `_pending` as stored in a checkpoint

    def next(self, prompts: list[PromptSample]) -> VersionedRollout:
        """Return the completions for this step; `prompts` are for the next one. Collective call."""
        steps, step = self.steps, self.steps.step_number
        current = self._collect() or restore_pending(
            self._restored_tensors, steps.prompts.at, steps.decode, steps.world
        )
        self._restored_tensors, self._pending = {}, None
        if current is None:  # the first step of a run
            self._begin(prompts, step)
            current, self._pending = self._collect(), None
            prompts = [*next(steps.prompts)]
        assert current is not None
        if step < self.last:
            self._begin(prompts, step + 1)
        return current

    def state(self) -> dict[str, Tensor]:
        """Return the completions for the next step, for a checkpoint. Collective call, which waits for them."""
        self._pending = self._collect()
        return {} if self._pending is None else self._pending.tensors(self.steps.world.rank)

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Take the completions of a checkpoint."""
        self._restored_tensors = dict(tensors)

    def _begin(self, prompts: list[PromptSample], step: int) -> None:
        """Begin to generate completions for a step with the current weights, or generate them."""
        if not self.overlaps:
            self._pending = self._sample(prompts, step)
            return
        steps, version = self.steps, self.steps.step_number - 1
        steps.send_weights(version)
        sampling = replace(steps.sampling, step=step)
        generation = self.engine.generate(version, [engine_prompt(p) for p in prompts], sampling, self.group)
        steps.weight_check.after_rollout(steps.step_number)
        self._job = _Job(prompts, version, generation)

    def _collect(self) -> VersionedRollout | None:
        """Return the pending completions, for which replicas may have to be waited."""
        job, self._job = self._job, None
        if job is None:
            return self._pending
        steps = self.steps
        steps.world.set_phase(f"step {steps.step_number}, rollout")
        completions = job.generation.result(lambda done, total: steps.on_progress(f"rollout {done}/{total}"))
        steps.generated_tokens += sum(len(completion.tokens) for completion in completions)
        rollout, figures = steps.describe_step(steps.score(job.prompts, completions))
        return VersionedRollout(replace(rollout, old=[c.logps for c in rollout.completions]), figures, job.version)

    def _sample(self, prompts: list[PromptSample], step: int) -> VersionedRollout:
        """Generate completions for a step and compute their log-probabilities with the current weights."""
        steps = self.steps
        rollout, figures = steps.sample_step(prompts, step)
        steps.rollout = rollout
        batches = [batch for part in steps.make_micro_batches(rollout) for batch in part]
        steps.compute_logprobs(batches, old=True, roles=False)
        old: dict[int, np.ndarray] = {}
        for batch in batches:
            experience: Experience = batch["experience"]
            assert experience.old is not None
            old |= {row: experience.old[n, rollout.span(row)].numpy() for n, row in enumerate(experience.rows)}
        version = steps.step_number - 1
        return VersionedRollout(replace(rollout, old=[old[row] for row in sorted(old)]), figures, version)
