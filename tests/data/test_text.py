"""The text set: its content, disjoint splits, and protection of existing files."""

import json
import sysconfig
from pathlib import Path

import pytest

from octavo.cli.main import main
from octavo.data import DataError
from octavo.data.builtin import text


@pytest.fixture(scope="module")
def text_set(tmp_path_factory):
    return text.write(tmp_path_factory.mktemp("text") / "set")


def rows(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_text_set_is_split_by_file(text_set):
    train, test = rows(text_set.train), rows(text_set.test)
    assert text_set.rows == {"train": len(train), "test": len(test)} and len(test) == (len(train) + len(test)) // 10
    sources = [row["source"] for row in (*train, *test)]
    assert len(set(sources)) == len(sources) and {"argparse.py", "json/decoder.py"} <= set(sources)
    library = Path(sysconfig.get_paths()["stdlib"])
    for row in (train[0], test[-1], *(row for row in train if row["source"] == "argparse.py")):
        name, _, topic = row["source"].partition(":")
        if topic:
            from pydoc_data.topics import topics

            assert row["text"] == topics[topic]
        else:
            assert row["text"] == (library / name).read_text()
    assert not [name for name in sources if "site-packages" in name or name.startswith(("test/", "encodings/"))]
    assert all(row["text"].strip() for row in (*train, *test))
    card = (text_set.directory / "README.md").read_text()
    assert "PSF License" in card and f"{len(train)} rows" in card


def test_existing_text_set_is_accepted_and_not_overwritten(text_set, tmp_path, capsys):
    before = text_set.train.stat().st_mtime_ns
    assert main(["text", str(text_set.directory)]) == 0 and text_set.train.stat().st_mtime_ns == before
    assert (
        f"wrote {text_set.rows['train']} training documents and {text_set.rows['test']} held-out documents to"
        in capsys.readouterr().out
    )
    (tmp_path / "mine").write_text("notes")
    with pytest.raises(DataError, match="exists and is not a text set; choose another directory"):
        text.write(tmp_path)
    (tmp_path / "mine").unlink()
    (tmp_path / "settings.json").write_text('{"layout": 1, "python": "2.7.18"}')
    with pytest.raises(DataError, match=r"contains a different text set \(python: 2.7.18 there, 3"):
        text.write(tmp_path)
    (tmp_path / "settings.json").write_text((text_set.directory / "settings.json").read_text())
    with pytest.raises(DataError, match=rf"not complete \(0 of {text_set.rows['train']} rows of train\); remove it"):
        text.write(tmp_path)


def test_python_without_library_files_is_rejected(tmp_path, monkeypatch):
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path / "python.zip")})
    with pytest.raises(DataError, match="0 source files in .*python.zip, and the text set is made of them"):
        text.write(tmp_path / "set")
    assert not list(tmp_path.iterdir())
