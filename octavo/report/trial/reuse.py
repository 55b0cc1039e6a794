"""What of an earlier trial is read again: runs that are finished, of the same configuration, data and model folder.

What was trained otherwise is refused, or deleted where the trial begins afresh.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from octavo.base import atomic_write, safe_read
from octavo.config import Config, load_config
from octavo.report.evidence.run_reader import ReportError, RunRecord, read
from octavo.report.evidence.trial_spec import Run


def clear(directory: Path) -> None:
    """Delete the runs and the report of an earlier trial; only folders that a trial made are touched."""
    for folder in sorted((directory / "arms").glob("*")):
        if (folder / "config.yaml").is_file():
            shutil.rmtree(folder)
    if (directory / "held-out" / "before.json").is_file():
        shutil.rmtree(directory / "held-out")
    for noted in ("files.json", "power.json"):
        (directory / noted).unlink(missing_ok=True)
    if (directory / "report" / "report.json").is_file():
        shutil.rmtree(directory / "report")


def check_reusable(run: Run) -> None:
    """Raise ``ReportError`` where the run's folder holds a run of another configuration."""
    directory = Path(run.cfg.run.dir)
    saved = directory / "config.yaml"
    if not saved.is_file():
        return
    differ = _differences(comparable(load_config(saved)), comparable(run.cfg))
    if differ:
        shown = "; ".join(f"{key} was {old!r}, is now {new!r}" for key, old, new in differ[:5])
        raise ReportError(
            f"{directory} was trained with another configuration: {shown}. "
            "Give another directory, or --fresh to train the runs again"
        )


def same_files(cfg: Config, directory: Path) -> None:
    """Note what the data and the model folder hold when a trial begins, and raise ``ReportError`` where they hold
    something else when it goes on: its runs would be of different data."""
    from octavo.train import TrainError
    from octavo.train.run_dir import input_fingerprints

    now, file = input_fingerprints.fingerprints(cfg), directory / "files.json"
    if not file.exists():
        directory.mkdir(parents=True, exist_ok=True)
        atomic_write.write_text(file, json.dumps(now, indent=1) + "\n")
        return
    try:
        input_fingerprints.same(safe_read.read_json(file, ReportError), now, directory, cfg.model.path)
    except TrainError as error:
        raise ReportError(f"{error}. --fresh trains the runs of this trial again") from error


def comparable(cfg: Config) -> dict[str, Any]:
    """What decides a run's figures: everything but where the run lies and how it is watched and saved."""
    data = cfg.model_dump(mode="json")
    saved = "save", "save_every", "save_states", "keep", "milestones"
    for key in ("dir", "resume", "fork", *saved, "tensorboard", "trackers"):
        data["run"].pop(key, None)
    return data


def _differences(old: Any, new: Any, key: str = "") -> list[tuple[str, Any, Any]]:
    if isinstance(old, dict) and isinstance(new, dict):
        found = []
        for name in dict.fromkeys([*old, *new]):
            found += _differences(old.get(name), new.get(name), f"{key}.{name}" if key else name)
        return found
    return [] if old == new else [(key, old, new)]


def finished(run: Run) -> RunRecord | None:
    """The record of a run that reached its end; None where it must (still) run."""
    directory = Path(run.cfg.run.dir)
    if not (directory / "metrics.jsonl").is_file():
        return None
    try:
        record = read(directory)
    except ReportError:
        return None
    return record if record.finished else None
