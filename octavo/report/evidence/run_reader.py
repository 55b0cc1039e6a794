"""Reads a run directory into a `RunRecord`, which the verdict, the plots and the page share.

A run directory holds ``metrics.jsonl`` (one JSON object per line, in the order of writing), ``plan.json``,
``proof.json``, ``environment.json``, ``config.yaml`` and ``result.json``; in phase rl also ``completions.jsonl``.
Only this file knows their layout. Arrays have one entry for each recorded step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from octavo.base import safe_read
from octavo.base.safe_read import COUNT, FINITE, NUMBER, TEXT, ValueCheck
from octavo.config import stage_folders

ROLES = ("x", "w", "dy", "x_wgrad", "dy_wgrad")
#: what rows of phases rl and preference have in addition
FIGURES = (
    "reward", "length", "entropy", "kl", "logp_gap_mean", "logp_gap_max", "rollout_tokens_per_s",
    "training_tokens_per_s", "rewards/accuracies", "rewards/margins", "rewards/chosen", "rewards/rejected",
)  # fmt: skip

# The expected structure of a run's files: the verdict and the page rely on it without further checks.
_EVAL = {...: NUMBER}
_HEALTH = {...: {**dict.fromkeys(ROLES, {...: NUMBER}), "dw_cosine": NUMBER, "nan_codes": COUNT}}
_ROW = {
    "step!": COUNT, "loss": NUMBER, "tokens": NUMBER, "tokens_per_s": NUMBER, "zeroed_v": COUNT,
    "seconds": NUMBER, "save_seconds": NUMBER, "time": TEXT,
    "memory": {...: FINITE}, "health": _HEALTH, "eval": _EVAL, **dict.fromkeys(FIGURES, NUMBER),
}  # fmt: skip
_COMPLETION = {
    "step!": COUNT, "file!": TEXT, "row!": COUNT, "sample!": COUNT, "completion!": TEXT, "reward!": NUMBER,
    "tokens": COUNT, "ended": TEXT,
}  # fmt: skip
_PLAN_ROW = {
    "name!": TEXT, "component": TEXT, "kind": TEXT, "reason": TEXT, "share": FINITE,
    "shape": [COUNT], "format": TEXT,
    "recipe": ValueCheck(
        lambda r: isinstance(r, str) or (isinstance(r, dict) and isinstance(r.get("name"), str)), "a recipe"
    ),
}  # fmt: skip
_SCHEMAS: dict[str, Any] = {
    "result.json": {"eval": _EVAL, "status": TEXT},
    "plan.json": {"rows": [_PLAN_ROW], "notes": [TEXT], "casts": {}},
    "proof.json": {
        "share": FINITE,
        "shares": {...: FINITE},
        "components": {...: {...: {...: COUNT}}},
        "rollouts": {"first!": COUNT, "last!": COUNT, "stale": COUNT},
        "spans": [{"steps!": [COUNT], "share": FINITE, "planned": FINITE}],
    },
    "environment.json": {},
    "memory.json": {"bytes": {...: COUNT}},
}


class ReportError(ValueError):
    """A report cannot be made from the input; the message names the file and the fix."""


class TrialStopped(ReportError):
    """A signal stopped a run of a trial. ``exit_code``: of the command, 128 + the number of the signal."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True)
class LayerHealth:
    """One FP8 layer, averaged over the measured steps that were applied.

    ``sqnr`` in dB and ``underflow`` as a share (0..1) by role (x, w, dy, x_wgrad, dy_wgrad); ``cosine`` between the
    FP8 weight gradient and the high-precision one of the same step, or None if there was no weight gradient;
    ``nan_codes`` summed over the measured steps.
    """

    layer: str
    sqnr: Mapping[str, float]
    underflow: Mapping[str, float]
    saturation: Mapping[str, float]
    cosine: float | None
    nan_codes: int


@dataclass(frozen=True)
class RunRecord:
    """The contents of a run directory.

    ``eval`` is the last evaluation, or None if there was none; ``finished`` is True if the run reached its end and
    wrote all files; ``failure`` is the error message of a failed training, whose arrays may be empty. ``zeroed``
    counts second moments that became zero, or is None if they were not counted; ``rates`` are learning rates.
    ``figures`` has the ``FIGURES`` that the run recorded, and ``exact_match``, ``held_out_reward`` and
    ``held_out_accuracies`` of its evaluations, NaN at other steps; ``completions`` has the rows of
    ``completions.jsonl``. ``skipped`` are the steps whose loss or gradient was not finite; ``overflowed`` those
    whose gradients overflowed FP16, after which the loss scale was reduced.
    """

    directory: Path
    steps: np.ndarray
    losses: np.ndarray
    tokens: np.ndarray
    tokens_per_s: np.ndarray
    skipped: tuple[int, ...]
    memory: Mapping[str, int]
    health: tuple[LayerHealth, ...]
    health_steps: tuple[int, ...]
    eval: Mapping[str, float] | None
    plan: Mapping[str, Any]
    proof: Mapping[str, Any]
    environment: Mapping[str, Any]
    config: str
    finished: bool = False
    failure: str | None = None
    zeroed: int | None = None
    rates: np.ndarray = field(default_factory=lambda: np.array([]))
    figures: Mapping[str, np.ndarray] = field(default_factory=dict)
    completions: tuple[Mapping[str, Any], ...] = ()
    overflowed: tuple[int, ...] = ()

    @property
    def mean_loss(self) -> float:
        """The mean of the finite losses of the run."""
        finite = self.losses[np.isfinite(self.losses)]
        return float(finite.mean()) if finite.size else math.nan

    @property
    def speed(self) -> float:
        """The median tokens per second without the first tenth of the steps (warm-up), or NaN if not recorded."""
        rest = self.tokens_per_s[len(self.tokens_per_s) // 10 :]
        rest = rest[np.isfinite(rest)]
        return float(np.median(rest)) if rest.size else math.nan


def common_steps(record: RunRecord, reference: RunRecord) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices in each record of the steps that both have, since runs may log at different steps."""
    _, record_at, reference_at = np.intersect1d(record.steps, reference.steps, return_indices=True)
    return record_at, reference_at


def read(directory: str | Path) -> RunRecord:
    """Read a run directory.

    Raises ``ReportError`` if the directory or ``metrics.jsonl`` is missing, empty or invalid.
    ``plan.json``, ``proof.json`` and ``environment.json`` may be missing (an interrupted run); the verdict judges that.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise ReportError(f"{directory} is not a directory; give the run directory that `octavo train` wrote")
    rows = list(read_rows(directory))
    trained = [row for row in rows if "loss" in row]
    if not trained:
        raise ReportError(
            f"{directory / 'metrics.jsonl'} holds no training step; the run stopped before its first one. Run it "
            "again, or delete the directory"
        )
    # Steps that were not applied have no meaningful health, so they are left out of it below.
    skipped = tuple(int(row["step"]) for row in trained if row.get("skipped"))
    overflowed = tuple(int(row["step"]) for row in trained if row.get("overflow"))
    measured = [row for row in rows if row.get("health")]
    evals = [row["eval"] for row in rows if row.get("eval")]
    zeroed = [int(row["zeroed_v"]) for row in trained if "zeroed_v" in row]
    result = read_json_file(directory / "result.json")
    return RunRecord(
        directory=directory,
        steps=np.array([int(row["step"]) for row in trained]),
        losses=_column(trained, "loss"),
        tokens=_column(trained, "tokens"),
        rates=_column(trained, "lr"),
        tokens_per_s=_column(trained, "tokens_per_s"),
        skipped=skipped,
        overflowed=overflowed,
        zeroed=sum(zeroed) if zeroed else None,
        memory=_peak_memory(trained),
        health=layer_health([row["health"] for row in measured if int(row["step"]) not in (*skipped, *overflowed)]),
        health_steps=tuple(int(row["step"]) for row in measured),
        eval=result.get("eval") or (evals[-1] if evals else None),
        plan=read_json_file(directory / "plan.json"),
        proof=read_json_file(directory / "proof.json"),
        environment=read_json_file(directory / "environment.json"),
        config=_read_text(directory / "config.yaml"),
        finished=result.get("status") == "finished" and not trained[-1].get("skipped"),
        figures=_collect_figures(trained),
        completions=tuple(_read_json_lines(shown, _COMPLETION))
        if (shown := directory / "completions.jsonl").exists()
        else (),
    )


def read_failed_run(directory: str | Path, failure: str) -> RunRecord:
    """Return the record of a run whose training failed with the message ``failure``; files that it did not write count
    as empty."""
    try:
        return replace(read(directory), failure=failure, finished=False)
    except ReportError:
        none, directory = np.array([]), Path(directory)
        return RunRecord(
            directory, none.astype(int), none, none, none, (), {}, (), (), None, {}, {}, {},
            _read_text(directory / "config.yaml"), failure=failure,
        )  # fmt: skip


def _read_text(path: Path) -> str:
    return safe_read.read_text(path, ReportError) if path.exists() else ""


def read_json_file(path: Path) -> dict[str, Any]:
    """Return a JSON file of a run directory after checking its structure; empty if it does not exist."""
    if not path.exists():
        return {}
    value = safe_read.read_json(path, ReportError)
    safe_read.check_schema(value, _SCHEMAS[path.name], path, ReportError)
    return value


def read_rows(directory: Path) -> Iterator[dict[str, Any]]:
    """Iterate over the rows of metrics.jsonl that belong to the run or the stage in the directory. Raises ReportError,
    with the line number, for an invalid row."""
    stage = stage_folders.stage_of(directory)
    for row in _read_json_lines(stage_folders.metrics_file(directory), _ROW):
        if stage is None or row.get("stage") == stage:
            yield row


def _read_json_lines(path: Path, form: Any) -> Iterator[dict[str, Any]]:
    if not path.exists():
        raise ReportError(f"{path} does not exist; is {path.parent} a run directory of Octavo?")
    for number, row in safe_read.json_lines(path, ReportError):
        if "step" in row:
            safe_read.check_schema(row, form, f"{path}:{number}", ReportError)
            yield row


def _column(rows: list[dict[str, Any]], key: str) -> np.ndarray:
    values = (row.get(key) for row in rows)
    return np.array([math.nan if value is None else float(value) for value in values], dtype=np.float64)


def _collect_figures(rows: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    evals = [row.get("eval") or {} for row in rows]
    columns = {key: _column(rows, key) for key in FIGURES}
    columns |= {"exact_match": _column(evals, "exact_match"), "held_out_reward": _column(evals, "reward")}
    columns |= {"held_out_accuracies": _column(evals, "rewards/accuracies")}
    return {key: column for key, column in columns.items() if np.isfinite(column).any()}


def _peak_memory(rows: list[dict[str, Any]]) -> dict[str, int]:
    """Return the peak bytes by kind over all recorded steps."""
    most: dict[str, int] = {}
    for row in rows:
        for kind, size in (row.get("memory") or {}).items():
            if isinstance(size, int | float):
                most[kind] = max(most.get(kind, 0), int(size))
    return most


def _finite_mean(values: list[Any]) -> float:
    numbers = [float(v) for v in values if v is not None and math.isfinite(float(v))]
    return sum(numbers) / len(numbers) if numbers else math.nan


def layer_health(tables: list[Mapping[str, Any]]) -> tuple[LayerHealth, ...]:
    """Average the tables of ``fp8.health()`` over the measured steps, layer by layer in the model's order."""
    layers = list(dict.fromkeys(name for table in tables for name in table))
    layers_health = []
    for name in layers:
        entries = [table[name] for table in tables if name in table]
        roles = [role for role in ROLES if any(isinstance(entry.get(role), Mapping) for entry in entries)]

        def of(figure: str, entries: list = entries, roles: list = roles) -> dict[str, float]:
            means = {role: _finite_mean([(entry.get(role) or {}).get(figure) for entry in entries]) for role in roles}
            return {role: value for role, value in means.items() if math.isfinite(value)}

        cosine = _finite_mean([entry.get("dw_cosine") for entry in entries])
        layers_health.append(
            LayerHealth(
                layer=name,
                sqnr=of("sqnr"),
                underflow=of("underflow"),
                saturation=of("saturation"),
                cosine=cosine if math.isfinite(cosine) else None,
                nan_codes=int(sum(entry.get("nan_codes") or 0 for entry in entries)),
            )
        )
    return tuple(layers_health)
