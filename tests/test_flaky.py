"""What CI does with a test that fails: planted tests, run as `.ci/run` runs them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import octavo
from tests import flaky

ROOT = Path(__file__).resolve().parents[1]
PLANTED = """
import os, signal
from pathlib import Path

HERE = Path(__file__).parent

def first_time(name):
    mark = HERE / (name + ".seen")
    seen = mark.exists()
    mark.touch()
    return not seen

def test_chance(tmp_path):
    (tmp_path / "left.txt").write_text("what it was working on")
    assert not first_time("chance"), "lost by chance"

def test_another_chance():
    assert not first_time("another")

def test_a_third_chance():
    assert not first_time("third")

def test_wrong():
    assert 1 == 2

def helper():
    os.kill(os.getpid(), signal.SIGCONT)

def test_that_kills():
    helper()
    assert not first_time("kills")

def test_resumes():
    assert not first_time("resumes")

def test_ended():
    import multiprocessing
    for process in multiprocessing.active_children():
        process.terminate()
    assert not first_time("ended")
"""


@pytest.fixture
def run(tmp_path: Path):
    """One part of CI on the planted tests that `words` choose; the folder of failures is kept between parts."""
    place = ROOT / "build" / "planted_flaky" / tmp_path.name
    place.mkdir(parents=True, exist_ok=True)
    planted = place / "test_planted.py"
    planted.write_text(PLANTED)
    folder = tmp_path / "failed"

    def part(words: str) -> str:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml")]
        command += ["--rootdir", str(ROOT), "-p", "tests.flaky", "--noconftest", str(planted), "-k", words]
        done = subprocess.run(command, cwd=ROOT, env={**os.environ, flaky.FOLDER: str(folder)}, capture_output=True)
        assert done.returncode == 1, done.stdout.decode()
        return flaky.again(folder)

    yield part, folder
    for path in sorted(place.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    place.rmdir()


def test_a_test_that_passes_when_run_again_is_reported_and_saves_the_run(run, capfd) -> None:
    part, folder = run
    assert part("test_chance") == ""
    printed = capfd.readouterr().out
    assert re.search(r"^flaky: \S+test_planted.py::test_chance$", printed, re.M) and "lost by chance" in printed
    [left] = folder.glob("*/tmp_path/left.txt")
    assert left.read_text() == "what it was working on"
    [line] = flaky.lines(folder)
    name, day, failure = line.split(" | ")
    assert name.endswith("::test_chance") and re.fullmatch(r"\d{4}-\d\d-\d\d", day) and "lost by chance" in failure
    # two tests a run of CI, over all of its parts
    assert "3 tests failed" in part("test_another_chance or test_a_third_chance")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("test_wrong", "failed again"),
        ("test_that_kills", "race_is_a_bug"),
        ("test_resumes", "race_is_a_bug"),
        ("test_ended", "race_is_a_bug"),
    ],
)
def test_what_fails_twice_or_races_fails_the_run(run, words: str, why: str) -> None:
    part, folder = run
    assert why in part(words)
    assert flaky.lines(folder) == [] and list(folder.glob("*/call.txt"))


def test_a_listed_name_that_fails_again_fails_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = tmp_path / "flaky.txt"
    listed.write_text("# a comment\ntests/a.py::test_x[1-b] | 2026-01-02 | assert 1 == 2\n")
    monkeypatch.setattr(flaky, "LIST", listed)
    record = {"python": sys.executable, "tests": {"tests/a.py::test_x[1-b]": "E  assert 1"}, "not a test": []}
    (tmp_path / "failed.json").write_text(json.dumps(record))
    assert "failed again" in flaky.again(tmp_path)


def test_a_crash_of_the_process_is_not_run_again(tmp_path: Path) -> None:
    text = "???: worker 'gw0' crashed while running 'tests/a.py::test_x'"
    record = {"python": sys.executable, "tests": {"tests/a.py::test_x": text}, "not a test": []}
    (tmp_path / "failed.json").write_text(json.dumps(record))
    assert "the process crashed" in flaky.again(tmp_path)


@pytest.mark.parametrize("reasons", [[], ["tests/a.py::test_dear takes too much CPU"]])
def test_a_run_that_failed_for_another_reason_stays_failed(tmp_path: Path, reasons: list[str]) -> None:
    assert flaky.again(tmp_path)  # lint, types or the installation
    (tmp_path / "failed.json").write_text(json.dumps({"python": "", "tests": {}, "not a test": reasons}))
    assert flaky.again(tmp_path)


def test_the_list_is_empty_at_a_release() -> None:
    released = "dev" not in octavo.__version__
    assert not (released and flaky.known()), (
        f"version {octavo.__version__} is a release; mend the tests in tests/flaky.txt"
    )


def test_each_line_of_the_list_has_its_three_parts() -> None:
    lines = [line for line in flaky.LIST.read_text().splitlines() if line and not line.startswith("#")]
    assert [line for line in lines if not re.fullmatch(r"\S.*? \| \d{4}-\d\d-\d\d \| \S.*", line)] == []
