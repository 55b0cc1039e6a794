"""Callbacks of a run, built-in (proof, health metrics, evaluation, saving, FP8 gain) and yours.

    class BestLoss(train.Callback):
        def begin(self, run):
            self.best = run.row.get("best_loss", float("inf"))  # also from an earlier session

        def after_step(self, run, step):
            self.best = min(self.best, step.row["loss"])
            step.row["best_loss"] = self.best  # a column of metrics.jsonl and TensorBoard

        def end(self, run, result):
            run.say(f"best loss {self.best:.4f}")

    train.run(cfg, callbacks=[BestLoss()])

Every rank calls every callback, in the order of the list and at the same points. Collective calls in a callback must
therefore be reached on all ranks. Print with `run.say`, and write files only if `run.world.is_main`.

Watchers are callbacks that only observe, such as a page or a tracker. Only the main rank calls them, after all others.
A watcher that fails after the run has begun is removed with a warning; the run continues.
"""

from __future__ import annotations

import inspect
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo import parallel
from octavo.base.safe_read import first_line
from octavo.base.wording import typing_error
from octavo.config import Config
from octavo.config.yaml.problems import describe_value
from octavo.train.callbacks.metrics import MetricsFile, MetricsLog
from octavo.train.callbacks.progress import Display
from octavo.train.callbacks.result import RunResult
from octavo.train.callbacks.signals import StopRequest
from octavo.train.errors import TrainError
from octavo.train.run_dir import run_dir
from octavo.train.setup.job import Job
from octavo.train.setup.resume import save
from octavo.train.step.step import Batches, Observe, StepResult

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: entries that are not in every row
_RARE = (
    *("eval", "health", "memory", "gain", "experts", "base", "skipped", "overflow", "empty", "aux_loss", "zeroed_v"),
    "massive_activations",
)


@dataclass
class Step:
    """A finished step.

    number   1 for the first of the run
    batches  the micro-batches of this rank
    result   the result of the step
    row      its row of metrics.jsonl; `after_step` may add entries, which must be JSON
    wanted   set to True to write the row even if `run.log_every` would skip it; in `end_step` True if it was written
    """

    number: int
    batches: Batches
    result: StepResult
    row: dict[str, Any]
    wanted: bool = False


class Callback:
    """The base class of callbacks. Override the methods that you need; all do nothing here.

    Arguments are for reading. `after_step` may add entries to `step.row` and set `step.wanted`; any other change is an
    error. Do not change weights, gradients or batches: the run would no longer be the configured one. An exception
    stops the run as a TrainError that names callback and step, with the exception as its cause. The last checkpoint
    remains, and run.resume=auto continues from it. The state of a callback is not in checkpoints.
    """

    def begin(self, run: Run) -> None:
        """Called after the run is assembled and resumed, before the first step of this session."""

    def before_step(self, run: Run, number: int, batches: Batches) -> Observe | None:
        """Called with this rank's micro-batches before step `number`. Returns an Observe that requests
        measurements in this step (which take time), or None."""

    def after_step(self, run: Run, step: Step) -> None:
        """Called after the update, or after a skipped step. Gradients are freed; the row is not written yet."""

    def evaluated(self, run: Run, figures: Mapping[str, object]) -> None:
        """Called with the `figures` of an evaluation after step `run.step`, which become part of the step's row."""

    def end_step(self, run: Run, step: Step) -> None:
        """Called after the row was passed to metrics.jsonl, before a checkpoint of this step."""

    def saved(self, run: Run, checkpoint: Path) -> None:
        """Called when a checkpoint is complete; with `run.save: async` some steps after the step of the checkpoint."""

    def end(self, run: Run, result: RunResult) -> None:
        """Called when the run has finished or was stopped, and all its files are written. Not called after an error."""

    def failed(self, run: Run, error: Exception) -> None:
        """Called only on watchers, when the run ends with an error."""


#: methods of Hugging Face's TrainerCallback -> the method here that is called at the same point
_OF_TRAINER = {
    "on_train_begin": "begin",
    "on_step_begin": "before_step",
    "on_step_end": "after_step",
    "on_evaluate": "evaluated",
    "on_log": "end_step",
    "on_save": "saved",
    "on_train_end": "end",
}


def check_callbacks(callbacks: object) -> list[tuple[str, str]]:
    """Return what is wrong with the argument ``callbacks`` of a run, each with its remedy; none: they can be used.

    A method whose name is a typing error of one of `Callback`'s, with the same number of parameters, would never be
    called without anyone noticing.
    """
    if not isinstance(callbacks, tuple | list):
        value = f"{describe_value(callbacks)} ({type(callbacks).__name__})"
        return [(f"expected a list of octavo.train.Callback, found {value}", _INSTANCES)]
    problems = []
    for callback in callbacks:
        if not isinstance(callback, Callback):
            value = f"{describe_value(callback)} ({type(callback).__name__})"
            problems.append((f"expected octavo.train.Callback, found {value}", _INSTANCES))
            continue
        for name, intended in _misspelt_methods(type(callback)):
            reason = f"{type(callback).__name__}.{name} would never be called"
            problems.append((reason, f"did you mean {intended}? A helper needs another name, such as _{name}"))
    return problems


_INSTANCES = "pass a list of instances, such as [MyCallback()]"


def _misspelt_methods(kind: type[Callback]) -> Iterator[tuple[str, str]]:
    hooks = {name: method for name, method in vars(Callback).items() if not name.startswith("_")}
    for name in dir(kind):
        method = getattr(kind, name, None)
        if name in hooks or name.startswith("_") or not inspect.isfunction(method):
            continue
        if name in _OF_TRAINER:
            yield name, _OF_TRAINER[name]
        elif hook := typing_error(name, {hook: hook for hook in hooks}):
            numbers = {len(inspect.signature(function).parameters) for function in (method, hooks[hook])}
            if len(numbers) == 1:
                yield name, hook


@dataclass
class Run:
    """A run in progress.

    job       the assembled run: cfg, world, model, loader, plan, stepper, progress (:mod:`octavo.train.setup.build`)
    first     the first step of this session
    row       the row of the last step
    stopping  True if a signal was received or `stop` was called; this step is the last step of the session
    watchers  empty except on the main rank
    eval, memory, gain    the newest figures; eval_step: after which step `eval` was measured
    """

    job: Job
    display: Display
    request: StopRequest
    first: int
    log: MetricsLog | None
    row: dict[str, Any]
    eval: Mapping[str, Any] | None
    eval_step: int | None
    memory: Mapping[str, int]
    gain: Mapping[str, Any] | None
    user_callbacks: Sequence[Callback]
    callbacks: Sequence[Callback] = ()
    watchers: Sequence[Callback] = ()
    stopping: bool = False
    _saved: dict[str, int] = field(default_factory=dict)  # folder -> the last step saved there
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

    def say(self, text: str) -> None:
        """Print a line, on the main rank."""
        self.display.log(text)

    def logs(self, number: int) -> bool:
        """Return True if the row of a step is written according to `run.log_every`."""
        return number % self.cfg.run.log_every == 0 or number in (self.first, self.cfg.train.total_steps)

    def stop(self) -> None:
        """Save and end the run after this step, as a signal does: status "stopped", exit code 0; run.resume=auto
        continues it. A call on one rank is enough. In `begin` and `saved` it applies to the next step."""
        self.request.asked = True

    def stop_requested(self) -> bool:
        """Return True if any rank received a signal or called `stop`. Collective call."""
        return self.world.any(self.request.asked or self.request.signal is not None)

    def save(self, folder: str = run_dir.CHECKPOINTS) -> None:
        """Write a checkpoint, unless this step has one; with `run.save: async` it is complete after `wait_for_save`.
        Collective call. The row of the step must be written first, because a resumed run needs it, so `save` raises
        ValueError in `after_step` and `evaluated`."""
        if self._saved.get(folder) == self.step:
            return
        if self.step >= self.first and self.row.get("step") != self.step:
            raise ValueError(f"step {self.step} has no row in metrics.jsonl yet; save in end_step")
        if self.log is not None:
            self.log.sync()
        self.wait_for_save()
        self._saved[folder] = self.step
        self.world.set_phase(f"step {self.step}, saving")
        with self._waiting():
            path = save(self.job, folder)
        self._notify_saved(path)

    def wait_for_save(self, block: bool = True) -> None:
        """Notify callbacks of an asynchronous checkpoint if it is complete; with `block`, wait for it. Raises write
        errors on all ranks. Collective call; does nothing if no checkpoint is being written."""
        background = self.job.background
        if background is None or not background.has_pending_save:
            return
        if block:
            self.world.set_phase(f"step {self.step}, waiting for the checkpoint that is being written")
        with self._waiting():
            path = background.poll(block)
        self._notify_saved(path)

    @property
    def saving(self) -> bool:
        """True while an asynchronous checkpoint is being written."""
        return self.job.background is not None and self.job.background.has_pending_save

    def pop_save_seconds(self) -> float:
        """Return the seconds that training waited for checkpoints since the last call."""
        waited, self._waited = self._waited, 0.0
        return waited

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self._waited += time.perf_counter() - started

    def _notify_saved(self, path: Path | None) -> None:
        if path is not None and path.parent.name == run_dir.CHECKPOINTS:
            self.notify("saved", path)

    def drop_last_row(self) -> None:
        """Drop the row of the last step, which will be written again."""
        if self.log is not None:
            self.log.close()
            MetricsFile.of(self.directory).truncate(self.step - 1)
            self.log = MetricsLog(self.directory, self.cfg.run.tensorboard, self.first, self.job.phase.tensorboard)

    def notify(self, event: str, *args: Any) -> list[Any]:
        """Call a method of all callbacks in order, then of the watchers; return the callbacks' results."""
        results = [self._call(callback, event, args) for callback in self.callbacks]
        self.notify_watchers(event, *args)
        return results

    def notify_watchers(self, event: str, *args: Any) -> None:
        """Call a method of the watchers, and remove those that fail."""
        for watcher in self.watchers:
            try:
                getattr(watcher, event)(self, *args)
            except Exception as error:  # from any library: a watcher must not end the run
                if event == "begin":
                    raise
                self.watchers = tuple(other for other in self.watchers if other is not watcher)
                self.say(f"warning: {watcher} failed and was removed; the run continues ({first_line(error)})")

    def _call(self, callback: Callback, event: str, args: Sequence[Any]) -> Any:
        if not any(callback is user for user in self.user_callbacks):
            return getattr(callback, event)(self, *args)
        before = self._protected_values(args)
        try:
            result = getattr(callback, event)(self, *args)
            after = self._protected_values(args)
            for name, value in before.items():
                if value is not after.get(name) and value != after.get(name):
                    raise ValueError(f"it changed {name}; after_step may add other entries to step.row, nothing else")
            if event == "before_step" and not isinstance(result, Observe | None):
                raise TypeError(f"it returned {result!r}, which is neither None nor a train.Observe")
            return result
        except TrainError:
            raise
        except Exception as error:
            ended = event == "end" and args[0].status == "finished"
            raise TrainError(
                f"the callback {type(callback).__name__} failed in {event} at step "
                f"{args[0] if event == 'before_step' else self.step}: {type(error).__name__}: {error}. "
                + ("The run itself has finished" if ended else "Fix or remove it, and continue with run.resume=auto")
            ) from error

    def _protected_values(self, args: Sequence[Any]) -> dict[str, Any]:
        """Return name -> value of everything that a callback must not change; figures as JSON. Raises if a row entry is
        not JSON."""
        values = {f"run.{name}": value for name, value in vars(self).items() if not name.startswith("_")}
        values |= {f"run.{name}": json.dumps(getattr(self, name)) for name in ("row", "eval", "memory", "gain")}
        for step in (it for it in args if isinstance(it, Step)):
            values |= {f"step.{name}": getattr(step, name) for name in ("number", "batches", "result")}
            values |= {f"the type of step.{name}": type(getattr(step, name)) for name in ("row", "wanted")}
            row = dict.fromkeys(_RARE) | dict(step.row or {})
            values |= {f"step.row[{key!r}]": json.dumps({key: value}) for key, value in row.items()}
        return values
