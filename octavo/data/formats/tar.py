"""Rows of tar files in the layout of WebDataset, read where they lie.

Files of a tar whose names are the same up to the first dot of their last part are one row; what follows the dot says
what each is:

    00/07.json   the row, as a line of JSONL would have it
    00/07.txt    its `text`               00/07.cls   its `cls`, a whole number where it is one
    00/07.jpg    its image; so are png, webp and the others, and 0.jpg, 1.jpg, ... in the order of their numbers
    00/07.wav    beside a json its sound; so are flac, and 0.wav, 1.wav, ... in the order of their numbers
    00/07.mp4    beside a json its video; so are webm, mov and mkv, likewise
    00/07.x.txt, 00/07.x.jpg              columns "x.txt" and "x.jpg", for `columns:`

An image, sound or video that the json names, by the file's name or by what follows its dot, stands where it is named.
Files of other kinds are not read, and no pickle ever is. What is kept of a tar is an index: of each row the names,
places and sizes of its files; it is made once, in the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from octavo.data.errors import BadSample
from octavo.data.formats.arrow_rows import BATCH_ROWS, Mapped, keys_of, parse_row, writer
from octavo.data.formats.media_kinds import IMAGE, SOUND, VIDEO
from octavo.data.formats.streaming import Pieces
from octavo.data.formats.tar_members import entries

INDEX = pa.schema([
    ("key", pa.string()), ("names", pa.list_(pa.string())), ("starts", pa.list_(pa.int64())),
    ("sizes", pa.list_(pa.int64())), ("problem", pa.string()),
])  # fmt: skip
TEXTS = ("txt", "text", "caption", "transcript")


class Member(NamedTuple):
    """A file of a row: what follows the dot of its name, where it begins, how long it is."""

    kind: str
    start: int
    size: int


class TarRows(Mapped):
    """The rows of a tar file by its index. `path`: what rows are called after, if not the `file` that is read."""

    schema = INDEX

    def __init__(self, path: Path | str, index: Path | pa.Buffer, file: Path | None = None) -> None:
        super().__init__(path, index)
        self.file = Path(path) if file is None else file
        self._pieces = Pieces(self.file, used=file is not None)
        self._pieces.open()

    def keys(self) -> set[str]:
        """Every key that some row has: all rows are read."""
        return keys_of(self)

    def __getitem__(self, row: int) -> Any:
        found = {name: column[0].as_py() for name, column in zip(INDEX.names, self._row(row).columns, strict=True)}
        if found["problem"] is not None:
            raise BadSample(self.path, row, found["problem"], found["key"])
        members = [*map(Member, found["names"], found["starts"], found["sizes"])]
        return self._build_row(row, found["key"], members)

    def _build_row(self, row: int, key: str, members: Sequence[Member]) -> Any:
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
            elif ending in (*TEXTS, "cls"):
                fields[kind] = self._text(row, name, self._pieces.read(start, size), ending)
        if not fields and not images:
            names = ", ".join(f"{key}.{member.kind}" for member in members)
            raise BadSample(self.path, row, f"holds {names}; a row has a json, a txt or an image", key)
        said = fields.pop("json", {})
        said = {"messages": said} if isinstance(said, list) else said
        if not isinstance(said, dict):
            raise BadSample(self.path, row, f"its {key}.json is no object and no list of turns", key)
        beside = {"text" if kind == "txt" else kind: value for kind, value in fields.items()}
        raw = _with_files({"id": key} | beside | said, key, images, IMAGE.keys)
        if said:
            raw = _with_files(_with_files(raw, key, sounds, SOUND.keys), key, videos, VIDEO.keys)
        elif videos:
            raise BadSample(self.path, row, f"holds {next(iter(videos))} and no json; say what is asked of it", key)
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

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "file": self.file, "_pieces": self._pieces}


def _with_files(
    raw: dict[str, Any], key: str, files: dict[str, dict[str, Any]], keys: tuple[str, str]
) -> dict[str, Any]:
    """A row with its images (sounds, videos) where it names them, else under one of `keys`: for one, for several."""
    called = {name: kind for kind in files for name in (kind, f"{key}.{kind}", f"{key.rpartition('/')[2]}.{kind}")}
    used: set[str] = set()

    def placed(value: Any, at: str = "") -> Any:
        if isinstance(value, dict):
            return {name: placed(entry, name) for name, entry in value.items()}
        if isinstance(value, list):
            return [placed(entry, at) for entry in value]
        if at in keys and isinstance(value, str) and value in called:
            used.add(called[value])
            return files[called[value]]
        return value

    raw = placed(raw)
    own = {kind: file for kind, file in files.items() if kind not in used}
    named = [kind for kind in own if "." in kind and not kind.partition(".")[0].isdecimal()]
    raw = {**{kind: own.pop(kind) for kind in named}, **raw}
    if own and not used and not {*keys} & raw.keys():
        ordered = [own[kind] for kind in sorted(own, key=_number)]
        raw |= {keys[0]: ordered[0]} if len(ordered) == 1 else {keys[1]: ordered}
    return raw


def _number(kind: str) -> tuple[int, str]:
    first = kind.partition(".")[0]
    return (int(first) if first.isdecimal() else -1), kind


def write_index(path: Path, sink: Any, progress: Callable[[float], None] = lambda share: None) -> None:
    """Write the index of a tar file. Raises `DataError` where it is none, or is compressed."""
    with writer(sink, INDEX) as out:
        found = _rows(path)
        while rows := [*islice(found, BATCH_ROWS)]:
            columns = zip(*rows, strict=True)
            made = [pa.array([*values], field.type) for values, field in zip(columns, INDEX, strict=True)]
            out.write_batch(pa.record_batch(made, schema=INDEX))


def _rows(path: Path) -> Iterator[tuple[str, list[str], list[int], list[int], str | None]]:
    """What the index has of each row, in the order in which their first files stand."""
    rows: dict[str, list[Member]] = {}
    problems: dict[str, str] = {}
    for name, start, size, problem in entries(path):
        place, _, last = name.rpartition("/")
        stem, _, kind = last.partition(".")
        kind = kind.lower()
        if not name:  # behind what is broken
            rows["the end of the tar"], problems["the end of the tar"] = [Member("", start, size)], str(problem)
            break
        if problem is None and (not stem or not kind or stem.startswith("__")):
            continue  # hidden files, files without an ending, and what WebDataset keeps of a shard
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
