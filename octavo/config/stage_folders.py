"""Where the stages of a run (``train.stages``) are: the last one is the run directory, the others have folders in it.

RUN/stages/config.yaml    the configuration with all stages
RUN/stages/1, 2, ...      directories of runs, one for each stage but the last
RUN/metrics.jsonl         the rows of all stages, each with its `stage`
"""

from __future__ import annotations

from pathlib import Path

STAGES = "stages"
_CONFIG = "config.yaml"
_METRICS = "metrics.jsonl"


def config_file(directory: Path) -> Path:
    """Return the file with the configuration of all stages, for the directory of the whole run."""
    return directory / STAGES / _CONFIG


def stage_of(directory: Path) -> int | None:
    """Return the number of the stage, from 1, that a run directory belongs to; None for a run without stages."""
    directory = directory.absolute()
    parent = directory.parent
    if parent.name == STAGES and directory.name.isdecimal() and (parent / _CONFIG).is_file():
        return int(directory.name)
    if not config_file(directory).is_file():
        return None
    return 1 + max((int(entry.name) for entry in (directory / STAGES).iterdir() if entry.name.isdecimal()), default=0)


def earlier_stages(directory: Path) -> list[Path]:
    """Return the directories of the stages before the one that a run directory belongs to, in order."""
    number = stage_of(directory)
    folder = _whole_run(directory) / STAGES
    return [folder / str(earlier) for earlier in range(1, number or 1)]


def metrics_file(directory: Path) -> Path:
    """Return the file with the rows of a run; the stages of a run share one."""
    return _whole_run(directory) / _METRICS


def _whole_run(directory: Path) -> Path:
    """Return the directory of the run that a stage belongs to."""
    inside = stage_of(directory) is not None and not config_file(directory).is_file()
    return directory.absolute().parent.parent if inside else directory
