"""KTO (arXiv 2402.01306): preferences without pairs, each answer judged desirable or not.

With the reward r = log p - log p_ref of an answer and the baseline z, the mean reward of answers to *other* prompts (an
estimate of the KL divergence from the reference, at least 0; here one for a whole step, in TRL one for each forward),
the loss of an answer is

    desirable      w_d (1 - s(beta (r - z)))            undesirable      w_u (1 - s(beta (z - r)))

a mean over all answers of the batch. The baseline has no gradient.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.rl.objectives.metrics import Figures

#: figures of a batch that has desirable and undesirable answers
FIGURES = ("rewards/chosen", "logps/chosen", "rewards/rejected", "logps/rejected", "rewards/margins")


class AnswerCounts(NamedTuple):
    """Denominators: of one part, or of an update's whole batch once added up over micro-batches and ranks."""

    desirable: float
    undesirable: float

    @classmethod
    def of(cls, parts: Iterable[tuple[Tensor, Tensor]]) -> AnswerCounts:
        """Count the answers of micro-batches, each (tokens [B], desirable bool [B]); answers without tokens do not
        count."""
        good = bad = 0.0
        for tokens, desirable in parts:
            good += float(((tokens > 0) & desirable).sum())
            bad += float(((tokens > 0) & ~desirable).sum())
        return cls(good, bad)


@torch.no_grad()
def baseline(logps: Tensor, ref_logps: Tensor) -> Tensor:
    """z, from the policy's and the reference's sums of log-probabilities [B] of mismatched answers; 0 for no answer."""
    return ((logps - ref_logps).sum() / max(len(logps), 1)).clamp(min=0.0)


def kto(
    logps: Tensor, tokens: Tensor, ref_logps: Tensor, desirable: Tensor, z: Tensor, n: AnswerCounts, *,
    beta: float = 0.1, desirable_weight: float = 1.0, undesirable_weight: float = 1.0,
) -> tuple[Tensor, Figures]:  # fmt: skip
    """KTO's loss and figures of B answers: the policy's sums of log-probabilities and tokens, as
    :func:`octavo.rl.objectives.pairwise.answer_logps` returns them, the reference's sums, and desirable bool [B].

    Figures have TRL's names and are means over the answers of a kind. Where the whole batch has no answer of a kind,
    its figures and the margin are absent."""
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
