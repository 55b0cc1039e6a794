"""The page of a run while it trains: ``RUN/page.html``, and beside it ``page.png`` and ``memory.json``.

Written behind evaluations and checkpoints and once a minute, as long as another page would not take more than
:data:`SHARE` of the time, and at the end. It is a watcher of the run: what fails in it ends no run.
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
from octavo.base.safe_read import finite, first_line
from octavo.report.evidence.run_reader import rows_of
from octavo.report.run import run_page
from octavo.report.run.history import History
from octavo.train.estimate.memory import Footprint

PAGE, MEMORY = "page.html", "memory.json"
SHARE = 0.01
FIRST = 1.0  # seconds that a page is taken to cost before one was written
EVERY = 60.0  # seconds after which one is due in any case


class Page(train.Callback):
    """Writes the page. ``predicted``: memory in bytes by kind, as it was told before the first step, else nothing."""

    predicted: Mapping[str, int] = MappingProxyType({})
    _history: History | None = None
    _due, _cost, _spent = False, FIRST, 0.0

    def __str__(self) -> str:
        return PAGE

    def expect(self, found: Footprint) -> None:
        """The memory that was predicted; of phase rl the larger of its two moments, kind by kind."""
        later = {} if found.rollout is None else found.rollout.kinds
        kinds = dict.fromkeys([*found.kinds, *later])
        self.predicted = {kind: max(found.kinds.get(kind, 0), later.get(kind, 0)) for kind in kinds}

    def begin(self, run: train.Run) -> None:
        self._began = self._last = time.monotonic()
        try:
            if self.predicted:
                atomic_write.write_text(run.directory / MEMORY, json.dumps({"bytes": dict(self.predicted)}) + "\n")
            self._history = History.begin(run.directory)
            for row in rows_of(run.directory) if run.step else ():
                self._history.add(row)
        except Exception as error:  # a page is worth no run, not even one that has not begun
            self._give_up(run, error)

    def evaluated(self, run: train.Run, figures: Mapping[str, Any]) -> None:
        self._due = True

    def saved(self, run: train.Run, checkpoint: Path) -> None:
        self._due = True

    def end_step(self, run: train.Run, step: train.Step) -> None:
        if self._history is None:
            return
        if step.wanted:
            self._history.add(finite(step.row))
        now = time.monotonic()
        due = self._due or now - self._last >= EVERY
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
            run_page.write([self._history], run.directory / PAGE, status)
        except Exception as error:
            self._give_up(run, error)
        self._last = time.monotonic()
        self._due, self._cost = False, self._last - began
        self._spent += self._cost

    def _give_up(self, run: train.Run, error: Exception) -> None:
        self._history = None
        run.say(f"warning: {PAGE} is not written; the run goes on ({first_line(error)})")
