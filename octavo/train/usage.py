"""Using what was trained: a run directory back as a model, and its evaluation."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from octavo import checkpoint, data, fp8, models, parallel
from octavo.config import Config, load_config
from octavo.train import planning, rundir
from octavo.train.build import data_settings, scaling_of
from octavo.train.errors import TrainError
from octavo.train.evaluation import evaluate
from octavo.train.forward import Forward, autocasts, model_dtype

Say = Callable[[str], None]


def load_run(
    run_dir: str | Path, step: int | None = None, recipe: str | None = None, say: Say = warnings.warn
) -> tuple[nn.Module, Any, Config]:
    """(model, processor, configuration) of a run, ready to evaluate or to generate: FP8 applied as it was trained.

    step    the checkpoint to load; None: the newest whole one
    recipe  another FP8 recipe than the run's for the whole model, "off" for high precision
    say     is told which newer checkpoints are damaged and were passed over

    One process. Raises TrainError where the directory is no run or has no such checkpoint.
    """
    model, processor, cfg, _ = _open(Path(run_dir), step, recipe, say)
    return model, processor, cfg


def _open(directory: Path, step: int | None, recipe: str | None, say: Say) -> tuple[nn.Module, Any, Config, int]:
    """`load_run`, and the step that was loaded."""
    cfg = configuration(directory)
    if recipe == "off":  # whatever formats, components and rules the run had
        cfg = cfg.model_copy(update={"fp8": type(cfg.fp8)(recipe="off")})
    elif recipe is not None:
        cfg = cfg.with_overrides([f"fp8.recipe={recipe}", "fp8.plan=null"])
    world = parallel.World(device=torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    path = _checkpoint(directory, step, world, say)
    plan, _, _ = planning.plan_for(cfg, saved=directory / rundir.PLAN if recipe is None else None)
    model = models.load(cfg.model.path, dtype=model_dtype(cfg), device=world.device)
    fp8.apply(model, plan)
    restored = checkpoint.load(path, model=model, optimizer=None, world=world)
    histories = scaling_of(restored.extra)
    if recipe is None and histories:
        fp8.load_scaling_state(model, histories)
    model.eval()
    processor = models.load_processor(cfg.model.path, cfg.data.max_pixels, cfg.data.min_pixels)
    return model, processor, cfg, restored.counters["step"]


def evaluate_run(
    run_dir: str | Path, step: int | None = None, recipe: str | None = None, say: Say = warnings.warn
) -> dict[str, Any]:
    """Evaluate a run on its held-out data: what `evaluate` gives, and the `step` that was evaluated. See `load_run`.

    Raises TrainError where the run's configuration names no held-out data.
    """
    cfg = configuration(Path(run_dir))
    if not cfg.data.eval:
        raise TrainError(f"the run {run_dir} names no held-out data; add data.eval to its configuration")
    model, processor, cfg, loaded = _open(Path(run_dir), step, recipe, say)
    evalset = data.eval_set(data_settings(cfg), processor)
    assert evalset is not None
    world = parallel.World(device=next(model.parameters()).device)
    found = evaluate(model, evalset, Forward(model, world, autocasts(cfg, world.device)), world)
    return {"step": loaded, **found}


def configuration(directory: Path) -> Config:
    """The configuration that a run was made with. Raises TrainError for a directory that holds no run."""
    file = directory / rundir.CONFIG
    if not file.is_file():
        raise TrainError(
            f"{directory} is not a run directory: it has no {rundir.CONFIG}. Name one that octavo train wrote"
        )
    return load_config(file)


def _checkpoint(directory: Path, step: int | None, world: parallel.World, say: Say) -> Path:
    folder = directory / rundir.CHECKPOINTS
    steps = checkpoint.steps(folder)
    if not steps:
        raise TrainError(f"the run {directory} has no checkpoint yet; it must reach run.save_every or its end first")
    if step is None:
        found = checkpoint.latest(folder, world, say)
        assert found is not None
        return found
    if step not in steps:
        raise TrainError(
            f"the run {directory} has no checkpoint of step {step}; there are {', '.join(map(str, steps))}"
        )
    return folder / f"step_{step}"
