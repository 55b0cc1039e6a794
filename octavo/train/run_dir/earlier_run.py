"""The files of an earlier run in the directory of a new one: whether they bind it, and how they make room.

A run is bound by its checkpoints and its result: they are resumed, or the start is refused. A run that failed before
its first checkpoint leaves nothing to resume. A new start moves its files to `previous_1/` (or the next free number),
where they can be read. Only names that a run writes are moved; a directory that no run wrote is refused.
"""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

from octavo.base import safe_read
from octavo.base.wording import count_noun
from octavo.config import ConfigError, load_config, to_yaml
from octavo.train.errors import TrainError
from octavo.train.run_dir.file_names import (
    CHECKPOINTS,
    CONFIG,
    ENVIRONMENT,
    METRICS,
    MILESTONES,
    RESULT,
    is_written_by_run,
)

PREVIOUS = "previous_"  # followed by a number, from 1


def has_steps(directory: Path) -> bool:
    """True if a run has written metrics there. Raises TrainError for a pipe, which would block a write."""
    metrics = directory / METRICS
    if metrics.exists():
        safe_read.open_file(metrics, TrainError).close()
    return metrics.exists() and metrics.stat().st_size > 0


def is_binding(directory: Path) -> bool:
    """True if the directory has a result or a checkpoint, even a damaged one. Unfinished saves do not count."""
    # `iterdir` lists hidden names, too: a save that replaces another keeps the older one as .step_N.old.
    folders = [directory / name for name in (CHECKPOINTS, MILESTONES) if (directory / name).is_dir()]
    entries = [entry.name for folder in folders for entry in folder.iterdir()]
    return (directory / RESULT).exists() or any(not name.endswith((".tmp", ".gone")) for name in entries)


def check_written_by_run(directory: Path, names: list[str]) -> None:
    """Raise TrainError unless a run wrote the directory, which has the entries `names`: it has its configuration, and
    a record of the machine or metrics. A file of another program, or of a user, may be named config.yaml, too."""
    listed = f"run.dir {directory} is not empty ({', '.join(names[:3])})"
    refusal = f"{listed} and contains no Octavo run. Name a directory that is new or empty; nothing is overwritten"
    if CONFIG not in names:
        raise TrainError(refusal)
    if is_binding(directory) or {ENVIRONMENT, METRICS} & {*names}:
        return
    try:  # a run that was killed at once: its configuration has every default, which a user's has not
        text = safe_read.read_bytes(directory / CONFIG, TrainError).decode("utf-8", "replace")
        is_resolved = to_yaml(load_config(directory / CONFIG)) == text
    except ConfigError:
        is_resolved = False
    if not is_resolved:
        raise TrainError(f"{refusal} ({CONFIG} is not one that a run wrote)")


def move_aside(directory: Path) -> str | None:
    """Move the files of a run without a checkpoint to a new `previous_N/` in its directory, and return a sentence that
    says so; None if there are none. Its configuration is copied, and the caller replaces it. Raises TrainError if they
    cannot be moved."""
    names = sorted(entry.name for entry in directory.iterdir() if is_written_by_run(entry.name))
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
    except OSError as error:
        raise TrainError(
            f"{directory} contains a run without a checkpoint, and its files cannot be moved to {PREVIOUS}N/ "
            f"({error.strerror}: {error.filename}). Name another run.dir"
        ) from error
    return (
        f"{directory} contains a run without a checkpoint: its {count_noun(len(names), 'file')} moved to "
        f"{target.name}/, and the run starts from the beginning"
    )
