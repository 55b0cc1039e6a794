"""What `.ci/run` does with a test that fails: once more, by itself, unless a race would be a bug.

As a pytest plugin: a test that kills, resumes, locks, signals or starts ranks gets the marker ``race_is_a_bug``, by
what it calls (`races`). With ``OCTAVO_FAILED=FOLDER`` each failure is written there: ``failed.json``, and the test's
``tmp_path`` with its text in a folder of its own.

As a command, ``python -m tests.flaky again FOLDER`` reads that after a failed run. It runs each failed test again, by
itself, in the Python that ran it, and exits with 0 if all pass: then they are flaky, and are printed with the text of
their first failure. It exits with 1 where a second run would prove nothing (a race, a name in ``tests/flaky.txt``,
more than two flaky tests in a run, a run that failed for another reason). ``python -m tests.flaky lines FOLDER`` prints
what is to be pasted into ``tests/flaky.txt``.
"""

from __future__ import annotations

import datetime
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

MARKER = "race_is_a_bug"
FOLDER = "OCTAVO_FAILED"  # the variable that names the folder
LIST = Path(__file__).with_name("flaky.txt")
AT_MOST = 2  # flaky tests in a run of CI: with more, chance is no explanation
CRASHED = re.compile(r"worker '\w+' crashed while running")  # as pytest-xdist says it
TEXT = 20_000  # characters of a failure that are kept
ARTEFACTS = 64 << 20  # bytes of a test's folder that are kept

#: what code that depends on the order of processes, threads or signals calls
RACING = {
    "kill", "killpg", "terminate", "send_signal", "raise_signal", "pthread_kill", "setitimer", "SIGTERM", "SIGINT",
    "SIGHUP", "SIGKILL", "SIGALRM", "flock", "FileLock", "start_processes", "init_process_group",
}  # fmt: skip
RACING_NAME = re.compile(r"resum|kill|interrupt|signal|(?<![a-z])lock|(?<![a-z])ranks?(?![a-z])")
RACING_MODULES = {"tests.ranks"}


def races(function: Any, seen: set[int] | None = None) -> bool:
    """Whether a function, or one of the same tests that it calls, kills, signals, locks or starts ranks."""
    seen = set() if seen is None else seen
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None or id(code) in seen:
        return False
    seen.add(id(code))
    namespace = inspect.unwrap(function).__globals__
    names = set(code.co_names)
    for inner in code.co_consts:  # functions and comprehensions inside
        if isinstance(inner, types.CodeType):
            names |= set(inner.co_names)
    if names & RACING:
        return True
    for name in names:
        value = namespace.get(name)
        if isinstance(value, types.ModuleType) and value.__name__ in RACING_MODULES:
            return True
        if isinstance(value, types.FunctionType):
            if value.__module__ in RACING_MODULES:
                return True
            if value.__module__.startswith("tests.") and races(value, seen):
                return True
    return False


def is_race(item: pytest.Item) -> bool:
    """By the test's name, by what it calls and by what its fixtures call."""
    function = getattr(item, "function", None)
    if function is None:
        return False
    if RACING_NAME.search(function.__name__):
        return True
    info = getattr(item, "_fixtureinfo", None)
    fixtures = [one.func for of_name in info.name2fixturedefs.values() for one in of_name[-1:]] if info else []
    own = [one for one in fixtures if one.__module__.startswith("tests.") and not one.__module__.endswith("conftest")]
    return any(races(one) for one in (function, *own))


class Failures:
    """Writes what failed. With pytest-xdist the controller writes the list, each worker keeps its tests' folders."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        of_worker = getattr(config, "workerinput", None)
        # a pytest that a test starts would write there too
        name = of_worker.get(FOLDER) if of_worker is not None else os.environ.pop(FOLDER, None)
        self.folder = Path(name) if name else None
        self.failed: dict[str, str] = {}

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        if self.folder is not None:
            node.workerinput[FOLDER] = str(self.folder)

    @pytest.hookimpl(tryfirst=True)  # before -m leaves tests out
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            if item.get_closest_marker(MARKER) is None and is_race(item):
                item.add_marker(MARKER)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: Any) -> Iterator[None]:
        report = yield
        if self.folder is not None and report.failed:
            keep_artefacts(item, report, self.folder)
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.setdefault(report.nodeid, f"{report.when}: {report.longreprtext}"[-TEXT:])

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.failed.setdefault(report.nodeid, f"collection: {report.longreprtext}"[-TEXT:])

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.folder is None or hasattr(self.config, "workerinput"):
            return
        budget = self.config.pluginmanager.get_plugin("cpu_budget")
        reasons = [f"{name} takes too much CPU" for name in (budget.too_dear() if budget else [])]
        if session.exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            reasons.append(f"pytest ended with {session.exitstatus!s}")
        self.folder.mkdir(parents=True, exist_ok=True)
        record = {"python": sys.executable, "tests": self.failed, "not a test": reasons}
        (self.folder / "failed.json").write_text(json.dumps(record, indent=1))


def keep_artefacts(item: pytest.Item, report: pytest.TestReport, folder: Path) -> None:
    """The test's own folder, up to a bound, and the text of its failure."""
    own = folder / re.sub(r"[^\w.-]+", "-", item.nodeid)[-150:]
    own.mkdir(parents=True, exist_ok=True)
    (own / f"{report.when}.txt").write_text(f"{item.nodeid}\n{report.longreprtext}\n{report.caplog}{report.capstdout}")
    source = getattr(item, "funcargs", {}).get("tmp_path")
    left = ARTEFACTS
    for path in sorted(source.rglob("*")) if isinstance(source, Path) and source.is_dir() else ():
        if path.is_symlink() or not path.is_file() or path.stat().st_size > left:
            continue
        left -= path.stat().st_size
        target = own / "tmp_path" / path.relative_to(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Failures(config), "flaky")


def known() -> set[str]:
    """The names in tests/flaky.txt: `name | date | first failure` a line."""
    lines = (line.split("|")[0].strip() for line in LIST.read_text().splitlines())
    return {name for name in lines if name and not name.startswith("#")}


def again(folder: Path) -> str:
    """Run the failed tests once more. Why that does not save the run, or nothing."""
    listed = folder / "failed.json"
    if not listed.exists():
        return "it was not a test that failed"
    record = json.loads(listed.read_text())
    listed.unlink()  # the next part of CI writes its own
    failed: dict[str, str] = record["tests"]
    if record["not a test"] or not failed:
        return "; ".join(record["not a test"]) or "it was not a test that failed"
    if crashed := sorted(name for name, text in failed.items() if CRASHED.search(text)):
        return f"{', '.join(crashed)}: the process crashed, which no test does by chance"
    if seen := sorted(known() & set(failed)):
        return f"{', '.join(seen)}: named in {LIST.name}, and failed again"
    log = folder / "flaky.json"
    earlier: dict[str, str] = json.loads(log.read_text()) if log.exists() else {}
    if len(earlier.keys() | failed.keys()) > AT_MOST:
        return f"{len(earlier.keys() | failed.keys())} tests failed in this run of CI; {AT_MOST} may be run again"
    for name, text in failed.items():
        words = ["-q", "-p", "no:cacheprovider", "-p", "tests.flaky", "-m", f"not {MARKER}", name]
        code = subprocess.run([record["python"], "-m", "pytest", *words], cwd=LIST.parents[1]).returncode
        if code == pytest.ExitCode.NO_TESTS_COLLECTED:
            return f"{name}: {MARKER}; what it left is in {folder}"
        if code:
            return f"{name}: failed again"
        print(f"flaky: {name}\n{text}", flush=True)
        earlier[name] = text
        log.write_text(json.dumps(earlier, indent=1))
    return ""


def lines(folder: Path) -> list[str]:
    """A line for tests/flaky.txt for each flaky test of this run."""
    log = folder / "flaky.json"
    today = datetime.date.today().isoformat()
    flaky: dict[str, str] = json.loads(log.read_text()) if log.exists() else {}
    return [f"{name} | {today} | {first_failure(text)}" for name, text in flaky.items()]


def first_failure(text: str) -> str:
    """The line of a failure that says what it was: the first that pytest marks with E, or the last one."""
    marked = [line[1:].strip() for line in text.splitlines() if line.startswith("E ")]
    return " ".join((marked or text.strip().splitlines() or [""])[0 if marked else -1].split())[:200]


def main(words: list[str]) -> int:
    if len(words) != 2 or words[0] not in ("again", "lines"):
        print(__doc__)
        return 2
    folder = Path(words[1])
    if words[0] == "lines":
        for line in lines(folder):
            print(line)
        return 0
    if why := again(folder):
        print(f"FAILED: {why}.")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
