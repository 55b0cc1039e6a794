"""What is added to a reward or a loss: the distance from a reference, the length, and what is left out of both.

The KL divergence of the policy from a reference is estimated from the tokens that the policy drew. With
d = log p - log p_ref of a token, Schulman's estimators (joschu.net/blog/kl-approx.html) are

    k1 = d                  unbiased, may be negative
    k2 = d^2 / 2            biased, never negative
    k3 = e^-d - 1 + d       unbiased, never negative: GRPO's

In the reward their value counts. In the loss their gradient does, and its mean is the KL's own for k2 alone: for k1 it
is 0 (the gradient of log p), for k3 that of the reverse divergence. Multiplied by the policy's ratio to the one that
drew the tokens (DeepSeek-V3.2, arXiv 2512.02556, 3.1) k1 and k3 have the KL's gradient.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from octavo.rl.objectives.importance import difference_of

Kl = Literal["k1", "k2", "k3"]


def kl(logps: Tensor, ref_logps: Tensor, mask: Tensor, estimator: Kl) -> Tensor:
    """[B, T] each -> the estimate of each token [B, T], in nats; 0 where the mask is 0."""
    if estimator not in get_args(Kl):
        raise ValueError(f"KL estimator {estimator!r} does not exist; there are {', '.join(get_args(Kl))}")
    difference = difference_of(logps, ref_logps, mask)
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference.square() / 2
    return torch.expm1(-difference) + difference


def overlong(lengths: Tensor, longest: int, buffer: int) -> Tensor:
    """DAPO's soft punishment (arXiv 2503.14476, eq. 13): tokens of completions [N] -> fp32 [N], added to rewards.

    0 up to ``longest - buffer`` tokens, then falling evenly to -1 at ``longest``, and -1 beyond.
    """
    if not 0 <= buffer <= longest:
        raise ValueError(f"the buffer of the overlong punishment is 0 to {longest} tokens (max_new_tokens): {buffer}")
    if not buffer:
        return -(lengths > longest).float()
    return ((longest - buffer - lengths.float()) / buffer).clamp(-1.0, 0.0)


def without_truncated(mask: Tensor, truncated: Tensor) -> Tensor:
    """The mask [B, T] without the completions that were cut off at the limit (bool [B]): they say nothing of how the
    policy would have ended. Their rewards stay in the group's mean (DAPO's overlong filtering, TRL)."""
    return mask.bool() & ~truncated.bool()[:, None]
