"""The claims of a trial: which figures of its runs each uses, and why it may remain undecided."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from octavo.report.evidence import claims
from octavo.report.evidence.claims import LOSS_MARGIN, Evaluation, Interval, decide
from octavo.report.evidence.run_reader import RunRecord, common_steps
from octavo.report.evidence.trial_spec import Run, Trial
from octavo.report.evidence.trust_table import FAIL, SKIPPED_WARN, UNTRIED, WARN, Check, check_gemms, loss_gap, percent

ACCURACY, WEIGHTS, FORKS, SEEDS = CLAIMS = ("accuracy", "loss_same_weights", "loss_forks", "loss_trajectories")
TITLES = {
    ACCURACY: "Held-out accuracy",
    WEIGHTS: "Loss at the same weights",
    FORKS: "Loss of forks",
    SEEDS: "Loss of trajectories",
}
NO_DATA = "there is no held-out data; set data.eval"


class Sides(NamedTuple):
    """One FP8 run, the high-precision run that it is compared with, and all runs of the trial."""

    fp8: tuple[Run, RunRecord]
    reference: tuple[Run, RunRecord]
    runs: Sequence[tuple[Run, RunRecord]]


def compute_claims(sides: Sides, trial: Trial, noise: float) -> list[Check]:
    """The four claims for one FP8 run; ``noise``: how far the seed moves mean losses. Held-out data without questions,
    such as plain text, give no claim on accuracy."""
    idle = why_nothing_learned(sides.reference[1], trial)
    asks = trial.held_out is None or any(piece["right"] is not None for piece in _reference_evaluation(trial).pieces)
    return [
        *([accuracy_claim(sides, trial, idle)] if asks else []),
        _claim_same_weights(sides, trial),
        _claim_forks(sides, trial, idle),
        _claim_trajectories(sides, trial, idle, noise),
    ]


def mean_loss_gap(record: RunRecord, reference: RunRecord, after: int = 0) -> float:
    """Signed relative gap of the mean losses over the steps after ``after`` that both runs recorded."""
    mine, theirs = common_steps(record, reference)
    later = record.steps[mine] > after
    return loss_gap(record.losses[mine][later], reference.losses[theirs][later])


def fork_step(steps: int) -> int:
    """The step after which forks begin: two thirds of the run."""
    return 2 * steps // 3


def why_nothing_learned(record: RunRecord, trial: Trial) -> str:
    """Why high precision learned nothing that FP8 could have lost; empty if it learned."""
    if why := why_no_weight_changed(record):
        return why
    if trial.held_out is not None:
        before, after = trial.held_out.before, _reference_evaluation(trial)
        change = claims.relative_loss(after.pieces, before.pieces)
        if change is not None and change.high < -LOSS_MARGIN:  # else an untrained model would be as good
            return ""
        return (
            f"high precision learned nothing, judging by held-out data (loss {before.loss:.4g} before, "
            f"{after.loss:.4g} after), so agreement with it means nothing; train more steps"
        )
    losses = record.losses[np.isfinite(record.losses)]
    tenth = max(2, len(losses) // 10)
    first, last = losses[:tenth], losses[-tenth:]
    if len(losses) >= 2 * tenth:
        error = math.sqrt(first.var(ddof=1) / tenth + last.var(ddof=1) / tenth)
        if first.mean() - last.mean() > 2 * error:
            return ""
    return "high precision learned nothing, judging by its losses, so agreement with it means nothing; train more steps"


def why_no_weight_changed(record: RunRecord) -> str:
    """Why no step changed a weight; empty if some did."""
    applied = ~np.isin(record.steps, (*record.skipped, *record.overflowed))
    if record.rates.size and not np.nan_to_num(record.rates[applied]).any():
        return "no step of high precision changed a weight: the learning rate was 0, or every step was skipped"
    return ""


def evaluation_pairs(sides: Sides, trial: Trial) -> list[tuple[Evaluation, Evaluation]]:
    """(FP8, high precision) on the held-out data: the trial's seed, then other seeds for which both were evaluated."""
    assert trial.held_out is not None
    name, runs = sides.fp8[0].name, trial.held_out.runs
    high = {run.cfg.run.seed: runs[run.name] for run, _ in sides.runs if run.kind == "noise" and run.name in runs}
    others = [run for run, _ in sides.runs if run.kind == "seed" and run.of == name and run.name in runs]
    pairs = [(runs[run.name], high[run.cfg.run.seed]) for run in others if run.cfg.run.seed in high]
    return [(runs[name], _reference_evaluation(trial)), *pairs]


def _reference_evaluation(trial: Trial) -> Evaluation:
    assert trial.held_out is not None
    return next(iter(trial.held_out.runs.values()))  # high precision is evaluated first


def accuracy_claim(sides: Sides, trial: Trial, idle: str) -> Check:
    """The claim on held-out accuracy, over all evaluated seeds; ``idle``: why high precision learned nothing (empty: it
    learned)."""
    run = sides.fp8[0]
    interval, why, seen = None, NO_DATA, ""
    if trial.held_out is not None:
        pairs = evaluation_pairs(sides, trial)
        ours, others = ([piece for pair in pairs for piece in pair[side].pieces] for side in (0, 1))
        interval = claims.paired_accuracy(ours, others)
        questions = sum(piece["right"] is not None for piece in pairs[0][1].pieces)
        mine, right = (sum(bool(p["right"]) for p in pieces) for pieces in (ours, others))
        seen = f"{mine} of {questions * len(pairs)} right, high precision {right}"
        seen += f", over {len(pairs)} seeds" if len(pairs) > 1 else ""
        if interval is None:
            why = f"{questions} held-out questions about fewer than two images or documents give no interval"
        elif not (why := why_accuracy_is_uninformative(trial, idle)):
            seen += f", about {interval.units} sources"
    return decide(
        ACCURACY, TITLES[ACCURACY], run.label, interval, trial.accuracy_margin,
        unit="sources of questions", scale=points, worse=-1, why_not=why, seen=seen,
    )  # fmt: skip


def why_accuracy_is_uninformative(trial: Trial, idle: str) -> str:
    """Why accuracy cannot show the effect of FP8; ``idle``: why high precision learned nothing. Empty if it can."""
    assert trial.held_out is not None
    theirs = _reference_evaluation(trial).pieces
    if not claims.beats_constant_answer(theirs):
        right = [bool(piece["right"]) for piece in theirs if piece["right"] is not None]
        floor = percent(claims.best_constant_accuracy(theirs), 1)
        return (
            f"high precision answers {sum(right)} of {len(right)} questions, no better than a constant answer "
            f"({floor}): so there was nothing to lose. Train more steps, or add questions"
        )
    if not idle and _is_within_margin(claims.paired_accuracy(trial.held_out.before.pieces, theirs), trial):
        return (
            "the model before training answers as well as high precision after it, within the margin, so nothing was "
            "learned that FP8 could have lost; train more steps"
        )
    return idle


def _is_within_margin(interval: Interval | None, trial: Trial) -> bool:
    """Whether the interval is above the margin of harm."""
    return interval is not None and interval.low >= -trial.accuracy_margin


def _claim_same_weights(sides: Sides, trial: Trial) -> Check:
    run = sides.fp8[0]
    interval, why, seen = None, NO_DATA, ""
    if trial.held_out is not None:
        low, high = trial.held_out.runs[run.name], trial.held_out.high[run.name]
        if not low.gemms:
            sentence = "the evaluation of the FP8 run used no FP8 GEMM"
            return Check(WEIGHTS, TITLES[WEIGHTS], run.label, 0.0, "no FP8", "evaluated in FP8", FAIL, sentence)
        interval = claims.relative_loss(low.pieces, high.pieces)
        why = "" if interval is not None else "held-out data of fewer than two images or documents give no interval"
        seen = f"held-out loss {low.loss:.5g} in FP8, {high.loss:.5g} in high precision"
    return decide(
        WEIGHTS, TITLES[WEIGHTS], run.label, interval, LOSS_MARGIN,
        unit="images or documents", scale=per_cent, worse=1, why_not=why, seen=seen,
    )  # fmt: skip


def _claim_forks(sides: Sides, trial: Trial, idle: str) -> Check:
    run, name, title = sides.fp8[0], FORKS, TITLES[FORKS]
    if not trial.forks and not trial.no_forks:
        sentence = "not tested; use --forks 3"
        return Check(
            name,
            title,
            run.label,
            None,
            "not tested",
            f"95 % interval below {per_cent(LOSS_MARGIN)}",
            UNTRIED,
            sentence,
        )
    forks = [(a, r) for a, r in sides.runs if a.kind == "fork" and a.of == run.name]
    high = {a.number: (a, r) for a, r in sides.runs if a.kind == "fork" and not a.of}
    if wrong := why_not_comparable(sides, [*forks, *high.values()]):
        return Check(name, title, run.label, None, "failed", "every fork is sound", FAIL, wrong)
    gaps = fork_gaps(sides)
    interval = claims.mean_gap(gaps)  # None for fewer than two forks, and if a gap is not finite
    few = f"{len(gaps)} fork(s) give no interval; use 3 or more"
    why = trial.no_forks or (idle if interval is not None else few if len(gaps) < 2 else "a fork has no finite losses")
    return decide(
        name, title, run.label, interval, LOSS_MARGIN,
        unit="forks", scale=per_cent, worse=1, why_not=why, seen=f"{len(gaps)} forks",
    )  # fmt: skip


def fork_gaps(sides: Sides) -> list[float]:
    """FP8's loss relative to high precision's in each fork of an FP8 run, over the fork's second half."""
    high = {a.number: r for a, r in sides.runs if a.kind == "fork" and not a.of}
    gaps = []
    for fork, record in ((a, r) for a, r in sides.runs if a.kind == "fork" and a.of == sides.fp8[0].name):
        # The first half is time to diverge. For the reference's seed, high precision's continuation exists already.
        middle = (fork.begins + fork.cfg.train.total_steps) // 2
        gaps.append(mean_loss_gap(record, high.get(fork.number, sides.reference[1]), after=middle))
    return gaps


def pair_gaps(sides: Sides) -> list[float]:
    """FP8's mean loss relative to high precision's with the same seed, for each seed; NaN if a run failed."""
    high = {a.cfg.run.seed: r for a, r in sides.runs if a.kind == "noise"}
    others = [(a, r) for a, r in sides.runs if a.kind == "seed" and a.of == sides.fp8[0].name]
    pairs = [math.nan if r.failure else mean_loss_gap(r, high[a.cfg.run.seed]) for a, r in others]
    return [mean_loss_gap(sides.fp8[1], sides.reference[1]), *pairs]


def why_not_comparable(sides: Sides, others: Sequence[tuple[Run, RunRecord]]) -> str:
    """Why forks or runs of other seeds cannot be compared with the FP8 run: one failed, skipped steps, did not run FP8
    where its plan says, or has another plan (as in a trial that an earlier version began). Empty if all can."""
    plan = _planned_layers(sides.fp8[1])
    for run, record in others:
        if record.failure:
            return f"{run.label}: {record.failure}"
        steps = max(1, run.cfg.train.total_steps - run.begins)
        if len(record.skipped) > SKIPPED_WARN * steps:
            return f"{run.label} skipped {len(record.skipped)} of {steps} steps, whose loss or gradient was not finite"
        if run.of and (check := check_gemms(run.label, record.proof)).status == FAIL:
            return f"{run.label}: {check.sentence}"
        if run.of and (odd := {name for name, _ in plan ^ _planned_layers(record)}):
            return (
                f"{run.label} has a different plan from {sides.fp8[0].label} ({len(odd)} layers, first {min(odd)}); "
                "--fresh trains all runs again"
            )
    return ""


def _planned_layers(record: RunRecord) -> set[tuple[str, str]]:
    """The plan that a run began with, layer by layer, without moves of `fp8.adapt`, which depend on the seed."""
    if lines := record.plan.get("layers"):
        return {(str(line.get("match")), f"{line.get('recipe')} {line.get('steps')}") for line in lines}
    return {(row["name"], str((row.get("recipe") or {}).get("name"))) for row in record.plan.get("rows", ())}


def _claim_trajectories(sides: Sides, trial: Trial, idle: str, noise: float) -> Check:
    run, title = sides.fp8[0], TITLES[SEEDS]
    pairs = pair_gaps(sides)
    others = [(a, r) for a, r in sides.runs if a.kind == "seed" and a.of == run.name]
    apart = f"another seed changes mean losses by up to {percent(noise)}"
    if trial.seeds == 1:
        sentence = f"one pair of seeds, {per_cent(pairs[0])}, gives no interval, and {apart}; use --seeds 5"
        threshold = f"95 % interval below {per_cent(LOSS_MARGIN)}"
        far = pairs[0] > max(2 * noise, LOSS_MARGIN)
        status = WARN if far else UNTRIED
        sentence += "; the gap is larger than seeds explain" if far else ""
        return Check(SEEDS, title, run.label, pairs[0], per_cent(pairs[0]), threshold, status, sentence)
    if wrong := why_not_comparable(sides, others):
        return Check(SEEDS, title, run.label, None, "failed", "every run is sound", FAIL, wrong)
    interval = claims.mean_gap(pairs)
    why = idle if interval is not None else "a run has no finite losses"
    return decide(
        SEEDS, title, run.label, interval, LOSS_MARGIN,
        unit="pairs of seeds", scale=per_cent, worse=1, why_not=why, seen=f"{len(pairs)} pairs of seeds; {apart}",
    )  # fmt: skip


def points(share: float) -> str:
    return f"{100 * share:+.2f} points"


def per_cent(share: float) -> str:
    return f"{100 * share:+.3f} %"
