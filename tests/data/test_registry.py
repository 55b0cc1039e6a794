"""The table of formats: an added entry is enough for files to be read, listed, cached and fetched."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from octavo.base import suffixes
from octavo.base.hub import is_name
from octavo.config import Dataset
from octavo.data import read
from octavo.data.formats import registry
from octavo.data.formats.arrow_rows import Text
from octavo.data.formats.streaming import Lines, Place
from octavo.data.storage import cache, remote
from octavo.data.storage.fetched import open_fetched
from octavo.data.storage.open_rows import open_rows

ROWS = [{"text": word, "number": str(n)} for n, word in enumerate(("cat", "dog", "cow", "pig"))]


def _texts(path: Path) -> Iterator[Text]:
    for number, line in enumerate(path.read_text().split("\n"), 1):
        word, _, count = line.partition(" ")
        yield Text(json.dumps({"text": word, "number": count}).encode(), number)


def _where_they_are(path: Path) -> Lines:
    lines = path.read_bytes().split(b"\n")
    starts = [sum(len(line) + 1 for line in lines[:n]) for n in range(len(lines))]
    places = [Place(n, start, start + len(line)) for n, (start, line) in enumerate(zip(starts, lines, strict=True), 1)]
    return Lines(path, places, lambda raw, line: Text(json.dumps(dict(zip(ROWS[0], raw.decode().split(), strict=True)))
                                                      .encode(), line))  # fmt: skip


@pytest.fixture
def planted(monkeypatch, tmp_path) -> Path:
    """Add a format to the table, and write a folder with two files of it and an image."""
    words = registry.text_format((".words",), _texts, _where_they_are, cells=True)
    monkeypatch.setattr(registry, "FORMATS", (*registry.FORMATS, words))
    folder = tmp_path / "rows"
    folder.mkdir()
    (folder / "a.words").write_text("cat 0\ndog 1")
    (folder / "b.WORDS").write_text("cow 2\npig 3")
    (folder / "c.png").write_text("no row")
    return folder


def test_new_format_is_read_listed_cached_and_fetched(planted, tmp_path, monkeypatch):
    def rows(of) -> list:
        return [of[n] for n in range(len(of))]

    assert rows(open_rows(planted / "a.words")) == ROWS[:2]
    assert rows(open_rows(planted / "a.words", stream=True)) == ROWS[:2]
    assert [file.name for file in cache.list_row_files(planted)] == ["a.words", "b.WORDS"]
    assert rows(open_rows(planted)) == ROWS
    monkeypatch.setattr(cache, "SMALL_FILE", 0)
    assert rows(open_rows(planted, tmp_path / "kept")) == ROWS and len([*(tmp_path / "kept").glob("*.arrow")]) == 2
    remote.list_files.cache_clear()
    assert rows(open_fetched(f"file://{planted}", tmp_path / "fetched")) == ROWS
    source = read(Dataset(path=str(planted / "a.words"), format="text"), "documents")
    assert source._cells and source[0].text == "cat"


def test_every_format_has_unique_suffixes():
    row_suffixes = registry.row_suffixes()
    assert len({*row_suffixes}) == len(row_suffixes) and {*row_suffixes} == {*suffixes.ROWS}
    assert registry.row_suffixes(indexed_only=True) == suffixes.TAR
    assert not any(is_name(f"folder/rows{end}") for end in suffixes.ALL_FILES) and is_name("folder/rows.en")
    assert registry.format_of("x").suffixes == registry.format_of("x.JSON").suffixes
