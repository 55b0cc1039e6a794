"""Reuses finished runs of an earlier trial with the same configuration, data and model folder.

A run that was trained with different settings is an error, or is deleted if the trial is started with ``--fresh``.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from octavo.base import atomic_write, safe_read
from octavo.config import Config, load_config, stage_folders
from octavo.config.stages import run_configs, stage_configs
from octavo.report.evidence.run_reader import ReportError, RunRecord, read
from octavo.report.evidence.trial_spec import Run


def delete_trial(directory: Path) -> None:
    """Delete the runs and the report of an earlier trial; only folders that a trial created are touched."""
    for folder in sorted((directory / "arms").glob("*")):
        if (folder / "config.yaml").is_file() or stage_folders.count_stages(folder) is not None:
            shutil.rmtree(folder)
    if (directory / "held-out" / "before.json").is_file():
        shutil.rmtree(directory / "held-out")
    for noted in ("files.json", "power.json"):
        (directory / noted).unlink(missing_ok=True)
    if (directory / "report" / "report.json").is_file():
        shutil.rmtree(directory / "report")


def check_reusable(run: Run) -> None:
    """Raise ``ReportError`` if the run's folder holds a run of another configuration."""
    directory = Path(run.cfg.run.dir)
    count = stage_folders.count_stages(directory)
    differ = []
    if count not in (None, len(run.cfg.train.stages)):
        differ = [("the number of train.stages", count, len(run.cfg.train.stages))]
    for number, stage in enumerate(run_configs(run.cfg)):
        saved = Path(stage.run.dir) / "config.yaml"
        if saved.is_file():
            before, now = comparable_settings(load_config(saved)), comparable_settings(stage)
            if number:  # the stage before, by a path that depends on the working directory
                for one in (before, now):
                    one["run"].pop("start_from")
            differ += _differences(before, now)
    if differ:
        shown = "; ".join(f"{key} was {old!r}, is now {new!r}" for key, old, new in differ[:5])
        raise ReportError(
            f"{directory} was trained with another configuration: {shown}. Choose another directory, or train the runs "
            "again with --fresh"
        )


def check_same_casts(runs: Sequence[Run]) -> None:
    """Raise ``ReportError`` if runs were trained by a version in which their recipes have other casts, and others are
    left to train: those would have the casts of this version, or of ``fp8.plan``."""
    from octavo.fp8 import PlanError
    from octavo.fp8.planning import outdated_casts, read_casts

    begun = [run for run in runs if _keeps_its_casts(run)]
    for run in begun if len(begun) < len(runs) else ():
        file = Path(run.cfg.run.dir) / "plan.json"
        try:
            plan = safe_read.read_json(file, ReportError) if file.is_file() else {}
            changes = outdated_casts(plan, file, read_casts(run.cfg.fp8.plan) if run.cfg.fp8.plan else None)
        except PlanError as error:
            raise ReportError(str(error)) from error
        if changes:
            raise ReportError(
                f"{file.parent} was trained with other casts, and runs that are left to train would not be comparable: "
                f"{'; '.join(changes)}. Choose another directory, or train the runs again with --fresh"
            )


def _keeps_its_casts(run: Run) -> bool:
    """Return whether a run has finished, or has a checkpoint, from which it continues with the casts of its plan."""
    return read_finished(run) is not None or any((Path(run.cfg.run.dir) / "checkpoints").glob("step_*"))


def check_same_files(cfg: Config, directory: Path) -> None:
    """Record the content of the data and the model folder when a trial begins, and raise ``ReportError`` if it has
    changed when the trial continues: its runs would use different data."""
    from octavo.train import TrainError
    from octavo.train.run_dir import input_fingerprints

    *earlier, now = (input_fingerprints.fingerprints(stage) for stage in stage_configs(cfg))
    file = directory / "files.json"
    if not file.exists():
        directory.mkdir(parents=True, exist_ok=True)
        document = {**now, **({"earlier_stages": earlier} if earlier else {})}
        atomic_write.write_text(file, json.dumps(document, indent=1) + "\n")
        return
    try:
        saved = safe_read.read_json(file, ReportError)
        input_fingerprints.check_same_inputs(saved, now, directory, cfg.model.path)
        for before, stage in zip(saved.get("earlier_stages", []), earlier, strict=False):
            input_fingerprints.check_same_inputs(before, stage, directory, cfg.model.path)
    except TrainError as error:
        raise ReportError(f"{error}. --fresh trains the runs of this trial again") from error


def comparable_settings(cfg: Config) -> dict[str, Any]:
    """Return the settings that determine the figures of a run: all but its folder, tracking and checkpoints."""
    data = cfg.model_dump(mode="json")
    saved = "save", "save_every", "save_states", "keep", "milestones"
    for key in ("dir", "resume", "fork", *saved, "tensorboard", "trackers"):
        data["run"].pop(key, None)
    return data


def _differences(old: Any, new: Any, key: str = "") -> list[tuple[str, Any, Any]]:
    if isinstance(old, dict) and isinstance(new, dict):
        differences = []
        for name in dict.fromkeys([*old, *new]):
            differences += _differences(old.get(name), new.get(name), f"{key}.{name}" if key else name)
        return differences
    return [] if old == new else [(key, old, new)]


def read_finished(run: Run) -> RunRecord | None:
    """Return the record of a finished run, or None if the run must still train."""
    directory = Path(run.cfg.run.dir)
    if not (directory / "metrics.jsonl").is_file():
        return None
    try:
        record = read(directory)
    except ReportError:
        return None
    return record if record.finished else None
