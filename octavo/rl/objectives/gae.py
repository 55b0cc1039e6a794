"""The parts of PPO in addition to its clipped surrogate: rewards and advantages per token, and the critic's loss.

A completion is an episode: token t is the action in the state of all tokens before it, and V_t is the critic's value of
that state. Rewards are [B, T]: the score at the last token that counts, and at every token the KL penalty. The state
after the last token has the value 0. Masked tokens in between are skipped.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from octavo.rl.objectives.metrics import Figures
from octavo.rl.objectives.policy_losses import Counts, by_token


def token_rewards(scores: Tensor, mask: Tensor, kl: Tensor | None = None, beta: float = 0.0) -> Tensor:
    """Scores [B] of completions, and the KL estimate of each token [B, T] (``octavo/rl/objectives/penalties.py``) ->
    [B, T].

    InstructGPT (arXiv 2203.02155, eq. 2): -beta KL at every token, the score at the last.
    """
    counted = mask.bool()
    after = counted.flip(1).cumsum(dim=1).flip(1)  # tokens that count from here on
    rewards = torch.where(counted & (after == 1), scores.float()[:, None], 0.0)
    return rewards if kl is None else rewards - beta * torch.where(counted, kl, 0.0)


@torch.no_grad()
def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation (arXiv 1506.02438, eq. 16): [B, T] each -> (advantages, returns), 0 if masked.

        delta_t = r_t + gamma V_(t+1) - V_t        A_t = delta_t + gamma lam A_(t+1)        R_t = A_t + V_t

    Without discounts (gamma = lam = 1) A_t is the reward still to come minus V_t.
    """
    counted = mask.bool()
    values = torch.where(counted, values, 0.0)
    rewards = torch.where(counted, rewards, 0.0)
    advantages = torch.zeros_like(values)
    later = value_after = values.new_zeros(len(values))
    for t in reversed(range(values.shape[1])):
        here = rewards[:, t] + gamma * value_after - values[:, t] + gamma * lam * later
        later = torch.where(counted[:, t], here, later)
        value_after = torch.where(counted[:, t], values[:, t], value_after)
        advantages[:, t] = torch.where(counted[:, t], here, 0.0)
    return advantages, advantages + values


def gae_of_micro_batches(
    rewards: Sequence[Tensor], values: Sequence[Tensor], masks: Sequence[Tensor], gamma: float, lam: float
) -> list[tuple[Tensor, Tensor]]:
    """:func:`gae` of micro-batches of any widths, in one pass over the tokens that count: a loop over time for each
    micro-batch would launch very many small operations where completions are long."""
    masks = [mask.bool() for mask in masks]

    def packed(parts: Sequence[Tensor]) -> Tensor:
        rows = [row[m] for part, mask in zip(parts, masks, strict=True) for row, m in zip(part, mask, strict=True)]
        return nn.utils.rnn.pad_sequence(rows, batch_first=True)

    inside, counts = packed(masks), [int(mask.sum()) for mask in masks]
    packed_result = gae(packed(rewards), packed(values), inside, gamma, lam)
    flat = zip(*(each[inside].split(counts) for each in packed_result), strict=True)
    return [
        (torch.zeros(mask.shape).masked_scatter(mask, a), torch.zeros(mask.shape).masked_scatter(mask, r))
        for mask, (a, r) in zip(masks, flat, strict=True)
    ]


def moments(advantages: Tensor, mask: Tensor) -> Tensor:
    """Return fp64 [3]: the number of counted tokens, and the sums of their advantages and squared advantages. Sums over
    micro-batches and ranks are added."""
    counted = mask.bool()
    wide = torch.where(counted, advantages, 0.0).double()
    return torch.stack([counted.sum().double(), wide.sum(), wide.square().sum()])


def whiten(advantages: Tensor, mask: Tensor, of_batch: Tensor, eps: float = 1e-8) -> Tensor:
    """Advantages with mean 0 and variance 1 over the whole batch, whose :func:`moments` are ``of_batch``; 0 where
    masked.

    A single token, and advantages that are all equal, become 0: the mean of equal fp32 numbers is exact in fp64.
    """
    n, total, squares = of_batch.tolist()
    mean = total / max(n, 1.0)
    variance = max(squares - n * mean * mean, 0.0) / max(n - 1, 1.0)
    return torch.where(mask.bool(), (advantages.double() - mean) * (variance + eps) ** -0.5, 0.0).float()


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, n: Counts, clip: float | None = 0.2
) -> tuple[Tensor, Figures]:
    """The critic's loss (PPO's reference code): values [B, T] with a gradient, values at the rollout, and returns.

        1/2 max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2)        mean over all tokens of the batch

    Figures: ``value_loss``; ``value_clip_ratio``, the share of tokens whose clipped error is larger; ``value_mean``.
    """
    counted = mask.bool()
    values, old_values, returns = (torch.where(counted, x, 0.0) for x in (values, old_values, returns))
    plain = (values - returns).square()
    bounded = plain
    if clip is not None:
        bounded = (torch.clamp(values, old_values - clip, old_values + clip) - returns).square()
    share = by_token(counted, n)
    loss = (torch.maximum(plain, bounded) * share).sum() / 2
    return loss, {
        "value_loss": loss.detach(),
        "value_clip_ratio": ((bounded > plain) * share).sum(),
        "value_mean": (values.detach() * share).sum(),
    }
