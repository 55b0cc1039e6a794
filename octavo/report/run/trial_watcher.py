"""Shows the time left for a whole trial with the steps of the run that trains, where runs train one after the other."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from octavo import train
from octavo.base.wording import count_noun, format_time
from octavo.report.evidence.trial_spec import Run
from octavo.report.run.time_left import TimeLeft, count_steps
from octavo.train.callbacks.metrics import MetricsFile


class TrialWatcher(train.Callback):
    """A watcher of all runs of a trial, which train in this process one after the other.

    ``ended``: numbers of the runs that are finished already. ``clock`` returns seconds.
    """

    def __init__(self, runs: Sequence[Run], ended: set[int], clock: Callable[[], float] = time.monotonic) -> None:
        self._left = TimeLeft([run.all_steps for run in runs], jobs=1)
        self._begins = [run.begins for run in runs]
        self._done = [count_steps(run) for run in runs]
        self._left.update(self._done, clock(), ended)
        self.ended, self._number, self._before, self._clock = ended, 0, 0, clock

    def __str__(self) -> str:
        return "the time left"

    def watch(self, number: int) -> None:
        """Set the number of the run that trains next, from 0."""
        self._number = number

    def begin(self, run: train.Run) -> None:
        self._before = MetricsFile.of(run.directory).before  # steps of earlier stages

    def after_step(self, run: train.Run, step: train.Step) -> None:
        self._done[self._number] = self._before + step.number - self._begins[self._number]
        seconds = self._left.update(self._done, self._clock(), self.ended)
        waiting = len(self._done) - len(self.ended) - 1
        if seconds is not None:
            others = f" with {count_noun(waiting, 'more run')}" if waiting else ""
            run.display.note = f"about {format_time(seconds)} left{others}"
