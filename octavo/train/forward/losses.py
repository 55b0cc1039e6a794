"""Loss reductions: every token's cross-entropy times a weight that is computed from the whole global batch.

With c_t the cross-entropy of token t in fp32 (nats), a step's loss is L = sum over all tokens t of w_t c_t, summed over
micro-batches and ranks, where

    token        w_t = 1 / N              N: loss tokens of the global batch
    sample       w_t = 1 / (S n_s)        S: its samples with a loss token, n_s: the loss tokens of t's sample
    microbatch   w_t = 1 / (M n_m)        M: its micro-batches (of all ranks) with a loss token, n_m: those of t's

A sample is a row of the batch, or a segment of a packed row, as given by `edges`. Only `microbatch` depends on how the
global batch is split: it is the average of per-micro-batch means, and gives tokens in short micro-batches a larger
weight; each pack is a micro-batch. The denominators are counted over all micro-batches and ranks before the first
backward (`count`, then a sum over ranks), so gradients add up to the gradient of L without a further factor. A masked
token (label -100) has weight 0; without loss tokens the loss and its gradient are 0, never NaN.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

REDUCTIONS = ("token", "sample", "microbatch")
IGNORE = -100


def targets(labels: Tensor) -> Tensor:
    """labels [B, T] -> [B, T-1]: position t predicts token t + 1."""
    return labels[:, 1:]


def count(all_labels: Sequence[Tensor], reduction: str, packs: Sequence[Sequence[int] | None] = ()) -> float:
    """Return this rank's part of the denominator N, S or M, from the labels [B, T] of its micro-batches of a step.
    `packs` has the edges of each micro-batch, or None for one that is not a pack; () if no micro-batch is a pack."""
    if reduction not in REDUCTIONS:
        raise ValueError(f"loss {reduction!r} does not exist; there are {', '.join(REDUCTIONS)}")
    total = 0
    for labels, edges in zip(all_labels, packs or [None] * len(all_labels), strict=True):
        has_loss = targets(labels) != IGNORE
        if reduction == "token":
            total += int(has_loss.sum())
        elif reduction == "sample":
            total += int((_tokens_per_sample(has_loss, edges) > 0).sum())
        else:
            total += int(has_loss.any())
    return float(total)


def weights(labels: Tensor, reduction: str, denominator: float, edges: Sequence[int] | None = None) -> Tensor:
    """Return w_t for one micro-batch: labels [B, T] -> fp32 [B, T-1]. `denominator` is the sum of `count` over ranks;
    `edges` are the boundaries of the samples in a packed row [1, T], including 0 and T."""
    has_loss = (targets(labels) != IGNORE).to(torch.float32)
    if reduction == "token":
        share = has_loss
    elif reduction == "sample":
        counts = _tokens_per_sample(has_loss, edges).clamp(min=1)
        share = has_loss / (counts[:, None] if edges is None else counts[_sample_indices(edges)])
    else:
        share = has_loss / has_loss.sum().clamp(min=1)
    return share / max(denominator, 1.0)


def _tokens_per_sample(has_loss: Tensor, edges: Sequence[int] | None) -> Tensor:
    """Return the number of loss tokens of each sample, from the mask of loss tokens [B, T-1]."""
    if edges is None:
        return has_loss.sum(dim=1)
    counts = torch.zeros(len(edges) - 1, dtype=torch.float32)
    return counts.index_add_(0, _sample_indices(edges), has_loss[0].float())


def _sample_indices(edges: Sequence[int]) -> Tensor:
    """Return, for each position of a pack [T-1], the index of the sample of the token that it predicts."""
    lengths = torch.tensor(edges).diff()
    return torch.repeat_interleave(lengths)[1:]


def cross_entropy(logits: Tensor, target: Tensor, label_smoothing: float = 0.0, z_loss: float = 0.0) -> Tensor:
    """Return c_t in fp32 [B, P] from logits [B, P, V] and target [B, P]; c_t is 0 where the target is -100.

    With lse = log sum_j exp(x_j) over a token's logits x and t its target, c_t is in nats

        (1 - label_smoothing) (lse - x_t) + label_smoothing (lse - mean_j x_j) + z_loss lse^2

    See :func:`octavo.fp8.memory.chunked_loss.linear_cross_entropy` for the sources; it computes the same values
    without full logits.
    """
    wide = logits.float().flatten(0, 1)
    flat = F.cross_entropy(
        wide, target.flatten(), ignore_index=IGNORE, reduction="none", label_smoothing=label_smoothing
    )
    if z_loss:
        squares = wide.logsumexp(-1).square()
        flat = flat + z_loss * torch.where(target.flatten() != IGNORE, squares, 0.0)
    return flat.view(target.shape)
