"""Loss scaling for activations and gradients in FP16 (`train.precision: fp16`).

FP16 has 5 exponent bits: no values beyond 65504, reduced precision below 2^-14 = 6e-5, zero below 2^-24 = 6e-8.
Gradients of a mean over a batch's tokens are that small, and a later scale cannot recover what FP16 rounds to zero. So
the loss is multiplied by a power of two before backward, and the fp32 gradients of parameters are divided by it before
the norm, clipping and the update, which get the same values as without (a power of two changes exponents and rounds
nothing). BF16 does not need this: it has the 8 exponent bits of fp32.

The largest scale without overflow is unknown and changes during training, so it is searched (Micikevicius et al.,
Mixed Precision Training, ICLR 2018): halved when a gradient overflows, in a step that is skipped, and doubled after
:data:`INTERVAL` steps without overflow. This is the rule of ``torch.amp.GradScaler``, with its constants. GradScaler
unscales in a separate pass, calls the optimizer and checks one process; here the clip factor undoes the scale, updates
may happen in backward, and all ranks see overflow in the norm of all gradients.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from octavo.config import Config
from octavo.train.errors import TrainError

START, INTERVAL = 2.0**16, 2000
MAX_SCALE = 2.0**127  # fp32's largest power of two


@dataclass
class LossScale:
    """The loss scale.

    value       factor of the losses
    good        steps without overflow since the value changed
    is_dynamic  False if the value is configured as a number, so that it never changes
    """

    value: float = START
    good: int = 0
    is_dynamic: bool = True

    @classmethod
    def of(cls, cfg: Config) -> LossScale | None:
        """Return the loss scale of a run, or None if it does not compute in FP16."""
        if cfg.train.precision != "fp16":
            return None
        setting = cfg.train.loss_scale
        return cls() if setting in (None, "dynamic") else cls(float(setting), is_dynamic=False)

    def record_step(self, applied: bool, loss_finite: bool) -> bool:
        """Record a step. Returns True if gradients overflowed and the scale was lowered. Returns False if the step was
        applied, if the loss itself is not finite, which does not depend on the scale, or if the scale is 1 or fixed."""
        if not self.is_dynamic or not loss_finite:
            return False
        if applied:
            self.good += 1
            if self.good == INTERVAL:
                self.value, self.good = min(2 * self.value, MAX_SCALE), 0
            return False
        before, self.good = self.value, 0
        self.value = max(self.value / 2, 1.0)
        return self.value < before

    def state(self) -> dict[str, Any]:
        """Return the state to checkpoint, as JSON."""
        return {"value": self.value, "good": self.good}

    def load(self, state: Mapping[str, Any], where: object) -> None:
        """Restore a :meth:`state`. Raises TrainError for an impossible one, from the file ``where``."""
        value, good = float(state["value"]), int(state["good"])
        if not 1 <= value <= MAX_SCALE or math.frexp(value)[0] != 0.5 or not 0 <= good < INTERVAL:
            raise TrainError(
                f"{where} has the loss scale {dict(state)}, which no run writes: the value is a power of two from 1, "
                f"`good` less than {INTERVAL}. The file was changed; use another checkpoint"
            )
        self.value, self.good = value, good
