"""Trains one short run unless its result exists, and reads its figures.

Each configuration has a separate folder, named by a hash of the settings that determine its numbers, so that a repeated
search reuses finished runs. A run writes no checkpoint: one that was interrupted is trained again from its start.
"""

from __future__ import annotations

import gc
import hashlib
import json
import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from octavo import checkpoint, rl, train
from octavo.base import atomic_write, safe_read
from octavo.config import Config
from octavo.fp8 import ProofError
from octavo.fp8.arithmetic import CastTable
from octavo.report.evidence.run_reader import ReportError, RunRecord, read, read_failed_run
from octavo.report.trial.reuse import comparable_settings
from octavo.train import TrainError

BARE = {
    "resume": "never", "save_every": 0, "save_states": False, "milestones": (), "log_every": 1,
    "health_every": 0, "gain_steps": 0, "hf": False, "tensorboard": False, "trackers": (), "save": "sync",
}  # fmt: skip

DONE, FAILURE = "done", "failure.txt"


class BisectError(ValueError):
    """A search is impossible or meaningless; the message says why, and what to do."""


class SearchStopped(BisectError):
    """A signal stopped a run of a search. ``exit_code``: of the command, 128 + the number of the signal."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True)
class Outcome:
    """The result of the first steps of a run, which begin after step ``begins``.

    losses   losses of the finished steps, in nats per token
    seconds  seconds of each of them
    failure  why the run ended early, or empty
    """

    name: str
    begins: int
    losses: np.ndarray
    seconds: np.ndarray
    failure: str = ""

    @property
    def fails_at(self) -> int | None:
        """The first step without a finite loss, or the one after the last if the run ended with an error; None if it is
        fine."""
        bad = np.flatnonzero(~np.isfinite(self.losses))
        if bad.size:
            return int(bad[0]) + 1
        return len(self.losses) + 1 if self.failure else None

    def upto(self, steps: int) -> Outcome:
        """Return the same result, cut to fewer steps."""
        failure = self.failure if len(self.losses) < steps else ""
        return Outcome(self.name, self.begins, self.losses[:steps], self.seconds[:steps], failure)

    @property
    def time(self) -> float:
        """Median seconds of a step, without the first third (warm-up)."""
        rest = self.seconds[len(self.seconds) // 3 :]
        return float(np.median(rest)) if rest.size else math.nan


class StepsDone(Exception):
    """A run has completed the requested steps."""


class StopAfter(train.Callback):
    """Ends a run without a checkpoint, by an exception, after a step or at the first loss that is not finite."""

    def __init__(self, last: int) -> None:
        self.last = last

    def end_step(self, run: train.Run, step: train.Step) -> None:
        if step.number >= self.last or not math.isfinite(step.row["loss"]):
            raise StepsDone


class Trials:
    """The runs of one search, in ``directory``/runs. ``log`` is called with a line about each trained run."""

    def __init__(self, directory: Path, log: Callable[[str], None]) -> None:
        self.directory, self.log = directory / "runs", log
        self.trained = 0

    def outcome(self, cfg: Config, steps: int, words: str) -> Outcome:
        """Return the result of a configuration after ``steps`` steps; ``words`` describe it."""
        folder = self.directory / run_name(cfg)
        begins = fork_step(cfg)
        stored = _read(folder, begins)
        if stored is None or (len(stored.losses) < steps and not stored.failure and stored.fails_at is None):
            self.trained += 1
            self.log(f"run {self.trained}: {words}")
            stored = self._train(cfg, folder, begins, steps)
        return stored.upto(steps)

    def _train(self, cfg: Config, folder: Path, begins: int, steps: int) -> Outcome:
        if folder.exists():
            shutil.rmtree(folder)
        run = cfg.run.model_copy(update={**BARE, "dir": str(folder)})
        data = cfg.data.model_copy(update={"eval": ()})
        cfg = cfg.model_copy(update={"run": run, "data": data})
        failure, stop_after = "", StopAfter(begins + steps)
        try:
            result = rl.run(cfg, callbacks=[stop_after], describe_plan=lambda planned: ())
            if result.status != "finished":
                raise SearchStopped(f"stopped in {folder}; run the same command to continue", result.exit_code)
        except Exception as error:
            if not isinstance(error.__cause__, StepsDone):
                if not _is_finding(error):
                    raise
                failure = f"{type(error).__name__}: {error}"
        gc.collect()
        if failure:
            folder.mkdir(parents=True, exist_ok=True)
            atomic_write.write_text(folder / FAILURE, failure + "\n")
        (folder / DONE).touch()
        stored = _read(folder, begins)
        assert stored is not None
        return stored


def run_name(cfg: Config) -> str:
    """Return a name derived from the settings that determine a configuration's numbers, its starting point, and the
    casts of this version's recipes."""
    text = json.dumps([comparable_settings(cfg), cfg.run.fork, CastTable().to_json()], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def fork_step(cfg: Config) -> int:
    """Return the step of the checkpoint that a configuration continues from, or 0."""
    if cfg.run.fork is None:
        return 0
    path = Path(cfg.run.fork)
    if (path / "state.json").is_file():  # a copied checkpoint may have any name
        return int(checkpoint.read_state(path)["step"])
    last = path.name.rpartition("_")[2]
    if not (last.isascii() and last.isdecimal()):
        raise BisectError(f"{cfg.run.fork} is not a checkpoint of a run: their names are step_N")
    return int(last)


def _is_finding(error: Exception) -> bool:
    """Return whether an error comes from computing: a step, a kernel, memory or the proof. Errors of the plan, the data
    or the folder do not depend on the settings under test."""
    return isinstance(error, TrainError | ProofError | RuntimeError | MemoryError)


def _read(folder: Path, begins: int) -> Outcome | None:
    """Return the stored result of a finished run, or None if there is none."""
    if not (folder / DONE).is_file():
        return None
    file = folder / FAILURE
    failure = safe_read.read_text(file, BisectError).strip() if file.is_file() else ""
    try:
        record: RunRecord = read(folder)
    except ReportError:
        record = read_failed_run(folder, failure)
    losses = np.where(np.isin(record.steps, record.skipped), math.nan, record.losses)
    return Outcome(folder.name, begins, losses, record.tokens / record.tokens_per_s, failure)
