"""The gap between rollout and trainer, and importance weights that correct for it.

The rollout draws tokens with probabilities mu; the trainer, with the same weights but other kernels, batches or
formats, computes p_old for them. With d = log p_old - log mu of a token, an expectation over the rollout becomes one
over the trainer's policy when each token, or each completion of n tokens, is weighted by

    token      e^d                  of a token given those before it
    sequence   e^(sum of d)         exact, but d adds up: 0.01 a token is a factor of 2.7 after 100 tokens
    geometric  e^(sum of d / n)     a mean, which does not grow with the length

A weight above its limit is truncated to the limit (truncated importance sampling), or the token or completion is
masked: its weight is 0 outside low .. high (IcePop by tokens, rejection by completions).
An objective over whole completions uses the mean of its tokens' weights.
``octavo/rl/objectives/policy_losses.py`` multiplies terms by weights.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from octavo.rl.objectives.metrics import Figures, highest, lowest

LARGEST = 20.0  # nats: a ratio of two probabilities is cut to e^-20 .. e^20, so that no product is inf * 0
Level = Literal["token", "sequence", "geometric"]
Action = Literal["truncate", "mask"]

# Default limits (low, high). Token and sequence: within the ranges in the documentation of verl's rollout correction
# (1.5 to 5 and 2 to 10, truncation at 2). Masking of tokens: IcePop. A geometric mean is a factor per token, so its
# limits are close to 1.
LIMITS: dict[tuple[Level, Action], tuple[float | None, float]] = {
    ("token", "truncate"): (None, 2.0),
    ("token", "mask"): (0.5, 5.0),
    ("sequence", "truncate"): (None, 2.0),
    ("sequence", "mask"): (0.5, 2.0),
    ("geometric", "truncate"): (None, 1.01),
    ("geometric", "mask"): (0.99, 1.01),
}


@dataclass(frozen=True)
class Correction:
    """Settings for the computation and limits of weights. A limit of None means the default in :data:`LIMITS`;
    truncation has no lower limit unless one is set. Raises ValueError for limits that exclude 1."""

    level: Level = "token"
    action: Action = "truncate"
    low: float | None = None
    high: float | None = None

    def __post_init__(self) -> None:
        if self.level not in get_args(Level) or self.action not in get_args(Action):
            raise ValueError(
                f"a correction is of {', '.join(get_args(Level))} and does {', '.join(get_args(Action))}; "
                f"found {self.level!r} and {self.action!r}"
            )
        low, high = self.limits
        if not 0 <= (low or 0.0) <= 1 <= high:
            raise ValueError(
                f"limits of a weight must include 1, the weight where there is no gap: low {low}, high {high}"
            )

    @property
    def limits(self) -> tuple[float | None, float]:
        low, high = LIMITS[self.level, self.action]
        return low if self.low is None else self.low, high if self.high is None else self.high


UNLIMITED = Correction(high=math.inf)
"""For weights that are reported but not applied."""


def logp_difference(logps: Tensor, others: Tensor, mask: Tensor) -> Tensor:
    """Return log p - log q of each token; where the mask is 0, the difference and its gradient are exactly 0, even for
    NaN."""
    return torch.where(mask.bool(), logps - others, 0.0).clamp(-LARGEST, LARGEST)


def gap(old_logps: Tensor, sampled_logps: Tensor, mask: Tensor, tokens: float) -> Figures:
    """Measure the gap between trainer and rollout over all counted tokens: fp32 [B, T] each, ``tokens`` of the whole
    batch.

    ``logp_gap_mean`` and ``logp_gap_max``: |d log p| in nats. ``logp_gap_k1`` and ``logp_gap_k3``: the KL divergence of
    the rollout's policy from the trainer's, estimated as in ``octavo/rl/objectives/penalties.py``. All four are 0 if
    both computed the same values.
    """
    d = logp_difference(old_logps, sampled_logps, mask)
    distance, total = d.abs(), max(tokens, 1.0)
    return {
        "logp_gap_mean": distance.sum() / total,
        "logp_gap_max": highest(distance, mask.bool()),
        "logp_gap_k1": -d.sum() / total,
        "logp_gap_k3": (torch.expm1(d) - d).sum() / total,
    }


@torch.no_grad()
def weights(
    old_logps: Tensor, sampled_logps: Tensor, mask: Tensor, correction: Correction, tokens: float, sequences: float
) -> tuple[Tensor, Figures]:
    """Compute the weights of the objective's terms: [B, T] by token, else [B, 1]; 1 where nothing counts. ``tokens``
    and ``sequences`` are the counts of the whole batch.

    Figures describe the weights after limiting: ``sampling/importance_sampling_ratio/min``, ``mean`` and ``max`` over
    tokens (or completions), and ``sampling/limited``, the share of them that was truncated or masked.
    """
    counted = mask.bool()
    d = logp_difference(old_logps, sampled_logps, mask)
    if correction.level != "token":
        d = d.sum(dim=1, keepdim=True)
        if correction.level == "geometric":
            d = d / counted.sum(dim=1, keepdim=True).clamp(min=1)
        counted = counted.any(dim=1, keepdim=True)
    raw = d.exp()
    low, high = correction.limits
    outside = (raw > high) if low is None else (raw > high) | (raw < low)
    used = raw.clamp(low, high) if correction.action == "truncate" else raw.masked_fill(outside, 0.0)
    total = max(tokens if correction.level == "token" else sequences, 1.0)
    name = "sampling/importance_sampling_ratio"
    return used, {
        f"{name}/min": lowest(used, counted),
        f"{name}/mean": torch.where(counted, used, 0.0).sum() / total,
        f"{name}/max": highest(used, counted),
        "sampling/limited": outside.sum() / total,
    }
