"""`rl.max_gap`: the largest difference of log-probabilities between rollout and trainer, and the first layer that
differs beyond it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from octavo import data
from octavo.fp8.observe import uncounted
from octavo.rl.phases.stepper_protocol import StepperProtocol
from octavo.rl.rollout.experience import engine_prompt, full_sample
from octavo.rl.rollout.first_mismatch import first_difference, rounding
from octavo.train import TrainError


class MismatchLimit:
    """Checks `rl.max_gap`; with `rl.invariant` and no `rl.max_gap` the limit is 0."""

    def __init__(self, stepper: StepperProtocol) -> None:
        section = stepper.settings.section
        self.stepper, self.configured = stepper, section.max_gap
        self.limit = 0.0 if section.max_gap is None else section.max_gap

    def check(self, batch: dict[str, Any], gaps: Tensor) -> None:
        """Raise TrainError if a difference exceeds the limit, before the weights are updated.

        `gaps` [B, P]: absolute differences of log-probabilities between trainer and rollout. Collective call.
        """
        world, each = self.stepper.world, gaps.amax(dim=1)
        maxima = world.gather_objects(float(each.max()))
        if max(maxima) <= self.limit:
            return
        worst = maxima.index(max(maxima))
        cause = self._find_first_difference(batch, int(each.argmax()) if worst == world.rank else None)
        raise TrainError(
            f"step {self.stepper.step_number}: log-probabilities of rollout and trainer differ by up to "
            f"{max(maxima):.3g} nats, and "
            f"{'rl.invariant allows none' if self.configured is None else f'rl.max_gap is {self.configured:g}'}: "
            f"{world.gather_objects(cause)[worst]}. The last checkpoint is not affected. Raise rl.max_gap, or remove "
            "what makes them differ (rl.kv: fp8, recipes whose scales span rows)"
        )

    def _find_first_difference(self, batch: dict[str, Any], row: int | None) -> str:
        """Describe the first layer that differs between rollout and trainer in a row of a micro-batch. The forward is a
        collective, so ranks without the row (`row` is None) run it too."""
        stepper, engine, rollout = self.stepper, self.stepper.roles.local, self.stepper.rollout
        prompt, tokens = None, np.zeros(0, dtype=np.int64)
        if row is not None:
            completion = rollout.completions[batch["experience"].rows[row]]
            sample, tokens = rollout.prompts[completion.prompt], completion.tokens
            prompt, batch = engine_prompt(sample), data.collate([full_sample(sample, completion)], stepper.pad_id)
        keep, *_ = stepper.loss_positions(batch, 1.0)

        def train() -> None:
            with stepper.batch_invariant_context():
                stepper.forward(batch, keep)

        limit = 0.0 if engine.caller.invariant else rounding(engine.caller.dtype)
        with torch.no_grad(), uncounted():
            difference = first_difference(stepper.model, train, lambda: engine.replay(prompt, tokens), limit)
        return str(difference or "rerun on its own, this completion is bit-identical in all layers")
