"""Estimates how long the runs of a trial still train, from the steps that they have recorded."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path

from octavo.report.evidence.trial_spec import Run


class TimeLeft:
    """Estimates the time left for runs of ``totals`` steps of which ``jobs`` train at the same time: each run at its
    own speed since its first step of this session, and those that wait at the mean speed of the others."""

    def __init__(self, totals: Sequence[int], jobs: int) -> None:
        self.totals, self.jobs = totals, jobs
        self._before: Sequence[int] | None = None  # steps of each run at the first update
        self._first: dict[int, tuple[int, float]] = {}  # run -> (steps, time) when it was first seen training
        self._paces: dict[int, float] = {}  # run -> seconds a step

    def update(self, done: Sequence[int], now: float, ended: Collection[int] = ()) -> float | None:
        """Return the seconds left after ``done`` steps of each run at the time ``now`` in seconds, or None before two
        steps of a run were seen. ``ended``: runs that train no more, also if they failed."""
        if self._before is None:
            self._before = tuple(done)
        left = []
        for number, (steps, total) in enumerate(zip(done, self.totals, strict=True)):
            if number in ended or steps >= total:
                continue
            left.append((number, total - steps))
            # A run that an earlier session began has steps while it waits; its time begins with the next one.
            if steps > self._before[number]:
                begun, since = self._first.setdefault(number, (steps, now))
                if steps > begun:
                    self._paces[number] = (now - since) / (steps - begun)
        if not left or not self._paces:
            return None
        mean = sum(self._paces.values()) / len(self._paces)
        seconds = [steps * self._paces.get(number, mean) for number, steps in left]
        return max(*seconds, sum(seconds) / self.jobs) if len(seconds) > 1 else seconds[0]


def count_steps(run: Run) -> int:
    """Return the steps that a run has trained, by its last whole row."""
    try:
        rows = (Path(run.cfg.run.dir) / "metrics.jsonl").read_bytes().rpartition(b"\n")[0]
    except FileNotFoundError:
        return 0
    if not rows:
        return 0
    with suppress(ValueError, KeyError, TypeError, AttributeError):  # a damaged row is reported when the run is read
        row = json.loads(rows.rpartition(b"\n")[2])
        return max(0, int(row.get("total_step", row["step"])) - run.begins)
    return 0
