"""Runs jobs as processes, each with its own limits. A crash or a hang only loses the case that was running:
it is listed with the last lines of output, and a new process continues with the remaining cases.
"""

from __future__ import annotations

import select
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.gpu.jobs import ROOT, Job
from benchmarks.gpu.process import Process
from benchmarks.gpu.store import Store
from benchmarks.gpu.worker import MORE

WORKER = (sys.executable, "-m", "benchmarks.gpu.worker")
MARGIN = 0.15  # of a suite's time: it ends by itself, with its last case timed, before it is ended
TURNS = 12  # processes that one job may take
PATIENCE = 30.0  # seconds in which torch is imported anywhere, several times at once
PYTEST = {2: "interrupted", 3: "an internal error of pytest", 4: "wrong usage of pytest"}  # 1: a test failed, 5: none


@dataclass
class Runner:
    """``device``, ``small``: what suites run on. ``lanes``: test files at a time. ``least``: seconds below which
    nothing is begun. ``command``: what a process runs; tests put another in its place. ``stopped``: the signal that
    asked it to end. ``gone``: why the device was lost, which ends the call too."""

    store: Store
    log: Callable[[str], None]
    call: str = ""
    device: str = "cuda"
    small: bool = False
    lanes: int = 4
    least: float = 10.0
    command: Sequence[str] = WORKER
    stopped: str = ""
    gone: str = ""

    @property
    def ends(self) -> bool:
        return bool(self.stopped or self.gone)

    def stop(self, number: int, frame: object) -> None:
        """A signal's handler. It only notes: an exception could fall between the reading of events and their saving."""
        self.stopped = signal.Signals(number).name

    def run(self, jobs: Sequence[Job], until: float) -> None:
        """Run all jobs before ``until`` (monotonic): tests in parallel, then the tests that need the GPU to themselves,
        then suites one by one.

        Each gets a share of the remaining time in proportion to its estimate, so that time that one leaves
        goes to the next.
        """
        tests = [job for job in jobs if job.kind == "tests" and not job.alone]
        alone = [job for job in jobs if job.alone]
        suites = [job for job in jobs if job.kind == "suite"]
        together = max([sum(job.seconds for job in tests) / self.lanes, *(job.seconds for job in tests)], default=0.0)
        turns = [(tests, self.lanes, together), *(([job], 1, job.seconds) for job in [*alone, *suites])]
        for number, (group, lanes, seconds) in enumerate(turns):
            if self.ends:
                for job in (job for group, _, _ in turns[number:] for job in group):
                    self._not_begun(job)
                self.store.save()
                break
            left = until - time.monotonic()
            scale = left / (sum(share for _, _, share in turns[number:]) or 1)
            self._together(group, lanes, time.monotonic() + scale * seconds, scale)

    def _together(self, jobs: Sequence[Job], lanes: int, until: float, scale: float) -> None:
        waiting, running = deque(jobs), list[_Task]()
        try:
            while (waiting or running) and not self.ends:
                while waiting and len(running) < lanes and (now := time.monotonic()) + self.least < until:
                    job = waiting.popleft()
                    running.append(_Task(self, job, min(until, now + scale * job.seconds)))
                if not running:
                    break
                if not waiting:  # no other job is waiting for a share of the time
                    for task in running:
                        task.until = until
                select.select([pipe for task in running for pipe in task.process.pipes], [], [], 0.1)
                running = [task for task in running if not task.over()]
                self.store.save()
        finally:
            for task in running:
                task.abandon()
            for job in waiting:
                self._not_begun(job)
            self.store.save()

    def _not_begun(self, job: Job) -> None:
        if job.name not in self.store.files[job.kind]["jobs"]:  # what an earlier call found of it stays
            self.store.apply(job.kind, job.name, {"state": "not begun"})
        self.log(f"{job.name}: not begun, {'the device is lost' if self.gone else self.stopped or 'no time is left'}")


@dataclass
class _Task:
    """A job under way: its process, and those before it that were lost."""

    runner: Runner
    job: Job
    until: float
    skip: list[Any] = field(default_factory=list)
    lost: int = 0
    turns: int = 0

    def __post_init__(self) -> None:
        self.began = time.monotonic()
        self.patience = min(self.job.stall, max(PATIENCE, self.job.patience * (self.until - self.began)))
        self._note(began=self.runner.call, tests=self.job.kind == "tests")
        self.runner.log(f"{self.job.name}: begins, for at most {self.until - self.began:.0f} s")
        self._start()

    def _start(self) -> None:
        self.turns += 1
        self.under_way: tuple[str, list[str]] | None = None
        self.exit: int | None = None
        self.broken = self.gone = ""
        self.answered = False
        left = self.until - time.monotonic()
        order = {
            "kind": self.job.kind,
            "target": self.job.target,
            "device": self.runner.device,
            "small": self.runner.small,
            "seconds": (1 - MARGIN) * left,
            "skip": self.skip,
            "settings": dict(self.job.settings),
            "apart": self.job.apart,
        }
        self.process = Process(self.runner.command, order, ROOT)

    def over(self) -> bool:
        """Take its events; see to the limits; once the process has ended, whether the job has."""
        self._take(self.process.events())
        if not self.process.ended:
            silent = time.monotonic() - self.process.last_event
            if time.monotonic() > self.until:
                self.process.force(f"its limit of {self.until - self.began:.0f} s was reached")
            elif silent > self.patience:
                self.process.force(f"hung: silent for {self.patience:.3g} s")
            elif self.process.forced:
                self.process.force(self.process.forced)
            return False
        self._take(self.process.close())
        late = time.monotonic() + self.runner.least > self.until
        if self.exit == MORE and not self.gone:
            if late or self.turns == TURNS:
                return self._end("cut off")
            self._start()
            return False
        if self.exit is not None and self.exit not in PYTEST and not self.gone:
            return self._end("done" if not self.lost else "done but for what was lost")
        silent = self.process.forced and not self.answered and self.job.kind == "suite"
        self.runner.gone = self.gone or ("the device does not answer" if silent else "")
        why = self.runner.gone or self.broken or PYTEST.get(self.exit or 0) or self.process.how
        case, candidates = self.under_way or ("", [])
        self._lose(case, candidates, why)
        if not case or late or self.turns == TURNS:
            return self._end("cut off")
        self.patience /= 2 if self.process.forced else 1  # who hung once may hang at each case
        self.skip += [case] if self.job.kind == "tests" else [[case, name] for name in candidates]
        self._start()
        return False

    def abandon(self) -> None:
        """The call ends: so does this."""
        self.process.kill()
        self._take(self.process.close())
        self._lose(*(self.under_way or ("", [])), "the call was stopped")
        self._end("cut off")

    def _take(self, events: list[dict[str, Any]]) -> None:
        for event in events:
            self.answered = True
            if "ready" in event:
                continue
            if "gone" in event:
                self.gone = event["gone"]
                continue
            if self.process.forced and ("begins" in event or event.get("test", ("", ""))[1] == "failed"):
                continue  # the signal that ends it can make a compiler fail, and the test with it
            if "begins" in event:
                self.under_way = (event["begins"][0], event["begins"][1])
                continue
            if "over" in event:
                self.exit = event["over"]
                continue
            if "broken" in event:
                self.broken, self.under_way = event["broken"], (self.skip[-1], [])
                continue
            if "test" in event:
                self.skip.append(event["test"][0])
                if event["test"][1] == "failed":
                    self.runner.log(f"failed: {event['test'][0]}")
            elif "rows" in event:
                self.skip += [[line["case"], line["candidate"]] for line in [*event["rows"], *event["absent"]]]
                for row in event["rows"]:
                    self.runner.log(f"{row['suite']} {row['case']}: {row['candidate']} {1e3 * row['seconds']:.3f} ms")
            self.under_way = self.under_way if "test" not in event and "rows" not in event else None
            self._note(**event)

    def _lose(self, case: str, candidates: list[str], why: str) -> None:
        self.lost += 1
        what = {"case": case, "candidates": candidates, "why": why, "last lines": self.process.tail()}
        self._note(lost=[what])
        named = f" in {case}{' with ' if candidates else ''}{', '.join(candidates)}" if case else ""
        self.runner.log(f"{self.job.name}: {why}{named}")

    def _end(self, state: str) -> bool:
        seconds = time.monotonic() - self.began
        self._note(state=state, seconds=round(seconds, 1))
        self.runner.log(f"{self.job.name}: {state}, {seconds:.0f} s")
        return True

    def _note(self, **event: Any) -> None:
        self.runner.store.apply(self.job.kind, self.job.name, event)
