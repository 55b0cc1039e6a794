"""The files of ``examples/import``, in the formats of others: each is translated as its top says, and trains."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from octavo.cli.main import main
from octavo.config import load_config
from octavo.importers import FRAMEWORKS, translate
from octavo.models.tiny import tiny

IMPORT = Path(__file__).resolve().parents[2] / "examples" / "import"
#: the file that is named to octavo import; loongforge.sh comes with its YAML
FILES = sorted(p for p in IMPORT.iterdir() if p.name not in ("loongforge.sh", "README.md"))
MPT = "llm_foundry_mpt.yaml"


def commands(path: Path) -> list[list[str]]:
    """What the comment at the top of an example says to type."""
    lines = path.read_text(encoding="utf-8").split("\n")
    return [line.removeprefix("#").split()[1:] for line in lines if line.startswith("#   octavo ")]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the commands are typed in: examples, the rows, and tiny models, each written once."""
    folder = tmp_path_factory.mktemp("home")
    shutil.copytree(IMPORT, folder / "examples" / "import")
    assert main(["digits", str(folder / "build" / "digits")]) == 0
    assert main(["text", str(folder / "build" / "text")]) == 0
    for family in sorted({words[1] for path in FILES for words in commands(path) if words[0] == "tiny"}):
        tiny.write(family, folder / "build" / "tiny" / family, size="mini")
    return folder


@pytest.mark.long
@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_imported_file_trains(path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)
    typed = commands(path)
    rows_by = "text" if path.name == MPT else "digits"
    assert [words[0] for words in typed] == ["tiny", rows_by, "import", "train"]
    assert main(typed[2]) == 0
    if path.name == MPT:
        (line,) = [words for words in map(str.split, path.read_text().split("\n")) if words[1:2] == ["cp"]]
        for file in home.glob(line[2]):
            shutil.copy(file, line[3])
    assert main(typed[3]) == 0
    cfg = load_config(typed[3][1])
    run = home / cfg.run.dir
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().split("\n") if line]
    assert [row["step"] for row in rows] == [1, 2] and all(row["loss"] > 0 for row in rows)
    report = (home / typed[3][1]).with_suffix("").with_suffix(".report.md").read_text()
    assert "## Translated" in report and "## Unknown keys" not in report
    if any(getattr(cfg.fp8, part) for part in ("foundation", "rules")) or cfg.fp8.recipe != "off":
        assert json.loads((run / "proof.json").read_text())["share"] > 0


def test_examples_cover_every_framework_and_mpt_becomes_a_folder(tmp_path: Path) -> None:
    more = {"loongforge.yaml": [IMPORT / "loongforge.sh"]}
    made = [translate([path, *more.get(path.name, [])], tmp_path / "out.yaml", root=tmp_path) for path in FILES]
    assert {one.framework for one in made} == set(FRAMEWORKS) and not any(one.problems for one in made)
    mpt = next(one for path, one in zip(FILES, made, strict=True) if path.name == MPT)
    assert [file.name for file in mpt.extra] == ["config.json"] and "recipe: delayed" in mpt.content
