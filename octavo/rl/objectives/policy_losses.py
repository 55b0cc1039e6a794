"""The policy objectives of reinforcement learning, one function each, as their papers write them.

Tokens of completions are ``[B, T]``: B completions of one micro-batch, T of them padded, with a mask. All objectives
have one form, a loss to be minimised

    L = sum over tokens of  share * (weight * term + beta * KL)  -  bonus * mean entropy

``term`` is the algorithm's loss of a token (below), ``weight`` corrects for differences between rollout and trainer
(``octavo/rl/objectives/importance.py``), and ``share`` divides by counts of the *whole* batch of an update, over all
micro-batches and ranks. So the gradients of micro-batches and ranks add up to the gradient of L without a further
factor; figures add up in the same way (``octavo/rl/objectives/metrics.py``). Where everything is masked, loss and
gradient are 0, never NaN.

With r = p / p_old of a token and A its advantage, the clipped surrogate (PPO, arXiv 1707.06347, eq. 7) is

    term = -min(r A, clip(r, 1 - low, 1 + high) A)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from octavo.rl.objectives.importance import LARGEST, logp_difference
from octavo.rl.objectives.metrics import Figures, highest, lowest
from octavo.rl.objectives.penalties import Kl, kl


@dataclass(frozen=True)
class Batch:
    """Completions of one micro-batch, fp32 ``[B, T]`` on one device.

    logps       log-probabilities of the tokens under the trained policy, in nats, with a gradient
    old_logps   the same under the weights that wrote the completions, computed by the trainer
    mask        true for tokens that count
    advantages  [B], or [B, T] from a critic
    ref_logps   log-probabilities under the reference
    weights     importance weights, [B, 1] or [B, T]
    entropy     of the policy's distribution at each token, in nats; with a gradient if there is an entropy bonus

    Masked values may be anything, including NaN; they are set to 0. Raises ValueError for other shapes and dtypes.
    """

    logps: Tensor
    old_logps: Tensor
    mask: Tensor
    advantages: Tensor
    ref_logps: Tensor | None = None
    weights: Tensor | None = None
    entropy: Tensor | None = None

    def __post_init__(self) -> None:
        shape, mask = self.logps.shape, self.mask.bool()
        if len(shape) != 2 or mask.shape != shape:
            raise ValueError(f"log-probabilities are [completions, tokens], as the mask: {[*shape]}, {[*mask.shape]}")
        object.__setattr__(self, "mask", mask)
        for name in ("logps", "old_logps", "advantages", "ref_logps", "weights", "entropy"):
            tensor: Tensor | None = getattr(self, name)
            if tensor is None:
                continue
            if name == "advantages" and tensor.dim() == 1:
                tensor = tensor[:, None]
            of_rows = name in ("advantages", "weights") and tensor.shape == (shape[0], 1)
            if tensor.shape != shape and not of_rows:
                raise ValueError(f"{name} is {list(tensor.shape)}; log-probabilities are {list(shape)}")
            if tensor.dtype not in (torch.float32, torch.float64):
                raise ValueError(f"{name} is {tensor.dtype}: differences of log-probabilities need float32")
            counts = mask.any(dim=1, keepdim=True) if of_rows else mask
            object.__setattr__(self, name, torch.where(counts, tensor, 0.0))


class Counts(NamedTuple):
    """Denominators: of one part, or of an update's whole batch once added up over micro-batches and ranks."""

    tokens: float  # that count
    sequences: float  # completions, including those without a token that counts: the papers' G
    room: float  # tokens that the completions could have had: sequences x max_new_tokens
    microbatches: float  # with a token that counts

    @classmethod
    def of(cls, masks: Iterable[Tensor], max_new_tokens: int) -> Counts:
        """Count the tokens and completions of micro-batches by their masks [B, T]."""
        each = [
            (float(mask.bool().sum()), float(len(mask)), float(len(mask) * max_new_tokens), float(mask.any()))
            for mask in masks
        ]
        return cls(*map(sum, zip(*each, strict=True))) if each else cls(0.0, 0.0, 0.0, 0.0)


class Clip(NamedTuple):
    """Limits of the ratio, 1 - low .. 1 + high, beyond which a token has no gradient; low None: no lower limit."""

    low: float | None
    high: float


class Terms(NamedTuple):
    """An objective's terms of a micro-batch: [B, T] each, or [B, 1] where all tokens of a row share a value."""

    term: Tensor
    share: Tensor  # of each token in the loss; 0 where masked
    ratio: Tensor  # of the policy to the policy that wrote the completions, with a gradient
    low: Tensor  # bool: the lower limit applies (A < 0), so that the token has no gradient, or a larger weight
    high: Tensor  # bool: the upper limit applies (A > 0)
    limited: Literal["tokens", "completions", "weights"] = "tokens"  # what the limits apply to


# --- The objectives ---------------------------------------------------------------------------------------------------


def ppo(b: Batch, clip: Clip, n: Counts) -> Terms:
    """PPO (arXiv 1707.06347, eq. 7) over tokens, mean over all of them; advantages by GAE, critic in
    ``rl/objectives/gae.py``."""
    return _clipped(b, _token_ratio(b), clip, by_token(b.mask, n))


def grpo(b: Batch, clip: Clip, n: Counts) -> Terms:
    """GRPO (DeepSeekMath, arXiv 2402.03300, eq. 3): mean over a completion's tokens, then over completions."""
    return _clipped(b, _token_ratio(b), clip, by_sequence(b.mask, n))


def dr_grpo(b: Batch, clip: Clip, n: Counts) -> Terms:
    """Dr. GRPO (arXiv 2503.20783, eq. 2 and listing 1): a sum over tokens, divided by max_new_tokens.

    GRPO divides by the completion's length, which penalizes long wrong answers too little.
    """
    return _clipped(b, _token_ratio(b), clip, by_room(b.mask, n))


def dapo(b: Batch, clip: Clip, n: Counts) -> Terms:
    """DAPO (arXiv 2503.14476, eq. 8): mean over all tokens of the batch; more room above than below (``high > low``).

    Its other two parts are :func:`octavo.rl.objectives.advantages.informative` and
    :func:`octavo.rl.objectives.penalties.overlong_penalty`.
    """
    return _clipped(b, _token_ratio(b), clip, by_token(b.mask, n))


def bnpo(b: Batch, clip: Clip, n: Counts) -> Terms:
    """BNPO as in TRL: mean over the tokens of a micro-batch, then over micro-batches.

    The only objective that depends on how a batch is split: with one completion a micro-batch it is GRPO, with one
    micro-batch DAPO.
    """
    return _clipped(b, _token_ratio(b), clip, by_microbatch(b.mask, n))


def gspo(b: Batch, clip: Clip, n: Counts) -> Terms:
    """GSPO (arXiv 2507.18071, eq. 5 to 7): one ratio a completion, the geometric mean of its tokens' ratios."""
    mean = _log_ratio(b).sum(dim=1, keepdim=True) / _lengths(b.mask)
    return _clipped(b, mean.exp(), clip, by_sequence(b.mask, n), "completions")


def cispo(b: Batch, clip: Clip, n: Counts) -> Terms:
    """CISPO (MiniMax-M1, arXiv 2506.13585, eq. 4 and 5): term = -sg(clip(r)) A log p.

    The clip applies to a weight without gradient, so every token keeps its gradient, including the rare tokens that
    start a new thought, which PPO would clip. Usually without a lower limit.
    """
    ratio = _token_ratio(b)
    bounded = ratio.clamp(min=None if clip.low is None else 1 - clip.low, max=1 + clip.high).detach()
    term = -bounded * b.advantages * b.logps
    below = torch.zeros_like(b.mask) if clip.low is None else (ratio < 1 - clip.low) & (b.advantages < 0)
    above = (ratio > 1 + clip.high) & (b.advantages > 0)
    return Terms(term, by_token(b.mask, n), ratio, below, above, "weights")


def rloo(b: Batch, clip: Clip, n: Counts) -> Terms:
    """RLOO (arXiv 2402.14740): a completion is one action; its ratio is the product of its tokens' ratios, clipped as
    in PPO.

    In the first update on a rollout the ratio is 1 and the gradient equals REINFORCE with the leave-one-out baseline.
    """
    product = _log_ratio(b).sum(dim=1, keepdim=True).clamp(-LARGEST, LARGEST).exp()
    return _clipped(b, product, clip, by_sequence(b.mask, n), "completions")


# --- Shares: the weight of a token in the mean ------------------------------------------------------------------------


def by_token(mask: Tensor, n: Counts) -> Tensor:
    """1 / N: every token of the batch has the same weight."""
    return mask / max(n.tokens, 1.0)


def by_sequence(mask: Tensor, n: Counts) -> Tensor:
    """1 / (S n_s): every completion has the same weight; n_s: its tokens."""
    return mask / _lengths(mask) / max(n.sequences, 1.0)


def by_room(mask: Tensor, n: Counts) -> Tensor:
    """1 / (S max_new_tokens)."""
    return mask / max(n.room, 1.0)


def by_microbatch(mask: Tensor, n: Counts) -> Tensor:
    """1 / (M n_m): every micro-batch has the same weight; n_m: its tokens."""
    return mask / mask.sum().clamp(min=1) / max(n.microbatches, 1.0)


# --- The whole loss ---------------------------------------------------------------------------------------------------


def policy_loss(
    b: Batch, terms: Terms, n: Counts, *, beta: float = 0.0, estimator: Kl = "k3", kl_weighted: bool = True,
    entropy_bonus: float = 0.0,
) -> tuple[Tensor, Figures]:  # fmt: skip
    """A micro-batch's part of the loss L and of the figures: correction, KL in the loss, entropy bonus and sums.

    beta           weight of the KL from ``b.ref_logps`` (0 where the KL is in the reward)
    kl_weighted    multiply the KL by the ratio, so that its gradient is the KL's gradient
    entropy_bonus  weight of the mean entropy of all tokens

    Raises ValueError where a weight has no tensor, and for k1 without the ratio, whose gradient has mean 0.

    Figures: ``policy_loss``, ``entropy`` (if ``b`` has it), ``kl`` (with beta), and shares of tokens, or of
    completions, at a limit: ``clip_ratio/low_mean``, ``high_mean``, ``region_mean``, and the smallest and largest share
    of a completion; for CISPO, whose tokens keep their gradient, ``cispo_clip_ratio``: the share whose weight is at a
    limit.
    """
    # `loss` accumulates all terms; `policy` stays the algorithm's own term, for the figure.
    term = terms.term if b.weights is None else terms.term * b.weights
    loss = policy = _sum(term, terms.share)
    figures: Figures = {}
    tokens = by_token(b.mask, n)
    if beta:
        if b.ref_logps is None:
            raise ValueError(f"a KL penalty of {beta} in the loss needs the reference's log-probabilities; found none")
        if estimator == "k1" and not kl_weighted:
            raise ValueError(
                "k1 in the loss has a gradient of mean 0 (see octavo.rl.objectives.penalties): use k2, k3 or the ratio"
            )
        distance = kl(b.logps, b.ref_logps, b.mask, estimator)
        distance = distance * terms.ratio if kl_weighted else distance
        loss = loss + beta * _sum(distance, terms.share)
        figures["kl"] = _sum(distance.detach(), tokens)
    if b.entropy is not None:
        entropy = _sum(b.entropy, tokens)
        loss = loss - entropy_bonus * entropy if entropy_bonus else loss
        figures["entropy"] = entropy.detach()
    elif entropy_bonus:
        raise ValueError(f"an entropy bonus of {entropy_bonus} needs the entropy of each token; found none")
    return loss, {"policy_loss": policy.detach()} | figures | _limits(b, terms, n)


def _limits(b: Batch, terms: Terms, n: Counts) -> Figures:
    """Where the clip acts, under TRL's names."""
    if terms.limited == "weights":
        return {"cispo_clip_ratio": _sum((terms.low | terms.high).float(), by_token(b.mask, n))}
    figures: Figures = {}
    lengths = b.mask.sum(dim=1)
    for name, where in (("low", terms.low), ("high", terms.high), ("region", terms.low | terms.high)):
        rows = ((where & b.mask).sum(dim=1) / lengths.clamp(min=1)).float()
        if terms.limited == "completions":
            figures[f"clip_ratio/{name}_mean"] = rows.sum() / max(n.sequences, 1.0)
        else:
            figures[f"clip_ratio/{name}_mean"] = _sum(where.float(), by_token(b.mask, n))
        if name == "low":
            figures["clip_ratio/low_min"] = lowest(rows, lengths > 0)
        elif name == "high":
            figures["clip_ratio/high_max"] = highest(rows, lengths > 0)
    return figures


# --- Parts ------------------------------------------------------------------------------------------------------------


def _clipped(
    b: Batch, ratio: Tensor, clip: Clip, share: Tensor, limited: Literal["tokens", "completions"] = "tokens"
) -> Terms:
    """The clipped surrogate: ratio [B, T], or [B, 1] of whole completions."""
    if clip.low is None:
        raise ValueError("this objective clips on both sides: a lower limit is needed, but there is none (rl.clip)")
    bounded = ratio.clamp(1 - clip.low, 1 + clip.high)
    term = -torch.minimum(ratio * b.advantages, bounded * b.advantages)
    low, high = (ratio < 1 - clip.low) & (b.advantages < 0), (ratio > 1 + clip.high) & (b.advantages > 0)
    return Terms(term, share, ratio, low, high, limited)


def _log_ratio(b: Batch) -> Tensor:
    return logp_difference(b.logps, b.old_logps, b.mask)


def _token_ratio(b: Batch) -> Tensor:
    return _log_ratio(b).exp()


def _lengths(mask: Tensor) -> Tensor:
    """[B, 1], at least 1."""
    return mask.sum(dim=1, keepdim=True).clamp(min=1)


def _sum(values: Tensor, share: Tensor) -> Tensor:
    return (values * share).sum()
