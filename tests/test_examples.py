"""Every example is read as written, and those for tiny checkpoints train 20 steps with a passing proof."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from octavo.cli.main import main
from octavo.config import load_config

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
TINY = sorted((EXAMPLES / "tiny").glob("*.yaml"))


@pytest.mark.parametrize("path", sorted(EXAMPLES.rglob("*.yaml")), ids=lambda p: p.stem)
def test_an_example_is_a_valid_configuration(path: Path) -> None:
    cfg = load_config(path)
    assert cfg.fp8.recipe != "off"


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The set that every example asks for, written once: the command accepts one that is there."""
    folder = tmp_path_factory.mktemp("set") / "digits"
    assert main(["digits", str(folder)]) == 0
    return folder


@pytest.mark.long
@pytest.mark.parametrize("path", TINY, ids=lambda p: p.stem)
def test_a_tiny_example_trains_as_its_comment_says(
    path: Path, digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = path.read_text(encoding="utf-8").split("\n")
    commands = [line.removeprefix("#").split() for line in lines if line.startswith("#   octavo ")]
    assert [words[1] for words in commands] == ["tiny", "digits", "train"]
    # The commands are typed in the root of the repository; a folder with the same layout stands in for it.
    copy = tmp_path / "examples" / "tiny" / path.name
    copy.parent.mkdir(parents=True)
    copy.write_text(path.read_text(encoding="utf-8"), encoding="utf-8")
    (tmp_path / "build").mkdir()
    (tmp_path / "build" / "digits").symlink_to(digits)
    monkeypatch.chdir(tmp_path)
    for words in commands:
        words = [str(copy) if word == f"examples/tiny/{path.name}" else word for word in words[1:]]
        assert main(words) == 0
    run = tmp_path / load_config(copy).run.dir
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().split("\n") if line]
    proof = json.loads((run / "proof.json").read_text())
    assert [m["step"] for m in metrics] == list(range(1, 21))
    assert metrics[-1]["loss"] < metrics[0]["loss"]
    assert not proof["pending"] and proof["share"] > 0
    written = "hf/config.json" if load_config(copy).lora is None else "adapter/adapter_config.json"
    assert (run / written).is_file()
