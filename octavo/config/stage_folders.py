"""Where the stages of a run (``train.stages``) are: the last one is the run directory, the others have folders in it.

RUN/stages/all_3.yaml     the configuration with all three stages
RUN/stages/1, 2           directories of runs, one for each stage but the last
RUN/metrics.jsonl         the rows of all stages, each with its `stage`
"""

from __future__ import annotations

import re
from pathlib import Path

STAGES = "stages"
_ALL = re.compile(r"all_([1-9]\d{0,2})\.yaml")
_METRICS = "metrics.jsonl"


def config_file(directory: Path, count: int) -> Path:
    """Return the file with the configuration of this number of stages, for the directory of the whole run."""
    return directory / STAGES / f"all_{count}.yaml"


def count_stages(directory: Path) -> int | None:
    """Return the number of stages of the whole run in a directory; None for a run without stages."""
    folder = directory / STAGES
    names = (_ALL.fullmatch(entry.name) for entry in folder.iterdir()) if folder.is_dir() else ()
    return next((int(name[1]) for name in names if name is not None), None)


def stage_of(directory: Path) -> int | None:
    """Return the number of the stage, from 1, that a run directory belongs to; None for a run without stages."""
    directory = directory.absolute()
    if directory.parent.name == STAGES and directory.name.isdecimal():
        count = count_stages(directory.parent.parent)
        if count is not None and 1 <= int(directory.name) < count:
            return int(directory.name)
    return count_stages(directory)


def earlier_stages(directory: Path) -> list[Path]:
    """Return the directories of the stages before the one that a run directory belongs to, in order."""
    folder = _whole_run(directory) / STAGES
    return [folder / str(earlier) for earlier in range(1, stage_of(directory) or 1)]


def metrics_file(directory: Path) -> Path:
    """Return the file with the rows of a run; the stages of a run share one."""
    return _whole_run(directory) / _METRICS


def _whole_run(directory: Path) -> Path:
    """Return the directory of the run that a stage belongs to."""
    inside = stage_of(directory) is not None and count_stages(directory) is None
    return directory.absolute().parent.parent if inside else directory
