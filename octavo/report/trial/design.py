"""The design of a trial before its first run: its runs, their order, and what they can be expected to decide.

No training and no writing here. The spread of gaps comes from earlier runs of the kind in the same folder if there are
any (two seeds were trained, six are requested); otherwise it is assumed to be as in runs that were measured. Every line
says which. A spread of two or three gaps may be several times too small.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from octavo.config import Config
from octavo.config.sections.rl import BEYOND_SFT
from octavo.report.evidence import claims, factorial, rl_claims
from octavo.report.evidence.claims import LOSS_MARGIN, MIN_FORK_STEPS, Evaluation, Interval
from octavo.report.evidence.power import Estimate, spread_from_half_width
from octavo.report.evidence.run_reader import ReportError, RunRecord
from octavo.report.evidence.trial_claims import (
    ACCURACY,
    FORKS,
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
from octavo.report.trial.reuse import check_reusable, read_finished

# Assumed spreads where no earlier run shows them, as shares; docs/trials.md lists them with their sources.
PAIR_SPREAD = 0.0017  # mean losses of FP8 and high precision, pairs of seeds: docs/studies.md, pretraining, four pairs
FORK_SPREAD = 0.00013  # of forks after two thirds about their mean: the same study, four of each recipe
ANSWER_SPREAD = 0.132  # accuracy, by source of questions: the demo, from its interval over 355 sources
WEIGHTS_SPREAD = 0.139  # loss of the same weights, by source: the demo, whose loss is near 0, so probably too large
SEED_SPREAD = 0.0107  # accuracy, pairs of seeds: digits in phase rl, two trials of three pairs
DECODER = "assumed, as in docs/studies.md"
DEMO = "assumed, as in the demo (docs/trials.md)"

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
    factors: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    expected: tuple[Estimate, ...] = field(default=(), repr=False)

    @property
    def identity(self) -> dict[str, Any]:
        """The identity of this design among those in the same folder."""
        recipes = [run.name for run in self.runs if run.kind == "fp8"]
        identity = {"recipes": recipes, "seeds": self.seeds, "forks": self.forks, "factors": list(self.factors)}
        return identity | {"accuracy_margin": self.accuracy_margin}

    @property
    def lines(self) -> list[str]:
        """The lines to print: expected results, and notes on the design."""
        lines_to_print = ["If FP8 changes nothing, the expected results of this trial are (95 % intervals):"]
        lines_to_print += [f"  {estimate.line}" for estimate in self.expected]
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
    factorial: Sequence[str] = (),
    fresh: bool = False,
) -> Design:
    """The runs that :func:`octavo.report.trial.compare.compare` would train with the same arguments, and what they can
    be expected to decide. Raises ``ReportError`` for what it would refuse."""
    from octavo.train.setup.resolve_config import resolve_recipe, resolve_steps

    beyond = cfg.train.phase in BEYOND_SFT
    if beyond and forks:
        raise ReportError(
            f"forks={forks}: forks compare losses, which decide nothing in phase {cfg.train.phase}. Remove forks; "
            "--seeds 3 trains whole runs of several seeds"
        )
    if accuracy_margin is None:
        accuracy_margin = (rl_claims if beyond else claims).ACCURACY_MARGIN
    factors = factorial_cells.check_components(factorial) if factorial else ()
    if factors:
        factorial_cells.check_settings(cfg, recipes, savings)
    cfg, directory = resolve_steps(resolve_recipe(cfg)), Path(directory)
    if factors:
        planned, left_out = factorial_cells.make_runs(cfg, factors, recipes, directory, forks, seeds)
    else:
        planned, left_out = runs.make_runs(cfg, recipes, directory, savings, forks, seeds), ()
    for run in [] if fresh else planned:  # refuse before the first run takes minutes
        check_reusable(run)
    no_forks = "" if not forks else _why_no_forks(planned, fresh)
    if no_forks:
        planned, forks = [run for run in planned if run.kind != "fork"], 0
    result = Design(cfg, directory, tuple(planned), seeds, forks, no_forks, accuracy_margin, factors, left_out)
    return replace(result, expected=tuple(_estimate_claims(result, fresh)))


def _why_no_forks(planned: Sequence[Run], fresh: bool) -> str:
    """Return why forks are not possible: the run is too short, or its checkpoint at two thirds does not exist."""
    from octavo import checkpoint

    fork, reference = (next(run for run in planned if run.kind == kind) for kind in ("fork", "reference"))
    steps = fork.cfg.train.total_steps
    if steps - fork.begins < MIN_FORK_STEPS:
        return (
            f"forks of {steps - fork.begins} steps cannot diverge, at least {MIN_FORK_STEPS} steps are needed: set "
            f"train.steps of at least {3 * MIN_FORK_STEPS}"
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


def _estimate_claims(of: Design, fresh: bool) -> list[Estimate]:
    """Return an estimate for each claim of the design, in order."""
    records = [] if fresh else [(run, record) for run in of.runs if (record := read_finished(run)) is not None]
    if of.cfg.train.phase in BEYOND_SFT:
        return [_estimate_accuracy(of, records)]
    estimates = [
        *([] if of.cfg.train.phase == "pretrain" else [_estimate_accuracy(of, records)]),
        _estimate_same_weights(of, records),
    ]
    if of.forks:
        estimates.append(_estimate_gaps(FORKS, "forks", of.forks, _fork_gaps(of, records), FORK_SPREAD))
    elif of.no_forks:
        estimates.append(replace(_estimate_gaps(FORKS, "forks", 0, [], FORK_SPREAD), why_not=of.no_forks))
    if of.seeds > 1:
        estimates.append(_estimate_gaps(SEEDS, "pairs of seeds", of.seeds, _pair_gaps(records), PAIR_SPREAD))
    return estimates + (_estimate_effects(of, records) if of.factors else [])


def _estimate_gaps(claim: str, unit: str, units: int, gaps: Sequence[float], prior: float) -> Estimate:
    title = TITLES[claim]
    if spread := _standard_deviation(gaps):
        return Estimate(claim, title, unit, units, spread, LOSS_MARGIN, f"seen in {len(gaps)} {unit} here", seen=True)
    return Estimate(claim, title, unit, units, prior, LOSS_MARGIN, DECODER)


def _standard_deviation(gaps: Sequence[float]) -> float:
    """The standard deviation of gaps; 0 if there is none: too few gaps, or equal answers in all cells."""
    return float(np.std(gaps, ddof=1)) if len(gaps) > 1 and np.isfinite(gaps).all() else 0.0


def _estimate_accuracy(of: Design, records: Records) -> Estimate:
    """Accuracy by sources of questions. In phases rl and preference the answers of all seeds count; their errors are
    assumed to be independent."""
    seeds = of.seeds if of.cfg.train.phase in BEYOND_SFT else 1
    pairs = _earlier_evaluations(of, records)
    interval = None
    if pairs:
        ours, theirs = ([piece for pair in pairs for piece in pair[side].pieces] for side in (0, 1))
        interval = claims.paired_accuracy(ours, theirs)
    share = math.sqrt(len(pairs) / seeds) if pairs else 1 / math.sqrt(seeds)
    return _estimate_by_sources(
        of, ACCURACY, "sources of questions", interval, ANSWER_SPREAD, of.accuracy_margin, share
    )


def _estimate_same_weights(of: Design, records: Records) -> Estimate:
    interval = None
    for run, _ in records:
        if run.kind == "fp8" and interval is None:
            low, high = (held_out.read_evaluation(run, of.directory, high) for high in (False, True))
            if low is not None and high is not None:
                interval = claims.relative_loss(low.pieces, high.pieces)
    return _estimate_by_sources(of, WEIGHTS, "images or documents", interval, WEIGHTS_SPREAD, LOSS_MARGIN, 1.0)


def _estimate_by_sources(
    of: Design, claim: str, unit: str, interval: Interval | None, prior: float, margin: float, share: float
) -> Estimate:
    """The estimate from an observed interval, else from the number of held-out rows, which is at least the number of
    sources."""
    if interval is not None:
        spread = share * spread_from_half_width(interval.half, interval.units)
        return Estimate(claim, TITLES[claim], unit, interval.units, spread, margin, "seen here", seen=True)
    unknown = Estimate(claim, TITLES[claim], "held-out rows", 0, share * prior, margin, DEMO)
    if not of.cfg.data.eval:
        return replace(unknown, why_not=NO_DATA)
    from octavo.data.errors import DataError

    try:
        return replace(unknown, units=held_out.count_rows(of.cfg))
    except DataError as error:  # the first run raises it again and ends the trial
        return replace(unknown, why_not=f"held-out data cannot be counted: {error}")


def _earlier_evaluations(of: Design, records: Records) -> list[tuple[Evaluation, Evaluation]]:
    """(FP8, high precision) as evaluated earlier, for each seed that has both."""
    high = {run.cfg.run.seed: run for run, _ in records if run.kind in ("reference", "noise")}
    first = next((run.name for run, _ in records if run.kind == "fp8"), None)
    pairs = []
    for run, _ in records:
        if (run.name == first or (run.kind == "seed" and run.of == first)) and run.cfg.run.seed in high:
            ours, theirs = (held_out.read_evaluation(side, of.directory) for side in (run, high[run.cfg.run.seed]))
            if ours is not None and theirs is not None:
                pairs.append((ours, theirs))
    return pairs


def _sides(records: Records) -> Sides | None:
    """The first FP8 run with high precision, and the other runs whose counterpart exists."""
    by_kind = {run.kind: (run, record) for run, record in reversed(records)}
    if "fp8" not in by_kind or "reference" not in by_kind:
        return None
    seeds = {run.cfg.run.seed for run, _ in records if run.kind == "noise"}
    paired = [(run, record) for run, record in records if run.kind != "seed" or run.cfg.run.seed in seeds]
    return Sides(by_kind["fp8"], by_kind["reference"], paired)


def _pair_gaps(records: Records) -> list[float]:
    sides = _sides(records)
    return [] if sides is None else pair_gaps(sides)


def _fork_gaps(of: Design, records: Records) -> list[float]:
    """The gaps of forks whose counterpart in high precision exists."""
    sides = _sides(records)
    if sides is None:
        return []
    trained = {run.name for run, _ in records}
    lacking = {run.number for run in of.runs if run.kind == "fork" and not run.of and run.name not in trained}
    whole = [(run, record) for run, record in sides.runs if run.kind != "fork" or run.number not in lacking]
    return fork_gaps(sides._replace(runs=whole))


def _estimate_effects(of: Design, records: Records) -> list[Estimate]:
    """Main effects over seeds, with the largest spread of the effects of earlier seeds, else the assumed spread of
    pairs."""
    estimates = []
    for name, margin, prior, source in (
        (factorial_cells.ACCURACY, of.accuracy_margin, SEED_SPREAD, "assumed, as in phase rl (docs/trials.md)"),
        (factorial_cells.LOSS, LOSS_MARGIN, PAIR_SPREAD, DECODER),
    ):
        spread, seen = factorial.effect_spread(prior, len(of.factors)), False
        mains = [
            effect.by_seed for effect in factorial_cells.estimate_effects(records, name, of.factors) if effect.is_main
        ]
        if widest := max(map(_standard_deviation, mains), default=0.0):
            spread, seen, source = widest, True, f"seen in {len(mains[0])} seeds here"
        if name == factorial_cells.LOSS or of.cfg.train.phase != "pretrain":
            estimates.append(
                Estimate(name, factorial_cells.TITLES[name], "seeds", of.seeds, spread, margin, source, seen)
            )
    return estimates
