"""The log of a run: metrics.jsonl and TensorBoard events."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octavo.base.safe_read import replace_nonfinite
from octavo.train.run_dir.run_dir import METRICS, truncate_metrics


class MetricsLog:
    """Appends rows to metrics.jsonl and their numbers to TensorBoard. Exists only on the main rank.

    A row is JSON without NaN or infinity: numbers that are not finite are written as null. `names` maps figures to
    their names in TensorBoard, where these differ.
    """

    def __init__(self, directory: Path, tensorboard: bool, first_step: int, names: Mapping[str, str] = {}) -> None:
        self._names = names
        self._path = directory / METRICS
        self._file = self._path.open("a", encoding="utf-8")
        self._events = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            # purge_step hides events that a killed run wrote after its checkpoint.
            self._events = SummaryWriter(str(directory / "tensorboard"), purge_step=first_step)

    def write(self, row: Mapping[str, Any], summary: Mapping[str, float] | None = None) -> None:
        """Write one line. `summary` has FP8 health figures for TensorBoard; the row has the whole table."""
        self._file.write(json.dumps(replace_nonfinite(row)) + "\n")
        self._file.flush()
        if self._events is None:
            return
        self._scalars(flatten_row(row, summary, self._names), row["step"])

    def amend(self, row: Mapping[str, Any], part: str) -> None:
        """Rewrite the last line as `row`, which now also has the group `part`."""
        self._file.close()
        truncate_metrics(self._path, row["step"] - 1)
        self._file = self._path.open("a", encoding="utf-8")
        self._file.write(json.dumps(replace_nonfinite(row)) + "\n")
        self._file.flush()
        self._scalars(flatten_row({part: row[part]}, None, self._names), row["step"])

    def _scalars(self, figures: Mapping[str, Any], step: int) -> None:
        """Write figures to TensorBoard, which cannot show None."""
        for name, value in figures.items():
            if self._events is not None and value is not None:
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
) -> dict[str, Any]:
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
