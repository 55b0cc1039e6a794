"""The text set: what ships with every Python, the source and the documentation of its standard library.

    README.md        the data set card
    settings.json    of which Python it was made
    train.jsonl      a row a file: {"text", "source"}
    test.jsonl       other files: every tenth, in alphabetical order

Documentation is what `help("assert")` shows, a topic a row. Tests, tables of character sets, empty files and what
was made for one machine are left out, and what others installed. Nothing is downloaded.
"""

from __future__ import annotations

import json
import platform
import sysconfig
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.base import atomic_write, target_folder
from octavo.base.safe_read import Unreadable, read_json
from octavo.data.errors import DataError

LAYOUT = 1  # rises when the same Python gives other files
HELD_OUT = 10  # every tenth file
PARTS = ("train", "test")
TOPICS = "pydoc_data/topics.py"
APART = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "encodings", "__pycache__"}
MACHINE = ("config-", "_sysconfigdata", "_sysconfig_vars")

CARD = """# Octavo text

The source of Python {python}'s standard library, a row a file, and its documentation, a row a topic: {train} rows to
train on ({train_characters:,} characters), {test} held out ({test_characters:,}).

```json
{example}
```

**Source.** The installed Python itself: `*.py` below its standard library and `pydoc_data.topics`, as they are
(Copyright Python Software Foundation and contributors; PSF License Version 2, https://docs.python.org/3/license.html).

**Split.** By file, in alphabetical order: every tenth is held out. No file is in both parts.

Written by `octavo text`.
"""


@dataclass(frozen=True)
class TextSet:
    """Where the set lies, and how many rows `train` and `test` hold."""

    directory: Path
    train: Path
    test: Path
    rows: dict[str, int]


def write(directory: str | Path) -> TextSet:
    """Write the text set into a new directory.

    The files are written aside and renamed at the end, so a directory is whole or absent. One that already holds the
    set of this Python is accepted as it is; anything else there raises `DataError`.
    """
    directory = Path(directory)
    asked = {"layout": LAYOUT, "python": platform.python_version()}
    if not target_folder.is_free(directory):
        rows = _check_existing(directory, asked)
    else:
        with atomic_write.folder(directory, DataError, replace=False) as made:
            rows = _write(made, asked)
            atomic_write.sync_tree(made)
    return TextSet(directory, directory / "train.jsonl", directory / "test.jsonl", rows)


def _check_existing(directory: Path, asked: dict[str, Any]) -> dict[str, int]:
    """The rows of a directory that holds what was asked for; any other is refused."""
    fix = "choose another directory, or remove this one"
    try:
        there = read_json(directory / "settings.json")
    except Unreadable as cause:
        raise DataError(f"{directory} exists and is not a text set; {fix}") from cause
    if changed := [
        f"{key}: {there.get(key)} there, {asked[key]} here" for key in asked if there.get(key) != asked[key]
    ]:
        raise DataError(f"{directory} holds another text set ({'; '.join(changed)}); {fix}")
    for part in PARTS:
        file = directory / f"{part}.jsonl"
        lines = file.read_bytes().count(b"\n") if file.is_file() else 0
        if lines != there.get(part):
            raise DataError(f"{directory} is not complete ({lines} of {there.get(part)} rows of {part}); remove it")
    return {part: there[part] for part in PARTS}


def _write(directory: Path, asked: dict[str, Any]) -> dict[str, int]:
    rows: dict[str, list[dict[str, str]]] = {part: [] for part in PARTS}
    for number, (source, text) in enumerate(sorted(_documents())):
        part = "test" if number % HELD_OUT == HELD_OUT - 1 else "train"
        rows[part].append({"text": text, "source": source})
    for part, own in rows.items():
        (directory / f"{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in own))
    counts = {part: len(own) for part, own in rows.items()}
    characters = {f"{part}_characters": sum(len(row["text"]) for row in own) for part, own in rows.items()}
    shortest = min(rows["train"], key=lambda row: len(row["text"]))
    card = CARD.format(python=asked["python"], **counts, **characters, example=json.dumps(shortest))
    (directory / "README.md").write_text(card)
    (directory / "settings.json").write_text(json.dumps(asked | counts) + "\n")
    return counts


def _documents() -> Iterator[tuple[str, str]]:
    """(source, text): files of the standard library by their names in it, topics of its documentation by theirs."""
    library = Path(sysconfig.get_paths()["stdlib"])
    found = 0
    for file in library.rglob("*.py"):
        name = file.relative_to(library)
        if APART & set(name.parts[:-1]) or any(part.startswith(MACHINE) for part in name.parts):
            continue
        if name.as_posix() == TOPICS or not file.is_file():
            continue
        with tokenize.open(file) as opened:  # as Python reads it, whatever its first line says of its encoding
            text = opened.read()
        if text.strip():
            found += 1
            yield name.as_posix(), text
    if found < 2 * HELD_OUT:
        raise DataError(
            f"this Python has {found} source files in {library}, and the text set is made of them; install Python "
            "with its standard library as files"
        )
    try:
        from pydoc_data.topics import topics
    except ImportError:  # some distributions part it from Python
        return
    for topic, text in topics.items():
        if text.strip():
            yield f"{TOPICS}:{topic}", text
