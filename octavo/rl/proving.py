"""That a step learns by the weights that wrote its completions: the part of a run's proof that is about rollouts.

Checksums of all parameters and of the FP8 codes that layers hold are taken as soon as a rollout ends and again before
the step's first update. The same bits on both sides, multiplied by the same plan, are the same policy; other bits mean
that somebody wrote to weights in between, and that log-probabilities of another policy would be learnt from.
"""

from __future__ import annotations

from torch import nn

from octavo import fp8

_NAMED = 3


class SameWeights:
    """Of the policy, step by step."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._wrote: dict[str, int] | None = None

    def wrote(self, step: int) -> None:
        """A rollout of this step has ended; of a step's further rollouts each must be by the first one's weights."""
        if self._wrote is not None:
            self._hold(step, "its first rollout and a further one")
        self._wrote = dict(fp8.weight_sums(self.model))

    def learns(self, step: int) -> None:
        """The step's first update begins. Raises ProofError where weights are not those of its rollout."""
        self._hold(step, "its rollout and its update")
        self._wrote = None

    def _hold(self, step: int, when: str) -> None:
        assert self._wrote is not None, "a step begins with a rollout"
        if not (changed := fp8.changed_weights(self._wrote, fp8.weight_sums(self.model))):
            return
        more = f" and {len(changed) - _NAMED} more" if len(changed) > _NAMED else ""
        raise fp8.ProofError(
            f"step {step}: weights changed between {when}: {', '.join(changed[:_NAMED])}{more}. Its completions were "
            "written by another policy than the one that learns from them. Between the two nobody may write to "
            "weights or to their codes: look at callbacks, hooks and rewards that hold the model"
        )
