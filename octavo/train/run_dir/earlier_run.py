"""The files of an earlier run in the directory of a new one: whether they bind it, and how they make room.

A run is bound by its checkpoints and its result: they are resumed, or the start is refused. A run that failed before
its first checkpoint leaves nothing to resume. A new start moves its files to `previous_1/` (or the next free number),
where they can be read. Only names that a run writes are moved; a directory that no run wrote is refused.
"""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path

from octavo import checkpoint
from octavo.base import safe_read, target_folder
from octavo.base.atomic_write import write_text
from octavo.base.wording import count_noun
from octavo.config import stage_folders
from octavo.config.yaml.document import read_text
from octavo.train.errors import TrainError
from octavo.train.run_dir.file_names import (
    CHECKPOINTS,
    CONFIG,
    ENVIRONMENT,
    METRICS,
    MILESTONES,
    NCCL_TRACE,
    REFERENCE,
    RESULT,
    is_written_by_run,
)

PREVIOUS = "previous_"  # followed by a number, from 1

# A run writes every key with its default, and a user few of them. These are in every version's config.yaml; later
# versions have more. `lora` is null in most runs.
_SECTIONS = {"model", "fp8", "lora", "data", "train", "optimizer", "run"}
_RUN_KEYS = {"dir", "seed", "resume", "save_every", "keep", "eval_every", "log_every", "health_every", "tensorboard"}


def has_steps(directory: Path) -> bool:
    """True if a run has written metrics there. Raises TrainError for a pipe, which would block a write."""
    metrics = stage_folders.metrics_file(directory)
    if metrics.exists():
        safe_read.open_file(metrics, TrainError).close()
    if stage_folders.stage_of(directory) is not None:
        return bool(_rows_of_stage(directory))
    return metrics.exists() and metrics.stat().st_size > 0


def _rows_of_stage(directory: Path) -> list[str]:
    """Return the lines of this stage in the file that all stages share."""
    file, stage = stage_folders.metrics_file(directory), stage_folders.stage_of(directory)
    rows = (row for _, row in safe_read.json_lines(file, TrainError)) if file.exists() else ()
    return [json.dumps(row) + "\n" for row in rows if row.get("stage") == stage]


def is_binding(directory: Path) -> bool:
    """True if the directory has a result or a checkpoint, even a damaged one. Unfinished saves do not count, nor do
    other entries of the folders of checkpoints, such as .DS_Store."""
    return (directory / RESULT).exists() or any(
        checkpoint.has_saves(directory / name) for name in (CHECKPOINTS, MILESTONES)
    )


def check_written_by_run(directory: Path, names: list[str]) -> None:
    """Raise TrainError unless a run wrote the directory, which has the entries `names`. Names prove nothing, because
    other programs write config.yaml, metrics.jsonl and wandb/, too: the configuration must be one that a run wrote.

    The configuration is a run's first file, except NCCL's traces, and environment.json is the second. A copy of a
    configuration next to files that are written later is not a run.
    """
    listed = f"run.dir {directory} is not empty ({', '.join(names[:3])})"
    refusal = f"{listed} and contains no Octavo run. Name a directory that is new or empty; nothing is overwritten"
    later = [name for name in names if is_written_by_run(name) and name != CONFIG and not name.startswith(NCCL_TRACE)]
    if CONFIG not in names:
        if all(name.startswith(NCCL_TRACE) for name in names):  # ranks lost each other before the run began
            return
        raise TrainError(refusal)
    if not _is_config_of_run(directory / CONFIG):
        raise TrainError(f"{refusal} ({CONFIG} is not one that a run wrote)")
    if later and not is_binding(directory) and not {ENVIRONMENT, METRICS} & {*later}:
        raise TrainError(f"{refusal} ({later[0]} is there without {ENVIRONMENT}, which a run writes before it)")


def _is_config_of_run(file: Path) -> bool:
    """Return whether a configuration has the keys that a run writes, whatever their values."""
    text = safe_read.read_bytes(file, TrainError).decode("utf-8", "replace")
    sections = read_text(text, str(file)).value
    run = sections.get("run")
    return {*sections} >= _SECTIONS and isinstance(run, dict) and {*run} >= _RUN_KEYS


def move_aside(directory: Path) -> str | None:
    """Move the files of a run without a checkpoint to a new `previous_N/` in its directory, and return a sentence that
    says so; None if there are none. Its configuration is copied, and the caller replaces it. Raises TrainError if they
    cannot be moved."""
    shared = () if stage_folders.stage_of(directory) is None else (METRICS,)  # it has the rows of earlier stages
    # Figures of the reference are used again if they belong to the new run, which checks that.
    names = sorted(
        entry.name
        for entry in directory.iterdir()
        if is_written_by_run(entry.name) and not entry.name.startswith(REFERENCE) and entry.name not in shared
    )
    names.sort(key=lambda name: name == ENVIRONMENT)  # last, so that an interrupted move leaves what a run left
    if not names:
        return None
    try:
        for number in itertools.count(1):
            target = directory / f"{PREVIOUS}{number}"
            if not target.exists() and not target.is_symlink():
                break
        target.mkdir()
        for name in names:
            if name == CONFIG:  # stays until the new one replaces it, so that the directory is a run at any moment
                shutil.copy2(directory / name, target / name)
            else:
                (directory / name).rename(target / name)
        if shared and (rows := _rows_of_stage(directory)):  # the run that begins drops them there
            write_text(target / METRICS, "".join(rows))
    except OSError as error:
        raise TrainError(
            f"{directory} contains a run without a checkpoint, and its files cannot be moved to {PREVIOUS}N/ "
            f"({error.strerror}: {error.filename}). Name another run.dir"
        ) from error
    return (
        f"{directory} contains a run without a checkpoint: its {count_noun(len(names), 'file')} moved to "
        f"{target.name}/, and the run starts from the beginning"
    )


def refuse_foreign_directory(directory: Path) -> None:
    """Raise TrainError if a directory holds files that no run wrote, or cannot be written to."""
    target_folder.check_target(directory, TrainError)
    names = sorted(entry.name for entry in directory.iterdir() if entry.name[0] != ".") if directory.is_dir() else []
    if names == [stage_folders.STAGES] and not any((directory / stage_folders.STAGES).iterdir()):
        return  # of a run that was killed before it wrote there
    if names:
        check_written_by_run(directory, names)


def continues_stage(start: str | None, directory: Path) -> bool:
    """Return whether a run in the directory that starts from ``start`` is the last of the stages there."""
    if (count := stage_folders.count_stages(directory)) is None:
        return False
    before = stage_folders.earlier_stages(directory)[-1:]
    return count == 1 or (start is not None and [Path(start).absolute()] == [folder.absolute() for folder in before])
