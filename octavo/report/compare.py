"""The trial: high precision, high precision with another seed, and each FP8 recipe, on the same data; then the verdict.

Forks decide the loss: from high precision's checkpoint at two thirds both precisions go on with the same data, for
several seeds. They part from one point, so the noise of a whole training is in both, at a third of the price. Held-out
data are judged once the runs are done: what FP8 and what high precision trained, and FP8's weights in high precision.

High precision has none of the memory savings that the configuration asks for; where these make the model BF16, it
computes in BF16 as well. Under LoRA every run trains the same adapters, high precision beside the base in BF16 (one
that is in FP8 on disk is dequantized), FP8 beside the base that the configuration loads. A configuration with savings
is trained without them, too, and with one more at a time (:mod:`octavo.report.savings`): the page says what each of
them cost.

Each is an ordinary run directory, ``DIRECTORY/arms/NAME``; the report lies in ``DIRECTORY/report``. The trial can be
stopped and started again: a finished run is read, a half-done one continues, and one that was trained with another
configuration is refused (or, with ``fresh``, made again).
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from octavo.config import Config
from octavo.config.phases import BEYOND_SFT
from octavo.report import claims, outcomes
from octavo.report.claims import LEAST_FORK, HeldOut
from octavo.report.judge import Verdict, judge
from octavo.report.reuse import check_reusable, clear, finished, same_files
from octavo.report.rundir import ReportError, RunRecord, read, read_failed
from octavo.report.runs import runs_of
from octavo.report.trial import Run, Trial

FORKS = 3  # in each precision, where losses decide


def compare(
    cfg: Config,
    recipes: Sequence[str] | None = None,
    directory: str | Path = "runs/compare",
    console: Any = None,
    fresh: bool = False,
    jobs: int = 1,
    nproc: int = 1,
    savings: bool = True,
    forks: int | None = None,
    seeds: int = 1,
    accuracy_margin: float | None = None,
    tell: Callable[[Any], Iterable[str]] | None = None,
) -> Verdict:
    """Run the trial and write the report.

    ``recipes`` are the FP8 recipes to try; None tries what ``cfg`` itself asks for. ``savings`` trains the runs that
    tell what each memory saving cost, where the trial is of one recipe and has any on. ``console`` is a rich console
    (None: silent). ``jobs`` runs train at a time, more than one in processes of their own (a CPU's cores; a GPU serves
    one); or one after the other, each over ``nproc`` processes of this machine. ``forks`` from high precision's
    checkpoint at two thirds, in each precision (0: none; None: 3, and none in the phases rl and preference, whose
    losses decide nothing); ``seeds`` whole runs in each precision, of which one makes no interval. ``accuracy_margin``:
    a share, how much lower FP8's may be (None: 0.01, in those phases 0.02). ``tell`` makes the lines about the plan,
    told once, before the first run (None: `octavo.train.summary.summary`).
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
    beyond = cfg.train.phase in BEYOND_SFT
    if forks is None:
        forks = 0 if beyond else FORKS
    if jobs > 1 and nproc > 1:
        raise ReportError(
            f"jobs={jobs} and nproc={nproc}: runs train beside each other, or each over several processes; give one"
        )
    if min(jobs, seeds, nproc) < 1 or forks < 0:
        asked = f"jobs={jobs}, nproc={nproc}, seeds={seeds}, forks={forks}"
        raise ReportError(f"{asked}: forks are at least 0, the others at least 1")
    if beyond and forks:
        raise ReportError(
            f"forks={forks}: they hold losses against each other, and in phase {cfg.train.phase} losses decide "
            "nothing. Leave forks out; --seeds 3 trains whole runs of several seeds"
        )
    if accuracy_margin is None:
        accuracy_margin = (outcomes if beyond else claims).ACCURACY_MARGIN
    from octavo.train import base

    cfg, directory = base.counted(base.settled(cfg)), Path(directory)
    runs = runs_of(cfg, recipes, directory, savings, forks, seeds)
    if fresh:
        clear(directory)
    plans: list[Any] = []
    for run in runs:  # refuse before the first run has cost minutes
        check_reusable(run)
        plans += _planned(run)
    same_files(cfg, directory)
    no_forks = "" if not forks else _why_no_forks(runs)
    if no_forks:
        runs = [run for run in runs if run.kind != "fork"]
    from octavo.report.page import write

    more = [(sum(run.kind == kind for run in runs), word) for kind, word in (("saving", "to tell what each memory "
            "saving costs"), ("fork", "forks of high precision"))]  # fmt: skip
    told = [f"{count} of them {word}" for count, word in more if count]
    _say(console, f"{', '.join([f'{len(runs)} runs', *told])}; they are in {directory / 'arms'}")
    if console is not None:
        from octavo.train.summary import summary

        for line in (line for plan in plans for line in (tell or summary)(plan)):
            _say(console, line)
    started = time.monotonic()
    records = _trained(runs, jobs, console, nproc)
    held = _held_out(cfg, records, directory, console, seeds)
    trial = Trial(held, 0 if no_forks else forks, no_forks, seeds, accuracy_margin, jobs)
    verdict = judge(records, trial)
    write(verdict, [(run, record) for run, record in records if run.kind != "fork"], directory / "report")
    _say(console, f"{len(runs)} runs in {time.monotonic() - started:.0f} s")
    return verdict


def _trained(runs: Sequence[Run], jobs: int, console: Any, nproc: int) -> list[tuple[Run, RunRecord]]:
    """The runs with what they left; those that are not finished are trained now."""
    records = []
    unfinished = [run for run in runs if finished(run) is None]
    together = bool(unfinished) and nproc > 1 or jobs > 1 and len(unfinished) > 1
    failures: dict[str, str] = {}
    if together:
        from octavo.report.side_by_side import train_together

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
    from octavo.report import held_out

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


def _why_no_forks(runs: Sequence[Run]) -> str:
    """Why forks cannot be: the run is too short for them, or its checkpoint at two thirds is not there."""
    from octavo import checkpoint

    fork, reference = (next(run for run in runs if run.kind == kind) for kind in ("fork", "reference"))
    steps = fork.cfg.train.steps
    if steps - fork.begins < LEAST_FORK:
        return (
            f"forks of {steps - fork.begins} steps have no time to part, at least {LEAST_FORK} are needed: "
            f"train.steps of at least {3 * LEAST_FORK}"
        )
    past = max(checkpoint.steps(Path(reference.cfg.run.dir) / "checkpoints"), default=0) >= fork.begins
    if (past or finished(reference) is not None) and fork.after is not None and not fork.after.is_dir():
        return (
            f"{reference.cfg.run.dir} is past step {fork.begins} and kept no checkpoint of it, from which forks go on; "
            "--fresh trains it again"
        )
    return ""


def _planned(run: Run) -> list[Any]:
    """The plan of an FP8 run, where it can be made now; raises ``PlanError`` where the model has nothing that the run
    could compute in FP8. A folder without a model is for the first run to tell, and what is measured first is planned
    when that is done."""
    if run.kind != "fp8" or not (Path(run.cfg.model.path) / "config.json").is_file() or finished(run) is not None:
        return []
    from octavo.train import planning

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
    from octavo.report.live import Page

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
    import torch

    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _say(console: Any, text: str) -> None:
    if console is not None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)
