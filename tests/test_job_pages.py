"""Each page of a job begins with a complete file, which is a configuration, and with commands, which run as typed."""

from __future__ import annotations

import json
import re
import runpy
import shlex
from pathlib import Path

import pytest

from octavo.cli.main import main
from octavo.config import load_config

ROOT = Path(__file__).resolve().parents[1]
#: page -> phase of its file
JOBS = {
    "sft": "sft", "lora": "sft", "preferences": "preference", "rl": "rl", "pretraining": "pretrain", "export": "sft",
    "compose": "sft",
}  # fmt: skip
TITLED = re.compile(r'^```(\w+) title="([^"]+)"\n(.*?)^```$', re.MULTILINE | re.DOTALL)
DATA = ("digits", "text")  # commands that write data sets
#: few steps: that the file trains is shown, not what it learns
SHORTER = ["train.steps=2", "train.warmup=0"]
SHORTER_STAGES = ["train.stages.0.steps=2", "train.stages.1.steps=2", "train.warmup=0"]


def page(job: str) -> str:
    return (ROOT / f"docs/{job}.md").read_text(encoding="utf-8")


def beginning(text: str) -> str:
    """A page up to and including the first block of commands."""
    return text[: text.index("```", text.index("```sh") + 5) + 3]


def files(text: str) -> dict[str, str]:
    return {name: body for _, name, body in TITLED.findall(text)}


def commands(text: str) -> list[list[str]]:
    """The words of the page's first commands, without `octavo`."""
    lines = text.split("```sh\n")[1].split("```")[0].splitlines()
    assert all(line.startswith("octavo ") for line in lines)
    return [shlex.split(line, comments=True)[1:] for line in lines]


def write(job: str, folder: Path) -> tuple[Path, list[list[str]]]:
    """Write the page's files into a folder; return the configuration and the commands."""
    first = beginning(page(job))
    for name, body in files(first).items():
        (folder / name).write_text(body, encoding="utf-8")
    (config,) = [folder / name for name in files(first) if name.endswith(".yaml")]
    return config, commands(first)


@pytest.mark.parametrize("job", JOBS)
def test_a_page_begins_with_a_complete_file(job: str, tmp_path: Path) -> None:
    title, prose, *_ = page(job).split("\n\n")
    assert title.startswith("# ") and len(re.findall(r"[.;:](?=\s|$)", prose)) <= 4, "a title and two sentences"
    first = page(job).split("```")[1]
    assert first.startswith('yaml title="'), "the first block is a file"
    config, typed = write(job, tmp_path)
    assert max(map(len, config.read_text(encoding="utf-8").splitlines())) <= 80, "wraps on the site"
    assert load_config(config).train.phase == JOBS[job]
    assert ["train", config.name] in typed and typed[0][0] == "tiny"
    written = {words[-1] for words in typed if words[0] in ("tiny", *DATA)} | {"examples", "vlm"}
    used = re.findall(r"path: ([\w-]+)", config.read_text(encoding="utf-8"))
    assert set(used) <= written | {Path(name).stem for name in files(page(job))}, "commands write what the file reads"


@pytest.fixture(scope="module")
def data_sets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data sets that the commands write, once for all pages; a command accepts a set that exists."""
    folder = tmp_path_factory.mktemp("sets")
    for name in DATA:
        assert main([name, str(folder / name)]) == 0
    return folder


@pytest.mark.long
@pytest.mark.usefixtures("no_pages")
@pytest.mark.parametrize("job", JOBS)
def test_the_commands_of_a_page_run(job: str, data_sets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    config, typed = write(job, tmp_path)
    for name in DATA:
        (tmp_path / name).symlink_to(data_sets / name)
    cfg = load_config(config)
    for words in typed:
        shorter = (SHORTER_STAGES if cfg.train.stages else SHORTER) if words[0] == "train" and job != "rl" else []
        assert main([*words, *shorter]) == 0, words
    run = tmp_path / cfg.run.dir
    assert (run / "proof.json").is_file()
    if job == "rl":  # the page says what its ten steps do
        rewards = [json.loads(line)["reward"] for line in (run / "metrics.jsonl").read_text().splitlines()]
        assert len(rewards) == 10 and rewards[0] < 0.1 and rewards[-1] > 0.8


def test_the_picture_of_why_fp8_shows_the_stored_figures() -> None:
    drawn = runpy.run_path(str(ROOT / "docs/site/why_fp8.py"))["picture"]()
    assert (ROOT / "docs/why_fp8.svg").read_text(encoding="utf-8") == drawn, "run python docs/site/why_fp8.py"
    for figure in ("1.29", "1.91", "1.14", "1.24", "0.67", "0.02"):
        assert figure in drawn and figure in page("why_fp8")


def test_why_fp8_is_short() -> None:
    text = re.sub(r"\]\([^)\s]*\)", "]", page("why_fp8"))
    assert len([word for word in text.replace("|", " ").split() if re.search(r"\w", word)]) <= 650
