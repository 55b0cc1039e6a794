"""Files in rows: how a row names them or holds them, and where they may be.

A row lists its files of a kind under one of two keys (a file's name, {"bytes", "path"} as `datasets` writes files that
stand in the rows themselves, or several), and a placeholder in its text, or a part of that type, is the place of the
next; or a part names its own file.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from octavo.data.errors import ImageProblem, RowProblem, shown


@dataclass(frozen=True)
class Inline:
    """A file by its bytes. `name`: what it was called, if at all."""

    data: bytes
    name: str = ""
    what: ClassVar[str] = "file"

    def __str__(self) -> str:
        """A name that tells it from others."""
        return f"{self.name or self.what} ({hashlib.sha256(self.data).hexdigest()[:12]})"


T = TypeVar("T", bound=Inline)


def file_named(value: Any, kind: type[T]) -> str | T | None:
    """A file as rows name it: its name, or its bytes, which become a `kind`. None: neither."""
    if isinstance(value, str):
        return value
    if not isinstance(value, dict) or not {"bytes", "path"} & value.keys():
        return None
    data, path = value.get("bytes"), value.get("path")
    if isinstance(data, bytes) and isinstance(path, str | None):
        return kind(data, path or "")
    return path if data is None and isinstance(path, str) else None


def no_file(value: Any) -> bool:
    """Null, or what a table makes of it: {"bytes", "path"} with neither."""
    return value is None or (
        isinstance(value, dict) and value.keys() <= {"bytes", "path"} and not any(v is not None for v in value.values())
    )


def locate(root: Path, name: str, what: str = "image", folders: bool = False) -> Path:
    """The file that the name of an image (or `what` else) means: inside `root`, and nowhere else. `folders`: or folder.

    `..`, absolute paths and symbolic links are followed first and the result is judged: what lies inside is
    accepted, however it was written; what lies outside is refused. Raises `ImageProblem`.
    """
    if name.startswith("file://"):
        name = name[len("file://") :]
    scheme = name.split(":", 1)[0].lower()
    if scheme in ("http", "https", "ftp", "s3", "gs", "hf", "data") and ":" in name:
        raise ImageProblem(
            f"{what} {name[:80]!r} is not a local file; Octavo fetches nothing: download it into the image folder"
        )
    if not name or "\0" in name:
        raise ImageProblem(f"{what} name {name!r} is not a file name")
    try:
        os.fsencode(name)
        root = _resolved(root)
        path = root / name
        path = path.resolve() if path.name in ("", "..") else _resolved(path.parent) / path.name
        if path.is_symlink():
            path = path.resolve()
        there = path.is_file() or (folders and path.is_dir())
    except (OSError, RuntimeError, ValueError) as cause:  # a name too long, a loop of links, half a character
        raise ImageProblem(f"{what} {name[:80]!r} cannot be looked up ({cause})") from cause
    if not path.is_relative_to(root):
        raise ImageProblem(
            f"{what} {name!r} lies outside the image folder {root} (at {path}); "
            f"name the folder that holds it in `images`, or copy it there"
        )
    if not there:
        raise ImageProblem(f"{what} {name!r} is missing: no file at {path}; check `images` in the configuration")
    return path


@lru_cache(maxsize=4096)
def _resolved(folder: Path) -> Path:
    """A folder of images, whose links are followed once."""
    return folder.resolve()


@dataclass(frozen=True)
class Ref:
    """The place of a file, by what the row calls it; "" before it is known which of the row's list it is."""

    name: Any = ""


@dataclass(frozen=True)
class Medium:
    """One kind of files: its `noun`, its place in a text, its keys in rows, types of parts and keys in them, what its
    places and the files in rows are here, and what a file should be (`expected`)."""

    noun: str
    placeholder: str
    keys: tuple[str, str]
    types: tuple[str, ...]
    of_part: tuple[str, ...]
    ref: type[Ref]
    inline: type[Inline]
    expected: str

    @property
    def unnamed(self) -> str:
        """What is wrong with a row that writes the placeholder and has no file."""
        return (
            f"writes {self.placeholder} in its text, but names no {self.noun}; list it under {self.keys[0]!r}, or "
            "remove the word"
        )

    def part(self, part: Any, number: int) -> Ref | None:
        """The file that a part of turn `number` is; None for another part. Raises `RowProblem`."""
        if not isinstance(part, dict) or part.get("type") not in self.types:
            return None
        given = [part[key] for key in self.of_part if not no_file(part.get(key))]
        if not given:
            return self.ref()
        inner = given[0].get("url") if isinstance(given[0], dict) and "url" in given[0] else given[0]
        name = file_named(inner, self.inline) if len(given) == 1 else None
        if not name:
            raise RowProblem(
                f"turn {number} has the {self.keys[0]} part {shown(part)}; expected one path in "
                f"{', '.join(self.of_part)}"
            )
        return self.ref(name)

    def place_files(self, raw: Any, turns: Sequence[Any], text: type) -> list[Any]:
        """Turns in which each file of the row's list has its place; `text` is the type of a piece of text. Raises
        `RowProblem`."""
        names = self.listed_files(raw) if isinstance(raw, dict) else []
        open_parts = sum(part == self.ref() for turn in turns for part in turn.parts)
        if not names and not open_parts:
            return list(turns)
        if any(isinstance(part, self.ref) and part.name for turn in turns for part in turn.parts):
            raise RowProblem(
                f"a turn names a {self.noun}, and the row has {_a(self.keys[0])} list, or a part without a name; keep "
                "one way"
            )
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
                f"has {places} {self.placeholder} placeholder(s) in its text and {len(names)} {self.noun}(s); they "
                "must be as many"
            )
        return out

    def listed_files(self, raw: dict[str, Any]) -> list[Any]:
        """The row's list of files. Raises `RowProblem`."""
        given = {key: raw[key] for key in self.keys if raw.get(key) not in (None, [], "")}
        if len(given) > 1:
            raise RowProblem(f"has both {self.keys[0]!r} and {self.keys[1]!r}; keep one of them")
        for key, value in given.items():
            names = [file_named(one, self.inline) for one in (value if isinstance(value, list) else [value])]
            if (found := [name for name in names if name]) != names:
                decoded = isinstance(value, dict) and "array" in value
                more = " (decoded samples are not taken: keep the file, datasets.Audio(decode=False))"
                raise RowProblem(
                    f"{key!r} is {shown(value)}; expected {self.expected}, by its name or as bytes and path, or a list "
                    f"of them{more if decoded else ''}"
                )
            return found
        return []

    def files(self, turns: Sequence[Any], folder: Path, folders: bool = False) -> tuple[Any, ...]:
        """The files in turns (:class:`octavo.data.Turn`), in reading order: each inside `folder`, or itself where the
        row holds it. `folders`: a folder is one too. Raises `ImageProblem`."""
        names = [part.name for turn in turns for part in turn.parts if isinstance(part, self.ref)]
        return tuple(
            name if isinstance(name, self.inline) else locate(folder, name, self.noun, folders) for name in names
        )


def _a(word: str) -> str:
    return f"{'an' if word[0] in 'aeio' else 'a'} {word}"
