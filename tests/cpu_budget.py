"""A pytest plugin: what the tests cost in CPU seconds, whoever ran them, and the ten dearest of them.

Wall-clock says how busy the machine was; CPU seconds say what the tests cost, subprocesses included. Every process of
pytest-xdist counts its own and sends the total when it ends. ``OCTAVO_TEST_CPU=FILE`` writes the seconds of every test
as JSON, which is what the table in ``tests/README.md`` is made of (``python -m tests.cpu_budget FILE``).

A test over 5 s is to be marked long and is named. Far beyond that it fails a run that leaves long tests out, such as
``make test``. Neither a busy machine takes a test there nor a child process of an earlier one: the system counts a
child's seconds when it is waited for, which can be tests later.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

CPU = "cpu_seconds"  # the user property that carries the seconds of one phase of a test
SLOWEST = 10
LONG = 5.0  # CPU seconds beyond which a test is to be marked long
TOLERATED = 4  # times that: what a test not marked long may cost before the run fails


def cpu_seconds() -> float:
    """CPU seconds of this process so far, in user and system mode, ended children included."""
    t = os.times()
    return t.user + t.system + t.children_user + t.children_system


def own_seconds() -> float:
    """The same without children: of the controller of pytest-xdist, whose workers count themselves."""
    t = os.times()
    return t.user + t.system


class CpuBudget:
    """Adds up CPU seconds of tests. On the controller of pytest-xdist the workers' reports and totals arrive here."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.tests: Counter[str] = Counter()
        self.short: set[str] = set()  # those not marked long
        self.workers = 0.0
        self.out = os.environ.pop("OCTAVO_TEST_CPU", None)  # a pytest that a test starts would write there, too

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        item.stash[_START] = cpu_seconds()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: Any) -> Iterator[None]:
        report = yield
        now = cpu_seconds()
        report.user_properties = [*report.user_properties, (CPU, now - item.stash[_START])]
        item.stash[_START] = now
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.tests[report.nodeid] += next((v for k, v in reversed(report.user_properties) if k == CPU), 0.0)
        if "long" not in report.keywords:
            self.short.add(report.nodeid)

    def over(self, seconds: float) -> list[str]:
        """The tests not marked long that took more than this, the dearest first."""
        return [name for name, cost in self.tests.most_common() if cost > seconds and name in self.short]

    def too_dear(self) -> list[str]:
        """The tests that fail this run by what they cost. A run that asks for long tests too is judged by none."""
        return self.over(TOLERATED * LONG) if "not long" in self.config.option.markexpr else []

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(self.config, "workeroutput"):
            self.config.workeroutput[CPU] = cpu_seconds()
        elif self.too_dear() and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: Any) -> None:
        self.workers += getattr(node, "workeroutput", {}).get(CPU, 0.0)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if hasattr(self.config, "workerinput") or not self.tests:
            return
        total = own_seconds() + self.workers if self.workers else cpu_seconds()
        terminalreporter.section(f"CPU seconds: {total:.0f} in all, {sum(self.tests.values()):.0f} of them in tests")
        for name, seconds in self.tests.most_common(SLOWEST):
            terminalreporter.write_line(f"{seconds:7.1f}  {name}")
        if over := self.over(LONG):
            terminalreporter.write_line(f"over {LONG:.0f} s, to be marked long: {', '.join(over)}")
        for name in self.too_dear():
            terminalreporter.write_line(
                f"FAILED {name} - it took {self.tests[name]:.1f} CPU seconds, and a test not marked long may take "
                f"{TOLERATED * LONG:g}: make it cheaper, or mark it pytest.mark.long",
                red=True,
            )
        if self.out:
            Path(self.out).write_text(json.dumps({"total": total, "tests": dict(self.tests)}, indent=1))


_START = pytest.StashKey[float]()


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(CpuBudget(config), "cpu_budget")


def by_file(tests: dict[str, float]) -> list[tuple[str, float, int]]:
    """(file, CPU seconds, number of tests), the dearest first."""
    seconds: Counter[str] = Counter()
    number: Counter[str] = Counter()
    for name, cost in tests.items():
        file = name.split("::")[0]
        seconds[file] += cost
        number[file] += 1
    return [(file, cost, number[file]) for file, cost in seconds.most_common()]


if __name__ == "__main__":
    for file, cost, number in by_file(json.loads(Path(sys.argv[1]).read_text())["tests"]):
        print(f"{cost:8.1f}  {number:5d}  {file}")
