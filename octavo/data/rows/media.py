"""Media files in rows: by name or as bytes, inside a folder.

A row lists its files of a kind under one of two keys: a file name, {"bytes", "path"} as `datasets` writes files inside
rows, or a list of these. A placeholder in its text, or a part of that type, is the place of the next one; or a part
names its file itself.
"""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from octavo.base.wording import count_noun, nearest
from octavo.data.errors import MediaProblem, RowProblem, quote_value

MAX_NAMES = 2000  # names in a folder that a missing name is compared with


@dataclass(frozen=True)
class InlineFile:
    """A file whose bytes are in the row. `name` is its original name, or ""."""

    data: bytes
    name: str = ""
    what: ClassVar[str] = "file"

    def __str__(self) -> str:
        """Return a name for messages that identifies the content."""
        return f"{self.name or self.what} ({hashlib.sha256(self.data).hexdigest()[:12]})"


T = TypeVar("T", bound=InlineFile)


def parse_file(value: object, kind: type[T]) -> str | T | None:
    """Return a file in a row: its name, its bytes as a `kind`, or None if the value is neither."""
    if isinstance(value, str):
        return value
    if not isinstance(value, dict) or not {"bytes", "path"} & value.keys():
        return None
    data, path = value.get("bytes"), value.get("path")
    if isinstance(data, bytes) and isinstance(path, str | None):
        return kind(data, path or "")
    return path if data is None and isinstance(path, str) else None


def is_null_file(value: object) -> bool:
    """Return True if a value is null, also in the form of a table: {"bytes", "path"}, both null."""
    return value is None or (
        isinstance(value, dict) and value.keys() <= {"bytes", "path"} and not any(v is not None for v in value.values())
    )


def locate(root: Path, name: str, what: str = "image", folders: bool = False) -> Path:
    """Return the file with this name, which must be inside `root`; `what`: its kind, for messages; `folders`: folders
    count too.

    `..`, absolute paths and symbolic links are resolved first, and the resulting path must be inside `root`. Raises
    `MediaProblem`.
    """
    if name.startswith("file://"):
        name = name[len("file://") :]
    scheme = name.split(":", 1)[0].lower()
    if scheme in ("http", "https", "ftp", "s3", "gs", "hf", "data") and ":" in name:
        raise MediaProblem(
            f"{what} {name[:80]!r} is not a local file, and Octavo does not download images; copy it into the image "
            "folder"
        )
    if not name or "\0" in name:
        raise MediaProblem(f"{what} name {name!r} is not a file name")
    try:
        os.fsencode(name)
        root = _resolved(root)
        path = root / name
        path = path.resolve() if path.name in ("", "..") else _resolved(path.parent) / path.name
        if path.is_symlink():
            path = path.resolve()
        exists = path.is_file() or (folders and path.is_dir())
    except (OSError, RuntimeError, ValueError) as cause:  # a name too long, a loop of links, a lone surrogate
        raise MediaProblem(f"{what} {name[:80]!r} cannot be resolved ({cause})") from cause
    if not path.is_relative_to(root):
        raise MediaProblem(
            f"{what} {name!r} is outside the image folder {root} (at {path}); "
            f"name the folder that holds it in `images`, or copy it there"
        )
    if not exists:
        near = nearest(path.name, _names_in(path.parent), 0.7)
        hint = f"did you mean {near!r}? Else check" if near else "check"
        raise MediaProblem(
            f"{what} {name!r} is missing: no file at {path}; {hint} the row, and `images` in the configuration"
        )
    return path


@lru_cache(maxsize=16)
def _names_in(folder: Path) -> tuple[str, ...]:
    """Return the names in a folder for a suggestion; none if there are so many that comparing them would take long."""
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in itertools.islice(entries, MAX_NAMES + 1)]
    except OSError:  # the folder is missing, too, which the message says by the path
        return ()
    return tuple(sorted(names)) if len(names) <= MAX_NAMES else ()


@lru_cache(maxsize=4096)
def _resolved(folder: Path) -> Path:
    """Return a folder of images with links resolved; cached, because every image name needs it."""
    return folder.resolve()


@dataclass(frozen=True)
class MediaRef:
    """The place of a file. `name`: its name or the file itself; "" until a file of the row's list is assigned."""

    name: str | InlineFile = ""


@dataclass(frozen=True)
class MediaType:
    """One kind of media: its `noun`, its placeholder in a text, its keys in rows, the types and keys of its parts, the
    classes of its places and of files in rows, and a description of a valid file (`expected`)."""

    noun: str
    placeholder: str
    keys: tuple[str, str]
    types: tuple[str, ...]
    part_keys: tuple[str, ...]
    ref: type[MediaRef]
    inline: type[InlineFile]
    expected: str

    @property
    def missing_file_text(self) -> str:
        """The error text for a row with a placeholder and no file."""
        return (
            f"writes {self.placeholder} in its text, but names no {self.noun}; list it under {self.keys[0]!r}, or "
            "remove the word"
        )

    def part(self, part: object, number: int) -> MediaRef | None:
        """Return the place of the file in a part of turn `number`, or None for a part of another type. Raises
        `RowProblem`."""
        if not isinstance(part, dict) or part.get("type") not in self.types:
            return None
        files = [part[key] for key in self.part_keys if not is_null_file(part.get(key))]
        if not files:
            return self.ref()
        inner = files[0].get("url") if isinstance(files[0], dict) and "url" in files[0] else files[0]
        name = parse_file(inner, self.inline) if len(files) == 1 else None
        if not name:
            raise RowProblem(
                f"turn {number} has the {self.keys[0]} part {quote_value(part)}; expected one path in "
                f"{', '.join(self.part_keys)}"
            )
        return self.ref(name)

    def place_files(self, raw: object, turns: Sequence[Any], text: type) -> list[Any]:
        """Turns with each file of the row's list assigned to its place; `text`: the class of a piece of text. Raises
        `RowProblem`."""
        names = self.listed_files(raw) if isinstance(raw, dict) else []
        open_parts = sum(part == self.ref() for turn in turns for part in turn.parts)
        if not names and not open_parts:
            return list(turns)
        if any(isinstance(part, self.ref) and part.name for turn in turns for part in turn.parts):
            raise RowProblem(
                f"a turn names a {self.noun}, and the row has {_with_article(self.keys[0])} list, or a part without a "
                "name; keep one way"
            )
        # Placeholders in texts and parts without a name take the files in reading order, whichever way a turn uses.
        left, out, places = iter(names), [], 0
        for turn in turns:
            parts: list[Any] = []
            for part in turn.parts:
                is_text, is_open = isinstance(part, text), part == self.ref()
                if not is_text and not is_open:
                    parts.append(part)
                    continue
                for index, piece in enumerate(part.text.split(self.placeholder) if is_text else ["", ""]):
                    if index:
                        parts.append(self.ref(next(left, "")))
                        places += 1
                    if piece:
                        parts.append(text(piece))
            out.append(replace(turn, parts=tuple(parts)))
        if places != len(names):
            raise RowProblem(
                f"has {count_noun(places, f'{self.placeholder} placeholder')} in its text and "
                f"{count_noun(len(names), self.noun)}; the numbers must be equal"
            )
        return out

    def listed_files(self, raw: dict[str, Any]) -> list[Any]:
        """Return the row's list of files. Raises `RowProblem`."""
        lists = {key: raw[key] for key in self.keys if raw.get(key) not in (None, [], "")}
        if len(lists) > 1:
            raise RowProblem(f"has both {self.keys[0]!r} and {self.keys[1]!r}; keep one of them")
        for key, value in lists.items():
            names = [parse_file(file, self.inline) for file in (value if isinstance(value, list) else [value])]
            if (valid := [name for name in names if name]) != names:
                decoded = isinstance(value, dict) and "array" in value
                hint = " (decoded samples are not taken: keep the file, datasets.Audio(decode=False))"
                raise RowProblem(
                    f"{key!r} is {quote_value(value)}; expected {self.expected}, by its name or as bytes and path, or "
                    f"a list of them{hint if decoded else ''}"
                )
            return valid
        return []

    def files(self, turns: Sequence[Any], folder: Path, folders: bool = False) -> tuple[Any, ...]:
        """Return the files in turns (:class:`octavo.data.Turn`), in reading order: a path inside `folder`, or the file
        itself if its bytes are in the row. `folders`: folders count as files. Raises `MediaProblem`."""
        names = [part.name for turn in turns for part in turn.parts if isinstance(part, self.ref)]
        return tuple(
            name if isinstance(name, InlineFile) else locate(folder, name, self.noun, folders) for name in names
        )


def _with_article(word: str) -> str:
    return f"{'an' if word[0] in 'aeio' else 'a'} {word}"
