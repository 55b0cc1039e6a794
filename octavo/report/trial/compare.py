"""Runs the trial: trains high precision with two seeds and each FP8 recipe on the same data, and computes the verdict.

Forks decide the loss claim: both precisions continue from high precision's checkpoint at two thirds with the same data,
for several seeds. They start from one point, so both have the noise of the whole training, at a third of the cost.
Held-out data are evaluated after the runs: the models that FP8 and high precision trained, and FP8's weights in high
precision.

High precision has none of the configuration's memory savings; if these make the model BF16, it computes in BF16 too.
With LoRA every run trains the same adapters, high precision on the base in BF16 (an FP8 base is dequantized), FP8 on
the base that the configuration loads. A configuration with savings is also trained without them, and with one more at a
time (:mod:`octavo.report.trial.memory_savings`): the page shows the cost of each.

Each run has an ordinary run directory, ``DIRECTORY/arms/NAME``; the report is in ``DIRECTORY/report``. A stopped trial
can be started again: finished runs are read, unfinished runs continue, and a run that was trained with a different
configuration is an error (with ``fresh``, it is trained again).
"""

from __future__ import annotations

import gc
import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.base import atomic_write, safe_read
from octavo.config import Config
from octavo.config.sections.rl import BEYOND_SFT
from octavo.report.evidence.claims import LOSS_MARGIN, HeldOut
from octavo.report.evidence.power import Estimate
from octavo.report.evidence.run_reader import ReportError, RunRecord, TrialStopped, read, read_failed_run
from octavo.report.evidence.trial_claims import CLAIMS, FORKS, WEIGHTS
from octavo.report.evidence.trial_spec import Run, Trial
from octavo.report.trial.design import Design, design
from octavo.report.trial.judge import Verdict, judge
from octavo.report.trial.reuse import check_same_files, delete_trial, read_finished

if TYPE_CHECKING:
    from octavo.report.run.trial_watcher import TrialWatcher
    from octavo.report.trial.report_page import Interview

DEFAULT_FORKS = 3  # in each precision, where losses decide


def compare(
    cfg: Config,
    recipes: Sequence[str] | None = None,
    directory: str | Path = "runs/compare",
    console: Any = None,
    fresh: bool = False,
    jobs: int = 1,
    nproc: int = 1,
    savings: bool | None = None,
    forks: int | None = None,
    seeds: int = 1,
    accuracy_margin: float | None = None,
    loss_margin: float = LOSS_MARGIN,
    factorial: Sequence[str] = (),
    describe_plan: Callable[[Any], Iterable[str]] | None = None,
    claims: Sequence[str] = (),
    announce: bool = True,
    ask: Callable[[Verdict], Interview | None] | None = None,
) -> Verdict:
    """Run the trial and write the report.

    recipes          FP8 recipes to try; default: the recipe of ``cfg``
    console          a rich console; None prints nothing
    fresh            train all runs again
    jobs             number of runs that train at the same time, each in its own process (useful on a CPU)
    nproc            processes of this machine for each run, one run after the other
    savings          also train the runs that measure the cost of each memory saving, if there is one recipe and any
                     saving; None: yes, unless the trial is factorial
    forks            number of forks in each precision from the high-precision checkpoint at two thirds; None: 3, or 0
                     in a factorial trial and in phases rl and preference, whose losses decide nothing
    seeds            number of whole runs in each precision; one gives no interval
    accuracy_margin  how much lower the accuracy of FP8 may be, as a share; None: 0.01, or 0.02 in phases rl and
                     preference
    loss_margin      how much higher the held-out loss of FP8 may be, as a share, where ``claims`` names that claim
    factorial        two to four components: train every combination of them in FP8 with ``seeds`` seeds, and judge the
                     effect of each (``docs/trials.md``)
    describe_plan    returns the lines about the plan, printed once before the first run; None:
                     `octavo.train.loop.summary.summary`
    claims           names of the claims to judge (`octavo.report.evidence.trial_claims.CLAIMS`), whose runs are
                     trained; none: `DEFAULT_CLAIMS`. Only in phases sft and pretrain
    announce         print the design, the number of runs and the plans before the first run
    ask              returns questions about a picture with their answers, which the page shows

    What the trial can be expected to decide is printed before the first run (:mod:`octavo.report.trial.design`). If an
    FP8 run fails, its verdict is fail and the others continue; a high-precision run that fails ends the trial. Writes
    ``directory/report/report.html``, ``report.json`` and PNG plots. Raises ``ReportError`` if nothing is in FP8, a
    recipe is unknown, an existing run was trained with another configuration, a run was stopped by a signal, or several
    processes run this function.
    """
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        raise ReportError(
            f"compare was started on {ranks} processes, but it runs in one. Start it without torchrun; `octavo "
            "compare FILE --nproc N` trains each run over N processes"
        )
    if claims and (cfg.train.phase in BEYOND_SFT or not set(claims) <= set(CLAIMS)):
        raise ReportError(f"claims={tuple(claims)}: phase {cfg.train.phase} has no such choice of {', '.join(CLAIMS)}")
    if claims and FORKS not in claims:
        if forks:
            raise ReportError(f"forks={forks}, but {FORKS} is not among the claims {', '.join(claims)}")
        forks = 0
    if forks is None:
        forks = 0 if cfg.train.phase in BEYOND_SFT or factorial else DEFAULT_FORKS
    if jobs > 1 and nproc > 1:
        raise ReportError(
            f"jobs={jobs} and nproc={nproc}: either several runs train at the same time, or each uses several "
            f"processes; set only one of them"
        )
    if min(jobs, seeds, nproc) < 1 or forks < 0:
        values = f"jobs={jobs}, nproc={nproc}, seeds={seeds}, forks={forks}"
        raise ReportError(f"{values}: forks must be at least 0, the others at least 1")
    if savings is None:
        savings = not factorial
    trial_design = design(
        cfg, recipes, directory, savings=savings, forks=forks, seeds=seeds, accuracy_margin=accuracy_margin,
        loss_margin=loss_margin, factorial=factorial, fresh=fresh, claims=claims,
    )  # fmt: skip
    plans = [
        plan for run in trial_design.runs for plan in _plan_run(run, fresh)
    ]  # refuse before the first run takes minutes
    if fresh:
        delete_trial(trial_design.directory)
    check_same_files(trial_design.cfg, trial_design.directory)
    trial_design = replace(trial_design, expected=_load_or_save_expectation(trial_design))
    from octavo.report.trial.report_page import write

    if announce:
        _announce(trial_design, plans, console, describe_plan)
    started = time.monotonic()
    records = _train_runs(trial_design.runs, jobs, console, nproc)
    with_high = not claims or WEIGHTS in claims
    evaluations = _evaluate_held_out(trial_design.cfg, records, trial_design.directory, console, seeds, with_high)
    trial = Trial(
        held_out=evaluations,
        forks=trial_design.forks,
        no_forks=trial_design.no_forks,
        seeds=seeds,
        accuracy_margin=trial_design.accuracy_margin,
        jobs=jobs,
        expected=trial_design.expected,
        factors=trial_design.factors,
        left_out=trial_design.left_out,
        claims=tuple(claims),
        loss_margin=loss_margin,
    )
    verdict = judge(records, trial)
    shown = [(run, record) for run, record in records if run.kind != "fork"]
    interview = None
    try:  # the page is written even if the questions fail
        interview = ask(verdict) if ask is not None else None
    finally:
        write(verdict, shown, trial_design.directory / "report", interview)
    _print(console, f"{len(trial_design.runs)} runs in {time.monotonic() - started:.0f} s")
    return verdict


def _announce(
    trial_design: Design, plans: Sequence[Any], console: Any, describe_plan: Callable[[Any], Iterable[str]] | None
) -> None:
    """Print what the trial can decide, its runs and their plans."""
    for line in trial_design.lines:
        _print(console, line)
    kinds = {"saving": "to measure the cost of each memory saving", "cell": "cells", "fork": "forks of high precision"}
    counts = {word: sum(run.kind == kind for run in trial_design.runs) for kind, word in kinds.items()}
    parts = [f"{count} of them {word}" for word, count in counts.items() if count]
    _print(
        console,
        f"{', '.join([f'{len(trial_design.runs)} runs', *parts])}; they are in {trial_design.directory / 'arms'}",
    )
    if console is not None:
        from octavo.train.loop.summary import summary

        for line in (line for plan in plans for line in (describe_plan or summary)(plan)):
            _print(console, line)


def _load_or_save_expectation(trial_design: Design) -> tuple[Estimate, ...]:
    """Return the expected results, stored when this design began: a resumed trial already has runs, whose results are
    not expectations."""
    file = trial_design.directory / "power.json"
    designs = safe_read.read_json(file, ReportError)["designs"] if file.exists() else []
    for stored in designs:
        # Up to 0.5.0 spreads of other tasks were assumed: those predict nothing.
        estimates = tuple(Estimate(**estimate) for estimate in stored["expected"])
        if stored["asked"] == trial_design.identity and all(e.seen or e.why_not for e in estimates):
            return estimates
    designs.append(
        {"asked": trial_design.identity, "expected": [asdict(estimate) for estimate in trial_design.expected]}
    )
    atomic_write.write_text(file, json.dumps({"designs": designs}, indent=1) + "\n")
    return trial_design.expected


def _train_runs(runs: Sequence[Run], jobs: int, console: Any, nproc: int) -> list[tuple[Run, RunRecord]]:
    """Return the runs with their records; unfinished runs are trained now."""
    records = []
    unfinished = [run for run in runs if read_finished(run) is None]
    in_processes = bool(unfinished) and nproc > 1 or jobs > 1 and len(unfinished) > 1
    failures: dict[str, str] = {}
    watcher: TrialWatcher | None = None
    if in_processes:
        from octavo.report.trial.parallel_runs import train_together

        failures = train_together(unfinished, jobs, console, nproc)
    elif unfinished:
        from octavo.report.run.trial_watcher import TrialWatcher

        watcher = TrialWatcher(runs, {number for number, run in enumerate(runs) if run not in unfinished})
    # Runs that trained together are read here; all others are trained or read in order, in this process.
    for number, run in enumerate(runs):
        record = None
        if run.name in failures:
            record = read_failed_run(run.cfg.run.dir, failures[run.name])
        elif in_processes and run in unfinished:
            record = read(run.cfg.run.dir)
        elif watcher is not None:
            watcher.watch(number)
        records.append((run, record or _train_or_read(run, f"{number + 1}/{len(runs)} {run.label}", console, watcher)))
        if watcher is not None:
            watcher.ended.add(number)
    return records


def _evaluate_held_out(
    cfg: Config, records: Sequence[tuple[Run, RunRecord]], directory: Path, console: Any, seeds: int, with_high: bool
) -> HeldOut | None:
    """Return the evaluations on held-out data that the claims need, or None without held-out data. In phases rl and
    preference these are all seeds of both precisions, otherwise the first seed, ``with_high`` also with its FP8 weights
    in high precision."""
    if not cfg.data.eval:
        return None
    from octavo.report.trial import held_out

    reference = next(run for run, _ in records if run.kind == "reference")
    evaluations = HeldOut(held_out.evaluate_model(reference.cfg, directory, console))
    evaluations.runs[reference.name] = held_out.evaluate_run(reference, directory, console)
    is_beyond_sft = cfg.train.phase in BEYOND_SFT
    kinds = ("fp8", "noise", "seed") if is_beyond_sft and seeds > 1 else ("fp8",)
    for run, record in records:
        if run.kind in kinds and not record.failure:
            evaluations.runs[run.name] = held_out.evaluate_run(run, directory, console)
        if run.kind == "fp8" and not record.failure and with_high and not is_beyond_sft:
            evaluations.high[run.name] = held_out.evaluate_run(run, directory, console, high=True)
    return evaluations


def _plan_run(run: Run, fresh: bool) -> list[Any]:
    """Plan an FP8 run if that is possible now; raises ``PlanError`` if the model has nothing that could run in
    FP8. A missing model is an error of the first run, and a plan that needs measurements is made by the run."""
    has_model = (Path(run.cfg.model.path) / "config.json").is_file()
    if run.kind != "fp8" or not has_model or (not fresh and read_finished(run) is not None):
        return []
    from octavo.train.setup import planning

    if planning.policy_from(run.cfg).requests_auto:
        return []
    return [planning.RunPlan(run.cfg, *planning.plan_for(run.cfg))]


def _train_or_read(run: Run, label: str, console: Any, watcher: TrialWatcher | None) -> RunRecord:
    """Train a run, or read its record if it is finished."""
    record = read_finished(run)
    if record is not None:
        _print(console, f"{label}: already finished, read from {run.cfg.run.dir}")
        return record
    from octavo import rl, train
    from octavo.fp8 import ProofError
    from octavo.report.run.live_page import Page

    _reset_peak_memory()
    failure = ""
    try:
        watchers = [Page(), *([watcher] if watcher is not None else [])]
        result = rl.run(run.cfg, console=console, label=label, describe_plan=lambda planned: (), watchers=watchers)
    except (train.TrainError, ProofError) as error:
        if not run.may_fail:
            raise
        failure = str(error)
        _print(console, f"{label} failed: {failure}")
    gc.collect()  # free the run's model and optimizer before the next run
    if failure:
        return read_failed_run(run.cfg.run.dir, failure)
    if result.status != "finished":
        message = f"{label} was stopped after step {result.steps}; the same command continues the trial"
        raise TrialStopped(message, result.exit_code)
    return read(run.cfg.run.dir)


def _reset_peak_memory() -> None:
    """Reset the peak of GPU memory, so that each run records its own peak."""
    from octavo.base import accelerator

    accelerator.empty_cache_and_reset_peak(accelerator.default_device())


def _print(console: Any, text: str) -> None:
    if console is not None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)
