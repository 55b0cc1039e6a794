"""`rl.max_gap`: how far log-probabilities of rollout and trainer may lie apart, and where they part if too far."""

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
    """Of one run, which names a limit or has `rl.invariant`, where it is 0."""

    def __init__(self, stepper: StepperProtocol) -> None:
        section = stepper.settings.section
        self.stepper, self.asked = stepper, section.max_gap
        self.most = 0.0 if section.max_gap is None else section.max_gap

    def hold(self, batch: dict[str, Any], gaps: Tensor) -> None:
        """Stop before weights are updated by what another policy wrote. `gaps` [B, P]: |d log p|. A collective."""
        world, each = self.stepper.world, gaps.amax(dim=1)
        every = world.gather_objects(float(each.max()))
        if max(every) <= self.most:
            return
        worst = every.index(max(every))
        found = self._parting(batch, int(each.argmax()) if worst == world.rank else None)
        raise TrainError(
            f"step {self.stepper.number}: log-probabilities of rollout and trainer differ by up to {max(every):.3g} "
            f"nats, and {'rl.invariant allows none' if self.asked is None else f'rl.max_gap is {self.asked:g}'}: "
            f"{world.gather_objects(found)[worst]}. The last checkpoint stands. Raise rl.max_gap, or take what "
            "makes both differ out of the run (rl.kv: fp8, recipes whose scales span rows)"
        )

    def _parting(self, batch: dict[str, Any], row: int | None) -> str:
        """Where rollout and trainer part in a row of a micro-batch; a rank with none (None) runs along."""
        stepper, engine, rollout = self.stepper, self.stepper.roles.engine, self.stepper.rollout
        prompt, tokens = None, np.zeros(0, dtype=np.int64)
        if row is not None:
            completion = rollout.completions[batch["experience"].rows[row]]
            sample, tokens = rollout.prompts[completion.prompt], completion.tokens
            prompt, batch = prompt_of(sample), data.collate([with_completion(sample, completion)], stepper.pad_id)
        keep, *_ = stepper.judged(batch, 1.0)

        def train() -> None:
            with stepper.rows():
                stepper.forward(batch, keep)

        limit = 0.0 if engine.caller.invariant else rounding(engine.caller.dtype)
        with torch.no_grad(), uncounted():
            found = first_difference(stepper.model, train, lambda: engine.replay(prompt, tokens), limit)
        return str(found or "run again by itself, this completion is the same in all layers to the bit")
