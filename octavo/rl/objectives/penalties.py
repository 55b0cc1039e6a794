"""Penalties on a reward or a loss: the distance from a reference and the length; and the mask of truncated completions.

The KL divergence of the policy from a reference is estimated from the tokens that the policy drew. With
d = log p - log p_ref of a token, Schulman's estimators (joschu.net/blog/kl-approx.html) are

    k1 = d                  unbiased, may be negative
    k2 = d^2 / 2            biased, never negative
    k3 = e^-d - 1 + d       unbiased, never negative: GRPO's

In the reward, their value matters. In the loss, their gradient does, and only the gradient of k2 has the KL's gradient
as its mean: the mean is 0 for k1 (the gradient of log p), and the reverse divergence's gradient for k3. Multiplied by
the ratio of the policy to the policy that drew the tokens (DeepSeek-V3.2, arXiv 2512.02556, 3.1), k1 and k3 have the
KL's gradient.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from octavo.rl.objectives.importance import logp_difference

Kl = Literal["k1", "k2", "k3"]


def kl(logps: Tensor, ref_logps: Tensor, mask: Tensor, estimator: Kl) -> Tensor:
    """Estimate the KL at each token [B, T], in nats, from log-probabilities [B, T]; 0 where the mask is 0."""
    if estimator not in get_args(Kl):
        raise ValueError(f"KL estimator {estimator!r} does not exist; there are {', '.join(get_args(Kl))}")
    difference = logp_difference(logps, ref_logps, mask)
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference.square() / 2
    return torch.expm1(-difference) + difference


def overlong_penalty(lengths: Tensor, longest: int, buffer: int) -> Tensor:
    """DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13) for completions of ``lengths`` [N] tokens: fp32 [N],
    to be added to rewards.

    0 up to ``longest - buffer`` tokens, then linearly down to -1 at ``longest``, and -1 beyond.
    """
    if not 0 <= buffer <= longest:
        raise ValueError(f"the buffer of the overlong punishment is 0 to {longest} tokens (max_new_tokens): {buffer}")
    if not buffer:
        return -(lengths > longest).float()
    return ((longest - buffer - lengths.float()) / buffer).clamp(-1.0, 0.0)


def mask_out_truncated(mask: Tensor, truncated: Tensor) -> Tensor:
    """Remove the completions that were cut off at the length limit (``truncated``, bool [B]) from the mask [B, T],
    because their endings are unknown. Their rewards stay in the group's mean (DAPO's overlong filtering, TRL)."""
    return mask.bool() & ~truncated.bool()[:, None]
