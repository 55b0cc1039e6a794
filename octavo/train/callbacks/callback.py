"""What listens to a run. Proof, figures, refusals, evaluation, saving and the gain window are callbacks; so are yours.

    class BestLoss(train.Callback):
        def begin(self, run):
            self.best = run.row.get("best_loss", float("inf"))  # of an earlier session too

        def after_step(self, run, step):
            self.best = min(self.best, step.row["loss"])
            step.row["best_loss"] = self.best  # a column of metrics.jsonl and TensorBoard

        def end(self, run, result):
            run.say(f"best loss {self.best:.4f}")

    train.run(cfg, callbacks=[BestLoss()])

Every rank calls every callback, in the order of the list and at the same moments. A collective inside one must
therefore be reached on all ranks; print with `run.say` and write files where `run.world.is_main`.

Watchers are callbacks on the main rank alone, behind all others, that only look: a page, a tracker. One that fails once
the run has begun is left out from there on, which is said; it ends no run.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo import parallel
from octavo.base.safe_read import first_line
from octavo.config import Config
from octavo.train.callbacks.metrics import MetricsLog
from octavo.train.callbacks.progress import Display
from octavo.train.callbacks.result import RunResult
from octavo.train.callbacks.signals import StopRequest
from octavo.train.errors import TrainError
from octavo.train.run_dir import run_dir
from octavo.train.setup.job import Job
from octavo.train.setup.resolve_config import total_steps
from octavo.train.setup.resume import save
from octavo.train.step.step import Batches, Observe, StepResult

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: what some rows have
_RARE = "eval", "health", "memory", "gain", "experts", "base", "skipped", "overflow", "empty", "aux_loss", "zeroed_v"


@dataclass
class Step:
    """One step that is done.

    number   1 for the first of the run
    batches  this rank's micro-batches
    result   what the step gave
    row      its line of metrics.jsonl; `after_step` may add entries, which must be JSON
    wanted   True: the line is written though `run.log_every` would pass it over; in `end_step`: it was written
    """

    number: int
    batches: Batches
    result: StepResult
    row: dict[str, Any]
    wanted: bool = False


class Callback:
    """Listens to a run. Override what you need; every method does nothing here.

    What a method is given may be read. In `after_step` it may add entries to `step.row` and set `step.wanted`; it is an
    error to change others, and with other weights, gradients or batches it is not the run that was asked for.
    An error stops the run: as a TrainError that names callback and step, with your error as its cause. The last
    checkpoint stands, and run.resume=auto goes on from there. What a callback remembers is in no checkpoint.
    """

    def begin(self, run: Run) -> None:
        """Everything is assembled and resumed; the first step of this session comes next."""

    def before_step(self, run: Run, number: int, batches: Batches) -> Observe | None:
        """This rank's micro-batches of step `number`, and what should be observed while it runs (it costs time)."""

    def after_step(self, run: Run, step: Step) -> None:
        """The weights are updated, or the step was skipped. Gradients are gone; the row is not written yet."""

    def evaluated(self, run: Run, figures: Mapping[str, Any]) -> None:
        """`figures` of the held-out data after step `run.step`; they go into the row of that step."""

    def end_step(self, run: Run, step: Step) -> None:
        """The row was handed to metrics.jsonl; the checkpoint of this step, where one is due, comes next."""

    def saved(self, run: Run, checkpoint: Path) -> None:
        """A checkpoint is whole and in its place; under `run.save: async` some steps after the one that it is of."""

    def end(self, run: Run, result: RunResult) -> None:
        """The run finished or was stopped; all of its files are written. Not called after an error."""

    def failed(self, run: Run, error: Exception) -> None:
        """Of watchers: the run ends by an error."""


@dataclass
class Run:
    """A run in progress.

    job       what was assembled: cfg, world, model, loader, plan, stepper, progress (:mod:`octavo.train.setup.build`)
    first     the first step of this session
    row       the last step's row
    stopping  a signal came or `stop` was called; this step is the session's last
    watchers  those that look on, on the main rank
    eval, memory, gain    the last figures of each
    """

    job: Job
    display: Display
    request: StopRequest
    first: int
    log: MetricsLog | None
    row: dict[str, Any]
    eval: Mapping[str, Any] | None
    memory: Mapping[str, int]
    gain: Mapping[str, Any] | None
    users: Sequence[Callback]
    callbacks: Sequence[Callback] = ()
    watchers: Sequence[Callback] = ()
    stopping: bool = False
    _saved: dict[str, int] = field(default_factory=dict)  # folder -> the step that was last saved into it
    _waited: float = 0.0

    @property
    def fp8(self) -> bool:
        return any(row.fp8 for row in self.job.plan.rows)

    @property
    def cfg(self) -> Config:
        return self.job.cfg

    @property
    def world(self) -> parallel.World:
        return self.job.world

    @property
    def model(self) -> PreTrainedModel:
        return self.job.model

    @property
    def directory(self) -> Path:
        return self.job.directory

    @property
    def step(self) -> int:
        """Steps done."""
        return self.job.progress.step

    @property
    def total_steps(self) -> int:
        """Steps of the whole run, also where the configuration counts `train.epochs`."""
        return total_steps(self.cfg)

    def say(self, text: str) -> None:
        """A line for people, on the main rank."""
        self.display.say(text)

    def logs(self, number: int) -> bool:
        """Whether a step's row is written in any case."""
        return number % self.cfg.run.log_every == 0 or number in (self.first, self.total_steps)

    def stop(self) -> None:
        """End the run after this step, saved as by a signal: status "stopped", exit code 0; run.resume=auto goes on.
        One rank suffices. In `begin` and `saved` it means the step to come."""
        self.request.asked = True

    def asked_to_stop(self) -> bool:
        """Whether a signal reached any rank, or one called `stop`. A collective."""
        return self.world.any(self.request.asked or self.request.signal is not None)

    def save(self, folder: str = run_dir.CHECKPOINTS) -> None:
        """Write a checkpoint, unless this step has one; under `run.save: async` it is in its place once `settle` has
        returned. A collective. Not before the row of the step is written, with which the run would go on: an error in
        `after_step` and `evaluated`."""
        if self._saved.get(folder) == self.step:
            return
        if self.step >= self.first and self.row.get("step") != self.step:
            raise ValueError(f"step {self.step} has no row in metrics.jsonl yet; save in end_step")
        if self.log is not None:
            self.log.sync()
        self.settle()
        self._saved[folder] = self.step
        self.world.at(f"step {self.step}, saving")
        with self._waiting():
            path = save(self.job, folder)
        self._tell_saved(path)

    def settle(self, wait: bool = True) -> None:
        """Let callbacks hear of the checkpoint that is being written beside the steps, once it is in its place; `wait`
        until it is. Raises what its writing raised, on all ranks alike. A collective; without such a one nothing."""
        background = self.job.background
        if background is None or not background.under_way:
            return
        if wait:
            self.world.at(f"step {self.step}, waiting for the checkpoint that is being written")
        with self._waiting():
            path = background.poll(wait)
        self._tell_saved(path)

    @property
    def saving(self) -> bool:
        """Whether a checkpoint is being written beside the steps."""
        return self.job.background is not None and self.job.background.under_way

    def waited(self) -> float:
        """Seconds that training stood still for checkpoints, since this was last asked."""
        waited, self._waited = self._waited, 0.0
        return waited

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self._waited += time.perf_counter() - began

    def _tell_saved(self, path: Path | None) -> None:
        if path is not None and path.parent.name == run_dir.CHECKPOINTS:
            self.notify("saved", path)

    def reopen_log(self) -> None:
        """Drop the row of the last step, which is written anew."""
        if self.log is not None:
            self.log.close()
            run_dir.truncate_metrics(self.directory / run_dir.METRICS, self.step - 1)
            self.log = MetricsLog(self.directory, self.cfg.run.tensorboard, self.first, self.job.phase.tensorboard)

    def notify(self, event: str, *args: Any) -> list[Any]:
        """Call a method of all callbacks, in their order, and of the watchers; what callbacks return."""
        answers = [self._call(callback, event, args) for callback in self.callbacks]
        self.tell_watchers(event, *args)
        return answers

    def tell_watchers(self, event: str, *args: Any) -> None:
        """Call a method of the watchers; one that fails is one no more."""
        for watcher in self.watchers:
            try:
                getattr(watcher, event)(self, *args)
            except Exception as error:  # of whatever library: the run is worth more than who looks on
                if event == "begin":
                    raise
                self.watchers = tuple(one for one in self.watchers if one is not watcher)
                self.say(f"warning: {watcher} failed and is left out; the run goes on ({first_line(error)})")

    def _call(self, callback: Callback, event: str, args: Sequence[Any]) -> Any:
        if not any(callback is user for user in self.users):
            return getattr(callback, event)(self, *args)
        before = self._fixed(args)
        try:
            answer = getattr(callback, event)(self, *args)
            after = self._fixed(args)
            for name, value in before.items():
                if value is not after.get(name) and value != after.get(name):
                    raise ValueError(f"it changed {name}; after_step may add other entries to step.row, nothing else")
            if event == "before_step" and not isinstance(answer, Observe | None):
                raise TypeError(f"it returned {answer!r}, which is neither None nor a train.Observe")
            return answer
        except TrainError:
            raise
        except Exception as error:
            ended = event == "end" and args[0].status == "finished"
            raise TrainError(
                f"the callback {type(callback).__name__} failed in {event} at step "
                f"{args[0] if event == 'before_step' else self.step}: {type(error).__name__}: {error}. "
                + ("The run itself has finished" if ended else "Mend or remove it, and continue with run.resume=auto")
            ) from error

    def _fixed(self, args: Sequence[Any]) -> dict[str, Any]:
        """What a callback may not change, by name; figures as JSON. Raises for entries of the row that are no JSON."""
        fixed = {f"run.{name}": value for name, value in vars(self).items() if not name.startswith("_")}
        fixed |= {f"run.{name}": json.dumps(getattr(self, name)) for name in ("row", "eval", "memory", "gain")}
        for step in (it for it in args if isinstance(it, Step)):
            fixed |= {f"step.{name}": getattr(step, name) for name in ("number", "batches", "result")}
            fixed |= {f"the type of step.{name}": type(getattr(step, name)) for name in ("row", "wanted")}
            row = dict.fromkeys(_RARE) | dict(step.row or {})
            fixed |= {f"step.row[{key!r}]": json.dumps({key: value}) for key, value in row.items()}
        return fixed
