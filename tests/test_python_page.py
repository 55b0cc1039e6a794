"""The blocks of docs/python.md run in order, in one namespace, as a reader would paste them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from octavo.cli.main import main

PAGE = Path(__file__).resolve().parents[1] / "docs/python.md"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def run_blocks(first: int, last: int) -> None:
    """The blocks of a part of the page; an error shows the line of the page."""
    text, names = PAGE.read_text(encoding="utf-8"), {"__name__": "page"}
    for match in BLOCK.finditer(text, first, last):
        line = text.count("\n", 0, match.start(1))
        exec(compile("\n" * line + match[1], str(PAGE), "exec"), names)


def test_what_needs_only_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_blocks(0, PAGE.read_text(encoding="utf-8").index("## Beyond FP8"))


@pytest.mark.long
def test_what_needs_the_whole_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["tiny", "qwen3_vl", "vision"]) == 0
    text = PAGE.read_text(encoding="utf-8")
    run_blocks(text.index("## Beyond FP8"), len(text))
