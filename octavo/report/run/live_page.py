"""Writes the page of a run while it trains: ``RUN/page.html``, with ``page.png`` and ``memory.json``.

The page is written after evaluations and checkpoints, once per minute, and at the end, as long as writing takes at most
:data:`SHARE` of the time. Errors while writing do not end the run.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from octavo import train
from octavo.base import atomic_write
from octavo.base.safe_read import first_line, replace_nonfinite
from octavo.report.evidence.run_reader import read_rows
from octavo.report.run import run_page
from octavo.report.run.history import History
from octavo.train.estimate.memory import Footprint

PAGE, MEMORY = "page.html", "memory.json"
SHARE = 0.01
FIRST = 1.0  # assumed seconds for a page before the first one
EVERY = 60.0  # maximum seconds between two pages


class Page(train.Callback):
    """Callback that writes the page. ``predicted`` maps kinds to predicted bytes; empty if unknown."""

    predicted: Mapping[str, int] = MappingProxyType({})
    _history: History | None = None
    _requested, _cost, _spent = False, FIRST, 0.0

    def __str__(self) -> str:
        return PAGE

    def expect(self, footprint: Footprint) -> None:
        """Set the predicted memory; for phase rl the larger of its two moments, kind by kind."""
        later = {} if footprint.rollout is None else footprint.rollout.kinds
        kinds = dict.fromkeys([*footprint.kinds, *later])
        self.predicted = {kind: max(footprint.kinds.get(kind, 0), later.get(kind, 0)) for kind in kinds}

    def begin(self, run: train.Run) -> None:
        self._began, self._spent = time.monotonic(), 0.0  # of this stage, where a run has several
        self._last = self._began
        try:
            if self.predicted:
                atomic_write.write_text(run.directory / MEMORY, json.dumps({"bytes": dict(self.predicted)}) + "\n")
            self._history = History.begin(run.directory)
            for row in read_rows(run.directory) if run.step else ():
                self._history.add(row)
        except Exception as error:  # an error of the page must not end the run
            self._give_up(run, error)

    def evaluated(self, run: train.Run, figures: Mapping[str, Any]) -> None:
        self._requested = True

    def saved(self, run: train.Run, checkpoint: Path) -> None:
        self._requested = True

    def end_step(self, run: train.Run, step: train.Step) -> None:
        if self._history is None:
            return
        if step.wanted:
            self._history.add(replace_nonfinite(step.row))
        now = time.monotonic()
        due = self._requested or now - self._last >= EVERY
        if due and self._spent + self._cost < SHARE * (now - self._began):
            self._write(run, "running")

    def end(self, run: train.Run, result: train.RunResult) -> None:
        self._write(run, result.status)

    def failed(self, run: train.Run, error: Exception) -> None:
        self._write(run, "failed")

    def _write(self, run: train.Run, status: str) -> None:
        if self._history is None or not self._history.steps:
            return
        began = time.monotonic()
        try:
            run_page.write_page([self._history], run.directory / PAGE, status)
        except Exception as error:
            self._give_up(run, error)
        self._last = time.monotonic()
        self._requested, self._cost = False, self._last - began
        self._spent += self._cost

    def _give_up(self, run: train.Run, error: Exception) -> None:
        self._history = None
        run.say(f"warning: {PAGE} is not written; the run continues ({first_line(error)})")
