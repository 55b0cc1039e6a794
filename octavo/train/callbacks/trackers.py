"""Sends the rows, the configuration and finally the page of a run to wandb, trackio, MLflow or SwanLab
(`run.trackers`).

One function per library opens a run and returns a common interface (:class:`TrackedRun`). A tracker is a watcher of the
run (:mod:`octavo.train.callbacks.callback`): only the main rank has it, and an error after the start does not end the
run. The libraries' own environment variables decide where data is stored and whether it is uploaded (WANDB_MODE,
TRACKIO_DIR, MLFLOW_TRACKING_URI, SWANLAB_MODE); the default project is octavo. `trackers.json` in the
run directory has the run's name in each tracker, so that a resumed run continues there.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from octavo.base import environment
from octavo.base.safe_read import first_line, replace_nonfinite
from octavo.config import Config
from octavo.train.callbacks.callback import Callback, Run, Step
from octavo.train.callbacks.metrics import flatten_row
from octavo.train.callbacks.result import RunResult
from octavo.train.errors import TrainError
from octavo.train.run_dir import run_dir

FILE, PAGE = "trackers.json", "page.html"
Numbers = Mapping[str, float]


class TrackedRun(NamedTuple):
    """A run in a tracker.

    ``name`` identifies it when the run is resumed. ``log`` takes the numbers of a step and the step, ``page`` an HTML
    file and the step, and ``close`` True if the run finished.
    """

    name: str
    log: Callable[[Numbers, int], Any]
    page: Callable[[Path, int], Any]
    close: Callable[[bool], Any]


def _wandb(settings: dict[str, Any], directory: Path, run_id: str | None) -> TrackedRun:
    import wandb

    project = os.environ.get("WANDB_PROJECT", "octavo")
    run = wandb.init(
        project=project, name=directory.name, dir=str(directory), id=run_id, resume="allow", config=settings
    )
    # A separate metric, because wandb's step can only increase, and a resumed run repeats steps.
    run.define_metric("step")
    run.define_metric("*", step_metric="step")
    return TrackedRun(
        run.id,
        lambda numbers, step: run.log({**numbers, "step": step}),
        lambda file, step: run.log({"page": wandb.Html(str(file), inject=False), "step": step}),
        lambda finished: run.finish(exit_code=0 if finished else 1),
    )


def _trackio(settings: dict[str, Any], directory: Path, run_id: str | None) -> TrackedRun:
    import trackio

    # trackio identifies runs by name, so the names of two run directories must differ.
    name = run_id or f"{directory.name}-{datetime.now(UTC):%Y%m%d-%H%M%S}"
    project = os.environ.get("TRACKIO_PROJECT", "octavo")
    run = trackio.init(project=project, name=name, resume="allow" if run_id else "never", config=settings)
    return TrackedRun(
        name,
        lambda numbers, step: run.log(dict(numbers), step=step),
        lambda file, step: run.log({"page": trackio.Html(file)}, step=step),
        lambda finished: run.finish(),
    )


def _mlflow(settings: dict[str, Any], directory: Path, run_id: str | None) -> TrackedRun:
    import mlflow

    if not {"MLFLOW_EXPERIMENT_NAME", "MLFLOW_EXPERIMENT_ID"} & os.environ.keys():
        mlflow.set_experiment("octavo")
    run_id = mlflow.start_run(run_id=run_id, run_name=None if run_id else directory.name).info.run_id
    if run_id is None:  # MLflow parameters cannot be changed
        parameters = list(_flatten(settings).items())
        for first in range(0, len(parameters), 100):  # the largest batch that a server accepts
            mlflow.log_params(dict(parameters[first : first + 100]), run_id=run_id)
    return TrackedRun(
        run_id,
        lambda numbers, step: mlflow.log_metrics(dict(numbers), step=step, run_id=run_id),
        lambda file, step: mlflow.log_artifact(str(file), run_id=run_id),
        lambda finished: mlflow.end_run("FINISHED" if finished else "KILLED"),
    )


def _swanlab(settings: dict[str, Any], directory: Path, run_id: str | None) -> TrackedRun:
    import swanlab

    project = os.environ.get("SWANLAB_PROJ_NAME", "octavo")
    resume_options = {} if run_id is None else {"id": run_id, "resume": "allow"}
    run = swanlab.init(
        project=project, name=directory.name, log_dir=str(directory / "swanlog"), config=settings, **resume_options
    )
    return TrackedRun(
        run.id,
        lambda numbers, step: run.log(dict(numbers), step=step),
        lambda file, step: run.log({"page": swanlab.Html(str(file))}, step=step),
        lambda finished: run.finish() if finished else run.finish(state="aborted"),
    )


_OPEN = {"wandb": _wandb, "trackio": _trackio, "mlflow": _mlflow, "swanlab": _swanlab}


def check_installed(cfg: Config) -> None:
    """Raise TrainError if the package of a tracker is not installed."""
    if why := environment.why_no_trackers(cfg.run.trackers):
        raise TrainError(why)


def make_trackers(cfg: Config) -> tuple[Tracker, ...]:
    """Return a watcher for each of `run.trackers`."""
    return tuple(Tracker(name) for name in cfg.run.trackers)


class Tracker(Callback):
    """A tracker of a run. It receives the rows of metrics.jsonl, with the names of TensorBoard."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.tracked: TrackedRun | None = None

    def __str__(self) -> str:
        return f"the tracker {self.name}"

    def begin(self, run: Run) -> None:
        names = run_dir.read_json(run.directory / FILE) or {}
        settings = replace_nonfinite(run.cfg.model_dump(mode="json"))
        try:
            self.tracked = _OPEN[self.name](settings, run.directory.resolve(), names.get(self.name))
        except Exception as error:
            raise TrainError(
                f"run.trackers: {self.name} could not start ({first_line(error)}). Log in, use it offline "
                f"(see its documentation), or remove {self.name}"
            ) from error
        if names.get(self.name) != self.tracked.name:
            run_dir.write_json(run.directory / FILE, {**names, self.name: self.tracked.name})

    def end_step(self, run: Run, step: Step) -> None:
        if step.wanted and self.tracked is not None:
            row = {**step.row, **({"gain": run.row["gain"]} if "gain" in run.row else {})}
            summary = run.job.progress.health if "health" in row else None
            self.tracked.log(flatten_row(replace_nonfinite(row), summary, run.job.phase.tensorboard), step.number)

    def end(self, run: Run, result: RunResult) -> None:
        self._close(run, result.status == "finished")

    def failed(self, run: Run, error: Exception) -> None:
        self._close(run, False)

    def _close(self, run: Run, finished: bool) -> None:
        if self.tracked is None:
            return
        try:
            if (file := run.directory / PAGE).exists():
                self.tracked.page(file, run.step)
        finally:
            self.tracked.close(finished)


def _flatten(settings: Any, key: str = "") -> dict[str, Any]:
    """Return nested settings by dotted key, and list items by index."""
    if isinstance(settings, list):
        settings = dict(enumerate(settings))
    if not isinstance(settings, dict):
        return {key: settings}
    parts = (_flatten(value, f"{key}.{name}" if key else str(name)) for name, value in settings.items())
    return {name: value for part in parts for name, value in part.items()}
