"""KTO (arXiv 2402.01306): preferences without pairs, each answer judged desirable or not.

With the reward r = log p - log p_ref of an answer and the baseline z, the mean such reward of answers that belong to
*other* prompts (an estimate of the KL divergence from the reference, at least 0; here over a whole step, where TRL has
one for each forward), the loss of an answer is

    desirable      w_d (1 - s(beta (r - z)))            undesirable      w_u (1 - s(beta (z - r)))

a mean over all answers of the batch. The baseline has no gradient.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.rl.objectives.metrics import Figures

#: what a batch of both kinds has
FIGURES = ("rewards/chosen", "logps/chosen", "rewards/rejected", "logps/rejected", "rewards/margins")


class AnswerCounts(NamedTuple):
    """Denominators, of one part or, added up over micro-batches and ranks, of the whole batch of an update."""

    desirable: float
    undesirable: float

    @classmethod
    def of(cls, parts: Iterable[tuple[Tensor, Tensor]]) -> AnswerCounts:
        """Of micro-batches: (tokens [B] of the answers, desirable bool [B]) each. Answers without tokens are none."""
        good = bad = 0.0
        for tokens, desirable in parts:
            good += float(((tokens > 0) & desirable).sum())
            bad += float(((tokens > 0) & ~desirable).sum())
        return cls(good, bad)


@torch.no_grad()
def baseline(logps: Tensor, ref_logps: Tensor) -> Tensor:
    """z from sums of log-probabilities [B] of mismatched answers, policy's and reference's. Of no answer: 0."""
    return ((logps - ref_logps).sum() / max(len(logps), 1)).clamp(min=0.0)


def kto(
    logps: Tensor, tokens: Tensor, ref_logps: Tensor, desirable: Tensor, z: Tensor, n: AnswerCounts, *,
    beta: float = 0.1, desirable_weight: float = 1.0, undesirable_weight: float = 1.0,
) -> tuple[Tensor, Figures]:  # fmt: skip
    """Sums of log-probabilities and tokens of B answers, as :func:`octavo.rl.objectives.pairwise.answer_logps` gives
    them, sums of the reference, and bool [B]: desirable. Figures under TRL's names, means over answers of a kind; of a
    kind that the whole batch has none of there is no figure, and no margin."""
    counted = tokens > 0
    good, bad = counted & desirable, counted & ~desirable
    reward = torch.where(counted, logps - ref_logps, 0.0)
    each = torch.where(
        desirable,
        desirable_weight * (1 - torch.sigmoid(beta * (reward - z.detach()))),
        undesirable_weight * (1 - torch.sigmoid(beta * (z.detach() - reward))),
    )
    loss = torch.where(counted, each, 0.0).sum() / max(n.desirable + n.undesirable, 1.0)
    figures: Figures = {}
    for name, of, count in (("chosen", good, n.desirable), ("rejected", bad, n.undesirable)):
        if count:
            figures[f"rewards/{name}"] = (beta * reward.detach())[of].sum() / count
            figures[f"logps/{name}"] = logps.detach()[of].sum() / count
    if n.desirable and n.undesirable:
        figures["rewards/margins"] = figures["rewards/chosen"] - figures["rewards/rejected"]
    return loss, figures
