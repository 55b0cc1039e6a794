"""How a run ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from octavo.train.callbacks.metrics import MetricsFile


@dataclass(frozen=True)
class RunResult:
    """How a run ended.

    dir      the run directory
    status   "finished", or "stopped" (a signal or `Run.stop`; saved, continue with run.resume=auto)
    steps    optimizer steps done
    final    the last row of metrics.jsonl without seconds, time, eval, health, memory, gain, experts, base and
             massive_activations
    eval     the last evaluation, None where there was none
    eval_step    the step after which it was made
    health   the last FP8 health summary (worst and median figures)
    memory   bytes by kind, as last measured
    gain     the measured speed of FP8 (run.gain_steps); {"failed": why, "step"} if memory ran out
    base     of a frozen base: number of weights, whether they are unchanged, size of FP8 codes (see base.json)
    skipped  steps that were not applied because loss or gradient were not finite
    overflowed    steps that were not applied because gradients overflowed FP16, which lowered the loss scale
    seconds  of training in all sessions of the run
    signal   that stopped it; None if a callback did
    late_stop    the signal, or 0 for a callback, that asked to stop while the run finished; only in this process
    """

    dir: Path
    status: str
    steps: int
    final: Mapping[str, Any] = field(default_factory=dict)
    eval: Mapping[str, Any] | None = None
    eval_step: int | None = None
    health: Mapping[str, float] = field(default_factory=dict)
    memory: Mapping[str, int] = field(default_factory=dict)
    gain: Mapping[str, Any] | None = None
    base: Mapping[str, Any] | None = None
    skipped: int = 0
    overflowed: int = 0
    seconds: float = 0.0
    signal: int | None = None
    late_stop: int | None = None

    @property
    def exit_code(self) -> int:
        """0; 128 + the signal's number for a run that a signal stopped (143 SIGTERM, 130 SIGINT, 129 SIGHUP)."""
        return 128 + self.signal if self.signal else 0

    def losses(self) -> dict[int, float]:
        """Step -> loss, from metrics.jsonl."""
        return {row["step"]: row["loss"] for row in MetricsFile.of(self.dir).read() if "loss" in row}

    def to_json(self) -> dict[str, Any]:
        values = {**asdict(self), "dir": str(self.dir)}
        del values["late_stop"]
        return values
