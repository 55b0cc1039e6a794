"""What a run writes down while it trains: metrics.jsonl and TensorBoard events."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octavo.train.rundir import METRICS, truncate_metrics


class MetricsLog:
    """Appends rows to metrics.jsonl and their numbers to TensorBoard. Only the main rank makes one.

    A row is JSON without NaN or infinity: what is not finite is written as null. `names`: figures of the row that
    TensorBoard has under another name.
    """

    def __init__(self, directory: Path, tensorboard: bool, first_step: int, names: Mapping[str, str] = {}) -> None:
        self._names = names
        self._path = directory / METRICS
        self._file = self._path.open("a", encoding="utf-8")
        self._events = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            # purge_step hides what a killed run wrote after the checkpoint.
            self._events = SummaryWriter(str(directory / "tensorboard"), purge_step=first_step)

    def write(self, row: Mapping[str, Any], summary: Mapping[str, float] | None = None) -> None:
        """One line. `summary`: flat FP8 health figures, for TensorBoard alone (the row has the whole table)."""
        self._file.write(json.dumps(finite(row)) + "\n")
        self._file.flush()
        if self._events is None:
            return
        step = row["step"]
        numbers = {k: v for k, v in row.items() if isinstance(v, int | float) and k != "step"}
        flat = {f"train/{self._names.get(k, k)}": v for k, v in numbers.items()}
        for group, values in (("memory", row.get("memory")), ("eval", row.get("eval")), ("fp8", summary)):
            flat.update({f"{group}/{k}": v for k, v in (values or {}).items()})
        for name, value in flat.items():
            self._events.add_scalar(name, value, step)

    def amend(self, row: Mapping[str, Any], part: str) -> None:
        """Write the last line again, now that `row` has the group `part` as well."""
        self._file.close()
        truncate_metrics(self._path, row["step"] - 1)
        self._file = self._path.open("a", encoding="utf-8")
        self._file.write(json.dumps(finite(row)) + "\n")
        self._file.flush()
        if self._events is not None:
            for name, value in row[part].items():
                self._events.add_scalar(f"{part}/{name}", value, row["step"])

    def sync(self) -> None:
        """Everything written so far is on the disk: called before a checkpoint that counts on it."""
        self._file.flush()
        os.fsync(self._file.fileno())
        if self._events is not None:
            self._events.flush()

    def close(self) -> None:
        self._file.close()
        if self._events is not None:
            self._events.close()


def finite(value: Any) -> Any:
    """The same JSON value with None for what is not finite."""
    if isinstance(value, Mapping):
        return {key: finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [finite(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
