"""Held-out data as a trial judges it, answer by answer: the trained weights in the precision that is asked for.

    held-out/before.json         the model as the trial found it, in high precision
    held-out/NAME.json           a run of the trial, as it was trained
    held-out/NAME-high.json      the same weights in high precision

Each is read again as long as it is of the same weights; that the data are the same is the trial's to see to.
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
from octavo.report.evidence.claims import Judged
from octavo.report.evidence.run_reader import ReportError
from octavo.report.evidence.trial_spec import Run

FOLDER = "held-out"


def judge_model(cfg: Config, directory: Path, console: Any) -> Judged:
    """The model that ``cfg`` begins with, in high precision."""
    weights = sorted(Path(cfg.model.path).glob("*.safetensors"))
    stats = [(file.name, file.stat()) for file in weights]
    # a copy over a file may set the former size and time (`cp -p`), and never its ctime
    sizes = [[name, s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino] for name, s in stats]
    random = ["random", cfg.run.seed, cfg.model.init_std] if cfg.model.init == "random" else None
    of = {"model": cfg.model.path, "weights": random or sizes}
    return _kept(directory / FOLDER / "before.json", of, Path(cfg.model.path), cfg, "off", "before training", console)


def judge_run(run: Run, directory: Path, console: Any, high: bool = False) -> Judged:
    """The weights that a finished run trained, as it computed or in high precision."""
    home = Path(run.cfg.run.dir)
    if not (home / "result.json").is_file():
        raise ReportError(f"{home} has no result.json: the run is not finished; the same command continues the trial")
    words = f"{run.label}{', the same weights in high precision' if high else ''}"
    recipe = "off" if high else None
    return _kept(_file(run, directory, high), _weights(run), home, run.cfg, recipe, words, console)


def judged_earlier(run: Run, directory: Path, high: bool = False) -> Judged | None:
    """What was judged of a finished run in an earlier call, if it was of these weights; judges nothing."""
    return _read(_file(run, directory, high), _weights(run))


def rows(cfg: Config) -> int:
    """How many held-out rows a configuration names, without looking into them. Raises DataError."""
    from octavo.data.tasks.sources import open_dataset

    cache = None if cfg.data.cache is None else Path(cfg.data.cache)
    counts = [(len(open_dataset(dataset, cache)), dataset.max_samples) for dataset in cfg.data.eval]
    return sum(count if most is None else min(count, most) for count, most in counts)


def _file(run: Run, directory: Path, high: bool) -> Path:
    return directory / FOLDER / f"{run.name}{'-high' if high else ''}.json"


def _weights(run: Run) -> dict[str, Any]:
    """What tells the weights of a finished run from those of another that had its place before."""
    return {"run": run.name, "result": read_text(Path(run.cfg.run.dir) / "result.json", ReportError)}


def _read(file: Path, of: dict[str, Any]) -> Judged | None:
    if not file.exists():
        return None
    found = read_json(file, error=ReportError)
    if not isinstance(found, dict) or found.get("of") != of:
        return None
    return Judged(tuple(found["pieces"]), int(found["gemms"]))


def _kept(
    file: Path, of: dict[str, Any], target: Path, cfg: Config, recipe: str | None, words: str, console: Any
) -> Judged:
    """What the file holds, where it is of the same thing; else judged now, and written."""
    if (known := _read(file, of)) is not None:
        return known
    import torch

    from octavo.train import artifacts
    from octavo.train.setup.resolve_config import random_weights

    found = artifacts.look(target)
    if found.kind == "folder":  # what training began with
        found = dataclasses.replace(found, random=random_weights(cfg))
    if console is not None:
        console.print(f"held-out data: {words}", highlight=False, markup=False, soft_wrap=True)
    pieces: list[dict[str, Any]] = []
    threads = torch.get_num_threads()
    torch.set_num_threads(cfg.run.threads or threads)
    try:
        result = artifacts.evaluate_target(found, cfg, recipe=recipe, pieces=pieces)
    finally:
        torch.set_num_threads(threads)
    gc.collect()
    file.parent.mkdir(parents=True, exist_ok=True)
    atomic_write.write_text(file, json.dumps({"of": of, "gemms": result["fp8_gemms"], "pieces": pieces}) + "\n")
    return Judged(tuple(pieces), int(result["fp8_gemms"]))
