"""Sound in rows: where they name it, or hold it.

A row lists its sounds under `audio` or `audios` (a file's name, {"bytes", "path"} as tables have it, or several), and
`<audio>` in its text, or a part `{"type": "audio"}`, is the place of the next; or a part names its own file. What is in
a file is read elsewhere (:mod:`octavo.data.waves`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from octavo.data.errors import RowProblem, shown
from octavo.data.images import locate
from octavo.data.inline import Inline, file_named, no_file

PLACEHOLDER = "<audio>"
SOUND_KEYS = ("audio", "audios")
UNNAMED = f"writes {PLACEHOLDER} in its text, but names no sound; list it under 'audio', or remove the word"
_OF_PART = ("audio", "path", "url", "audio_url")


class Recording(Inline):
    """A file of sound whose bytes stand in the row itself."""

    what: ClassVar[str] = "sound"


Name = str | Recording  # of a sound in a row: a file's name, or the file itself
SoundFile = Path | Recording


@dataclass(frozen=True)
class AudioRef:
    """The place of a sound, by what the row calls it; "" before it is known which of the row's list it is."""

    name: Name = ""


def find_sounds(turns: Sequence[Any], folder: Path) -> tuple[SoundFile, ...]:
    """The files of the sounds in turns (:class:`octavo.data.Turn`), in reading order, each inside `folder`. Raises
    `ImageProblem`."""
    names = [part.name for turn in turns for part in turn.parts if isinstance(part, AudioRef)]
    return tuple(name if isinstance(name, Recording) else locate(folder, name, "sound") for name in names)


def sound_part(part: Any, number: int) -> AudioRef | None:
    """The sound that a part of turn `number` is; None for another part. Raises `RowProblem`."""
    if not isinstance(part, dict) or part.get("type") not in ("audio", "audio_url"):
        return None
    given = [part[key] for key in _OF_PART if not no_file(part.get(key))]
    if not given:
        return AudioRef()
    inner = given[0].get("url") if isinstance(given[0], dict) and "url" in given[0] else given[0]
    name = file_named(inner, Recording) if len(given) == 1 else None
    if not name:
        raise RowProblem(f"turn {number} has the audio part {shown(part)}; expected one path in {', '.join(_OF_PART)}")
    return AudioRef(name)


def placed(raw: Any, turns: Sequence[Any], text: type) -> list[Any]:
    """Turns in which each sound of the row's list has its place; `text` is the type of a piece of text. Raises
    `RowProblem`."""
    names = listed(raw) if isinstance(raw, dict) else []
    open_parts = sum(part == AudioRef() for turn in turns for part in turn.parts)
    if not names and not open_parts:
        return list(turns)
    if any(isinstance(part, AudioRef) and part.name for turn in turns for part in turn.parts):
        raise RowProblem("a turn names a sound, and the row has an audio list, or a part without a name; keep one way")
    left, out, places = iter(names), [], 0
    for turn in turns:
        parts: list[Any] = []
        for part in turn.parts:
            pieces = part.text.split(PLACEHOLDER) if isinstance(part, text) else [""] * (1 + (part == AudioRef()))
            if not isinstance(part, text | AudioRef):
                parts.append(part)
            for index, piece in enumerate(pieces):
                if index:
                    parts.append(AudioRef(next(left, "")))
                    places += 1
                if piece:
                    parts.append(text(piece))
        out.append(replace(turn, parts=tuple(parts)))
    if places != len(names):
        raise RowProblem(f"has {places} {PLACEHOLDER} placeholder(s) in its text and {len(names)} sound(s); they must "
                         "be as many")  # fmt: skip
    return out


def listed(raw: dict[str, Any]) -> list[Name]:
    """The row's list of sounds. Raises `RowProblem`."""
    given = {key: raw[key] for key in SOUND_KEYS if raw.get(key) not in (None, [], "")}
    if len(given) > 1:
        raise RowProblem("has both 'audio' and 'audios'; keep one of them")
    for key, value in given.items():
        names = [file_named(one, Recording) for one in (value if isinstance(value, list) else [value])]
        if (found := [name for name in names if name]) != names:
            decoded = isinstance(value, dict) and "array" in value
            more = " (decoded samples are not taken: keep the file, datasets.Audio(decode=False))" if decoded else ""
            raise RowProblem(
                f"{key!r} is {shown(value)}; expected a wav or flac file, by its name or as bytes and path, or a list "
                f"of them{more}"
            )
        return found
    return []
