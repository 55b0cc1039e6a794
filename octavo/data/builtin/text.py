"""The text set: the source and the documentation of Python's standard library, which every installation has.

    README.md        the data set card
    settings.json    the version of Python it was made from
    train.jsonl      one row per file: {"text", "source"}
    test.jsonl       other files: every tenth, in alphabetical order

The documentation is what `help("assert")` prints, one row per topic. Tests, tables of character sets, empty files,
files generated for one machine and installed packages are left out. Nothing is downloaded.
"""

from __future__ import annotations

import json
import platform
import sysconfig
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from octavo.base import atomic_write, target_folder
from octavo.base.safe_read import Unreadable, read_json
from octavo.data.errors import DataError

LAYOUT = 1  # incremented when the same Python gives other files
HELD_OUT = 10  # every tenth file
PARTS = ("train", "test")
TOPICS = "pydoc_data/topics.py"
EXCLUDED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "encodings", "__pycache__"}
EXCLUDED_PREFIXES = ("config-", "_sysconfigdata", "_sysconfig_vars")

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
    """The paths of the set, and the number of rows in `train` and `test`."""

    directory: Path
    train: Path
    test: Path
    rows: dict[str, int]


def write(directory: str | Path) -> TextSet:
    """Write the text set into a new directory.

    The files are written to a temporary folder that is renamed at the end, so a directory is complete or absent. One
    that already contains the set of this Python is accepted; other content raises `DataError`.
    """
    directory = Path(directory)
    settings: dict[str, object] = {"layout": LAYOUT, "python": platform.python_version()}
    if not target_folder.is_free(directory):
        rows = _check_existing(directory, settings)
    else:
        with atomic_write.new_folder(directory, DataError, replace=False) as new_folder:
            rows = _write(new_folder, settings)
            atomic_write.sync_tree(new_folder)
    return TextSet(directory, directory / "train.jsonl", directory / "test.jsonl", rows)


def _check_existing(directory: Path, settings: dict[str, object]) -> dict[str, int]:
    """Return the number of rows by part, of a directory with these settings. Raises `DataError` for any other."""
    fix = "choose another directory, or remove this one"
    try:
        existing = read_json(directory / "settings.json")
    except Unreadable as cause:
        raise DataError(f"{directory} exists and is not a text set; {fix}") from cause
    if changed := [
        f"{key}: {existing.get(key)} there, {value} here"
        for key, value in settings.items()
        if existing.get(key) != value
    ]:
        raise DataError(f"{directory} contains a different text set ({'; '.join(changed)}); {fix}")
    for part in PARTS:
        file = directory / f"{part}.jsonl"
        lines = file.read_bytes().count(b"\n") if file.is_file() else 0
        if lines != existing.get(part):
            raise DataError(f"{directory} is not complete ({lines} of {existing.get(part)} rows of {part}); remove it")
    return {part: existing[part] for part in PARTS}


def _write(directory: Path, settings: dict[str, object]) -> dict[str, int]:
    rows: dict[str, list[dict[str, str]]] = {part: [] for part in PARTS}
    for number, (source, text) in enumerate(sorted(_documents())):
        part = "test" if number % HELD_OUT == HELD_OUT - 1 else "train"
        rows[part].append({"text": text, "source": source})
    for part, listed in rows.items():
        (directory / f"{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in listed))
    counts = {part: len(listed) for part, listed in rows.items()}
    characters = {f"{part}_characters": sum(len(row["text"]) for row in listed) for part, listed in rows.items()}
    shortest = min(rows["train"], key=lambda row: len(row["text"]))
    card = CARD.format(python=settings["python"], **counts, **characters, example=json.dumps(shortest))
    (directory / "README.md").write_text(card)
    (directory / "settings.json").write_text(json.dumps(settings | counts) + "\n")
    return counts


def _documents() -> Iterator[tuple[str, str]]:
    """(source, text) of each file and each documentation topic of the standard library; `source` is its name there."""
    library = Path(sysconfig.get_paths()["stdlib"])
    files = 0
    for file in library.rglob("*.py"):
        name = file.relative_to(library)
        if EXCLUDED_FOLDERS & set(name.parts[:-1]) or any(part.startswith(EXCLUDED_PREFIXES) for part in name.parts):
            continue
        if name.as_posix() == TOPICS or not file.is_file():
            continue
        with tokenize.open(file) as opened:  # decodes as Python does, by the encoding in the first lines
            text = opened.read()
        if text.strip():
            files += 1
            yield name.as_posix(), text
    if files < 2 * HELD_OUT:
        raise DataError(
            f"this Python has {files} source files in {library}, and the text set is made of them; install Python "
            "with its standard library as files"
        )
    try:
        from pydoc_data.topics import topics
    except ImportError:  # some distributions package it separately
        return
    for topic, text in topics.items():
        if text.strip():
            yield f"{TOPICS}:{topic}", text
