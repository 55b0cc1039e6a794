"""Trains the units of a study, each once; later calls read it from its file.

    HOME/units/NAME/unit.json    losses by step, held-out figures, CPU seconds; or the error message of a failed unit
    ARCHIVE/NAME.json            the same, of a study whose units take too long for one machine's evening

A unit without that file is trained from the beginning, so the same command continues a study that was interrupted in
any way. Each unit has its own process with one thread, and several run in parallel; units that others begin from come
first.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from unit import Outcome, Unit

from octavo.base import atomic_write
from octavo.config import Config, load_config_text, override, to_yaml
from octavo.fp8.arithmetic import CastTable
from octavo.fp8.planning.file_form import parse_casts
from octavo.report.trial import exit_with_parent

ROOT = Path(__file__).resolve().parents[2]
UNITS, DONE, TRAINED, HF = "units", "unit.json", "run", "hf"
BARE = (
    "run.resume=never", "run.save_every=0", "run.log_every=1", "run.health_every=0", "run.gain_steps=0", "run.hf=false",
    "run.tensorboard=false", "run.trackers=[]", "run.threads=1", "run.save_states=true",
)  # fmt: skip


def bare(cfg: Config, home: Path, name: str, seed: int, *words: str) -> Config:
    """A configuration as a unit trains it: into its own folder, with nothing but the training."""
    return override(cfg, [*BARE, f"run.dir={home / UNITS / name / TRAINED}", f"run.seed={seed}", *words])


def read(home: Path, unit: Unit, archive: Path | None = None) -> Outcome | None:
    """What a unit found; None where it is not trained yet."""
    file = home / UNITS / unit.name / DONE
    if not file.is_file() and archive is not None:
        file = archive / f"{unit.name}.json"
    if not file.is_file():
        return None
    stored = json.loads(file.read_text(encoding="utf-8"))
    config, plant, task = stored.pop("config"), stored.pop("plant"), stored.pop("task", ())
    casts = stored.pop("casts", None)
    was = _settings(None if config is None else load_config_text(_portable(config, home)), plant, task)
    present = None if unit.cfg is None else load_config_text(_portable(to_yaml(unit.cfg), home))
    now = _settings(present, unit.plant, unit.task)
    if present is not None:
        was["casts"], now["casts"] = _casts(present, parse_casts(casts, file)), _casts(present, CastTable())
    if keys := [key for key in now if was.get(key) != now[key]]:
        where = file.parent if file.name == DONE else file
        raise SystemExit(f"{where} was trained with other {', '.join(keys)}; give another --dir, or delete it")
    losses = tuple(math.nan if loss is None else loss for loss in stored["losses"])  # of steps that were skipped
    return Outcome(**{**stored, "losses": losses})


@contextmanager
def alone(home: Path) -> Iterator[None]:
    """Keep a folder from other studies while this one trains in it: each would delete what the other is training."""
    home.mkdir(parents=True, exist_ok=True)
    with (home / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SystemExit(f"another study is training in {home}; wait for it, or give another --dir") from None
        yield


def train_all(
    home: Path,
    units: Sequence[Unit],
    jobs: int,
    hours: float,
    log: Callable[[str], None],
    archive: Path | None = None,
) -> dict[str, Outcome]:
    """The outcomes by name of all units that are trained, after training those that are not, ``jobs`` at a time.

    No unit begins once the processor hours of all units together exceed ``hours``.
    """
    outcomes = {unit.name: outcome for unit in units if (outcome := read(home, unit, archive)) is not None}
    waiting = [unit for unit in units if unit.name not in outcomes]
    if not waiting:
        return outcomes
    # Before the workers are started, so that torch finds it there.
    os.environ["OMP_NUM_THREADS"] = "1"
    # A worker whose study was killed must not train on: it would write into the folder that the same command then makes
    # again.
    pool = ProcessPoolExecutor(
        jobs,
        get_context("spawn"),
        exit_with_parent.signal_on_parent_exit,
        (os.getpid(), signal.SIGKILL),
        max_tasks_per_child=12,
    )
    running: dict[Any, Unit] = {}
    try:
        while waiting or running:
            while len(running) < jobs and (unit := _next(waiting)) is not None:
                if sum(outcome.cpu_seconds for outcome in outcomes.values()) > 3600 * hours:
                    log(f"{hours:g} CPU hours are spent; {len(waiting)} units are left")
                    waiting.clear()
                    break
                waiting.remove(unit)
                running[pool.submit(_train, home, unit)] = unit
            if not running:
                if waiting:
                    log(f"{len(waiting)} units cannot begin: there is no {_needs(waiting[0].cfg)[0]}")
                break
            ended = next(as_completed(running))
            unit = running.pop(ended)
            ended.result()
            outcome = read(home, unit)
            assert outcome is not None
            if archive is not None:
                archive.mkdir(parents=True, exist_ok=True)
                content = (home / UNITS / unit.name / DONE).read_text(encoding="utf-8")
                atomic_write.write_text(archive / f"{unit.name}.json", _portable(content, home))
            outcomes[unit.name] = outcome
            held = ", ".join(f"{key} {value:.4f}" for key, value in outcome.held.items())
            log(f"{len(outcomes)}/{len(units)} {unit.name}: {outcome.failure or held} ({outcome.cpu_seconds:.0f} s)")
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
    return outcomes


def _next(waiting: Sequence[Unit]) -> Unit | None:
    """The first unit whose checkpoint is there, or that begins without one; None where all wait for those that run.

    A checkpoint is there once the unit that it is of is done: one that was cut off is trained from its beginning.
    """

    def there(path: Path) -> bool:  # UNIT/run/milestones/step_N or UNIT/run/hf
        unit = path.parent if path.name == HF else path.parents[1]
        return path.exists() and (unit.parent / DONE).is_file()

    return next((unit for unit in waiting if all(map(there, _needs(unit.cfg)))), None)


def _needs(cfg: Config | None) -> list[Path]:
    """What another unit must have left: a checkpoint, or a model."""
    if cfg is None:
        return []
    model = Path(cfg.model.path)
    trained = model if model.parts[-2:] == (TRAINED, HF) else None
    return [Path(path) for path in (cfg.run.fork, cfg.run.start_from, trained) if path is not None]


def _casts(cfg: Config, table: CastTable) -> dict[str, dict[str, str | int]]:
    """The casts of the recipes that a configuration names; no study lets a plan choose."""
    named = set(re.findall(r"\b(?:recipe|fwd|dgrad|wgrad): (\w+)", to_yaml(cfg)))
    return {key: casts for key, casts in table.to_json().items() if key.split()[0] in named}


def _settings(cfg: Config | None, plant: Sequence[object], task: Sequence[object]) -> dict[str, Any]:
    """The settings that decide a unit's numbers: all but paths."""
    from octavo.report.trial.reuse import comparable_settings

    if cfg is None:
        return {"task": list(task)}
    return {**comparable_settings(cfg), "fork": _tail(cfg.run.fork), "plant": list(plant)}


def _portable(text: str, home: Path) -> str:
    """A configuration without the paths of this machine: as if the command had run in the root of the repository."""
    return text.replace(str(home), f"build/studies/{home.name}").replace(f"{ROOT}/", "")


def _tail(path: Any) -> str | None:
    """Unit and step of a checkpoint, whatever folder the study is in."""
    return None if path is None else "/".join(Path(path).parts[-4:])


def _train(home: Path, unit: Unit) -> None:
    """Train and judge one unit, in a process of the pool."""
    folder = home / UNITS / unit.name
    if folder.exists():
        shutil.rmtree(folder)
    if unit.cfg is None:
        _run_task(folder, home, unit)
    else:
        _train_model(folder, unit, unit.cfg)


def _run_task(folder: Path, home: Path, unit: Unit) -> None:
    from judging import call

    folder.mkdir(parents=True)
    began = time.process_time()
    figures = call(unit.task, home)
    stored = {"name": unit.name, "begins": 0, "losses": [], "held": {}, "more": figures}
    stored |= {"cpu_seconds": round(time.process_time() - began, 1), "config": None, "plant": (), "task": unit.task}
    atomic_write.write_text(folder / DONE, json.dumps(stored) + "\n")


def _train_model(folder: Path, unit: Unit, cfg: Config) -> None:
    from judging import Judging

    from octavo import rl, train

    began, judging, failure = time.process_time(), Judging(unit), ""
    try:
        result = rl.run(cfg, callbacks=[judging], describe_plan=lambda planned: ())
        if result.status != "finished":
            raise SystemExit(f"{unit.name} was stopped; the same command goes on")
    except train.TrainError as error:
        if not (folder / TRAINED / "metrics.jsonl").is_file():
            raise  # before its first step: a fault of the study, no finding
        failure = str(error)
    rows = (folder / TRAINED / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    losses = [row["loss"] for row in map(json.loads, rows) if "loss" in row and row["step"] > unit.begins]
    stored = {
        "name": unit.name, "begins": unit.begins, "losses": losses, "held": judging.held, "more": judging.more,
        "cpu_seconds": round(time.process_time() - began, 1), "failure": failure,
        "config": to_yaml(cfg), "plant": unit.plant, "casts": _casts(cfg, CastTable()),
    }  # fmt: skip
    atomic_write.write_text(folder / DONE, json.dumps(stored) + "\n")
    if not unit.keeps:
        shutil.rmtree(folder / TRAINED)
