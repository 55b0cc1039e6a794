"""The history of one run in bounded memory: each figure as at most ``2 * POINTS`` means.

Rows arrive one by one, from ``metrics.jsonl`` or from a running training, and are not stored. The other files are read
when a page is written; of files that grow with the run, only the beginning and the end are read.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from octavo.base import safe_read
from octavo.config import Config, ConfigError, load_config
from octavo.report.evidence.run_reader import ReportError, layer_health, read_json_file, read_rows
from octavo.train.forward.evaluation import name_loss

POINTS = 400
EVALS = 12  # number of evaluations on a page: the first and the newest
BEGINNING, END = 1 << 16, 1 << 18  # bytes of a file that grows with the run

#: keys of rows that are not figures of a step
_NO_FIGURES = ("step", "skipped", "overflow", "empty", "zeroed_v")


class Series:
    """A figure over the steps: means of ``width`` consecutive values; if there are too many, neighbours are merged
    in pairs. Non-finite values are skipped."""

    def __init__(self) -> None:
        self.width, self.last = 1, math.nan
        self._steps: list[float] = []
        self._values: list[float] = []
        self._open = (0.0, 0.0, 0)  # sums of steps and values, and count, of the unfinished mean

    def add(self, step: int, value: float) -> None:
        if not math.isfinite(value):
            return
        self.last = value
        steps, values, count = self._open
        self._open = steps + step, values + value, count + 1
        if count + 1 < self.width:
            return
        self._steps.append((steps + step) / self.width)
        self._values.append((values + value) / self.width)
        self._open = 0.0, 0.0, 0
        if len(self._steps) == 2 * POINTS:
            self._steps, self._values = _merge_neighbors(self._steps), _merge_neighbors(self._values)
            self.width *= 2

    @property
    def curve(self) -> tuple[np.ndarray, np.ndarray]:
        """Steps and values."""
        steps, values, count = self._open
        pending = ([steps / count], [values / count]) if count else ([], [])
        return np.array(self._steps + pending[0]), np.array(self._values + pending[1])

    @property
    def newest(self) -> float:
        """The mean of the last 5 % of the values, or NaN."""
        values = self.curve[1]
        return float(values[-max(1, len(values) // 20) :].mean()) if values.size else math.nan

    @property
    def median(self) -> float:
        """The median without the first 10 % (warm-up), or NaN."""
        values = self.curve[1]
        return float(np.median(values[len(values) // 10 :])) if values.size else math.nan


def _merge_neighbors(values: list[float]) -> list[float]:
    return [(first + second) / 2 for first, second in zip(values[::2], values[1::2], strict=True)]


@dataclass
class History:
    """The recorded steps of a run. ``figures`` has a series for every number in the rows, and ``judged`` for every
    number in the evaluations, which ``evals`` lists with their steps; ``memory`` has the peak bytes by kind; ``health``
    has the worst layer by component and figure (sqnr, underflow, saturation, cosine), and ``layers`` the figures of
    each layer in the newest measured step."""

    directory: Path
    cfg: Config
    plan: Mapping[str, Any]
    figures: dict[str, Series] = field(default_factory=dict)
    judged: dict[str, Series] = field(default_factory=dict)
    first_eval: tuple[int, Mapping[str, Any]] | None = None
    newest_evals: deque[tuple[int, Mapping[str, Any]]] = field(default_factory=lambda: deque(maxlen=EVALS - 1))
    memory: dict[str, int] = field(default_factory=dict)
    health: dict[str, dict[str, Series]] = field(default_factory=dict)
    layers: Mapping[str, Any] = field(default_factory=dict)
    measured: int = 0
    step: int = 0
    steps: int = 0
    skipped: int = 0
    seconds: float = 0.0
    time: str = ""

    def __post_init__(self) -> None:
        self._component = {row["name"]: row.get("component") or "" for row in self.plan.get("rows", ())}

    @classmethod
    def begin(cls, directory: str | Path) -> History:
        """Create the history of a run directory, without rows. Raises ReportError if it is not a run directory."""
        directory = Path(directory)
        if not directory.is_dir():
            raise ReportError(f"{directory} is not a directory; give the run directory that `octavo train` wrote")
        if not (directory / "config.yaml").is_file():
            raise ReportError(f"{directory} has no config.yaml, so it is not a run directory")
        try:
            cfg = load_config(directory / "config.yaml")
        except ConfigError as error:
            raise ReportError(f"{directory / 'config.yaml'} cannot be read: {error}") from error
        return cls(directory, cfg, read_json_file(directory / "plan.json"))

    @classmethod
    def read(cls, directory: str | Path) -> History:
        """Read a run directory. Raises ReportError if it is not a run directory or has no step."""
        history = cls.begin(directory)
        for row in read_rows(history.directory):
            history.add(row)
        if not history.steps:
            raise ReportError(
                f"{history.directory / 'metrics.jsonl'} has no training step yet, and a page needs one. Wait for it, "
                "or look at the run's output"
            )
        return history

    def add(self, row: Mapping[str, Any]) -> None:
        """Add a row of metrics.jsonl. A repeated step counts twice, which has no visible effect on curves."""
        step = self.step = int(row["step"])
        self.steps += "loss" in row
        self.skipped += bool(row.get("skipped"))
        self.time = row.get("time") or self.time
        self.seconds += row.get("seconds") or 0.0
        self._keep(self.figures, step, {key: value for key, value in row.items() if key not in _NO_FIGURES})
        if row.get("eval"):
            held_out = name_loss(row["eval"], self.cfg.train.phase)  # earlier versions had other names
            self._keep(self.judged, step, held_out)
            if self.first_eval is None:
                self.first_eval = step, held_out
            else:
                self.newest_evals.append((step, held_out))
        for kind, size in (row.get("memory") or {}).items():
            if isinstance(size, int | float):
                self.memory[kind] = max(self.memory.get(kind, 0), int(size))
        if row.get("health"):
            self._measure(step, row["health"])

    @staticmethod
    def _keep(into: dict[str, Series], step: int, numbers: Mapping[str, Any]) -> None:
        for key, value in numbers.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                into.setdefault(key, Series()).add(step, float(value))

    def _measure(self, step: int, table: Mapping[str, Any]) -> None:
        self.layers, self.measured = table, step
        worst: dict[str, dict[str, float]] = {}
        for layer in layer_health([table]):
            of = worst.setdefault(self._component.get(layer.layer, ""), {})
            operands = [layer.sqnr.get(role, math.inf) for role in ("x", "w", "dy")]
            of["sqnr"] = min(of.get("sqnr", math.inf), *operands)
            for name in ("underflow", "saturation"):
                of[name] = max([of.get(name, 0.0), *getattr(layer, name).values()])
            if layer.cosine is not None:
                of["cosine"] = min(of.get("cosine", math.inf), layer.cosine)
        for component, measured in worst.items():
            self._keep(self.health.setdefault(component, {}), step, measured)

    @property
    def evals(self) -> list[tuple[int, Mapping[str, Any]]]:
        return [*([self.first_eval] if self.first_eval else []), *self.newest_evals]

    @property
    def result(self) -> Mapping[str, Any]:
        return read_json_file(self.directory / "result.json")

    @property
    def predicted(self) -> Mapping[str, int]:
        """Predicted bytes by kind; empty if there is no prediction, as in runs of 0.4.0."""
        return read_json_file(self.directory / "memory.json").get("bytes", {})

    def curve(self, key: str) -> tuple[np.ndarray, np.ndarray] | None:
        """Return the curve of a figure, or of ``eval/NAME`` for evaluations; None if the run has no values."""
        kind, _, name = key.partition("/")
        series = self.judged.get(name) if kind == "eval" else self.figures.get(key)
        return None if series is None or not series.curve[0].size else series.curve

    def answers(self) -> list[dict[str, Any]]:
        """Return the answers of the first and the newest evaluation, ``[{"step", "rows"}]``."""
        return _read_first_and_last(self.directory / "answers.jsonl", {"prompt", "wanted", "said", "right", "reward"})

    def completions(self) -> list[dict[str, Any]]:
        """Return the completions of the first and the newest step of reinforcement learning."""
        return _read_first_and_last(self.directory / "completions.jsonl", {"prompt", "answer", "completion", "reward"})

    def moves(self) -> list[dict[str, Any]]:
        """Return the newest decisions of `fp8.adapt`."""
        file = self.directory / "adapt.jsonl"
        if not file.exists():
            return []
        fields = {"layer", "gemm", "from", "to", "kind", "figure", "value", "threshold"}
        return [row for line in _read_tail(file) if (row := _parse_row(line, fields)) is not None]

    def fleet(self, fields: set[str]) -> list[dict[str, Any]]:
        """Return the newest rows with these fields of what replicas (`rl.engine`) received, and of their events."""
        file = self.directory / "fleet.jsonl"
        if not file.exists():
            return []
        return [row for line in _read_tail(file) if (row := _parse_row(line, fields)) is not None]

    def checks(self) -> list[dict[str, Any]]:
        """Return the newest results of the checks that `run.check_every` enables."""
        file = self.directory / "checks.jsonl"
        fields = {"products", "codes", "values", "faults"}
        return (
            [row for line in _read_tail(file) if (row := _parse_row(line, fields)) is not None] if file.exists() else []
        )

    def when(self) -> datetime | None:
        """Return when the newest row was written, or None for runs of 0.4.0, which did not record it."""
        try:
            return datetime.fromisoformat(self.time)
        except ValueError:
            return None


def _read_first_and_last(file: Path, fields: set[str]) -> list[dict[str, Any]]:
    """Return the rows of the first and last step in a file of JSON lines; incomplete rows are skipped."""
    if not file.exists():
        return []
    with safe_read.open_file(file, ReportError) as opened:
        beginning = opened.read(BEGINNING)
    lines = beginning.split(b"\n")[:-1], _read_tail(file)
    first, last = ([row for line in part if (row := _parse_row(line, fields)) is not None] for part in lines)
    ends: list[dict[str, Any]] = []
    for rows, at in ((first, 0), (last, -1)):
        if rows and (not ends or rows[at]["step"] != ends[0]["step"]):
            step = rows[at]["step"]
            ends.append({"step": step, "rows": [row for row in rows if row["step"] == step]})
    return ends


def _read_tail(file: Path) -> list[bytes]:
    """Return the last complete lines of a file that grows with the run."""
    with safe_read.open_file(file, ReportError) as opened:
        size = opened.seek(0, 2)
        opened.seek(max(0, size - END))
        return opened.read().split(b"\n")[bool(size > END) : -1]


def _parse_row(line: bytes, fields: set[str]) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) and fields <= row.keys() else None
