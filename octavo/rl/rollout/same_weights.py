"""Proof that a step updates the weights that wrote its completions: the part of a run's proof about rollouts.

Checksums of all parameters and of the FP8 codes that layers hold are taken when a rollout ends and again before the
step's first update. Equal bits, multiplied by the same plan, are the same policy. Other bits mean that some code wrote
to the weights in between, and that the step would learn from log-probabilities of another policy. proof.json records
which steps were checked, and the digest of the weights of the last one.
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
_CACHED = " codes in "  # in the names of cached codes, which are recomputed from their parameter at any time
PROVEN = {"first!": safe_read.COUNT, "last!": safe_read.COUNT, "sha256": safe_read.TEXT, "stale": safe_read.COUNT}
"""The form of the entry on rollouts in proof.json."""


class SameWeights:
    """Checks the policy's weights, step by step."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._wrote: dict[str, int] | None = None
        self._moved: dict[str, int] | None = None
        self._learnt: dict[str, int] = {}
        self.first = self.last = 0
        self.sha256: str | None = None

    def resume(self, earlier: Mapping[str, Any], step: int) -> None:
        """Continue after `step` from the entry of earlier sessions in proof.json, if it covers that step."""
        first, last = (int(earlier.get(name, 0)) for name in ("first", "last"))
        if step and first <= step <= last:
            self.first, self.last = first, step
            self.sha256 = earlier.get("sha256") if last == step else None

    def wrote(self, step: int) -> None:
        """A rollout of this step has ended. Raises ProofError where the weights are not those of the step's first
        rollout, or of the update before it."""
        if self._wrote is not None:
            self._hold(step, self._wrote, "its first rollout and a further one")
        elif self._moved is not None:
            self._hold(step, self._moved, "the update before it and its rollout")
        self._wrote = dict(weight_sums(self.model))

    def learns(self, step: int) -> None:
        """The step's first update begins. Raises ProofError where the weights differ from those of the rollout."""
        before = self._wrote or self._moved
        if before is None:  # a session's first step without a rollout: the weights are the checkpoint's
            before = dict(weight_sums(self.model))
        self._hold(step, before, "its rollout and its update")
        self._learnt, self._wrote = before, None
        self.first, self.last = self.first or step, step

    def moved(self) -> None:
        """The step's last update has ended, and the next step learns from completions of before it (`rl.stale`): until
        then the weights must not change. Cached codes belong to the weights before the update and are cast again."""
        self._moved = _lasting(weight_sums(self.model))

    def report(self, world: World) -> dict[str, Any]:
        """The first and last step that were checked, and the digest of the weights on all ranks with which the last one
        began (None if it is no longer known). Empty without a step. A collective."""
        digests = world.gather_objects(_digest(_lasting(self._learnt)))
        if self._learnt:
            self.sha256 = _digest(digests)
        return {"first": self.first, "last": self.last, "sha256": self.sha256} if self.last else {}

    def _hold(self, step: int, before: Mapping[str, int], when: str) -> None:
        if not (changed := changed_weights(before, weight_sums(self.model))):
            return
        others = f" and {len(changed) - _NAMED} more" if len(changed) > _NAMED else ""
        raise fp8.ProofError(
            f"step {step}: weights changed between {when}: {', '.join(changed[:_NAMED])}{others}. Its completions were "
            "written by another policy than the one that learns from them. Weights and their codes must not change "
            "between the two: check callbacks, hooks and rewards that hold the model"
        )


def _lasting(sums: Mapping[str, int]) -> dict[str, int]:
    return {name: checksum for name, checksum in sums.items() if _CACHED not in name}


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()
