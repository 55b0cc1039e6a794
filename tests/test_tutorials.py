"""The tutorials do what they say: their blocks run in order, in a folder of their own, as a reader would type them.

A block with a title is a file of that name, `sh` is typed, `text` with the title "prints" is what the command before
it must have printed. `console` is shown and not run, which the page must say.
"""

from __future__ import annotations

import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest

from octavo.cli.main import main

PAGES = Path(__file__).resolve().parents[1] / "docs" / "tutorials"
BLOCK = re.compile(r'^```(\w*)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
#: pages that go on in the folder of another follow it
STORIES = [["own_data", "lora_24gb", "reading_the_page"], ["trainer"], ["eight_lines"]]
VERDICTS = {"compare": {0, 1, 3}}  # that a trial was made; what it finds is the machine's to say
#: of trials in 50 steps on these examples no page names a figure; forks are those of report/test_demo.py
SHORTER = {"compare": ["train.steps=6", "data.eval.0.max_samples=8", "--forks", "0"]}


def typed(line: str) -> None:
    """A line of `sh`, in this process: what a command costs is mostly its imports."""
    program, *words = shlex.split(line, comments=True)
    if program == "octavo":
        assert main([*words, *SHORTER.get(words[0], [])]) in VERDICTS.get(words[0], {0}), line
    else:
        assert program == "python", f"{line}: no such program here"
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")


def told(line: str, output: str) -> bool:
    return " ".join(line.split()) in " ".join(output.split())


def work_through(text: str, output) -> None:
    """Everything that a page asks its reader to do, in the folder that one is in."""
    last = ""
    for kind, title, body in BLOCK.findall(text):
        if title == "prints":
            missing = [line for line in body.splitlines() if not told(line, last)]
            assert not missing, f"not printed: {missing}\n{last}"
        elif title:
            Path(title).write_text(body, encoding="utf-8")
        elif kind == "sh":
            for line in body.splitlines():
                typed(line)
            last = output.readouterr().out
        else:
            assert kind == "console" and "not run" in text, f"nobody runs this block:\n{body}"


def test_every_tutorial_is_worked_through() -> None:
    assert sorted(page for story in STORIES for page in story) == sorted(page.stem for page in PAGES.glob("*.md"))


@pytest.mark.long
@pytest.mark.usefixtures("no_pages")
@pytest.mark.parametrize("story", STORIES, ids=lambda story: story[0])
def test_a_tutorial_does_what_it_says(story: list[str], tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    for page in story:
        work_through((PAGES / f"{page}.md").read_text(encoding="utf-8"), capsys)


@pytest.mark.parametrize(
    "text",
    [
        '```sh\noctavo schema\n```\n```text title="prints"\nno such line\n```\n',
        "```sh\noctavo plan gone.yaml\n```\n",
        "```python\nprint(1)\n```\n",
        "```console\n$ ls\n```\n",
    ],
)
def test_a_page_that_lies_is_found(text: str, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(AssertionError):
        work_through(text, capsys)
