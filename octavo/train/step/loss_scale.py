"""Loss scaling, where activations and their gradients are FP16 (`train.precision: fp16`).

FP16 has 5 bits of exponent: nothing beyond 65504, bits lost one by one below 2^-14 = 6e-5, nothing below 2^-24 = 6e-8.
Gradients of a loss that is a mean over a batch's tokens lie there, and what FP16 rounds to zero no later scale brings
back. So the loss is multiplied by a power of two before backward, and the gradients of parameters, which are fp32, are
divided by it before anything looks at them: norm, clipping and update see what they would have seen (a power of two
moves exponents and rounds nothing). BF16 needs none of this: its 8 bits of exponent are those of fp32.

The largest scale that overflows nothing is not known and moves with training, so it is tried (Micikevicius et al.,
Mixed Precision Training, ICLR 2018): halved when a gradient overflows, in a step that is skipped, and doubled after
:data:`INTERVAL` steps without. That is the rule of ``torch.amp.GradScaler``, with its figures. Its object unscales in a
pass of its own, calls the optimizer and asks one process; here the clip factor undoes the scale, updates may happen in
backward, and all ranks know from the norm of all gradients whether one was not finite.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from octavo.config import Config
from octavo.train.errors import TrainError

START, INTERVAL = 2.0**16, 2000
LARGEST = 2.0**127  # of fp32's powers of two


@dataclass
class LossScale:
    """``value``: what losses are multiplied by; ``good``: steps since it moved, none of which overflowed; ``moves``:
    False for a number that was asked for, which stays."""

    value: float = START
    good: int = 0
    moves: bool = True

    @classmethod
    def of(cls, cfg: Config) -> LossScale | None:
        """That of a run, None where nothing computes in FP16."""
        if cfg.train.precision != "fp16":
            return None
        setting = cfg.train.loss_scale
        return cls() if setting in (None, "dynamic") else cls(float(setting), moves=False)

    def after(self, applied: bool, loss_finite: bool) -> bool:
        """A step is done. True: gradients overflowed, and the scale fell. A loss that is not finite itself says nothing
        of the scale, and at a scale of 1, or one that stays, there is nothing left to try: False, as of a step that was
        applied."""
        if not self.moves or not loss_finite:
            return False
        if applied:
            self.good += 1
            if self.good == INTERVAL:
                self.value, self.good = min(2 * self.value, LARGEST), 0
            return False
        before, self.good = self.value, 0
        self.value = max(self.value / 2, 1.0)
        return self.value < before

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, as JSON."""
        return {"value": self.value, "good": self.good}

    def load(self, state: Mapping[str, Any], where: object) -> None:
        """Put back what :meth:`state` gave. Raises TrainError for what it never gave, found in ``where``."""
        value, good = float(state["value"]), int(state["good"])
        if not 1 <= value <= LARGEST or math.frexp(value)[0] != 0.5 or not 0 <= good < INTERVAL:
            raise TrainError(
                f"{where} says of the loss scale {dict(state)}, which no run writes: the value is a power of two from "
                f"1, `good` less than {INTERVAL}. The file was changed; take another checkpoint"
            )
        self.value, self.good = value, good
