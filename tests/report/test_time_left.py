"""The time left for a trial: its estimate, and what the steps of runs that train one after the other show."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from octavo.base.wording import format_time
from octavo.report.run.time_left import TimeLeft
from octavo.report.run.trial_watcher import TrialWatcher
from octavo.report.trial import compare
from octavo.report.trial.runs import make_runs
from octavo.train.callbacks.progress import Display

FIGURES = {"loss": 0.5, "lr": 1e-3, "tokens_per_s": 1500.0}


def test_time_left_is_of_all_runs_each_at_its_own_speed() -> None:
    left = TimeLeft([100, 100, 50], jobs=2)
    assert left.update([0, 0, 0], 0.0) is None and left.update([1, 1, 0], 10.0) is None
    # One step a second and two a second; the third waits, at 0.75 s a step on average.
    assert left.update([11, 21, 0], 20.0) == max(89, (89 + 79 * 0.5 + 50 * 0.75) / 2)
    assert left.update([100, 100, 1], 100.0) == pytest.approx(49 * 0.75), "the speeds of runs that ended stay"
    assert left.update([100, 100, 26], 125.0) == pytest.approx(24)
    assert left.update([100, 50, 26], 125.0, ended={1}) == pytest.approx(24), "a run that failed trains no more"
    assert TimeLeft([10], 1).update([10], 5.0) is None, "read, not trained"
    assert [format_time(t) for t in (0.2, 44, 58, 131, 600)] == ["10 s", "40 s", "1 min", "2 min 10 s", "10 min"]


def test_waiting_run_with_earlier_steps_has_no_slow_step() -> None:
    left = TimeLeft([100, 100], jobs=1)
    left.update([0, 50], 0.0)
    left.update([1, 50], 1.0)
    left.update([99, 50], 99.0)
    assert left.update([100, 50], 100.0) == pytest.approx(50)
    assert left.update([100, 51], 130.0) == pytest.approx(49), "the step after a wait tells no speed"
    assert left.update([100, 61], 150.0) == pytest.approx(39 * 2)


class Clock:
    """A clock that a test moves."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_steps_of_one_run_show_the_time_left_for_all(cfg: Any, tmp_path: Any) -> None:
    runs, clock, out = make_runs(cfg, ["blockwise"], tmp_path), Clock(), io.StringIO()
    watcher = TrialWatcher(runs, {1}, clock)  # the second of three is finished
    display = Display(Console(file=out, width=200), "1/3 high precision")
    display.begin(0, runs[0].steps)
    notes = []
    for number, seconds in ((1, 30.0), (2, 33.0), (12, 63.0)):  # the first step compiles, loads, and so on
        clock.now = seconds
        watcher.watch(0)
        watcher.after_step(SimpleNamespace(display=display), SimpleNamespace(number=number))  # type: ignore[arg-type]
        notes.append(display.note)
        display.step({"step": number, **FIGURES, **({"eval": {"loss": 1.0}} if number == 12 else {})})
    left = (runs[0].steps - 12) * 3 + runs[2].steps * 3
    assert notes == ["", notes[1], f"about {format_time(left)} left with 1 more run"] and notes[1]
    assert f"step 12/{runs[0].steps}  " in out.getvalue() and notes[2] in out.getvalue().splitlines()[-1]
    watcher.ended.add(0)
    watcher.watch(2)
    clock.now = 1000.0
    watcher.after_step(SimpleNamespace(display=display), SimpleNamespace(number=1))  # type: ignore[arg-type]
    assert display.note == f"about {format_time(3 * (runs[2].steps - 1))} left"


def test_trial_without_processes_shows_the_time_left(cfg: Any, tmp_path: Any, monkeypatch: Any) -> None:
    """Every run that is trained here has the same watcher, which knows the run's number and the finished ones."""
    runs, seen = make_runs(cfg, ["blockwise"], tmp_path), []
    records = {runs[1].name: SimpleNamespace(name="read")}
    monkeypatch.setattr(compare, "read_finished", lambda run: records.get(run.name))

    def train(run: Any, label: str, console: Any, watcher: TrialWatcher) -> Any:
        seen.append((label, watcher._number, sorted(watcher.ended)))
        return SimpleNamespace(name=run.name)

    monkeypatch.setattr(compare, "_train_or_read", train)
    compare._train_runs(runs, 1, None, 1)
    assert seen == [
        (f"1/3 {runs[0].label}", 0, [1]),
        (f"2/3 {runs[1].label}", 1, [0, 1]),
        (f"3/3 {runs[2].label}", 2, [0, 1]),
    ]
