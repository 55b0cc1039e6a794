"""The trial: high precision, high precision with another seed, and each FP8 recipe, on the same data; then the verdict.

Forks decide the loss: from high precision's checkpoint at two thirds both precisions go on with the same data, for
several seeds. They part from one point, so the noise of a whole training is in both, at a third of the price. Held-out
data are judged once the runs are done: what FP8 and what high precision trained, and FP8's weights in high precision.

High precision has none of the memory savings that the configuration asks for; where these make the model BF16, it
computes in BF16 as well. Under LoRA every run trains the same adapters, high precision beside the base in BF16 (one
that is in FP8 on disk is dequantized), FP8 beside the base that the configuration loads. A configuration with savings
is trained without them, too, and with one more at a time (:mod:`octavo.report.trial.memory_savings`): the page says
what each of them cost.

Each is an ordinary run directory, ``DIRECTORY/arms/NAME``; the report lies in ``DIRECTORY/report``. The trial can be
stopped and started again: a finished run is read, a half-done one continues, and one that was trained with another
configuration is refused (or, with ``fresh``, made again).
"""

from __future__ import annotations

import gc
import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from octavo.base import atomic_write, safe_read
from octavo.config import Config
from octavo.config.sections.rl import BEYOND_SFT
from octavo.report.evidence.claims import HeldOut
from octavo.report.evidence.power import Estimate
from octavo.report.evidence.run_reader import ReportError, RunRecord, read, read_failed
from octavo.report.evidence.trial_spec import Run, Trial
from octavo.report.trial.design import Design, design
from octavo.report.trial.judge import Verdict, judge
from octavo.report.trial.reuse import clear, finished, same_files

FORKS = 3  # in each precision, where losses decide


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
    factorial: Sequence[str] = (),
    tell: Callable[[Any], Iterable[str]] | None = None,
) -> Verdict:
    """Run the trial and write the report.

    ``recipes`` are the FP8 recipes to try; None tries what ``cfg`` itself asks for. ``savings`` trains the runs that
    tell what each memory saving cost, where the trial is of one recipe and has any on (None: unless it is factorial,
    which has none on). ``console`` is a rich console (None: silent). ``jobs`` runs train at a time, more than one in
    processes of their own (a CPU's cores; a GPU serves one); or one after the other, each over ``nproc`` processes of
    this machine. ``forks`` from high precision's checkpoint at two thirds, in each precision (0: none; None: 3, and
    none in a factorial trial or in the phases rl and preference, whose losses decide nothing); ``seeds`` whole runs in
    each precision, of which one makes no interval. ``accuracy_margin``: a share, how much lower FP8's may be (None:
    0.01, in those phases 0.02). ``factorial`` names two to four components: every combination of them is trained in FP8
    with ``seeds`` seeds, and the effect of each judged (``docs/trials.md``). ``tell`` makes the lines about the plan,
    told once, before the first run (None: `octavo.train.loop.summary.summary`).
    What the trial can be expected to decide is said before the first run (:mod:`octavo.report.trial.design`).
    An FP8 run whose training fails is judged so and the others go on; a high-precision run that fails ends the
    trial. Writes ``directory/report/report.html``, ``report.json`` and PNG plots. Raises ``ReportError`` where
    nothing in FP8 was asked for, a recipe is unknown, an existing run was trained with another configuration, a run
    was stopped by a signal, or more than one process runs this.
    """
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        raise ReportError(
            f"compare was started on {ranks} processes; it runs in one. Start it without torchrun; `octavo "
            "compare FILE --nproc N` trains each run over N processes"
        )
    if forks is None:
        forks = 0 if cfg.train.phase in BEYOND_SFT or factorial else FORKS
    if jobs > 1 and nproc > 1:
        raise ReportError(
            f"jobs={jobs} and nproc={nproc}: runs train beside each other, or each over several processes; give one"
        )
    if min(jobs, seeds, nproc) < 1 or forks < 0:
        asked = f"jobs={jobs}, nproc={nproc}, seeds={seeds}, forks={forks}"
        raise ReportError(f"{asked}: forks are at least 0, the others at least 1")
    if savings is None:
        savings = not factorial
    of = design(
        cfg, recipes, directory, savings=savings, forks=forks, seeds=seeds, accuracy_margin=accuracy_margin,
        factorial=factorial, fresh=fresh,
    )  # fmt: skip
    plans = [plan for run in of.runs for plan in _planned(run, fresh)]  # refuse before the first run has cost minutes
    if fresh:
        clear(of.directory)
    same_files(of.cfg, of.directory)
    of = replace(of, expected=_said_first(of))
    from octavo.report.trial.report_page import write

    for line in of.lines:
        _say(console, line)
    more = [(sum(run.kind == kind for run in of.runs), word) for kind, word in (("saving", "to tell what each memory "
            "saving costs"), ("cell", "cells"), ("fork", "forks of high precision"))]  # fmt: skip
    told = [f"{count} of them {word}" for count, word in more if count]
    _say(console, f"{', '.join([f'{len(of.runs)} runs', *told])}; they are in {of.directory / 'arms'}")
    if console is not None:
        from octavo.train.loop.summary import summary

        for line in (line for plan in plans for line in (tell or summary)(plan)):
            _say(console, line)
    started = time.monotonic()
    records = _trained(of.runs, jobs, console, nproc)
    held = _held_out(of.cfg, records, of.directory, console, seeds)
    trial = Trial(held, of.forks, of.no_forks, seeds, of.accuracy_margin, jobs, of.expected, of.factors, of.left_out)
    verdict = judge(records, trial)
    write(verdict, [(run, record) for run, record in records if run.kind != "fork"], of.directory / "report")
    _say(console, f"{len(of.runs)} runs in {time.monotonic() - started:.0f} s")
    return verdict


def _said_first(of: Design) -> tuple[Estimate, ...]:
    """What was expected when this design began: a trial that goes on has runs of its own by then, and what these show
    was not expected. Noted here where it begins."""
    file = of.directory / "power.json"
    designs = safe_read.read_json(file, ReportError)["designs"] if file.exists() else []
    for one in designs:
        if one["asked"] == of.asked:
            return tuple(Estimate(**estimate) for estimate in one["expected"])
    designs.append({"asked": of.asked, "expected": [asdict(estimate) for estimate in of.expected]})
    atomic_write.write_text(file, json.dumps({"designs": designs}, indent=1) + "\n")
    return of.expected


def _trained(runs: Sequence[Run], jobs: int, console: Any, nproc: int) -> list[tuple[Run, RunRecord]]:
    """The runs with what they left; those that are not finished are trained now."""
    records = []
    unfinished = [run for run in runs if finished(run) is None]
    together = bool(unfinished) and nproc > 1 or jobs > 1 and len(unfinished) > 1
    failures: dict[str, str] = {}
    if together:
        from octavo.report.trial.parallel_runs import train_together

        failures = train_together(unfinished, jobs, console, nproc)
    for number, run in enumerate(runs, 1):
        record = None
        if run.name in failures:
            record = read_failed(run.cfg.run.dir, failures[run.name])
        elif together and run in unfinished:
            record = read(run.cfg.run.dir)
        records.append((run, record or _one(run, f"{number}/{len(runs)} {run.label}", console)))
    return records


def _held_out(
    cfg: Config, records: Sequence[tuple[Run, RunRecord]], directory: Path, console: Any, seeds: int
) -> HeldOut | None:
    """What the claims need of the held-out data; None where the configuration names none. Beyond SFT that is all seeds
    of both precisions; else the first, and the weights that it trained in FP8 in high precision as well."""
    if not cfg.data.eval:
        return None
    from octavo.report.trial import held_out

    reference = next(run for run, _ in records if run.kind == "reference")
    found = HeldOut(held_out.judge_model(reference.cfg, directory, console))
    found.runs[reference.name] = held_out.judge_run(reference, directory, console)
    beyond = cfg.train.phase in BEYOND_SFT
    kinds = ("fp8", "noise", "seed") if beyond and seeds > 1 else ("fp8",)
    for run, record in records:
        if run.kind in kinds and not record.failure:
            found.runs[run.name] = held_out.judge_run(run, directory, console)
        if run.kind == "fp8" and not record.failure and not beyond:
            found.high[run.name] = held_out.judge_run(run, directory, console, high=True)
    return found


def _planned(run: Run, fresh: bool) -> list[Any]:
    """The plan of an FP8 run, where it can be made now; raises ``PlanError`` where the model has nothing that the run
    could compute in FP8. A folder without a model is for the first run to tell, and what is measured first is planned
    when that is done."""
    there = (Path(run.cfg.model.path) / "config.json").is_file()
    if run.kind != "fp8" or not there or (not fresh and finished(run) is not None):
        return []
    from octavo.train.setup import planning

    if planning.policy_from(run.cfg).asks_auto:
        return []
    return [planning.Planned(run.cfg, *planning.plan_for(run.cfg))]


def _one(run: Run, label: str, console: Any) -> RunRecord:
    """Train a run, or read it where it is finished."""
    record = finished(run)
    if record is not None:
        _say(console, f"{label}: finished earlier, read from {run.cfg.run.dir}")
        return record
    from octavo import rl, train
    from octavo.fp8 import ProofError
    from octavo.report.run.live_page import Page

    _forget_peaks()
    failure = ""
    try:
        result = rl.run(run.cfg, console=console, label=label, tell=lambda planned: (), watchers=[Page()])
    except (train.TrainError, ProofError) as error:
        if not run.may_fail:
            raise
        failure = str(error)
        _say(console, f"{label} failed: {failure}")
    gc.collect()  # a run's model and optimizer must not stay beside the next one's
    if failure:
        return read_failed(run.cfg.run.dir, failure)
    if result.status != "finished":
        raise ReportError(f"{label} was stopped after step {result.steps}; the same command continues the trial")
    return read(run.cfg.run.dir)


def _forget_peaks() -> None:
    """Let each run have its own peak of GPU memory."""
    from octavo.base import accelerator

    accelerator.empty_cache_and_reset_peak(accelerator.here())


def _say(console: Any, text: str) -> None:
    if console is not None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)
