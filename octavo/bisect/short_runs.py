"""Trains one short run unless its result exists, and reads its figures.

Each configuration has a folder of its own, named by what decides its numbers, so that a search that is started again
reads what it has trained. A run leaves no checkpoint: one that was cut off is trained again from its beginning.
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
from octavo.report.evidence.run_reader import ReportError, RunRecord, read, read_failed_run
from octavo.report.trial.reuse import comparable_settings
from octavo.train import TrainError

BARE = {
    "resume": "never", "save_every": 0, "save_states": False, "milestones": (), "log_every": 1,
    "health_every": 0, "gain_steps": 0, "hf": False, "tensorboard": False, "trackers": (), "save": "sync",
}  # fmt: skip

DONE, FAILURE = "done", "failure.txt"


class BisectError(ValueError):
    """A search is impossible or meaningless; the message says why and what to do."""


@dataclass(frozen=True)
class Outcome:
    """The result of a run's first steps, which begin after step ``begins``.

    losses   of the steps that it did, in nats per token
    seconds  of each of them
    failure  why it did not do them all; empty where it did
    """

    name: str
    begins: int
    losses: np.ndarray
    seconds: np.ndarray
    failure: str = ""

    @property
    def fails_at(self) -> int | None:
        """The first step without a finite loss, or the one after the last if the run ended with an error."""
        bad = np.flatnonzero(~np.isfinite(self.losses))
        if bad.size:
            return int(bad[0]) + 1
        return len(self.losses) + 1 if self.failure else None

    def upto(self, steps: int) -> Outcome:
        """The same result, cut to fewer steps."""
        failure = self.failure if len(self.losses) < steps else ""
        return Outcome(self.name, self.begins, self.losses[:steps], self.seconds[:steps], failure)

    @property
    def time(self) -> float:
        """Median seconds of a step, without the first third (warm-up)."""
        rest = self.seconds[len(self.seconds) // 3 :]
        return float(np.median(rest)) if rest.size else math.nan


class Enough(Exception):
    """A run has completed the requested steps."""


class Until(train.Callback):
    """Ends a run after a step with an exception, so without a checkpoint; also at the first loss that is not finite."""

    def __init__(self, last: int) -> None:
        self.last = last

    def end_step(self, run: train.Run, step: train.Step) -> None:
        if step.number >= self.last or not math.isfinite(step.row["loss"]):
            raise Enough


class Trials:
    """The runs of one search, in ``directory``/runs. ``log`` is called with a line about each that is trained."""

    def __init__(self, directory: Path, log: Callable[[str], None]) -> None:
        self.directory, self.log = directory / "runs", log
        self.trained = 0

    def outcome(self, cfg: Config, steps: int, words: str) -> Outcome:
        """The result of a configuration after ``steps`` steps; ``words`` describe it."""
        home = self.directory / name_of(cfg)
        begins = fork_step(cfg)
        stored = _read(home, begins)
        if stored is None or (len(stored.losses) < steps and not stored.failure and stored.fails_at is None):
            self.trained += 1
            self.log(f"run {self.trained}: {words}")
            stored = self._train(cfg, home, begins, steps)
        return stored.upto(steps)

    def _train(self, cfg: Config, home: Path, begins: int, steps: int) -> Outcome:
        if home.exists():
            shutil.rmtree(home)
        run = cfg.run.model_copy(update={**BARE, "dir": str(home)})
        data = cfg.data.model_copy(update={"eval": ()})
        cfg = cfg.model_copy(update={"run": run, "data": data})
        failure, until = "", Until(begins + steps)
        try:
            result = rl.run(cfg, callbacks=[until], describe_plan=lambda planned: ())
            if result.status != "finished":
                raise BisectError(f"stopped in {home}; the same command goes on")
        except Exception as error:
            if not isinstance(error.__cause__, Enough):
                if not _is_finding(error):
                    raise
                failure = f"{type(error).__name__}: {error}"
        gc.collect()
        if failure:
            home.mkdir(parents=True, exist_ok=True)
            atomic_write.write_text(home / FAILURE, failure + "\n")
        (home / DONE).touch()
        stored = _read(home, begins)
        assert stored is not None
        return stored


def name_of(cfg: Config) -> str:
    """A name derived from the settings that decide a configuration's numbers, and its starting point."""
    text = json.dumps([comparable_settings(cfg), cfg.run.fork], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def fork_step(cfg: Config) -> int:
    """The step of the checkpoint that a configuration continues from; 0 without one."""
    if cfg.run.fork is None:
        return 0
    path = Path(cfg.run.fork)
    if (path / "state.json").is_file():  # a copied checkpoint may have any name
        return int(checkpoint.read_state(path)["step"])
    last = path.name.rpartition("_")[2]
    if not (last.isascii() and last.isdecimal()):
        raise BisectError(f"{cfg.run.fork} is no checkpoint of a run: those are called step_N")
    return int(last)


def _is_finding(error: Exception) -> bool:
    """Whether an error comes from computing: a step, a kernel, memory or the proof. Errors of the plan, the data or the
    folder do not depend on the settings under test."""
    return isinstance(error, TrainError | ProofError | RuntimeError | MemoryError)


def _read(home: Path, begins: int) -> Outcome | None:
    """The stored result of a run that reached its intended end, None if there is none."""
    if not (home / DONE).is_file():
        return None
    file = home / FAILURE
    failure = safe_read.read_text(file, BisectError).strip() if file.is_file() else ""
    try:
        record: RunRecord = read(home)
    except ReportError:
        record = read_failed_run(home, failure)
    losses = np.where(np.isin(record.steps, record.skipped), math.nan, record.losses)
    return Outcome(home.name, begins, losses, record.tokens / record.tokens_per_s, failure)
