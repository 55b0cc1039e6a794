"""Computes the claims of a trial from the figures of its runs, with the reason if one remains undecided."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from octavo.report.evidence import claims
from octavo.report.evidence.claims import LOSS_MARGIN, Evaluation, Interval, decide
from octavo.report.evidence.run_reader import RunRecord, common_steps
from octavo.report.evidence.trial_spec import Run, Trial
from octavo.report.evidence.trust_table import FAIL, SKIPPED_WARN, UNTRIED, WARN, Check, check_gemms, loss_gap, percent

ACCURACY, WEIGHTS, FORKS, SEEDS = DEFAULT_CLAIMS = ("accuracy", "loss_same_weights", "loss_forks", "loss_trajectories")
HELD_OUT_LOSS = "loss_held_out"  # judged only where a trial names it: one pair of runs, without other seeds
CLAIMS = (*DEFAULT_CLAIMS, HELD_OUT_LOSS)
TITLES = {
    HELD_OUT_LOSS: "Held-out loss",
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
    """Return the trial's claims for one FP8 run; ``noise`` is the seed noise of mean losses. Held-out data without
    questions, such as plain text, give no claim on accuracy."""
    no_learning = why_nothing_learned(sides.reference[1], trial)
    has_questions = trial.held_out is None or any(
        piece["right"] is not None for piece in _reference_evaluation(trial).pieces
    )
    claims_by_name: dict[str, Callable[[], Check]] = {
        **({ACCURACY: lambda: accuracy_claim(sides, trial, no_learning)} if has_questions else {}),
        WEIGHTS: lambda: _claim_same_weights(sides, trial),
        FORKS: lambda: _claim_forks(sides, trial, no_learning),
        SEEDS: lambda: _claim_trajectories(sides, trial, no_learning, noise),
        HELD_OUT_LOSS: lambda: _claim_held_out_loss(sides, trial, no_learning),
    }
    return [claim() for name, claim in claims_by_name.items() if name in (trial.claims or DEFAULT_CLAIMS)]


def mean_loss_gap(record: RunRecord, reference: RunRecord, after: int = 0) -> float:
    """Return the signed relative gap of the mean losses over the steps after ``after`` that both runs recorded."""
    record_at, reference_at = common_steps(record, reference)
    later = record.steps[record_at] > after
    return loss_gap(record.losses[record_at][later], reference.losses[reference_at][later])


def fork_step(steps: int) -> int:
    """Return the step after which forks begin: two thirds of the run."""
    return 2 * steps // 3


def why_nothing_learned(record: RunRecord, trial: Trial) -> str:
    """Return why high precision learned nothing that FP8 could have lost, or "" if it learned."""
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
    """Return why no step changed a weight, or "" if some step did."""
    applied = ~np.isin(record.steps, (*record.skipped, *record.overflowed))
    if record.rates.size and not np.nan_to_num(record.rates[applied]).any():
        return "no step of high precision changed a weight: the learning rate was 0, or every step was skipped"
    return ""


def evaluation_pairs(sides: Sides, trial: Trial) -> list[tuple[Evaluation, Evaluation]]:
    """Return pairs (FP8, high precision) of held-out evaluations: the trial's seed first, then each other seed that has
    both."""
    assert trial.held_out is not None
    name, runs = sides.fp8[0].name, trial.held_out.runs
    high = {run.cfg.run.seed: runs[run.name] for run, _ in sides.runs if run.kind == "noise" and run.name in runs}
    seed_runs = [run for run, _ in sides.runs if run.kind == "seed" and run.of == name and run.name in runs]
    pairs = [(runs[run.name], high[run.cfg.run.seed]) for run in seed_runs if run.cfg.run.seed in high]
    return [(runs[name], _reference_evaluation(trial)), *pairs]


def _reference_evaluation(trial: Trial) -> Evaluation:
    assert trial.held_out is not None
    return next(iter(trial.held_out.runs.values()))  # high precision is evaluated first


def accuracy_claim(sides: Sides, trial: Trial, no_learning: str) -> Check:
    """Return the claim on held-out accuracy over all evaluated seeds.

    ``no_learning``: why high precision learned nothing, or "" if it learned.
    """
    run = sides.fp8[0]
    interval, why, seen = None, NO_DATA, ""
    if trial.held_out is not None:
        pairs = evaluation_pairs(sides, trial)
        fp8_pieces, high_pieces = ([piece for pair in pairs for piece in pair[side].pieces] for side in (0, 1))
        interval = claims.paired_accuracy(fp8_pieces, high_pieces)
        questions = sum(piece["right"] is not None for piece in pairs[0][1].pieces)
        fp8_right, high_right = (sum(bool(p["right"]) for p in pieces) for pieces in (fp8_pieces, high_pieces))
        seen = f"{fp8_right} of {questions * len(pairs)} right, high precision {high_right}"
        seen += f", over {len(pairs)} seeds" if len(pairs) > 1 else ""
        if interval is None:
            why = f"{questions} held-out questions about fewer than two images or documents give no interval"
        elif not (why := why_accuracy_is_uninformative(trial, no_learning)):
            seen += f", about {interval.units} sources"
    return decide(
        ACCURACY, TITLES[ACCURACY], run.label, interval, trial.accuracy_margin,
        unit="sources of questions", scale=points, worse=-1, why_not=why, seen=seen,
    )  # fmt: skip


def why_accuracy_is_uninformative(trial: Trial, no_learning: str) -> str:
    """Return why accuracy cannot show the effect of FP8, or "" if it can. ``no_learning`` as in `accuracy_claim`."""
    assert trial.held_out is not None
    high_pieces = _reference_evaluation(trial).pieces
    if not claims.beats_constant_answer(high_pieces):
        right = [bool(piece["right"]) for piece in high_pieces if piece["right"] is not None]
        floor = percent(claims.best_constant_accuracy(high_pieces), 1)
        return (
            f"high precision answers {sum(right)} of {len(right)} questions, no better than a constant answer "
            f"({floor}), so there was nothing to lose. Train more steps, or add questions"
        )
    if not no_learning and _is_within_margin(claims.paired_accuracy(trial.held_out.before.pieces, high_pieces), trial):
        return (
            "the model before training answers as well as high precision after it, within the margin, so nothing was "
            "learned that FP8 could have lost; train more steps"
        )
    return no_learning


def _is_within_margin(interval: Interval | None, trial: Trial) -> bool:
    """Return whether the interval is above the margin of harm."""
    return interval is not None and interval.low >= -trial.accuracy_margin


def _claim_same_weights(sides: Sides, trial: Trial) -> Check:
    run = sides.fp8[0]
    interval, why, seen = None, NO_DATA, ""
    if trial.held_out is not None:
        low, high = trial.held_out.runs[run.name], trial.held_out.high[run.name]
        if not low.gemms and _plans_fp8_forward(sides.fp8[1]):
            return _evaluated_without_fp8(WEIGHTS, run)
        interval = claims.relative_loss(low.pieces, high.pieces)
        why = "" if interval is not None else "held-out data of fewer than two images or documents give no interval"
        seen = f"held-out loss {low.loss:.5g} in FP8, {high.loss:.5g} in high precision"
    return decide(
        WEIGHTS, TITLES[WEIGHTS], run.label, interval, LOSS_MARGIN,
        unit="images or documents", scale=per_cent, worse=1, why_not=why, seen=seen,
    )  # fmt: skip


def _claim_held_out_loss(sides: Sides, trial: Trial, no_learning: str) -> Check:
    """Compare the held-out losses of the models that both precisions trained, document by document."""
    run = sides.fp8[0]
    interval, why, seen = None, NO_DATA, ""
    if trial.held_out is not None:
        low, high = trial.held_out.runs[run.name], _reference_evaluation(trial)
        if not low.gemms and _plans_fp8_forward(sides.fp8[1]):
            return _evaluated_without_fp8(HELD_OUT_LOSS, run)
        interval = claims.relative_loss(low.pieces, high.pieces)
        why = no_learning if interval is not None else "fewer than two images or documents give no interval"
        seen = f"{low.loss:.4f} nats a token, high precision {high.loss:.4f}, before training "
        seen += f"{trial.held_out.before.loss:.4f}"
    return decide(
        HELD_OUT_LOSS,
        TITLES[HELD_OUT_LOSS],
        run.label,
        interval,
        trial.loss_margin,
        unit="images or documents",
        scale=per_cent,
        worse=1,
        why_not=why,
        seen=seen,
    )


def _plans_fp8_forward(record: RunRecord) -> bool:
    """Return whether a layer of the run is planned to compute its forward in FP8; with `fp8.fwd: bf16` none is."""
    recipes = [row.get("recipe") for row in record.plan.get("rows", ())]
    return any(not isinstance(recipe, Mapping) or recipe.get("fwd", "fp8") == "fp8" for recipe in recipes if recipe)


def _evaluated_without_fp8(claim: str, run: Run) -> Check:
    sentence = "the evaluation of the FP8 run used no FP8 GEMM"
    return Check(claim, TITLES[claim], run.label, 0.0, "no FP8", "evaluated in FP8", FAIL, sentence)


def _claim_forks(sides: Sides, trial: Trial, no_learning: str) -> Check:
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
    forks = [(fork, record) for fork, record in sides.runs if fork.kind == "fork" and fork.of == run.name]
    high = {fork.number: (fork, record) for fork, record in sides.runs if fork.kind == "fork" and not fork.of}
    if reason := why_not_comparable(sides, [*forks, *high.values()]):
        return Check(name, title, run.label, None, "failed", "every fork is sound", FAIL, reason)
    gaps = fork_gaps(sides)
    interval = claims.mean_gap(gaps)  # None for fewer than two forks, and if a gap is not finite
    too_few = f"{len(gaps)} fork(s) give no interval; use 3 or more"
    why = trial.no_forks or (
        no_learning if interval is not None else too_few if len(gaps) < 2 else "a fork has no finite losses"
    )
    return decide(
        name, title, run.label, interval, LOSS_MARGIN,
        unit="forks", scale=per_cent, worse=1, why_not=why, seen=f"{len(gaps)} forks",
    )  # fmt: skip


def fork_gaps(sides: Sides) -> list[float]:
    """Return the relative loss gap to high precision in each fork of an FP8 run, over the second half of the fork."""
    high = {run.number: record for run, record in sides.runs if run.kind == "fork" and not run.of}
    gaps = []
    for fork, record in sides.runs:
        if fork.kind != "fork" or fork.of != sides.fp8[0].name:
            continue
        # The first half is time to diverge. For the reference's seed, high precision's continuation exists already.
        middle = (fork.begins + fork.cfg.train.total_steps) // 2
        gaps.append(mean_loss_gap(record, high.get(fork.number, sides.reference[1]), after=middle))
    return gaps


def pair_gaps(sides: Sides) -> list[float]:
    """Return the relative gap of mean losses to high precision for each seed; NaN if a run failed."""
    high = {run.cfg.run.seed: record for run, record in sides.runs if run.kind == "noise"}
    seed_runs = [(run, record) for run, record in sides.runs if run.kind == "seed" and run.of == sides.fp8[0].name]
    pairs = [math.nan if record.failure else mean_loss_gap(record, high[run.cfg.run.seed]) for run, record in seed_runs]
    return [mean_loss_gap(sides.fp8[1], sides.reference[1]), *pairs]


def why_not_comparable(sides: Sides, others: Sequence[tuple[Run, RunRecord]]) -> str:
    """Return why forks or runs with other seeds cannot be compared with the FP8 run, or "" if all can.

    Reasons: a run failed, skipped steps, did not run FP8 where planned, or has a different plan (if an earlier version
    began the trial).
    """
    reference = sides.fp8[1]
    for run, record in others:
        if record.failure:
            return f"{run.label}: {record.failure}"
        steps = max(1, run.cfg.train.total_steps - run.begins)
        if len(record.skipped) > SKIPPED_WARN * steps:
            return f"{run.label} skipped {len(record.skipped)} of {steps} steps, whose loss or gradient was not finite"
        if run.of and (check := check_gemms(run.label, record.proof)).status == FAIL:
            return f"{run.label}: {check.sentence}"
        if run.of and (different := _different_layers(reference, record)):
            return (
                f"{run.label} has a different plan from {sides.fp8[0].label} ({len(different)} layers, first "
                f"{min(different)}); --fresh trains all runs again"
            )
    return ""


def _different_layers(reference: RunRecord, record: RunRecord) -> set[str]:
    """Return the layers that have other recipes, or other casts, in two runs."""
    return {name for name, _ in _planned_layers(reference) ^ _planned_layers(record)}


def _planned_layers(record: RunRecord) -> set[tuple[str, str]]:
    """Return the initial plan of a run by layer, with its casts, without changes by `fp8.adapt`, which depend on the
    seed."""
    from octavo.fp8.planning import saved_recipes

    if record.plan.get("layers"):
        lines = saved_recipes(record.plan, Path("plan.json"))
        return {(line.match, f"{line.steps} {casts.describe()}") for line, casts in lines}
    return {(row["name"], str((row.get("recipe") or {}).get("name"))) for row in record.plan.get("rows", ())}


def _claim_trajectories(sides: Sides, trial: Trial, no_learning: str, noise: float) -> Check:
    run, title = sides.fp8[0], TITLES[SEEDS]
    pairs = pair_gaps(sides)
    seed_runs = [
        (seed_run, record) for seed_run, record in sides.runs if seed_run.kind == "seed" and seed_run.of == run.name
    ]
    seed_effect = f"another seed changes mean losses by up to {percent(noise)}"
    if trial.seeds == 1:
        sentence = f"one pair of seeds, {per_cent(pairs[0])}, gives no interval, and {seed_effect}; use --seeds 5"
        threshold = f"95 % interval below {per_cent(LOSS_MARGIN)}"
        is_far = pairs[0] > max(2 * noise, LOSS_MARGIN)
        status = WARN if is_far else UNTRIED
        sentence += "; the gap is larger than seeds explain" if is_far else ""
        return Check(SEEDS, title, run.label, pairs[0], per_cent(pairs[0]), threshold, status, sentence)
    if reason := why_not_comparable(sides, seed_runs):
        return Check(SEEDS, title, run.label, None, "failed", "every run is sound", FAIL, reason)
    interval = claims.mean_gap(pairs)
    why = no_learning if interval is not None else "a run has no finite losses"
    return decide(
        SEEDS, title, run.label, interval, LOSS_MARGIN,
        unit="pairs of seeds", scale=per_cent, worse=1, why_not=why, seen=f"{len(pairs)} pairs of seeds; {seed_effect}",
    )  # fmt: skip


def points(share: float) -> str:
    return f"{100 * share:+.2f} points"


def per_cent(share: float) -> str:
    return f"{100 * share:+.3f} %"
