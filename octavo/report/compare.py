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
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from octavo import atomic, reading
from octavo.config import COMPONENTS, RECIPES, Config, Fp8Section, load_config, override
from octavo.config.model import FITTING
from octavo.config.phases import BEYOND_SFT
from octavo.report import claims, outcomes
from octavo.report.claims import LEAST_FORK, HeldOut
from octavo.report.judge import Verdict, judge
from octavo.report.rundir import ReportError, RunRecord, read, read_failed
from octavo.report.savings import ablation, storable, without
from octavo.report.training import forks_begin
from octavo.report.trial import Run, Trial

HIGH = "high precision"
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


def runs_of(
    cfg: Config, recipes: Sequence[str] | None, directory: Path, savings: bool = True, forks: int = 0, seeds: int = 1
) -> list[Run]:
    """The runs of a trial, in the order they run; raises ``ReportError`` where none of them would be FP8."""
    own = own_recipe(cfg)
    if recipes is None:
        if own == "off":
            raise ReportError(
                "the configuration asks for fp8.recipe: off, so there is nothing to compare with high precision. "
                f"Set fp8.recipe, or name recipes to try: {', '.join(r for r in RECIPES if r != 'off')}"
            )
        recipes = [own]
    wrong = [r for r in recipes if r == "off" or (r not in (*RECIPES, "auto") and r != own)]
    if wrong or not recipes:
        known = ", ".join(r for r in RECIPES if r != "off")
        asked = f"{', '.join(map(repr, wrong))} asked for" if wrong else "no recipe given"
        raise ReportError(f"{asked}; compare sets FP8 recipes beside high precision. Give one or more of: {known}")
    plain = high_precision(cfg)
    seed, begins = cfg.run.seed, forks_begin(cfg.train.steps)
    # Kept also where no forks are asked for yet: they can then be tried without training high precision again.
    forkable = cfg.train.phase not in BEYOND_SFT and cfg.train.steps - begins >= LEAST_FORK
    milestones = (begins,) if forks or forkable else ()
    kept = plain.model_copy(update={"run": plain.run.model_copy(update={"milestones": milestones})})
    reference = _run_of(kept, directory, "high-precision", HIGH, "reference", seed)
    others = range(seed + 1, seed + max(seeds, 2))
    runs = [
        reference,
        *(_run_of(plain, directory, f"high-precision-seed-{s}", f"{HIGH}, seed {s}", "noise", s) for s in others),
    ]
    names = list(dict.fromkeys(recipes))
    for name in names:
        chosen = cfg if name == own else with_recipe(cfg, name)
        for number, (words, setting) in enumerate(ablation(chosen) if savings and len(names) == 1 else ()):
            runs.append(_run_of(setting, directory, f"saving-{number}", words, "saving", seed))
        fp8 = _run_of(chosen, directory, f"fp8-{name}", f"FP8 {name}", "fp8", seed)
        runs.append(fp8)
        for s in range(seed + 1, seed + seeds):
            run = _run_of(chosen, directory, f"{fp8.name}-seed-{s}", f"{fp8.label}, seed {s}", "seed", s)
            runs.append(replace(run, of=fp8.name))
        runs += [_fork(reference, fp8, storable(chosen), number, directory) for number in range(forks)]
    # High precision's own fork of the reference's seed is the reference, where it records every step.
    first = 1 if cfg.run.log_every == 1 else 0
    return runs + [_fork(reference, None, plain, number, directory) for number in range(first, forks)]


def _fork(reference: Run, fp8: Run | None, cfg: Config, number: int, directory: Path) -> Run:
    """A run from the reference's checkpoint at two thirds to its end, with data in the order of another seed."""
    begins = reference.cfg.run.milestones[0]
    checkpoint = Path(reference.cfg.run.dir).resolve() / "milestones" / f"step_{begins}"
    bare = {"health_every": 0, "gain_steps": 0, "hf": False, "tensorboard": False, "trackers": ()}
    bare |= {"fork": str(checkpoint), "start_from": None}
    cfg = cfg.model_copy(
        update={
            "run": cfg.run.model_copy(update=bare | {"milestones": (), "save_every": 0, "keep": 1, "log_every": 1}),
            "data": cfg.data.model_copy(update={"eval": ()}),
        }
    )
    name, label = ("high-precision", HIGH) if fp8 is None else (fp8.name, fp8.label)
    seed = reference.cfg.run.seed + number
    run = _run_of(cfg, directory, f"fork-{number}-{name}", f"{label}, fork {number + 1}", "fork", seed)
    return replace(run, of="" if fp8 is None else fp8.name, number=number, begins=begins)


def high_precision(cfg: Config) -> Config:
    """What FP8 is held against: no FP8 and no saving, computing in BF16 where the configuration's model is BF16."""
    return without(cfg).model_copy(update={"fp8": Fp8Section(recipe="off")})


def with_recipe(cfg: Config, name: str) -> Config:
    """Another recipe for all that has none of its own; a base that is quantized while it is read is so in the kind of
    codes that this recipe multiplies by, and in high precision where there is none."""
    kind = next((kind for kind, recipes in FITTING.items() if name in recipes), None)
    kinds = {
        part: kind if (own := getattr(cfg.fp8, part)) is None or own.recipe is None else was
        for part, was in cfg.model.load_in_fp8.kinds.items()
    }
    listed = ", ".join(f"{part}: {kind or 'null'}" for part, kind in kinds.items())
    base = [f"model.load_in_fp8={{{listed}}}"] if kinds else []
    return override(cfg, [f"fp8.recipe={name}", "fp8.plan=null", *base])


def own_recipe(cfg: Config) -> str:
    """What a configuration asks for: its recipe; "by-plan" where a plan file decides; "by-component" where only
    components or rules ask for one; or off."""
    fp8 = cfg.fp8
    if fp8.plan is not None:
        return "by-plan"
    if fp8.recipe != "off":
        return fp8.recipe
    parts = [*(getattr(fp8, name) for name in COMPONENTS), fp8.lm_head, *fp8.rules]
    return "by-component" if any(p and p.recipe not in (None, "off") for p in parts) else "off"


def _run_of(cfg: Config, directory: Path, name: str, label: str, kind: str, seed: int) -> Run:
    own = {"dir": str(directory / "arms" / name), "resume": "auto", "save_states": True, "seed": seed}
    return Run(name, label, kind, cfg.model_copy(update={"run": cfg.run.model_copy(update=own)}))


def clear(directory: Path) -> None:
    """Delete the runs and the report of an earlier trial; only folders that a trial made are touched."""
    for folder in sorted((directory / "arms").glob("*")):
        if (folder / "config.yaml").is_file():
            shutil.rmtree(folder)
    if (directory / "held-out" / "before.json").is_file():
        shutil.rmtree(directory / "held-out")
    (directory / "files.json").unlink(missing_ok=True)
    if (directory / "report" / "report.json").is_file():
        shutil.rmtree(directory / "report")


def check_reusable(run: Run) -> None:
    """Raise ``ReportError`` where the run's folder holds a run of another configuration."""
    directory = Path(run.cfg.run.dir)
    saved = directory / "config.yaml"
    if not saved.is_file():
        return
    differ = _differences(comparable(load_config(saved)), comparable(run.cfg))
    if differ:
        shown = "; ".join(f"{key} was {old!r}, is now {new!r}" for key, old, new in differ[:5])
        raise ReportError(
            f"{directory} was trained with another configuration: {shown}. "
            "Give another directory, or --fresh to train the runs again"
        )


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


def same_files(cfg: Config, directory: Path) -> None:
    """Note what the data and the model folder hold when a trial begins, and raise ``ReportError`` where they hold
    something else when it goes on: its runs would be of different data."""
    from octavo.train import TrainError, datafiles

    now, file = datafiles.fingerprints(cfg), directory / "files.json"
    if not file.exists():
        directory.mkdir(parents=True, exist_ok=True)
        atomic.write_text(file, json.dumps(now, indent=1) + "\n")
        return
    try:
        datafiles.same(reading.read_json(file, ReportError), now, directory, cfg.model.path)
    except TrainError as error:
        raise ReportError(f"{error}. --fresh trains the runs of this trial again") from error


def comparable(cfg: Config) -> dict[str, Any]:
    """What decides a run's figures: everything but where the run lies and how it is watched and saved."""
    data = cfg.model_dump(mode="json")
    saved = "save", "save_every", "save_states", "keep", "milestones"
    for key in ("dir", "resume", "fork", *saved, "tensorboard", "trackers"):
        data["run"].pop(key, None)
    return data


def _differences(old: Any, new: Any, key: str = "") -> list[tuple[str, Any, Any]]:
    if isinstance(old, dict) and isinstance(new, dict):
        found = []
        for name in dict.fromkeys([*old, *new]):
            found += _differences(old.get(name), new.get(name), f"{key}.{name}" if key else name)
        return found
    return [] if old == new else [(key, old, new)]


def finished(run: Run) -> RunRecord | None:
    """The record of a run that reached its end; None where it must (still) run."""
    directory = Path(run.cfg.run.dir)
    if not (directory / "metrics.jsonl").is_file():
        return None
    try:
        record = read(directory)
    except ReportError:
        return None
    return record if record.finished else None


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
