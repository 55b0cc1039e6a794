"""Rows of tar files in the layout of WebDataset, read from the tar.

Files in a tar whose names are equal up to the first dot of the last path component form a row; the rest of the name is
the kind of each file:

    00/07.json   the row, as a line of JSONL would have it
    00/07.txt    its `text`               00/07.cls   its `cls`, as a whole number if it is one
    00/07.jpg    its image; also png, webp and the others, and 0.jpg, 1.jpg, ... in the order of their numbers
    00/07.wav    its sound, if there is a json; also flac, and 0.wav, 1.wav, ... in the order of their numbers
    00/07.mp4    its video, if there is a json; also webm, mov and mkv, likewise
    00/07.x.txt, 00/07.x.jpg              columns "x.txt" and "x.jpg", for `columns:`

An image, sound or video that the json names, by the file name or by the part after the dot, replaces that name. Files
of other kinds are not read, and pickles never are. An index of the tar, with the names, positions and sizes of the
files of each row, is written once into the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from octavo.data.errors import BadSample
from octavo.data.formats.arrow_rows import BATCH_ROWS, MappedTable, Sink, collect_keys, open_writer, parse_row
from octavo.data.formats.media_kinds import IMAGE, SOUND, VIDEO
from octavo.data.formats.streaming import ByteReader
from octavo.data.formats.tar_members import read_entries

INDEX = pa.schema([
    ("key", pa.string()), ("names", pa.list_(pa.string())), ("starts", pa.list_(pa.int64())),
    ("sizes", pa.list_(pa.int64())), ("problem", pa.string()),
])  # fmt: skip
TEXT_SUFFIXES = ("txt", "text", "caption", "transcript")


class Member(NamedTuple):
    """A file of a row: the part of its name after the dot, its first byte and its size."""

    kind: str
    start: int
    size: int


class TarRows(MappedTable):
    """The rows of a tar file with its index. `path`: the name in messages, e.g. a URL, if it is not the `file` read."""

    schema = INDEX

    def __init__(self, path: Path | str, index: Path | pa.Buffer, file: Path | None = None) -> None:
        super().__init__(path, index)
        self.file = Path(path) if file is None else file
        self._pieces = ByteReader(self.file, in_store=file is not None)
        self._pieces.open()

    def keys(self) -> set[str]:
        """Return all keys of the rows; reads all rows."""
        return collect_keys(self)

    def __getitem__(self, row: int) -> Any:
        entry = {name: column[0].as_py() for name, column in zip(INDEX.names, self._row(row).columns, strict=True)}
        if entry["problem"] is not None:
            raise BadSample(self.path, row, entry["problem"], entry["key"])
        members = [*map(Member, entry["names"], entry["starts"], entry["sizes"])]
        return self._build_row(row, entry["key"], members)

    def _build_row(self, row: int, key: str, members: Sequence[Member]) -> dict[str, Any]:
        """Return the row of a key from its files. Raises `BadSample`."""
        fields: dict[str, Any] = {}
        images: dict[str, dict[str, Any]] = {}
        sounds: dict[str, dict[str, Any]] = {}
        videos: dict[str, dict[str, Any]] = {}
        for kind, start, size in members:
            ending, name = kind.rpartition(".")[2], f"{key}.{kind}"
            if ending in (*IMAGE.endings, *SOUND.endings, *VIDEO.endings):
                files = images if ending in IMAGE.endings else sounds if ending in SOUND.endings else videos
                files[kind] = {"bytes": self._pieces.read(start, size), "path": name}
            elif ending == "json":
                fields[kind] = parse_row(self.path, row, self._pieces.read(start, size), 0, None, f"its {name}")
            elif ending in (*TEXT_SUFFIXES, "cls"):
                fields[kind] = self._text(row, name, self._pieces.read(start, size), ending)
        if not fields and not images:
            names = ", ".join(f"{key}.{member.kind}" for member in members)
            raise BadSample(self.path, row, f"holds {names}; a row has a json, a txt or an image", key)
        raw_json = fields.pop("json", {})
        raw_json = {"messages": raw_json} if isinstance(raw_json, list) else raw_json
        if not isinstance(raw_json, dict):
            raise BadSample(self.path, row, f"its {key}.json is neither an object nor a list of turns", key)
        # Keys of the json take precedence over files with the same name.
        texts = {"text" if kind == "txt" else kind: value for kind, value in fields.items()}
        raw = _with_files({"id": key} | texts | raw_json, key, images, IMAGE.keys)
        if raw_json:
            raw = _with_files(_with_files(raw, key, sounds, SOUND.keys), key, videos, VIDEO.keys)
        elif videos:
            raise BadSample(
                self.path, row, f"holds {next(iter(videos))} and no json; add a json with the question", key
            )
        return raw

    def _text(self, row: int, name: str, data: bytes, ending: str) -> str | int:
        try:
            text = data.decode("utf-8-sig")
        except UnicodeDecodeError as cause:
            raise BadSample(self.path, row, f"its {name} is not UTF-8 (its byte {cause.start})") from cause
        number = text.strip()
        return int(number) if ending == "cls" and number.isdecimal() and len(number) < 19 else text

    def _on_disk(self) -> Path:
        return self.file

    def __getstate__(self) -> dict[str, object]:
        return {**super().__getstate__(), "file": self.file, "_pieces": self._pieces}


def _with_files(
    raw: dict[str, Any], key: str, files: dict[str, dict[str, Any]], keys: tuple[str, str]
) -> dict[str, Any]:
    """Return a row with its images (sounds, videos) in place of their names; if it names none, under the first of
    `keys` for one file, under the second for several."""
    kind_by_name = {
        name: kind for kind in files for name in (kind, f"{key}.{kind}", f"{key.rpartition('/')[2]}.{kind}")
    }
    used: set[str] = set()

    def place(value: Any, field: str = "") -> Any:
        if isinstance(value, dict):
            return {name: place(entry, name) for name, entry in value.items()}
        if isinstance(value, list):
            return [place(entry, field) for entry in value]
        if field in keys and isinstance(value, str) and value in kind_by_name:
            used.add(kind_by_name[value])
            return files[kind_by_name[value]]
        return value

    raw = place(raw)
    unused = {kind: file for kind, file in files.items() if kind not in used}
    # `x.jpg` is the column "x.jpg"; `jpg` and `0.jpg` name no column and become the row's media below.
    named = [kind for kind in unused if "." in kind and not kind.partition(".")[0].isdecimal()]
    raw = {**{kind: unused.pop(kind) for kind in named}, **raw}
    if unused and not used and not {*keys} & raw.keys():
        ordered = [unused[kind] for kind in sorted(unused, key=_sort_key)]
        raw |= {keys[0]: ordered[0]} if len(ordered) == 1 else {keys[1]: ordered}
    return raw


def _sort_key(kind: str) -> tuple[int, str]:
    first = kind.partition(".")[0]
    return (int(first) if first.isdecimal() else -1), kind


def write_index(path: Path, sink: Sink, progress: Callable[[float], None] = lambda share: None) -> None:
    """Write the index of a tar file. Raises `DataError` if it is not a tar, or is compressed."""
    with open_writer(sink, INDEX) as out:
        entries_left = _index_rows(path)
        while rows := [*islice(entries_left, BATCH_ROWS)]:
            columns = zip(*rows, strict=True)
            arrays = [pa.array([*values], field.type) for values, field in zip(columns, INDEX, strict=True)]
            out.write_batch(pa.record_batch(arrays, schema=INDEX))


def _index_rows(path: Path) -> Iterator[tuple[str, list[str], list[int], list[int], str | None]]:
    """Yield the index entry of each row, in the order of the first files of the rows."""
    rows: dict[str, list[Member]] = {}
    problems: dict[str, str] = {}
    for name, start, size, problem in read_entries(path):
        place, _, last = name.rpartition("/")
        stem, _, kind = last.partition(".")
        kind = kind.lower()
        if not name:  # the tar is broken from here on
            rows["the end of the tar"], problems["the end of the tar"] = [Member("", start, size)], str(problem)
            break
        if problem is None and (not stem or not kind or stem.startswith("__")):
            continue  # hidden files, files without a suffix, and metadata of WebDataset shards
        key = f"{place}/{stem}" if place else stem
        members = rows.setdefault(key, [])
        if any(member.kind == kind for member in members):
            problem = f"has two files {name}; rename one"
        if problem is not None:
            problems.setdefault(key, problem)
        members.append(Member(kind, start, size))
    for key, members in rows.items():
        kinds, starts, sizes = ([*column] for column in zip(*members, strict=True))
        yield key, kinds, starts, sizes, problems.get(key)
