"""The claims of a trial about FP8 training: an estimate, a 95 % interval, and a margin that was fixed in advance.

    accuracy            the same held-out questions, answered by the models that FP8 and high precision trained
    loss_same_weights   the weights that FP8 trained, evaluated in FP8 and in high precision on held-out data
    loss_forks          both precisions continue from a checkpoint of high precision, with the same data; several seeds
    loss_trajectories   whole runs in both precisions, in pairs with the same seed

The margin is how much worse FP8 may be. A claim passes if its whole interval is within the margin, fails if the whole
interval is beyond it, and is undecided otherwise: then it reports how many more units would decide it. Noise never
widens a margin. FP8 that is better than high precision by more than the margin gives a warning, because something else
must differ. A pass also requires that the trial could have shown harm (high precision learned, and its answers beat
a constant answer), and enough units for an interval.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from octavo.report.evidence.run_reader import ReportError
from octavo.report.evidence.trust_table import FAIL, PASS, UNDECIDED, WARN, Check

ACCURACY_MARGIN = 0.01  # one point
LOSS_MARGIN = 0.0025
MIN_FORK_STEPS = 30  # steps: shorter forks have no time to diverge, so their agreement means little
MIN_CLUSTERS = 10  # clusters whose answers differ: with fewer, the correlation within a cluster cannot be estimated
MAX_UNITS = 100_000  # limit of the estimate of how many more units would decide

Pieces = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Evaluation:
    """The evaluation of one model on the held-out data: its answers as ``evaluate`` returns them, each with its
    ``source`` (the image or document that it is about), and the number of FP8 GEMMs that computed them."""

    pieces: tuple[dict[str, Any], ...]
    gemms: int = 0

    @property
    def loss(self) -> float:
        """The mean loss in nats per token, or NaN if there are no tokens."""
        tokens = sum(piece["tokens"] for piece in self.pieces)
        return sum(piece["loss"] for piece in self.pieces) / tokens if tokens else math.nan


@dataclass
class HeldOut:
    """Evaluations on held-out data: the model ``before`` training; by run name, each run as it was trained; and by run
    name, the weights that FP8 runs trained in ``high`` precision."""

    before: Evaluation
    runs: dict[str, Evaluation] = field(default_factory=dict)
    high: dict[str, Evaluation] = field(default_factory=dict)


@dataclass(frozen=True)
class Interval:
    """An estimate and its 95 % interval, from ``units`` independent samples (clusters, forks, pairs of seeds)."""

    estimate: float
    low: float
    high: float
    units: int

    @property
    def half(self) -> float:
        return (self.high - self.low) / 2


def paired_accuracy(pieces: Pieces, baseline: Pieces) -> Interval | None:
    """Return the accuracy of ``pieces`` minus the accuracy of ``baseline`` on the same questions, or None with fewer
    than two sources.

    Bonett and Price's interval of paired proportions (2012): Wald's interval after adding one question of each kind on
    which the two differ, so that no observed difference does not mean certainty. Questions of one source (an image, a
    document) are correlated: they count as n / deff, where deff is the variance by clusters divided by the variance of
    independent questions; if fewer than ten sources have answers that differ, each source counts once.
    """
    pairs = [(a, b) for a, b in _pair_answers(pieces, baseline) if a["right"] is not None]
    d = np.array([int(a["right"]) - int(b["right"]) for a, b in pairs])
    groups = _group_indices([a["source"] for a, _ in pairs])
    count = int(groups.max(initial=-1)) + 1
    if count < 2:
        return None
    n, mean = len(d), float(d.mean())
    spread = float(((d - mean) ** 2).sum())
    if spread and np.unique(groups[d != 0]).size >= MIN_CLUSTERS:
        sums = np.bincount(groups, weights=d - mean, minlength=count)
        deff = max(1.0, count / (count - 1) * float((sums**2).sum()) / spread)
    else:
        deff = n / count
    size = n / deff
    better, worse = (((d == sign).sum() / deff + 1) / (size + 2) for sign in (1, -1))
    half = _t_quantile(count - 1) * math.sqrt((better + worse - (better - worse) ** 2) / (size + 2))
    return Interval(mean, max(better - worse - half, -1.0), min(better - worse + half, 1.0), count)


def relative_loss(pieces: Pieces, baseline: Pieces) -> Interval | None:
    """Return the mean loss of ``pieces`` relative to ``baseline`` on the same tokens, minus 1, or None with fewer than
    two sources or no loss.

    The interval of a ratio of sums over clusters: residuals r = sum loss - ratio * sum baseline of each source give the
    variance G / (G - 1) * sum r^2 / (sum baseline)^2 (Cochran, Sampling Techniques, 6.4), with Student's t of G - 1.
    """
    pairs = _pair_answers(pieces, baseline)
    groups = _group_indices([a["source"] for a, _ in pairs])
    count = int(groups.max(initial=-1)) + 1
    losses, baseline_losses = (
        np.bincount(groups, weights=[p[i]["loss"] for p in pairs], minlength=count) for i in (0, 1)
    )
    total = float(baseline_losses.sum())
    if count < 2 or not total > 0 or not np.isfinite(losses).all():
        return None
    ratio = float(losses.sum()) / total
    residuals = losses - ratio * baseline_losses
    half = _t_quantile(count - 1) * math.sqrt(count / (count - 1) * float((residuals**2).sum())) / total
    return Interval(ratio - 1, ratio - 1 - half, ratio - 1 + half, count)


def mean_gap(gaps: Sequence[float]) -> Interval | None:
    """Return the mean of independent gaps with Student's interval, or None for fewer than two gaps or a non-finite
    one."""
    if len(gaps) < 2 or not np.isfinite(gaps).all():
        return None
    half = _t_quantile(len(gaps) - 1) * float(np.std(gaps, ddof=1)) / math.sqrt(len(gaps))
    mean = float(np.mean(gaps))
    return Interval(mean, mean - half, mean + half, len(gaps))


def best_constant_accuracy(pieces: Pieces) -> float:
    """Return the accuracy of giving the most common answer to every question."""
    answers = Counter(piece["said"] for piece in pieces if piece["right"] is not None)
    return max(answers.values(), default=0) / max(sum(answers.values()), 1)


def beats_constant_answer(pieces: Pieces) -> bool:
    """Return whether the answers beat a constant answer, beyond chance (one-sided, 97.5 %)."""
    right = [bool(piece["right"]) for piece in pieces if piece["right"] is not None]
    n, floor = len(right), best_constant_accuracy(pieces)
    return n > 0 and sum(right) / n > floor + 1.96 * math.sqrt(max(floor * (1 - floor), 1 / n) / n)


def decide(
    name: str, title: str, run: str, interval: Interval | None, margin: float, *,
    unit: str, scale: Callable[[float], str], worse: int, why_not: str = "", seen: str = "",
) -> Check:  # fmt: skip
    """Return the check of a claim.

    Args:
        interval: the estimate and its interval, or None; ``why_not`` then gives the reason.
        margin: how far the interval may reach on the worse side of zero.
        unit: the independent units of the interval, in the plural; more of them make it narrower.
        scale: formats a figure with its sign and unit.
        worse: the sign of a harm: +1 for losses, -1 for accuracies. Beyond the margin on the other side only warns.
        why_not: why the trial cannot pass this claim, whatever the interval; an observed harm still fails.
        seen: a description of the data behind the interval.
    """
    # The order matters: an observed harm fails even if the trial could not have passed.
    threshold = f"95 % interval {'below' if worse > 0 else 'above'} {scale(worse * margin)}"
    if interval is None:
        return Check(name, title, run, None, "no interval", threshold, UNDECIDED, why_not, margin=margin)
    shown = f"{scale(interval.estimate)} ({scale(interval.low)} to {scale(interval.high)})"
    outside = interval.low > margin or interval.high < -margin
    if outside and worse * interval.estimate > 0:
        status, sentence = FAIL, "FP8 made this training worse"
    elif why_not:
        status, sentence = UNDECIDED, why_not
    elif outside:
        status, sentence = WARN, "better than high precision by more than the margin, so something else must differ"
    elif (interval.high if worse > 0 else -interval.low) <= margin:
        status, sentence = PASS, ""
    else:
        status, sentence = UNDECIDED, _units_needed(interval, abs(margin - worse * interval.estimate), unit)
    sentence = "; ".join(text for text in (seen, sentence) if text)
    bounds = {"low": interval.low, "high": interval.high, "margin": margin}
    return Check(name, title, run, interval.estimate, shown, threshold, status, sentence, **bounds)


def _units_needed(interval: Interval, room: float, unit: str) -> str:
    """Return a sentence on how many more units would decide if the estimate stayed the same; ``room``: its distance
    from the margin."""
    spread = interval.half / _t_quantile(interval.units - 1) * math.sqrt(interval.units)
    n = interval.units
    while n < MAX_UNITS and _t_quantile(n - 1) * spread / math.sqrt(n) > room:
        n = max(n + 1, int(n * 1.02))
    if n >= MAX_UNITS:
        return f"too close to the margin: more than {MAX_UNITS:,} {unit} would be needed"
    return f"about {n - interval.units} more {unit} would decide"


def _pair_answers(pieces: Pieces, baseline: Pieces) -> list[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Pair the answers to the same questions, in order. Raises ReportError if questions or correct answers differ."""
    questions, baseline_questions = (
        [(p["file"], p["row"], p["answer"], p["said"]) for p in side] for side in (pieces, baseline)
    )
    if questions != baseline_questions:
        raise ReportError(
            f"{len(pieces)} and {len(baseline)} held-out answers are to different questions: the data changed during "
            "the trial. --fresh trains and evaluates all runs again"
        )
    return list(zip(pieces, baseline, strict=True))


def _group_indices(names: Sequence[str]) -> np.ndarray:
    order = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return np.array([order[name] for name in names], dtype=np.int64)


def _t_quantile(freedom: int) -> float:
    """Return the two-sided 95 % quantile of Student's t distribution."""
    from scipy.stats import t

    return float(t.ppf(0.975, freedom))
