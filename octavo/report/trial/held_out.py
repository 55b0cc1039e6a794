"""Evaluates the weights that a trial trained on held-out data, answer by answer, in a given precision.

    held-out/before.json         the initial model, in high precision
    held-out/NAME.json           a run of the trial, in the precision of its training
    held-out/NAME-high.json      the same weights in high precision

A file is reused as long as the weights are the same; the trial checks that the data are the same.
"""

from __future__ import annotations

import dataclasses
import gc
import json
from pathlib import Path
from typing import Any

from octavo.base import atomic_write
from octavo.base.safe_read import read_json, read_text
from octavo.config import Config
from octavo.report.evidence.claims import Evaluation
from octavo.report.evidence.run_reader import ReportError
from octavo.report.evidence.trial_spec import Run

FOLDER = "held-out"


def evaluate_model(cfg: Config, directory: Path, console: Any) -> Evaluation:
    """Evaluate the initial model of ``cfg``, in high precision."""
    weights = sorted(Path(cfg.model.path).glob("*.safetensors"))
    stats = [(file.name, file.stat()) for file in weights]
    # overwriting a file may restore its size and mtime (`cp -p`), but not its ctime
    sizes = [[name, s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino] for name, s in stats]
    random = ["random", cfg.run.seed, cfg.model.init_std] if cfg.model.init == "random" else None
    identity = {"model": cfg.model.path, "weights": random or sizes}
    return _evaluate_or_read(
        directory / FOLDER / "before.json", identity, Path(cfg.model.path), cfg, "off", "before training", console
    )


def evaluate_run(run: Run, directory: Path, console: Any, high: bool = False) -> Evaluation:
    """Evaluate the weights of a finished run, in the precision of its training or in high precision."""
    run_dir = Path(run.cfg.run.dir)
    if not (run_dir / "result.json").is_file():
        raise ReportError(
            f"{run_dir} has no result.json: the run is not finished; the same command continues the trial"
        )
    description = f"{run.label}{', the same weights in high precision' if high else ''}"
    recipe = "off" if high else None
    return _evaluate_or_read(
        _result_file(run, directory, high), _weights_identity(run), run_dir, run.cfg, recipe, description, console
    )


def read_evaluation(run: Run, directory: Path, high: bool = False) -> Evaluation | None:
    """Return the stored evaluation of a finished run, or None if there is none for these weights."""
    return _read(_result_file(run, directory, high), _weights_identity(run))


def _result_file(run: Run, directory: Path, high: bool) -> Path:
    return directory / FOLDER / f"{run.name}{'-high' if high else ''}.json"


def _weights_identity(run: Run) -> dict[str, Any]:
    """Return properties that distinguish the weights of a finished run from an earlier run in the same folder."""
    return {"run": run.name, "result": read_text(Path(run.cfg.run.dir) / "result.json", ReportError)}


def _read(file: Path, identity: dict[str, Any]) -> Evaluation | None:
    if not file.exists():
        return None
    stored = read_json(file, error=ReportError)
    if not isinstance(stored, dict) or stored.get("of") != identity:
        return None
    return Evaluation(tuple(stored["pieces"]), int(stored["gemms"]))


def _evaluate_or_read(
    file: Path, identity: dict[str, Any], target: Path, cfg: Config, recipe: str | None, description: str, console: Any
) -> Evaluation:
    """Return the stored result if it belongs to the same weights; otherwise evaluate now and write it."""
    if (stored := _read(file, identity)) is not None:
        return stored
    import torch

    from octavo.train import artifacts
    from octavo.train.setup.resolve_config import random_init

    opened = artifacts.inspect_target(target)
    if opened.kind == "folder":  # the initial model
        opened = dataclasses.replace(opened, random=random_init(cfg))
    if console is not None:
        console.print(f"held-out data: {description}", highlight=False, markup=False, soft_wrap=True)
    pieces: list[dict[str, Any]] = []
    threads = torch.get_num_threads()
    torch.set_num_threads(cfg.run.threads or threads)
    try:
        result = artifacts.evaluate_target(opened, cfg, recipe=recipe, pieces=pieces)
    finally:
        torch.set_num_threads(threads)
    gc.collect()
    file.parent.mkdir(parents=True, exist_ok=True)
    atomic_write.write_text(file, json.dumps({"of": identity, "gemms": result["fp8_gemms"], "pieces": pieces}) + "\n")
    return Evaluation(tuple(pieces), int(result["fp8_gemms"]))
