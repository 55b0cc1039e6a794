"""Designs a trial before its first run: its runs, their order, and the expected results.

No training and no writing here. The spread of gaps comes from earlier runs in the same folder (two seeds were trained,
six are requested). Without such runs nothing is predicted: another task's spread says nothing about this one, by a
factor of hundreds in both directions. A spread of two or three gaps may be several times too small.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from octavo.base.wording import count_noun
from octavo.config import Config
from octavo.config.sections.rl import BEYOND_SFT
from octavo.config.stages import keys_in_stage
from octavo.report.evidence import claims as intervals
from octavo.report.evidence import rl_claims
from octavo.report.evidence.claims import LOSS_MARGIN, MIN_FORK_STEPS, Evaluation, Interval
from octavo.report.evidence.power import Estimate, spread_from_half_width
from octavo.report.evidence.run_reader import ReportError, RunRecord
from octavo.report.evidence.trial_claims import (
    ACCURACY,
    DEFAULT_CLAIMS,
    FORKS,
    HELD_OUT_LOSS,
    NO_DATA,
    SEEDS,
    TITLES,
    WEIGHTS,
    Sides,
    fork_gaps,
    pair_gaps,
)
from octavo.report.evidence.trial_spec import Run
from octavo.report.trial import factorial_cells, held_out, runs
from octavo.report.trial.reuse import check_reusable, check_same_casts, read_finished

UNKNOWN = "no spread is recorded for this task, so nothing is predicted; {fix}"
FIRST_SEEDS = "--seeds 2 first, then more in the same folder, predicts by the first two"

Records = list[tuple[Run, RunRecord]]


@dataclass(frozen=True)
class Design:
    """A trial before it begins: its runs in order, and the expected results of its claims.

    ``forks``: the number of possible forks; ``no_forks``: why there are none; ``factors``: the components of a
    factorial trial; ``left_out``: the components that the configuration has in FP8 in addition.
    """

    cfg: Config
    directory: Path
    runs: tuple[Run, ...]
    seeds: int
    forks: int
    no_forks: str
    accuracy_margin: float
    loss_margin: float = LOSS_MARGIN
    factors: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    expected: tuple[Estimate, ...] = field(default=(), repr=False)

    @property
    def identity(self) -> dict[str, Any]:
        """The identity of this design among those in the same folder."""
        recipes = [run.name for run in self.runs if run.kind == "fp8"]
        identity = {"recipes": recipes, "seeds": self.seeds, "forks": self.forks, "factors": list(self.factors)}
        if self.loss_margin != LOSS_MARGIN:
            identity["loss_margin"] = self.loss_margin
        estimated = [estimate.claim for estimate in self.expected]
        return identity | {"accuracy_margin": self.accuracy_margin, "claims": estimated}

    @property
    def lines(self) -> list[str]:
        """The lines to print: expected results, and notes on the design."""
        known = [estimate for estimate in self.expected if not estimate.why_not]
        unknown: dict[str, list[str]] = {}
        for estimate in self.expected:
            if estimate.why_not:
                unknown.setdefault(estimate.why_not, []).append(estimate.title)
        lines_to_print = ["If FP8 changes nothing, the expected results are (95 % intervals):"] if known else []
        lines_to_print += [f"  {estimate.line}" for estimate in known]
        lines_to_print += [f"{', '.join(titles)}: {why}" for why, titles in unknown.items()]
        if self.factors:
            lines_to_print.append(
                f"  {2 ** len(self.factors)} cells of {self.seeds} seed(s): {', '.join(self.factors)}"
            )
        if self.left_out:
            others = ", ".join(self.left_out)
            lines_to_print.append(f"  in high precision in all cells, although in FP8 in the configuration: {others}")
        if self.seeds == 1 and self.factors:
            lines_to_print.append("  one seed gives no interval, so no effect can be decided; use --seeds 3 or more")
        return lines_to_print

    def to_json(self) -> dict[str, Any]:
        """Return the output of ``--power --json``."""
        order = [{"name": run.name, "label": run.label, "trained": read_finished(run) is not None} for run in self.runs]
        return {
            "power": [estimate.to_json() for estimate in self.expected], "runs": order, "seeds": self.seeds,
            "forks": self.forks, "no_forks": self.no_forks, "components": list(self.factors),
            "left_out": list(self.left_out),
        }  # fmt: skip


def design(
    cfg: Config,
    recipes: Sequence[str] | None = None,
    directory: str | Path = "runs/compare",
    *,
    savings: bool = False,
    forks: int = 0,
    seeds: int = 1,
    accuracy_margin: float | None = None,
    loss_margin: float = LOSS_MARGIN,
    factorial: Sequence[str] = (),
    fresh: bool = False,
    claims: Sequence[str] = (),
) -> Design:
    """Return the runs that :func:`octavo.report.trial.compare.compare` would train with the same arguments, and their
    expected results. Raises ``ReportError`` for arguments that it would reject."""
    from octavo.train.setup.resolve_config import resolve_recipe, resolve_steps

    is_beyond_sft = cfg.train.phase in BEYOND_SFT
    if is_beyond_sft and forks:
        raise ReportError(
            f"forks={forks}: forks compare losses, which decide nothing in phase {cfg.train.phase}. Remove forks; "
            "--seeds 3 trains whole runs of several seeds"
        )
    if accuracy_margin is None:
        accuracy_margin = (rl_claims if is_beyond_sft else intervals).ACCURACY_MARGIN
    factors = factorial_cells.check_components(factorial) if factorial else ()
    if factors:
        factorial_cells.check_settings(cfg, recipes, savings)
    cfg, directory = resolve_steps(resolve_recipe(cfg)), Path(directory)
    if factors:
        planned, left_out = factorial_cells.make_runs(cfg, factors, recipes, directory, forks, seeds)
    else:
        planned, left_out = runs.make_runs(cfg, recipes, directory, savings, forks, seeds, claims=claims), ()
    for run in [] if fresh else planned:  # refuse before the first run takes minutes
        check_reusable(run)
    if not fresh:
        check_same_casts(planned)
    no_forks = "" if not forks else _why_no_forks(planned, fresh)
    if no_forks:
        planned, forks = [run for run in planned if run.kind != "fork"], 0
    result = Design(
        cfg, directory, tuple(planned), seeds, forks, no_forks, accuracy_margin, loss_margin, factors, left_out
    )
    judged = claims or (*DEFAULT_CLAIMS, *factorial_cells.EFFECTS)
    expected = (estimate for estimate in _estimate_claims(result, fresh) if estimate.claim in judged)
    return replace(result, expected=tuple(expected))


def _why_no_forks(planned: Sequence[Run], fresh: bool) -> str:
    """Return why forks are not possible: the run is too short, or its checkpoint at two thirds does not exist."""
    from octavo import checkpoint

    fork, reference = (next(run for run in planned if run.kind == kind) for kind in ("fork", "reference"))
    steps = fork.cfg.train.total_steps
    if steps - fork.begins < MIN_FORK_STEPS:
        key = keys_in_stage(reference.cfg, -1).get("train.steps", "train.steps")
        return (
            f"forks of {count_noun(steps - fork.begins, 'step')} cannot diverge, at least {MIN_FORK_STEPS} are needed: "
            f"set {key} of at least {3 * MIN_FORK_STEPS}"
        )
    if fresh:
        return ""
    past = max(checkpoint.steps(Path(reference.cfg.run.dir) / "checkpoints"), default=0) >= fork.begins
    if (past or read_finished(reference) is not None) and fork.after is not None and not fork.after.is_dir():
        return (
            f"{reference.cfg.run.dir} is past step {fork.begins} and has no checkpoint of it, from which forks "
            "continue; --fresh trains it again"
        )
    return ""


def _estimate_claims(trial_design: Design, fresh: bool) -> list[Estimate]:
    """Return an estimate for each claim of the design, in order."""
    records = (
        [] if fresh else [(run, record) for run in trial_design.runs if (record := read_finished(run)) is not None]
    )
    if trial_design.cfg.train.phase in BEYOND_SFT:
        return [_estimate_accuracy(trial_design, records)]
    estimates = [
        *([] if trial_design.cfg.train.phase == "pretrain" else [_estimate_accuracy(trial_design, records)]),
        _estimate_same_weights(trial_design, records),
        _estimate_held_out_loss(trial_design, records),
    ]
    if trial_design.forks:
        estimates.append(_estimate_gaps(FORKS, "forks", trial_design.forks, _fork_gaps(trial_design, records)))
    elif trial_design.no_forks:
        estimates.append(replace(_estimate_gaps(FORKS, "forks", 0, []), why_not=trial_design.no_forks))
    if trial_design.seeds > 1:
        estimates.append(_estimate_gaps(SEEDS, "pairs of seeds", trial_design.seeds, _pair_gaps(records)))
    return estimates + (_estimate_effects(trial_design, records) if trial_design.factors else [])


def _estimate_gaps(claim: str, unit: str, units: int, gaps: Sequence[float]) -> Estimate:
    spread = _standard_deviation(gaps)
    why_not = "" if spread else UNKNOWN.format(fix=FIRST_SEEDS if claim == SEEDS else "the first forks show it")
    source = f"seen in {len(gaps)} {unit} here"
    return Estimate(claim, TITLES[claim], unit, units, spread, LOSS_MARGIN, source, seen=bool(spread), why_not=why_not)


def _standard_deviation(gaps: Sequence[float]) -> float:
    """Return the standard deviation of gaps, or 0 if it is unknown: too few gaps, or a gap that is not finite."""
    return float(np.std(gaps, ddof=1)) if len(gaps) > 1 and np.isfinite(gaps).all() else 0.0


def _estimate_accuracy(trial_design: Design, records: Records) -> Estimate:
    """Estimate the accuracy claim by sources of questions. In phases rl and preference the answers of all seeds
    count; their errors are assumed to be independent."""
    seeds = trial_design.seeds if trial_design.cfg.train.phase in BEYOND_SFT else 1
    pairs = _earlier_evaluations(trial_design, records)
    interval = None
    if pairs:
        fp8_pieces, high_pieces = ([piece for pair in pairs for piece in pair[side].pieces] for side in (0, 1))
        interval = intervals.paired_accuracy(fp8_pieces, high_pieces)
    share = math.sqrt(len(pairs) / seeds)
    margin = trial_design.accuracy_margin
    return _estimate_by_sources(trial_design, ACCURACY, "sources of questions", interval, margin, share)


def _estimate_same_weights(trial_design: Design, records: Records) -> Estimate:
    interval = None
    for run, _ in records:
        if run.kind == "fp8" and interval is None:
            low, high = (held_out.read_evaluation(run, trial_design.directory, high) for high in (False, True))
            if low is not None and high is not None:
                interval = intervals.relative_loss(low.pieces, high.pieces)
    return _estimate_by_sources(trial_design, WEIGHTS, "images or documents", interval, LOSS_MARGIN)


def _estimate_held_out_loss(trial_design: Design, records: Records) -> Estimate:
    pairs = _earlier_evaluations(trial_design, records)
    interval = intervals.relative_loss(pairs[0][0].pieces, pairs[0][1].pieces) if pairs else None
    return _estimate_by_sources(trial_design, HELD_OUT_LOSS, "images or documents", interval, trial_design.loss_margin)


def _estimate_by_sources(
    trial_design: Design, claim: str, unit: str, interval: Interval | None, margin: float, share: float = 1.0
) -> Estimate:
    """Return the estimate from an observed interval; ``share``: of its spread."""
    title, seen = TITLES[claim], "seen here"
    if interval is not None:
        spread = share * spread_from_half_width(interval.half, interval.units)
        return Estimate(claim, title, unit, interval.units, spread, margin, seen, seen=True)
    why_not = UNKNOWN.format(fix="the first runs show it") if trial_design.cfg.data.eval else NO_DATA
    return Estimate(claim, title, unit, 0, 0.0, margin, "", why_not=why_not)


def _earlier_evaluations(trial_design: Design, records: Records) -> list[tuple[Evaluation, Evaluation]]:
    """Return earlier evaluations as pairs (FP8, high precision), for each seed that has both."""
    high = {run.cfg.run.seed: run for run, _ in records if run.kind in ("reference", "noise")}
    first = next((run.name for run, _ in records if run.kind == "fp8"), None)
    pairs = []
    for run, _ in records:
        if (run.name == first or (run.kind == "seed" and run.of == first)) and run.cfg.run.seed in high:
            fp8_evaluation, high_evaluation = (
                held_out.read_evaluation(side, trial_design.directory) for side in (run, high[run.cfg.run.seed])
            )
            if fp8_evaluation is not None and high_evaluation is not None:
                pairs.append((fp8_evaluation, high_evaluation))
    return pairs


def _sides(records: Records) -> Sides | None:
    """Return the first FP8 run with high precision, and the other runs whose counterpart exists."""
    by_kind = {run.kind: (run, record) for run, record in reversed(records)}
    if "fp8" not in by_kind or "reference" not in by_kind:
        return None
    seeds = {run.cfg.run.seed for run, _ in records if run.kind == "noise"}
    paired = [(run, record) for run, record in records if run.kind != "seed" or run.cfg.run.seed in seeds]
    return Sides(by_kind["fp8"], by_kind["reference"], paired)


def _pair_gaps(records: Records) -> list[float]:
    sides = _sides(records)
    return [] if sides is None else pair_gaps(sides)


def _fork_gaps(trial_design: Design, records: Records) -> list[float]:
    """Return the gaps of forks whose counterpart in high precision exists."""
    sides = _sides(records)
    if sides is None:
        return []
    trained = {run.name for run, _ in records}
    unpaired = {
        run.number for run in trial_design.runs if run.kind == "fork" and not run.of and run.name not in trained
    }
    paired_runs = [(run, record) for run, record in sides.runs if run.kind != "fork" or run.number not in unpaired]
    return fork_gaps(sides._replace(runs=paired_runs))


def _estimate_effects(trial_design: Design, records: Records) -> list[Estimate]:
    """Estimate main effects over seeds, by the largest spread over earlier seeds."""
    estimates = []
    for name, margin in (
        (factorial_cells.ACCURACY, trial_design.accuracy_margin),
        (factorial_cells.LOSS, LOSS_MARGIN),
    ):
        mains = [
            effect.by_seed
            for effect in factorial_cells.estimate_effects(records, name, trial_design.factors)
            if effect.is_main
        ]
        spread = max(map(_standard_deviation, mains), default=0.0)
        why_not = "" if spread else UNKNOWN.format(fix=FIRST_SEEDS)
        source = f"seen in {len(mains[0])} seeds here" if mains else ""
        title = factorial_cells.TITLES[name]
        if name == factorial_cells.LOSS or trial_design.cfg.train.phase != "pretrain":
            estimates.append(
                Estimate(name, title, "seeds", trial_design.seeds, spread, margin, source, bool(spread), why_not)
            )
    return estimates
