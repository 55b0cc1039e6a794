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

from octavo import atomic
from octavo.config import Config
from octavo.reading import read_json, read_text
from octavo.report.claims import Judged
from octavo.report.rundir import ReportError
from octavo.report.trial import Run

FOLDER = "held-out"


def judge_model(cfg: Config, directory: Path, console: Any) -> Judged:
    """The model that ``cfg`` begins with, in high precision."""
    weights = sorted(Path(cfg.model.path).glob("*.safetensors"))
    sizes = [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in weights]
    random = ["random", cfg.run.seed, cfg.model.init_std] if cfg.model.init == "random" else None
    of = {"model": cfg.model.path, "weights": random or sizes}
    return _kept(directory / FOLDER / "before.json", of, Path(cfg.model.path), cfg, "off", "before training", console)


def judge_run(run: Run, directory: Path, console: Any, high: bool = False) -> Judged:
    """The weights that a finished run trained, as it computed or in high precision."""
    home = Path(run.cfg.run.dir)
    state = home / "result.json"
    if not state.is_file():
        raise ReportError(f"{home} has no result.json: the run is not finished; the same command continues the trial")
    of = {"run": run.name, "result": read_text(state, ReportError)}
    file = directory / FOLDER / f"{run.name}{'-high' if high else ''}.json"
    words = f"{run.label}{', the same weights in high precision' if high else ''}"
    return _kept(file, of, home, run.cfg, "off" if high else None, words, console)


def _kept(
    file: Path, of: dict[str, Any], target: Path, cfg: Config, recipe: str | None, words: str, console: Any
) -> Judged:
    """What the file holds, where it is of the same thing; else judged now, and written."""
    if file.exists():
        found = read_json(file, error=ReportError)
        if isinstance(found, dict) and found.get("of") == of:
            return Judged(tuple(found["pieces"]), int(found["gemms"]))
    import torch

    from octavo.train import base, finished

    found = finished.look(target)
    if found.kind == "folder":  # what training began with
        found = dataclasses.replace(found, random=base.drawn(cfg))
    if console is not None:
        console.print(f"held-out data: {words}", highlight=False, markup=False, soft_wrap=True)
    pieces: list[dict[str, Any]] = []
    threads = torch.get_num_threads()
    torch.set_num_threads(cfg.run.threads or threads)
    try:
        result = finished.evaluate_target(found, cfg, recipe=recipe, pieces=pieces)
    finally:
        torch.set_num_threads(threads)
    gc.collect()
    file.parent.mkdir(parents=True, exist_ok=True)
    atomic.write_text(file, json.dumps({"of": of, "gemms": result["fp8_gemms"], "pieces": pieces}) + "\n")
    return Judged(tuple(pieces), int(result["fp8_gemms"]))
