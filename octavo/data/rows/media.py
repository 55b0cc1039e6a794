"""Sounds and videos in rows: where a row names them, or holds them.

A row lists its files of a kind under one of two keys (a file's name, {"bytes", "path"} as tables have it, or several),
and a placeholder in its text, or a part of that type, is the place of the next; or a part names its own file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from octavo.data.errors import RowProblem, shown
from octavo.data.rows.inline import Inline, file_named, no_file


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

    def placed(self, raw: Any, turns: Sequence[Any], text: type) -> list[Any]:
        """Turns in which each file of the row's list has its place; `text` is the type of a piece of text. Raises
        `RowProblem`."""
        names = self.listed(raw) if isinstance(raw, dict) else []
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

    def listed(self, raw: dict[str, Any]) -> list[Any]:
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

    def names(self, turns: Sequence[Any]) -> list[Any]:
        """What the places in turns name, in reading order."""
        return [part.name for turn in turns for part in turn.parts if isinstance(part, self.ref)]


def _a(word: str) -> str:
    return f"{'an' if word[0] in 'aeio' else 'a'} {word}"
