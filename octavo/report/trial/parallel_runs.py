"""Trains several runs of a trial at once, each in its own process.

Small models cannot keep two cores busy: the threads of one process mostly wait for each other. Two runs on one core
each take half the time. Each run is the command ``octavo train`` on its own configuration, so that it stops, fails and
resumes like any run; its output goes to ``arms/NAME.log``. Speeds measured this way are for runs that share a machine:
only their ratios are meaningful, and the report says so.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from octavo.base.wording import format_time
from octavo.config import to_yaml
from octavo.report.evidence.run_reader import ReportError
from octavo.report.evidence.trial_spec import Run
from octavo.report.run.time_left import TimeLeft, count_steps
from octavo.report.trial import exit_with_parent

POLL = 0.5  # seconds between checks of the runs
LINES = 10.0  # seconds between lines without a terminal
PATIENCE = 60.0  # seconds that a run may take to save and exit

#: what the process of a run executes: ``octavo train FILE``, which also exits when the trial has ended
COMMAND = (
    f"import runpy, sys; from {exit_with_parent.__name__} import signal_on_parent_exit; "
    "signal_on_parent_exit(int(sys.argv.pop(1))); runpy.run_module('octavo', run_name='__main__')"
)


@dataclass
class _RunProcess:
    run: Run
    process: subprocess.Popen[bytes]
    log: Path


def train_together(runs: Sequence[Run], jobs: int, console: Any = None, nproc: int = 1) -> dict[str, str]:
    """Train ``runs`` to their end, at most ``jobs`` at a time, each over ``nproc`` processes of this machine.

    Returns {name: error message} of FP8 runs whose training began and failed; the others continue. If another run fails
    or is stopped, raises ``ReportError`` with its last lines; the others then save and exit, and the same command
    continues all of them. The same happens on Ctrl-C, and on SIGTERM and SIGHUP, which then raise
    ``SystemExit`` (143, 129).
    """
    waiting = _sort_runs(runs)
    running: list[_RunProcess] = []
    failures: dict[str, str] = {}
    with ExitStack() as stack:
        requests = stack.enter_context(_stop_requests())
        progress = stack.enter_context(_Progress(runs, console, jobs))
        stack.callback(_stop_all, running)
        while waiting or running:
            while len(running) < jobs and (ready := next((run for run in waiting if _is_ready(run)), None)):
                waiting.remove(ready)
                running.append(_start(ready, stack, nproc))
            if not running:
                raise ReportError(f"{waiting[0].label} cannot start: {waiting[0].after} does not exist")
            time.sleep(POLL)
            if requests:
                raise SystemExit(128 + requests[0])
            progress.update()
            # Runs that ended, well or not, make room for the next ones.
            for started in [s for s in running if s.process.poll() is not None]:
                running.remove(started)
                progress.ended.add(runs.index(started.run))
                if sentence := _fp8_failure(started):
                    failures[started.run.name] = sentence
                elif started.process.returncode:
                    raise ReportError(_describe_failure(started))
    return failures


def _sort_runs(runs: Sequence[Run]) -> list[Run]:
    """Sort runs: first those that others wait for, then the longest: FP8, then high precision, then forks."""
    awaited = any(run.after is not None for run in runs)
    rank = {"reference": 0 if awaited else 2, "fp8": 1, "saving": 1, "seed": 1, "cell": 1, "noise": 2, "fork": 3}
    return sorted(runs, key=lambda run: rank[run.kind])


def _is_ready(run: Run) -> bool:
    return run.after is None or run.after.is_dir()


def _start(run: Run, stack: ExitStack, nproc: int) -> _RunProcess:
    directory = Path(run.cfg.run.dir)
    directory.parent.mkdir(parents=True, exist_ok=True)
    file, log = (directory.with_name(f"{directory.name}.{end}") for end in ("yaml", "log"))
    file.write_text(to_yaml(run.cfg), encoding="utf-8")
    out: IO[bytes] = stack.enter_context(log.open("wb"))
    several = ["--nproc", str(nproc)] if nproc > 1 else []
    command = [sys.executable, "-c", COMMAND, str(os.getpid()), "train", str(file), *several]
    threads = {} if run.cfg.run.threads is None else {"OMP_NUM_THREADS": str(run.cfg.run.threads)}
    # A separate process group: Ctrl-C reaches only this process, which then asks every run to save and exit.
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, env={**os.environ, **threads},
        start_new_session=True,
    )  # fmt: skip
    return _RunProcess(run, process, log)


def _fp8_failure(started: _RunProcess) -> str | None:
    """Return the error of an FP8 run, or None if it did not fail or failed before its first step."""
    directory = Path(started.run.cfg.run.dir)
    began = (directory / "metrics.jsonl").exists() or (directory / "proof.json").exists()
    if started.process.returncode != 1 or not started.run.may_fail or not began:
        return None
    _, prefix, message = started.log.read_text(encoding="utf-8", errors="replace").rpartition("octavo train: ")
    return message.strip() if prefix else None


def _describe_failure(started: _RunProcess) -> str:
    text = started.log.read_text(encoding="utf-8", errors="replace").strip()
    code = started.process.returncode
    how = f"was stopped by signal {-code if code < 0 else code - 128}" if code < 0 or code > 128 else f"failed ({code})"
    last = "\n".join(text.split("\n")[-12:])
    return f"{started.run.label} {how}; the same command continues the trial. The end of {started.log}:\n{last}"


@contextmanager
def _stop_requests() -> Iterator[list[int]]:
    """Collect SIGTERM and SIGHUP as requests to stop, read between two checks of the runs; a second one has no effect.

    Ignored signals stay ignored (nohup). Outside the main thread signals cannot be caught: then only the runs'
    monitoring of their parent process remains.
    """
    requests: list[int] = []
    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)):
            if number not in before and signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, lambda received, _frame: requests.append(received))
    try:
        yield requests
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _stop_all(running: list[_RunProcess]) -> None:
    """Ask the running processes to save and exit, and wait for them."""
    for started in running:
        started.process.terminate()
    deadline = time.monotonic() + PATIENCE
    for started in running:
        try:
            started.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            started.process.kill()
            started.process.wait()


class _Progress:
    """Shows progress from the metrics of the runs and the time left for all of them: a bar per run on a terminal,
    otherwise lines, nothing if the console is None."""

    def __init__(self, runs: Sequence[Run], console: Any, jobs: int = 1) -> None:
        self.runs, self.console = runs, console
        self.left = TimeLeft([run.all_steps for run in runs], jobs)
        self.ended: set[int] = set()
        self._bars: Any = None
        self._last = time.monotonic()

    def __enter__(self) -> _Progress:
        if self.console is not None and self.console.is_terminal:
            from rich.progress import BarColumn, Progress, TextColumn

            columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[note]}"))
            self._bars = Progress(*columns, console=self.console, refresh_per_second=4)
            self._tasks = [self._bars.add_task(run.label, total=1.0, note="") for run in self.runs]
            self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):  # after a hang-up there is no terminal to write to
            self.update(final=True)
            if self._bars is not None:
                self._bars.stop()

    def update(self, final: bool = False) -> None:
        if self.console is None:
            return
        done, totals = [count_steps(run) for run in self.runs], self.left.totals
        left = self.left.update(done, time.monotonic(), self.ended)
        shown = f", about {format_time(left)} left" if left and not final else ""
        if self._bars is not None:
            for number, (task, steps, total) in enumerate(zip(self._tasks, done, totals, strict=True)):
                note = f"{steps}/{total}{shown if number == len(done) - 1 else ''}"
                self._bars.update(task, completed=steps / total, note=note)
        elif final or time.monotonic() - self._last >= LINES:
            self._last = time.monotonic()
            counts = list(zip(self.runs, done, totals, strict=True))
            ended = sum(now >= total for _, now, total in counts)
            going = [f"{run.label} {now}/{total}" for run, now, total in counts if 0 < now < total]
            text = " | ".join([f"{ended} of {len(counts)} runs done{shown}", *going])
            self.console.print(text, highlight=False, markup=False, soft_wrap=True)
