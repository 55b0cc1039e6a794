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
from octavo.rl.rollout.experience import prompt_of
from octavo.rl.rollout.experience import whole as with_completion
from octavo.rl.rollout.first_mismatch import first_difference, rounding
from octavo.train import TrainError


class MismatchLimit:
    """The limit of a run with `rl.max_gap`, or with `rl.invariant`, whose limit is 0."""

    def __init__(self, stepper: StepperProtocol) -> None:
        section = stepper.settings.section
        self.stepper, self.asked = stepper, section.max_gap
        self.most = 0.0 if section.max_gap is None else section.max_gap

    def hold(self, batch: dict[str, Any], gaps: Tensor) -> None:
        """Raise TrainError before weights are updated by completions of another policy. `gaps` [B, P]: |d log p|. A
        collective."""
        world, each = self.stepper.world, gaps.amax(dim=1)
        every = world.gather_objects(float(each.max()))
        if max(every) <= self.most:
            return
        worst = every.index(max(every))
        cause = self._parting(batch, int(each.argmax()) if worst == world.rank else None)
        raise TrainError(
            f"step {self.stepper.number}: log-probabilities of rollout and trainer differ by up to {max(every):.3g} "
            f"nats, and {'rl.invariant allows none' if self.asked is None else f'rl.max_gap is {self.asked:g}'}: "
            f"{world.gather_objects(cause)[worst]}. The last checkpoint is not affected. Raise rl.max_gap, or remove "
            "what makes them differ (rl.kv: fp8, recipes whose scales span rows)"
        )

    def _parting(self, batch: dict[str, Any], row: int | None) -> str:
        """Which layer differs first between rollout and trainer in a row of a micro-batch. The forward is a collective,
        so ranks without the row (None) run it too."""
        stepper, engine, rollout = self.stepper, self.stepper.roles.engine, self.stepper.rollout
        prompt, tokens = None, np.zeros(0, dtype=np.int64)
        if row is not None:
            completion = rollout.completions[batch["experience"].rows[row]]
            sample, tokens = rollout.prompts[completion.prompt], completion.tokens
            prompt, batch = prompt_of(sample), data.collate([with_completion(sample, completion)], stepper.pad_id)
        keep, *_ = stepper.loss_positions(batch, 1.0)

        def train() -> None:
            with stepper.rows():
                stepper.forward(batch, keep)

        limit = 0.0 if engine.caller.invariant else rounding(engine.caller.dtype)
        with torch.no_grad(), uncounted():
            difference = first_difference(stepper.model, train, lambda: engine.replay(prompt, tokens), limit)
        return str(difference or "run again separately, this completion is the same in all layers to the bit")
