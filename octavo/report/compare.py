"""The trial: high precision, high precision with another seed, and each FP8 recipe, on the same data; then the verdict.

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
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from octavo.config import RECIPES, Config, Fp8Section, load_config, override
from octavo.config.sections import FITTING
from octavo.report.judge import Run, Verdict, judge
from octavo.report.rundir import ReportError, RunRecord, read, read_failed
from octavo.report.savings import ablation, without


def compare(
    cfg: Config,
    recipes: Sequence[str] | None = None,
    directory: str | Path = "runs/compare",
    console: Any = None,
    fresh: bool = False,
    jobs: int = 1,
    savings: bool = True,
) -> Verdict:
    """Run the trial and write the report.

    ``recipes`` are the FP8 recipes to try; None tries what ``cfg`` itself asks for. ``savings`` trains the runs that
    tell what each memory saving cost, where the trial is of one recipe and has any on. ``console`` is a rich console
    (None: silent). ``jobs`` runs train at a time, more than one in processes of their own (a CPU's cores; a GPU serves
    one). An FP8 run whose training fails is judged so and the others go on; a high-precision run that fails ends the
    trial. Writes ``directory/report/report.html``, ``report.json`` and PNG plots. Raises ``ReportError`` where
    nothing in FP8 was asked for, a recipe is unknown, an existing run was trained with another configuration, a run
    was stopped by a signal, or more than one process runs this.
    """
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        raise ReportError(
            f"compare was started on {ranks} processes; it runs in one. Start it without torchrun, or train each run "
            "with `torchrun ... -m octavo train`"
        )
    if jobs < 1:
        raise ReportError(f"jobs={jobs}: at least one run must train at a time")
    from octavo.train import base

    cfg, directory = base.settled(cfg), Path(directory)
    runs = runs_of(cfg, recipes, directory, savings)
    if fresh:
        clear(directory)
    for run in runs:  # refuse before the first run has cost minutes
        check_reusable(run)
    from octavo.report.page import write

    records = []
    if settings := sum(run.kind == "saving" for run in runs):
        _say(console, f"{len(runs)} runs, {settings} of them to tell what each memory saving costs")
    started = time.monotonic()
    unfinished = [run for run in runs if finished(run) is None]
    together = jobs > 1 and len(unfinished) > 1
    failures: dict[str, str] = {}
    if together:
        from octavo.report.side_by_side import train_together

        failures = train_together(unfinished, jobs, console)
    for number, run in enumerate(runs, 1):
        record = None
        if run.name in failures:
            record = read_failed(run.cfg.run.dir, failures[run.name])
        elif together and run in unfinished:
            record = read(run.cfg.run.dir)
        records.append((run, record or _one(run, f"{number}/{len(runs)} {run.label}", console)))
    verdict = judge(records, jobs)
    write(verdict, records, directory / "report")
    _say(console, f"{len(runs)} runs in {time.monotonic() - started:.0f} s")
    return verdict


def runs_of(cfg: Config, recipes: Sequence[str] | None, directory: Path, savings: bool = True) -> list[Run]:
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
    seed, other = cfg.run.seed, cfg.run.seed + 1
    runs = [
        _run_of(plain, directory, "high-precision", "high precision", "reference", seed),
        _run_of(plain, directory, f"high-precision-seed-{other}", f"high precision, seed {other}", "noise", other),
    ]
    names = list(dict.fromkeys(recipes))
    for name in names:
        chosen = cfg if name == own else with_recipe(cfg, name)
        for number, (words, setting) in enumerate(ablation(chosen) if savings and len(names) == 1 else ()):
            runs.append(_run_of(setting, directory, f"saving-{number}", words, "saving", seed))
        runs.append(_run_of(chosen, directory, f"fp8-{name}", f"FP8 {name}", "fp8", seed))
    return runs


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
    parts = [fp8.image_encoder, fp8.image_projector, fp8.foundation, fp8.lm_head, *fp8.rules]
    return "by-component" if any(p and p.recipe not in (None, "off") for p in parts) else "off"


def _run_of(cfg: Config, directory: Path, name: str, label: str, kind: str, seed: int) -> Run:
    own = cfg.run.model_copy(update={"dir": str(directory / "arms" / name), "resume": "auto", "seed": seed})
    return Run(name, label, kind, cfg.model_copy(update={"run": own}))


def clear(directory: Path) -> None:
    """Delete the runs and the report of an earlier trial; only folders that a trial made are touched."""
    for folder in sorted((directory / "arms").glob("*")):
        if (folder / "config.yaml").is_file():
            shutil.rmtree(folder)
    if (directory / "report" / "report.json").is_file():
        shutil.rmtree(directory / "report")


def check_reusable(run: Run) -> None:
    """Raise ``ReportError`` where the run's folder holds a run of another configuration."""
    directory = Path(run.cfg.run.dir)
    saved = directory / "config.yaml"
    if not saved.is_file():
        return
    differ = _differences(_comparable(load_config(saved)), _comparable(run.cfg))
    if differ:
        shown = "; ".join(f"{key} was {old!r}, is now {new!r}" for key, old, new in differ[:5])
        raise ReportError(
            f"{directory} was trained with another configuration: {shown}. "
            "Give another directory, or --fresh to train the runs again"
        )


def _comparable(cfg: Config) -> dict[str, Any]:
    """What decides a run's figures: everything but where the run lies and how it is watched and saved."""
    data = cfg.model_dump(mode="json")
    for key in ("dir", "resume", "save_every", "keep", "tensorboard"):
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
    from octavo import train
    from octavo.fp8 import ProofError

    _forget_peaks()
    failure = ""
    try:
        result = train.run(run.cfg, console=console, label=label)
    except (train.TrainError, ProofError) as error:
        if run.kind not in ("fp8", "saving"):
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
