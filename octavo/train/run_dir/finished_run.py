"""A run directory with a result: whether its run has finished, and whether a new start has the same inputs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octavo import checkpoint
from octavo.base import safe_read
from octavo.checkpoint import compat
from octavo.checkpoint.run_state.files import read_state
from octavo.config import Config
from octavo.data.storage.cache import Log
from octavo.train.errors import TrainError
from octavo.train.run_dir import input_fingerprints
from octavo.train.run_dir.file_names import CHECKPOINTS, MILESTONES


def why_not_finished(directory: Path, result: Mapping[str, Any]) -> str | None:
    """Return why a run with a result has not finished, or None if it has."""

    def last() -> str | None:
        steps = checkpoint.steps(directory / CHECKPOINTS)
        if not steps or steps[-1] != result["steps"]:
            return None
        newest = directory / CHECKPOINTS / f"step_{steps[-1]}"
        bad = checkpoint.describe_nonfinite(newest, read_state(newest))
        return None if bad is None else f"in {newest} {bad}"

    return compat.why_not_finished(result, last)


def check_same_inputs(
    directory: Path, result: Mapping[str, Any], cfg: Config, phase: Mapping[str, str], log: Log
) -> None:
    """Raise TrainError, with the names of the inputs, if a finished run was trained on others than the start has.

    The run's newest checkpoint records them. If none is left, a line is logged. Inputs that are missing now, and files
    at a URL, are not compared: a result stays readable when its data were deleted, and without a network. ``phase``:
    `Phase.fingerprints`.
    """
    folders = (directory / CHECKPOINTS, directory / MILESTONES)
    saves = {step: folder / f"step_{step}" for folder in reversed(folders) for step in checkpoint.steps(folder)}
    step = max((step for step in saves if step <= result["steps"]), default=None)
    if step is None:
        log(f"note: {directory} has no checkpoint left, so whether its run had the same data is not checked")
        return
    counters = read_state(saves[step])["counters"]
    safe_read.check_schema(counters, {"data": {}, "model": {}, "phase": {}}, saves[step] / "state.json", TrainError)
    now = {**input_fingerprints.fingerprints(cfg, log, with_urls=False), "phase": dict(phase)}
    model = {name: value for name, value in counters.get("model", {}).items() if name in now["model"]}
    saved = {**counters, "model": model if "model" in counters else None}
    input_fingerprints.check_same_inputs(saved, now, saves[step], cfg.model.path)
