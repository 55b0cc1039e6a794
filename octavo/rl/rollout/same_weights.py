"""That a step learns by the weights that wrote its completions: the part of a run's proof that is about rollouts.

Checksums of all parameters and of the FP8 codes that layers hold are taken as soon as a rollout ends and again before
the step's first update. The same bits on both sides, multiplied by the same plan, are the same policy; other bits mean
that somebody wrote to weights in between, and that log-probabilities of another policy would be learnt from. proof.json
says which steps were held to it, and the digest of the last one's weights.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from torch import nn

from octavo import fp8
from octavo.base import safe_read
from octavo.fp8.weights import changed_weights, weight_sums
from octavo.parallel import World

_NAMED = 3
_CACHED = " codes in "  # in the names of codes that a layer holds: they come and go, and follow from their parameter
PROVEN = {"first!": safe_read.COUNT, "last!": safe_read.COUNT, "sha256": safe_read.TEXT, "stale": safe_read.COUNT}
"""The form of what proof.json says of rollouts."""


class SameWeights:
    """Of the policy, step by step."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._wrote: dict[str, int] | None = None
        self._moved: dict[str, int] | None = None
        self._learnt: dict[str, int] = {}
        self.first = self.last = 0
        self.sha256: str | None = None

    def resume(self, earlier: Mapping[str, Any], step: int) -> None:
        """Go on after `step` from what proof.json says of earlier sessions, as far as it says anything of that step."""
        first, last = (int(earlier.get(name, 0)) for name in ("first", "last"))
        if step and first <= step <= last:
            self.first, self.last = first, step
            self.sha256 = earlier.get("sha256") if last == step else None

    def wrote(self, step: int) -> None:
        """A rollout of this step has ended; of a step's further rollouts each must be by the first one's weights."""
        if self._wrote is not None:
            self._hold(step, self._wrote, "its first rollout and a further one")
        elif self._moved is not None:
            self._hold(step, self._moved, "the update before it and its rollout")
        self._wrote = dict(weight_sums(self.model))

    def learns(self, step: int) -> None:
        """The step's first update begins. Raises ProofError where weights are not those of its rollout."""
        before = self._wrote or self._moved
        if before is None:  # a session's first step that writes nothing: its weights are the checkpoint's
            before = dict(weight_sums(self.model))
        self._hold(step, before, "its rollout and its update")
        self._learnt, self._wrote = before, None
        self.first, self.last = self.first or step, step

    def moved(self) -> None:
        """The step's last update has ended, and what was written before is learnt from in the next (`rl.stale`): until
        then nobody else may write. Codes that layers hold are of the weights before, and are cast anew."""
        self._moved = _lasting(weight_sums(self.model))

    def report(self, world: World) -> dict[str, Any]:
        """The steps that were held to it, first to last, and a digest of the weights, on all ranks, that the last one
        began with (None where nobody knows it any more). Empty where there is no step. A collective."""
        digests = world.gather_objects(_digest(_lasting(self._learnt)))
        if self._learnt:
            self.sha256 = _digest(digests)
        return {"first": self.first, "last": self.last, "sha256": self.sha256} if self.last else {}

    def _hold(self, step: int, before: Mapping[str, int], when: str) -> None:
        if not (changed := changed_weights(before, weight_sums(self.model))):
            return
        more = f" and {len(changed) - _NAMED} more" if len(changed) > _NAMED else ""
        raise fp8.ProofError(
            f"step {step}: weights changed between {when}: {', '.join(changed[:_NAMED])}{more}. Its completions were "
            "written by another policy than the one that learns from them. Between the two nobody may write to "
            "weights or to their codes: look at callbacks, hooks and rewards that hold the model"
        )


def _lasting(sums: Mapping[str, int]) -> dict[str, int]:
    return {name: found for name, found in sums.items() if _CACHED not in name}


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()
