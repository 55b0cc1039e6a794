"""Preference losses over pairs of answers to one prompt, one chosen and one rejected, as their papers write them.

A pair is four sums of log-probabilities over its answers' tokens, two of the policy and two of the reference, and two
counts of tokens. DPO's reward of an answer is beta (log p - log p_ref). With the margin m, log p - log p_ref of the
chosen answer minus the same difference of the rejected answer, the losses of a pair are

    sigmoid       -(1 - e) log s(beta m) - e log s(-beta m)                  DPO, arXiv 2305.18290, eq. 7
    robust        (-(1 - e) log s(beta m) + e log s(-beta m)) / (1 - 2e)     arXiv 2403.00409
    hinge         max(0, 1 - beta m)                                         SLiC, arXiv 2305.10425
    ipo           (m' - 1 / (2 beta))^2                                      arXiv 2310.12036, eq. 17
    sigmoid_norm  sigmoid with m'                                            length-normalised, arXiv 2411.15124

where s is the logistic function, e the label smoothing, and m' has means over tokens in place of sums. ORPO and SimPO
need no reference and use means. All are averaged over the pairs of the *whole* batch of an update, whose counts are
arguments, so that gradients and figures of micro-batches and ranks add up. A pair with an empty answer does not count:
its loss is 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.rl.objectives.metrics import Figures


def answer_logps(logps: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Sum the log-probabilities of tokens [B, T] over the mask of the answers. Returns (sums [B], tokens [B]) in
    fp32."""
    counted = mask.bool()
    return torch.where(counted, logps.float(), 0.0).sum(dim=1), counted.sum(dim=1).float()


@dataclass(frozen=True)
class Pairs:
    """B pairs: sums of log-probabilities and counts of tokens, each fp32 [B], as :func:`answer_logps` returns them.

    Raises ValueError for other shapes or dtypes."""

    chosen: Tensor
    rejected: Tensor
    chosen_tokens: Tensor
    rejected_tokens: Tensor
    ref_chosen: Tensor | None = None
    ref_rejected: Tensor | None = None

    def __post_init__(self) -> None:
        shape = self.chosen.shape
        for name, tensor in vars(self).items():
            if tensor is not None and (tensor.shape != shape or tensor.dtype not in (torch.float32, torch.float64)):
                raise ValueError(f"{name} is {tensor.dtype} {list(tensor.shape)}; pairs are float32 {list(shape)}")

    @classmethod
    def of(cls, logps: Tensor, mask: Tensor, ref: Tensor | None = None) -> Pairs:
        """Create the pairs of 2B rows, chosen answers first: log-probabilities [2B, T], mask [2B, T], and the
        reference's sums [2B]."""
        if len(logps) % 2:
            raise ValueError(f"pairs are an even number of rows, chosen ones first; found {len(logps)}")
        sums, tokens = answer_logps(logps, mask)
        return cls(*sums.chunk(2), *tokens.chunk(2), *((None, None) if ref is None else ref.chunk(2)))

    @property
    def whole(self) -> Tensor:
        """bool [B]: both answers have tokens."""
        return (self.chosen_tokens > 0) & (self.rejected_tokens > 0)

    def means(self) -> tuple[Tensor, Tensor]:
        """Mean log-probability per token of each answer; -1, which no loss uses, for an empty answer."""
        return tuple(
            torch.where(tokens > 0, sums / tokens.clamp(min=1), -1.0)
            for sums, tokens in ((self.chosen, self.chosen_tokens), (self.rejected, self.rejected_tokens))
        )  # type: ignore[return-value]


class PairCounts(NamedTuple):
    """Denominators: of one part, or of an update's whole batch once added up over micro-batches and ranks."""

    pairs: float
    chosen_tokens: float

    @classmethod
    def of(cls, masks: Iterable[Tensor]) -> PairCounts:
        """Count the pairs of micro-batches by their masks [2B, T], chosen answers first."""
        pairs = tokens = 0.0
        for mask in masks:
            chosen, rejected = (half.bool().sum(dim=1) for half in mask.chunk(2))
            both = (chosen > 0) & (rejected > 0)
            pairs, tokens = pairs + float(both.sum()), tokens + float(chosen[both].sum())
        return cls(pairs, tokens)


def dpo(
    p: Pairs, n: PairCounts, *, loss: str = "sigmoid", beta: float = 0.1, label_smoothing: float = 0.0, sft: float = 0.0
) -> tuple[Tensor, Figures]:
    """DPO and its relatives, by ``loss``; ``sft`` is the weight of the chosen answers' cross-entropy (a mean over their
    tokens), which keeps their probability from falling (RPO, arXiv 2404.19733)."""
    if loss not in DPO_LOSSES:
        raise ValueError(f"preference loss {loss!r} is not one of {', '.join(DPO_LOSSES)}")
    if p.ref_chosen is None or p.ref_rejected is None:
        raise ValueError(f"preference loss {loss} needs the log-probabilities of a reference")
    if label_smoothing and loss in ("hinge", "ipo"):
        raise ValueError(f"{loss} has no label smoothing; found {label_smoothing}")
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(f"label smoothing is the share of labels that are wrong, 0 to below 0.5: {label_smoothing}")
    chosen, rejected = p.chosen - p.ref_chosen, p.rejected - p.ref_rejected
    if loss in ("ipo", "sigmoid_norm"):
        margin = chosen / p.chosen_tokens.clamp(min=1) - rejected / p.rejected_tokens.clamp(min=1)
    else:
        margin = chosen - rejected
    total = _mean(DPO_LOSSES[loss](margin, beta, label_smoothing), p.whole, n)
    figures = _figures(p, n, beta * chosen, beta * rejected, p.chosen, p.rejected)
    if sft:
        nll = _nll(p, n)
        total, figures["nll_loss"] = total + sft * nll, nll.detach()
    return total, figures


def orpo(p: Pairs, n: PairCounts, *, beta: float = 0.1) -> tuple[Tensor, Figures]:
    """ORPO (arXiv 2403.07691, eq. 4 to 7): cross-entropy of the chosen answers plus beta times the odds ratio's loss.

    odds(p) = p / (1 - p) of the geometric mean p of an answer's token probabilities.
    """
    chosen, rejected = p.means()
    log_odds = (chosen - rejected) - (_log_not(chosen) - _log_not(rejected))
    ratio, nll = F.logsigmoid(log_odds), _nll(p, n)
    odds = {"log_odds_ratio": _mean(ratio, p.whole, n), "log_odds_chosen": _mean(log_odds, p.whole, n)}
    figures = _figures(p, n, beta * chosen, beta * rejected, chosen, rejected)
    parts = {name: value.detach() for name, value in (odds | {"nll_loss": nll}).items()}
    return nll - beta * odds["log_odds_ratio"], figures | parts


def simpo(
    p: Pairs, n: PairCounts, *, beta: float = 2.0, gamma: float = 1.0, label_smoothing: float = 0.0, sft: float = 0.0
) -> tuple[Tensor, Figures]:
    """SimPO (arXiv 2405.14734, eq. 6): -log s(beta (mean log p chosen - mean log p rejected) - gamma); no reference.

    gamma is the margin of rewards that a pair should have. ``sft``: as in :func:`dpo` (CPO-SimPO).
    """
    chosen, rejected = p.means()
    total = _mean(_sigmoid(chosen - rejected - gamma / beta, beta, label_smoothing), p.whole, n)
    figures = _figures(p, n, beta * chosen, beta * rejected, chosen, rejected)
    if sft:
        nll = _nll(p, n)
        total, figures["nll_loss"] = total + sft * nll, nll.detach()
    return total, figures


def _sigmoid(margin: Tensor, beta: float, smoothing: float) -> Tensor:
    return -(1 - smoothing) * F.logsigmoid(beta * margin) - smoothing * F.logsigmoid(-beta * margin)


def _robust(margin: Tensor, beta: float, smoothing: float) -> Tensor:
    right, wrong = F.logsigmoid(beta * margin), F.logsigmoid(-beta * margin)
    return (smoothing * wrong - (1 - smoothing) * right) / (1 - 2 * smoothing)


def _hinge(margin: Tensor, beta: float, smoothing: float) -> Tensor:
    return (1 - beta * margin).relu()


def _ipo(margin: Tensor, beta: float, smoothing: float) -> Tensor:
    return (margin - 1 / (2 * beta)).square()


DPO_LOSSES = {"sigmoid": _sigmoid, "robust": _robust, "hinge": _hinge, "ipo": _ipo, "sigmoid_norm": _sigmoid}


def _log_not(logp: Tensor) -> Tensor:
    """log(1 - e^x) for x < 0, by the branch that loses no digits; a probability of 1 is treated as 1 - 1e-7."""
    x = logp.clamp(max=-1e-7)
    return torch.where(x > -math.log(2.0), (-torch.expm1(x)).log(), torch.log1p(-x.exp()))


def _mean(each: Tensor, counts: Tensor, n: PairCounts) -> Tensor:
    return torch.where(counts, each, 0.0).sum() / max(n.pairs, 1.0)


def _nll(p: Pairs, n: PairCounts) -> Tensor:
    """Cross-entropy of the chosen answers, a mean over their tokens."""
    return -torch.where(p.whole, p.chosen, 0.0).sum() / max(n.chosen_tokens, 1.0)


@torch.no_grad()
def _figures(
    p: Pairs, n: PairCounts, reward_chosen: Tensor, reward_rejected: Tensor, logp_chosen: Tensor, logp_rejected: Tensor
) -> Figures:
    """Means over pairs under TRL's names: implicit rewards, how often they are in order, and log-probabilities."""
    means = {
        "rewards/chosen": reward_chosen,
        "rewards/rejected": reward_rejected,
        "rewards/accuracies": (reward_chosen > reward_rejected).float(),
        "rewards/margins": reward_chosen - reward_rejected,
        "logps/chosen": logp_chosen,
        "logps/rejected": logp_rejected,
    }
    return {name: _mean(each, p.whole, n) for name, each in means.items()}
