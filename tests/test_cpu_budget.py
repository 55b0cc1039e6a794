"""What a test may cost: the plugin is run on a small folder of tests, with a budget of hundredths of a second."""

from __future__ import annotations

import pytest

from tests import cpu_budget

pytest_plugins = ["pytester"]

TESTS = """
import pytest, time

def burn():
    until = time.process_time() + 0.15
    while time.process_time() < until: pass

def test_dear(): burn()
def test_cheap(): pass
@pytest.mark.long
def test_long(): burn()
"""


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["-m", "not long"], pytest.ExitCode.TESTS_FAILED),
        (["-m", "not long", "-n", "1"], pytest.ExitCode.TESTS_FAILED),  # as make test runs it
        (["-m", "not long", "-k", "cheap"], pytest.ExitCode.OK),
        ([], pytest.ExitCode.OK),
    ],
)
def test_a_dear_test_that_is_not_marked_long_fails_a_run_without_long_tests(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, words: list[str], code: pytest.ExitCode
) -> None:
    monkeypatch.setattr(cpu_budget, "LONG", 0.025)
    monkeypatch.delenv("OCTAVO_TEST_CPU", raising=False)
    pytester.makeini("[pytest]\nmarkers = long")
    pytester.makepyfile(TESTS)
    result = pytester.runpytest_inprocess("-p", "tests.cpu_budget", "-p", "no:cacheprovider", *words)
    assert result.ret == code
    told = [line for line in result.outlines if "CPU seconds, and a test not marked long may take 0.1: make it" in line]
    assert len(told) == (code != pytest.ExitCode.OK) and all("::test_dear - it took 0." in line for line in told)
    named = [line.rpartition("::")[2] for line in result.outlines if line.startswith("over ")]
    assert named == ["test_dear"] * (words == [] or code != pytest.ExitCode.OK)
