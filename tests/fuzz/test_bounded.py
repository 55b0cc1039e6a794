"""The harness of the fuzzers detects each kind of violation."""

import os
import subprocess
import time
from pathlib import Path

import pytest

from octavo.base.safe_read import Unreadable
from tests.fuzz.bounded import Finding, bounds, outcome

HERE = Path("/somewhere/file.json")


def _raise(error: BaseException) -> None:
    raise error


def _fork() -> None:
    if (child := os.fork()) == 0:
        os._exit(0)
    os.waitpid(child, 0)


@pytest.mark.parametrize(
    ("reader", "what"),
    [
        (lambda: _raise(Unreadable(f"{HERE} is empty")), None),
        (_fork, None),  # a template is tried in a separate process
        (lambda: _raise(Unreadable("it is empty")), "names no file: it is empty"),
        (lambda: _raise(KeyError("a")), "KeyError: 'a'"),
        (lambda: _raise(SystemExit("bye")), "SystemExit: bye"),
        (lambda: subprocess.run(["true"]), "started subprocess.Popen"),
    ],
)
def test_outcomes_are_classified(reader, what) -> None:
    found: list[Finding] = []
    outcome(reader, HERE, "case 1", found)
    assert [f.case for f in found] == ["case 1"] * (what is not None)
    assert all(f.what.startswith(what) for f in found)


def test_exceeded_bounds_are_reported() -> None:
    found: list[Finding] = []
    with bounds("hang", found, seconds=0.05):
        time.sleep(5)
    with bounds("cpu", found, cpu=0.01):
        sum(range(2_000_000))
    with bounds("memory", found, growth=-1):
        pass
    with bounds("fork", found, forks=False):
        _fork()
    assert [f.case for f in found] == ["hang", "cpu", "memory", "fork"]
