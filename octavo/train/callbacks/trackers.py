"""`run.trackers`: the rows of a run, its configuration and at the end its page, in wandb, trackio, MLflow or SwanLab.

One function per library opens a run there and returns a common interface (:class:`Opened`). A tracker is a watcher of
the run (:mod:`octavo.train.callbacks.callback`): only the main rank has it, and an error after the start does not end
the run. The libraries' own environment variables decide where data is stored and whether it is uploaded (WANDB_MODE,
TRACKIO_DIR, MLFLOW_TRACKING_URI, SWANLAB_MODE); the project is octavo unless they name another. `trackers.json` in the
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


class Opened(NamedTuple):
    """A run in a tracker. ``name`` identifies it for a resume; ``log`` takes the numbers of a step; ``page`` an HTML
    file and its step; ``close`` whether the run finished."""

    name: str
    log: Callable[[Numbers, int], Any]
    page: Callable[[Path, int], Any]
    close: Callable[[bool], Any]


def _wandb(settings: dict[str, Any], home: Path, known: str | None) -> Opened:
    import wandb

    project = os.environ.get("WANDB_PROJECT", "octavo")
    run = wandb.init(project=project, name=home.name, dir=str(home), id=known, resume="allow", config=settings)
    # A separate metric, because wandb's own step can only increase, and a resumed run repeats steps.
    run.define_metric("step")
    run.define_metric("*", step_metric="step")
    return Opened(
        run.id,
        lambda numbers, step: run.log({**numbers, "step": step}),
        lambda file, step: run.log({"page": wandb.Html(str(file), inject=False), "step": step}),
        lambda finished: run.finish(exit_code=0 if finished else 1),
    )


def _trackio(settings: dict[str, Any], home: Path, known: str | None) -> Opened:
    import trackio

    # trackio identifies runs by name, so the name must not collide with another run directory's.
    name = known or f"{home.name}-{datetime.now(UTC):%Y%m%d-%H%M%S}"
    project = os.environ.get("TRACKIO_PROJECT", "octavo")
    run = trackio.init(project=project, name=name, resume="allow" if known else "never", config=settings)
    return Opened(
        name,
        lambda numbers, step: run.log(dict(numbers), step=step),
        lambda file, step: run.log({"page": trackio.Html(file)}, step=step),
        lambda finished: run.finish(),
    )


def _mlflow(settings: dict[str, Any], home: Path, known: str | None) -> Opened:
    import mlflow

    if not {"MLFLOW_EXPERIMENT_NAME", "MLFLOW_EXPERIMENT_ID"} & os.environ.keys():
        mlflow.set_experiment("octavo")
    run_id = mlflow.start_run(run_id=known, run_name=None if known else home.name).info.run_id
    if known is None:  # MLflow parameters cannot be changed
        every = list(_flat(settings).items())
        for first in range(0, len(every), 100):  # the largest batch that a server accepts
            mlflow.log_params(dict(every[first : first + 100]), run_id=run_id)
    return Opened(
        run_id,
        lambda numbers, step: mlflow.log_metrics(dict(numbers), step=step, run_id=run_id),
        lambda file, step: mlflow.log_artifact(str(file), run_id=run_id),
        lambda finished: mlflow.end_run("FINISHED" if finished else "KILLED"),
    )


def _swanlab(settings: dict[str, Any], home: Path, known: str | None) -> Opened:
    import swanlab

    project = os.environ.get("SWANLAB_PROJ_NAME", "octavo")
    again = {} if known is None else {"id": known, "resume": "allow"}
    run = swanlab.init(project=project, name=home.name, log_dir=str(home / "swanlog"), config=settings, **again)
    return Opened(
        run.id,
        lambda numbers, step: run.log(dict(numbers), step=step),
        lambda file, step: run.log({"page": swanlab.Html(str(file))}, step=step),
        lambda finished: run.finish() if finished else run.finish(state="aborted"),
    )


_OPEN = {"wandb": _wandb, "trackio": _trackio, "mlflow": _mlflow, "swanlab": _swanlab}


def check_installed(cfg: Config) -> None:
    """Raises TrainError for trackers whose package is not installed."""
    if why := environment.why_no_trackers(cfg.run.trackers):
        raise TrainError(why)


def trackers_of(cfg: Config) -> tuple[Tracker, ...]:
    """A watcher for each of `run.trackers`."""
    return tuple(Tracker(name) for name in cfg.run.trackers)


class Tracker(Callback):
    """One tracker of a run. It gets the rows of metrics.jsonl, with TensorBoard's names."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.opened: Opened | None = None

    def __str__(self) -> str:
        return f"the tracker {self.name}"

    def begin(self, run: Run) -> None:
        names = run_dir.read_json(run.directory / FILE) or {}
        settings = replace_nonfinite(run.cfg.model_dump(mode="json"))
        try:
            self.opened = _OPEN[self.name](settings, run.directory.resolve(), names.get(self.name))
        except Exception as error:
            raise TrainError(
                f"run.trackers: {self.name} could not start ({first_line(error)}). Log in, or use it offline "
                f"(see its own documentation), or leave {self.name} out"
            ) from error
        if names.get(self.name) != self.opened.name:
            run_dir.write_json(run.directory / FILE, {**names, self.name: self.opened.name})

    def end_step(self, run: Run, step: Step) -> None:
        if step.wanted and self.opened is not None:
            row = {**step.row, **({"gain": run.row["gain"]} if "gain" in run.row else {})}
            summary = run.job.progress.health if "health" in row else None
            self.opened.log(flatten_row(replace_nonfinite(row), summary, run.job.phase.tensorboard), step.number)

    def end(self, run: Run, result: RunResult) -> None:
        self._close(run, result.status == "finished")

    def failed(self, run: Run, error: Exception) -> None:
        self._close(run, False)

    def _close(self, run: Run, finished: bool) -> None:
        if self.opened is None:
            return
        try:
            if (file := run.directory / PAGE).exists():
                self.opened.page(file, run.step)
        finally:
            self.opened.close(finished)


def _flat(settings: Any, key: str = "") -> dict[str, Any]:
    """Nested settings by dotted key; list items by index."""
    if isinstance(settings, list):
        settings = dict(enumerate(settings))
    if not isinstance(settings, dict):
        return {key: settings}
    parts = (_flat(value, f"{key}.{name}" if key else str(name)) for name, value in settings.items())
    return {name: value for part in parts for name, value in part.items()}
