"""The last line of `.ci/run`: how many tests used real weights and a server; zero of either fails."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import conftest

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
