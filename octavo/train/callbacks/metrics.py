"""The log of a run: metrics.jsonl and TensorBoard events. The stages of a run share metrics.jsonl, and each sees its
rows."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.base.atomic_write import write_text
from octavo.base.safe_read import replace_nonfinite
from octavo.config import stage_folders
from octavo.config.stage_folders import STAGES
from octavo.train.run_dir.run_dir import METRICS, read_rows


@dataclass(frozen=True)
class MetricsFile:
    """The file of the run in ``directory``; ``stage`` is None for a run without stages, ``before`` the number of steps
    of earlier stages."""

    path: Path
    stage: int | None = None
    before: int = 0

    @classmethod
    def of(cls, directory: Path) -> MetricsFile:
        if directory.absolute().parent.name != STAGES and not (directory / STAGES).is_dir():
            return cls(directory / METRICS)
        path, stage = stage_folders.metrics_file(directory), stage_folders.stage_of(directory)
        # Not from the directories of earlier stages, which may be deleted; their last steps are always logged.
        totals = (row.get("total_step", 0) for row in read_rows(path) if stage and row.get("stage", 0) < stage)
        return cls(path, stage, max(totals, default=0))

    def read(self) -> list[dict[str, Any]]:
        """Return the rows of this stage, without an incomplete last line of a killed process."""
        return [row for row in read_rows(self.path) if self._stage(row) == self.stage]

    def truncate(self, step: int) -> None:
        """Atomically drop the lines after `step` of this stage, which will be written again, and an incomplete last
        line."""
        if self.path.exists():
            rows = (row for row in read_rows(self.path) if self._stage(row) != self.stage or row["step"] <= step)
            write_text(self.path, "".join(json.dumps(row) + "\n" for row in rows))

    def entries(self, step: int) -> dict[str, int]:
        """Return what the row of a step has besides: its stage, and the number of steps since the first stage."""
        return {} if self.stage is None else {"stage": self.stage, "total_step": self.before + step}

    def _stage(self, row: Mapping[str, int]) -> int | None:
        return None if self.stage is None else row.get("stage", 0)


class MetricsLog:
    """Appends rows to metrics.jsonl and their numbers to TensorBoard. Exists only on the main rank.

    A row is JSON without NaN or infinity: numbers that are not finite are written as null. `names` maps figures to
    their names in TensorBoard, where these differ.
    """

    def __init__(self, directory: Path, tensorboard: bool, first_step: int, names: Mapping[str, str] = {}) -> None:
        self._names = names
        self._rows = MetricsFile.of(directory)
        self._file = self._rows.path.open("a", encoding="utf-8")
        self._events = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            # purge_step hides events that a killed run wrote after its checkpoint.
            self._events = SummaryWriter(str(directory / "tensorboard"), purge_step=first_step)

    def write(self, row: Mapping[str, Any], summary: Mapping[str, float] | None = None) -> None:
        """Write one line. `summary` has FP8 health figures for TensorBoard; the row has the whole table."""
        self._write(row)
        if self._events is None:
            return
        self._scalars(flatten_row(row, summary, self._names), row["step"])

    def amend(self, row: Mapping[str, Any], part: str) -> None:
        """Rewrite the last line as `row`, which now also has the group `part`."""
        self._file.close()
        self._rows.truncate(row["step"] - 1)
        self._file = self._rows.path.open("a", encoding="utf-8")
        self._write(row)
        self._scalars(flatten_row({part: row[part]}, None, self._names), row["step"])

    def _write(self, row: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(replace_nonfinite({**row, **self._rows.entries(row["step"])})) + "\n")
        self._file.flush()

    def _scalars(self, figures: Mapping[str, float], step: int) -> None:
        """Write figures to TensorBoard."""
        for name, value in figures.items():
            if self._events is not None:
                self._events.add_scalar(name, value, step)

    def sync(self) -> None:
        """Flush everything to the disk. Called before a checkpoint, because a resumed run expects these rows."""
        self._file.flush()
        os.fsync(self._file.fileno())
        if self._events is not None:
            self._events.flush()

    def close(self) -> None:
        self._file.close()
        if self._events is not None:
            self._events.close()


def flatten_row(
    row: Mapping[str, Any], summary: Mapping[str, float] | None, names: Mapping[str, str]
) -> dict[str, float]:
    """The numbers of a row for trackers and TensorBoard: `train/`, `memory/`, `eval/`, `gain/`, and `fp8/` for the
    health summary. Other values and None are left out."""
    groups = {name: row.get(name) for name in ("memory", "eval", "gain")} | {"fp8": summary}
    groups["train"] = {key: value for key, value in row.items() if key != "step"}
    return {
        f"{group}/{names.get(key, key)}": value
        for group, values in groups.items()
        for key, value in (values or {}).items()
        if isinstance(value, int | float)
    }
