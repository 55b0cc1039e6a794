"""The claims of a trial in phases rl and preference, where held-out answers decide and losses do not.

    accuracy         the same held-out questions, answered by the models that FP8 and high precision trained, all seeds
    accuracy_seeds   the differences of single seeds, with an interval over other seeds; reported
    accuracy_gained  the same questions after training in FP8 and before; reported
    reward_gap       FP8's reward minus high precision's at the end of training, in pairs with the same seed; reported

Only the first has a margin; its interval covers other questions, with these seeds. Reported figures have an interval
and do not count: the run optimizes the reward itself, and how much a reward gap matters depends on the reward.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from octavo.base.wording import count_noun
from octavo.config.sections.rl import BEYOND_SFT
from octavo.report.evidence import claims
from octavo.report.evidence.claims import Interval
from octavo.report.evidence.run_reader import RunRecord, common_steps
from octavo.report.evidence.trial_claims import (
    ACCURACY,
    NO_DATA,
    TITLES,
    Sides,
    accuracy_claim,
    evaluation_pairs,
    points,
    why_no_weight_changed,
    why_not_comparable,
)
from octavo.report.evidence.trial_spec import Run, Trial
from octavo.report.evidence.trust_table import FAIL, PASS, REPORTED, WARN, Check

ACCURACY_MARGIN = 0.02  # two points: what these phases learn varies more from seed to seed than what SFT does
FINAL_FRACTION = 3  # the end of training is its last third
CLAIMS = (ACCURACY, "accuracy_seeds", "accuracy_gained", "reward_gap")


class Panel(NamedTuple):
    """A figure of these phases: its key in a record, its title, its word in tables, its unit, and whether its axis is
    logarithmic."""

    key: str
    title: str
    word: str
    unit: str
    log: bool = False


_HELD_OUT = Panel("exact_match", "Held-out answers equal to the reference", "equal", "share")
#: phase -> figures of its curves and of its table at the end of training; gaps are computed for the first
PANELS = {
    "rl": (
        Panel("reward", "Reward", "reward", "mean of a step"),
        _HELD_OUT,
        Panel("held_out_reward", "Reward of held-out answers", "held out", "mean"),
        Panel("length", "Length of completions", "length", "tokens"),
        Panel("entropy", "Entropy", "entropy", "nats per token"),
        Panel("kl", "KL to the reference", "KL", "nats per token"),
        Panel("logp_gap_mean", "|d log p|, rollout and trainer: mean", "mean |d log p|", "nats", log=True),
        Panel("logp_gap_max", "|d log p|, rollout and trainer: largest", "largest", "nats", log=True),
    ),
    "preference": (
        Panel("rewards/margins", "Margin of rewards", "margin", "chosen minus rejected"),
        Panel("rewards/accuracies", "Pairs in order", "in order", "share"),
        Panel("held_out_accuracies", "Held-out pairs in order", "held out", "share"),
        _HELD_OUT,
        Panel("rewards/chosen", "Reward of chosen answers", "chosen", "mean of a step"),
        Panel("rewards/rejected", "Reward of rejected answers", "rejected", "mean of a step"),
    ),
}
#: phase -> why losses decide nothing in it
WHY_NO_LOSS_CLAIMS = {
    "rl": "The loss of reinforcement learning weights completions by how much better they are than the others of their "
    "step: it stays about 0, however good the policy is. So there are no claims on losses of forks, of trajectories or "
    "at the same weights.",
    "preference": "The loss of preferences is relative to a reference and tends to 0 once the model ranks answers in "
    "order, so a loss gap says little about the model's answers. So there are no claims on losses of forks, of "
    "trajectories or at the same weights.",
}


def is_rl_or_preference(run: Run) -> bool:
    """Return whether a run is of phase rl or preference."""
    return run.cfg.train.phase in BEYOND_SFT


def compute_claims(sides: Sides, trial: Trial) -> list[Check]:
    """Return the claims for one FP8 run and its other seeds."""
    run = sides.fp8[0]
    seed_runs = [
        (seed_run, record) for seed_run, record in sides.runs if seed_run.kind == "seed" and seed_run.of == run.name
    ]
    if reason := why_not_comparable(sides, seed_runs):
        failed = Check(ACCURACY, TITLES[ACCURACY], run.label, None, "failed", "every run is sound", FAIL, reason)
        return [failed]
    claim = accuracy_claim(sides, trial, why_no_weight_changed(sides.reference[1]))
    if trial.held_out is None:
        claim = replace(claim, sentence=f"{NO_DATA}: only held-out answers decide in phase {run.cfg.train.phase}")
    return [claim, *_accuracy_by_seed(sides, trial), _accuracy_gain(sides, trial), _reward_gap(sides)]


def pair_runs(sides: Sides) -> list[tuple[RunRecord, RunRecord]]:
    """Return (FP8, high precision) for each seed that both have, the trial's seed first."""
    run = sides.fp8[0]
    high = {other.cfg.run.seed: record for other, record in sides.runs if other.kind == "noise"}
    pairs = [
        (record, high[other.cfg.run.seed])
        for other, record in sides.runs
        if other.kind == "seed" and other.of == run.name
    ]
    return [(sides.fp8[1], sides.reference[1]), *pairs]


def final_mean(record: RunRecord, key: str) -> float:
    """Return the mean of a figure over the last third of the recorded steps, or NaN if none has it."""
    values = record.figures.get(key, np.array([]))[-max(1, record.steps.size // FINAL_FRACTION) :]
    values = values[np.isfinite(values)]
    return float(values.mean()) if values.size else math.nan


def final_gap(record: RunRecord, reference: RunRecord, key: str) -> float:
    """Return the mean of ``record`` minus ``reference`` over the last third of the steps that both recorded."""
    if key not in record.figures or key not in reference.figures:
        return math.nan
    record_at, reference_at = common_steps(record, reference)
    last = max(1, len(record_at) // FINAL_FRACTION)
    gaps = record.figures[key][record_at][-last:] - reference.figures[key][reference_at][-last:]
    gaps = gaps[np.isfinite(gaps)]
    return float(gaps.mean()) if gaps.size else math.nan


def check_same_prompts(run: str, record: RunRecord, reference: RunRecord) -> Check:
    """Check that both runs had the same prompts in every recorded step."""
    name, title, threshold = "same_data", "Same data", "equal prompts at every step"
    prompts, reference_prompts = (_prompts_by_step(side) for side in (record, reference))
    shared_steps = prompts.keys() & reference_prompts.keys()
    if not shared_steps:
        sentence = "the runs recorded no completions of the same step; set rl.show"
        return Check(name, title, run, None, "not recorded", threshold, WARN, sentence)
    if differ := sorted(step for step in shared_steps if prompts[step] != reference_prompts[step]):
        sentence = f"{count_noun(len(differ), 'step')} had different prompts from high precision, first {differ[0]}"
        return Check(name, title, run, float(len(differ)), f"{len(differ)} differ", threshold, FAIL, sentence)
    sentence = f"the recorded prompts of all {len(shared_steps)} steps are the same as in high precision"
    return Check(name, title, run, 0.0, "0 differ", threshold, PASS, sentence)


def _prompts_by_step(record: RunRecord) -> dict[int, list[tuple[str, int, int]]]:
    prompts: dict[int, list[tuple[str, int, int]]] = {}
    for row in record.completions:
        prompts.setdefault(row["step"], []).append((row["file"], row["row"], row["sample"]))
    return prompts


def _accuracy_by_seed(sides: Sides, trial: Trial) -> list[Check]:
    """Return the accuracy difference between FP8 and high precision by seed; empty with one seed."""
    pairs = [] if trial.held_out is None else evaluation_pairs(sides, trial)
    if len(pairs) < 2:
        return []
    gaps = [
        paired.estimate
        for fp8, high in pairs
        if (paired := claims.paired_accuracy(fp8.pieces, high.pieces)) is not None
    ]
    interval = claims.mean_gap(gaps)
    sentence = f"{', '.join(map(points, gaps))}: the interval covers other seeds"
    return [
        _reported_check(
            "accuracy_seeds",
            "Held-out accuracy by seed",
            sides.fp8[0].label,
            interval,
            _interval_text(interval),
            sentence,
        )
    ]


def _accuracy_gain(sides: Sides, trial: Trial) -> Check:
    """Return the gain in held-out accuracy from training in FP8."""
    name, title, run = "accuracy_gained", "Held-out accuracy gained", sides.fp8[0].label
    if trial.held_out is None:
        return _reported_check(name, title, run, None, "", NO_DATA)
    evaluations = [fp8 for fp8, _ in evaluation_pairs(sides, trial)]
    interval = claims.paired_accuracy(
        [piece for evaluation in evaluations for piece in evaluation.pieces],
        [*trial.held_out.before.pieces] * len(evaluations),
    )
    questions = [piece for piece in trial.held_out.before.pieces if piece["right"] is not None]
    sentence = f"{sum(bool(p['right']) for p in questions)} of {len(questions)} right before training"
    if interval is None:
        return _reported_check(
            name, title, run, None, "", f"{sentence}; questions of fewer than two sources give no interval"
        )
    return _reported_check(
        name, title, run, interval, _interval_text(interval), f"after training in FP8 minus before it; {sentence}"
    )


def _reward_gap(sides: Sides) -> Check:
    """Return the final reward difference between FP8 and high precision, over pairs with the same seed."""
    panel = PANELS[sides.fp8[0].cfg.train.phase][0]
    name, title, run = "reward_gap", f"Gap of the {panel.title.lower()}", sides.fp8[0].label
    pairs = pair_runs(sides)
    gaps = [final_gap(fp8, high, panel.key) for fp8, high in pairs]
    fp8_mean, high_mean = (np.mean([final_mean(pair[side], panel.key) for pair in pairs]) for side in (0, 1))
    sentence = (
        f"{fp8_mean:.4g} in FP8, {high_mean:.4g} in high precision over the last third of the steps, "
        f"{len(pairs)} seed(s)"
    )
    interval = claims.mean_gap(gaps)
    if interval is None:
        reason = "one pair of seeds gives no interval: use --seeds 3" if len(gaps) == 1 else "a run has no figures"
        shown = f"{gaps[0]:+.4g}" if math.isfinite(gaps[0]) else ""
        return _reported_check(name, title, run, None, shown, f"{sentence}; {reason}")
    return _reported_check(
        name, title, run, interval, f"{interval.estimate:+.4g} ({interval.low:+.4g} to {interval.high:+.4g})", sentence
    )


def _interval_text(interval: Interval | None) -> str:
    return (
        "" if interval is None else f"{points(interval.estimate)} ({points(interval.low)} to {points(interval.high)})"
    )


def _reported_check(name: str, title: str, run: str, interval: Interval | None, shown: str, sentence: str) -> Check:
    bounds = {} if interval is None else {"low": interval.low, "high": interval.high}
    figure = None if interval is None else interval.estimate
    return Check(
        name, title, run, figure, shown or "no interval", "no margin: reported only", REPORTED, sentence, **bounds
    )
