"""The last lines of `.ci/run`: the budget by the speed of the machine, and how many tests used real weights and a
server; zero of either fails."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import conftest, machine_speed

SCRIPT = Path(__file__).resolve().parents[1] / ".ci" / "run"


def _report(*needs: str) -> SimpleNamespace:
    return SimpleNamespace(user_properties=[("needs", name) for name in needs])


@pytest.mark.parametrize(
    ("reports", "line"),
    [
        (
            [_report("real"), _report("server"), _report("real", "server"), _report()],
            "on real weights: 2, in the server: 2",
        ),
        ([_report()], None),
    ],
)
def test_tests_with_requirements_are_counted(reports: list[SimpleNamespace], line: str | None) -> None:
    lines: list[str] = []
    conftest.pytest_terminal_summary(SimpleNamespace(stats={"passed": reports}, write_line=lines.append))
    assert lines == ([] if line is None else [line])


@pytest.mark.parametrize(
    ("printed", "code", "last"),
    [
        ("on real weights: 2, in the server: 0\nrest\non real weights: 1, in the server: 6\n", 0, (3, 6)),
        ("on real weights: 2, in the server: 0\n", 1, (2, 0)),
        ("11 passed in 3 s\n", 1, (0, 0)),
    ],
)
def test_last_line_of_ci_counts_them(printed: str, code: int, last: tuple[int, int], tmp_path: Path) -> None:
    text = SCRIPT.read_text(encoding="utf-8")
    command = text[text.index("awk '/^on real weights") :]
    file = tmp_path / "printed"
    file.write_text(printed)
    ended = subprocess.run(["bash", "-c", f"printed={file}\n{command}"], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (
        code,
        f"on real weights: {last[0]} tests, in the server: {last[1]} tests\n",
    )


@pytest.mark.parametrize(
    ("seconds", "slower", "code"), [(4049, "1.00", 0), (4051, "1.00", 1), (6000, "1.50", 0), (6100, "1.50", 1)]
)
def test_budget_is_of_the_machine_for_which_it_was_set(seconds: int, slower: str, code: int) -> None:
    text = SCRIPT.read_text(encoding="utf-8")
    command = text[text.index('if awk -v all="$all"') : text.index("awk '/ passed.* in")]
    variables = f'BUDGET=2700\nall={seconds}\nslower="{slower}"\n'
    ended = subprocess.run(["bash", "-c", variables + command], capture_output=True, text=True)
    assert ended.returncode == code and ("above 1.5 times the budget" in ended.stdout) == bool(code)


def test_faster_machine_keeps_the_budget() -> None:
    assert machine_speed.factor(machine_speed.REFERENCE / 2) == 1
    assert machine_speed.factor(machine_speed.REFERENCE * 1.5) == pytest.approx(1.5)
