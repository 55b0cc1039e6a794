"""CONTRIBUTING.md names tests, code and commits that exist."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import textwrap

import pytest

from tests.project_rules import ROOT

TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def test_every_named_test_exists() -> None:
    defined = "".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "tests").rglob("test_*.py")))
    names = set(re.findall(r"`(test_\w+)`", TEXT))
    assert len(names) >= 5 and {name for name in names if f"def {name}(" not in defined} == set()


def test_every_block_of_python_parses() -> None:
    blocks = re.findall(r"^ *```python\n(.*?)^ *```$", TEXT, re.MULTILINE | re.DOTALL)
    for block in blocks:
        ast.parse(textwrap.dedent(block))
    assert len(blocks) >= 5


def test_the_example_recipe_is_the_one_that_a_test_plants() -> None:
    planted = (ROOT / "tests/base/test_recipe_specs.py").read_text(encoding="utf-8")
    (line,) = re.findall(r'"tilewise", \(\(.*', planted)
    assert line in TEXT


def test_every_example_commit_has_the_quoted_subject() -> None:
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("no git checkout")
    commits = re.findall(r"\b([0-9a-f]{8}) `([^`]+)`", TEXT)
    assert len(commits) >= 5
    for commit, subject in commits:
        shown = subprocess.run(
            ["git", "-C", str(ROOT), "log", "-1", "--format=%s", commit], capture_output=True, text=True
        )
        if shown.returncode:
            pytest.skip(f"{commit} is not in this clone, which may be shallow")
        assert shown.stdout.strip() == " ".join(subject.split())
