"""Conversations, and the three ways in which people write them down.

- `llava`: `{"id", "image"?, "conversations": [{"from": "human"|"gpt", "value"}]}`; each `<image>` in a value stands
  for the next image.
- `sharegpt`: the same with more roles and an `images` list (`conversations` or `messages` as the key).
- `messages`: `{"messages": [{"role", "content"}]}` or the bare list; content is text or a list of parts
  (`{"type": "text", "text"}`, `{"type": "image", "image"|"path"|"url"}`).

All become a `Conversation`. Nothing here opens an image or knows a tokenizer.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.data.errors import BadSample
from octavo.data.images import ImageProblem, locate

PLACEHOLDER = "<image>"
FORMATS = ("llava", "sharegpt", "messages")
ROLES = {
    "llava": {"human": "user", "gpt": "assistant", "system": "system"},
    "sharegpt": {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"},
    "messages": {"user": "user", "assistant": "assistant", "system": "system"},
}
VIDEO = "holds a video; video is not available in this version: remove the row, or set on_bad_sample: skip"


@dataclass(frozen=True)
class Text:
    """A piece of text."""

    text: str


@dataclass(frozen=True)
class ImageRef:
    """The place of an image: the n-th of the conversation's images, in reading order."""

    index: int


@dataclass(frozen=True)
class Turn:
    """What one side says. `role` is system, user or assistant; `parts` are texts and images in reading order."""

    role: str
    parts: tuple[Text | ImageRef, ...]

    @property
    def text(self) -> str:
        """The turn's words, without its images."""
        return "".join(part.text for part in self.parts if isinstance(part, Text))


@dataclass(frozen=True)
class Conversation:
    """One row of a data set: its turns, the files of its images in reading order, and where it came from."""

    turns: tuple[Turn, ...]
    images: tuple[Path, ...] = ()
    source: str = ""
    row: int = 0
    id: str | None = None


_REPR = reprlib.Repr()  # what is shown of a value costs the same, however large the value
_REPR.maxstring = _REPR.maxother = 80


class RowProblem(ValueError):
    """Why a row is no conversation. `parse` turns it into a `BadSample` with file and row."""


def parse(raw: Any, format: str, *, file: str | Path, row: int, images: Path) -> Conversation:
    """One decoded row as a `Conversation`.

    `format` is one of `FORMATS`; `images` is the folder that image names are relative to and may not leave.
    Raises `BadSample`.
    """
    with naming(raw, file, row) as identity:
        turns, names = read_turns(raw, format)
        check_turns(turns)
        return Conversation(tuple(turns), find_images(names, images), str(file), row, identity)


@contextmanager
def naming(raw: Any, file: str | Path, row: int) -> Iterator[str | None]:
    """Gives the row's id, and makes what is wrong with its turns or images a `BadSample` of that row."""
    given = raw.get("id") if isinstance(raw, dict) else None
    identity = str(given) if isinstance(given, str | int) else None
    try:
        yield identity
    except (RowProblem, ImageProblem) as cause:
        raise BadSample(file, row, str(cause), identity) from cause


def read_turns(raw: Any, format: str) -> tuple[list[Turn], list[str]]:
    """The turns of a row and the names of its images, in reading order. Raises `RowProblem`."""
    return _from_messages(raw) if format == "messages" else _from_values(raw, format)


def find_images(names: Sequence[str], folder: Path) -> tuple[Path, ...]:
    """The files that names mean, each looked up once. Raises `ImageProblem`."""
    places = {name: locate(folder, name) for name in dict.fromkeys(names)}
    return tuple(places[name] for name in names)


def _from_values(raw: Any, format: str) -> tuple[list[Turn], list[str]]:
    raw = _object(raw)
    _refuse_video(raw)
    key = _turn_key(raw, ("conversations", "messages") if format == "sharegpt" else ("conversations",), format)
    names = _image_names(raw, format)
    left = iter(range(len(names)))
    turns, seen = [], 0
    for number, turn in enumerate(_list(raw[key], key), 1):
        if not isinstance(turn, dict) or not isinstance(turn.get("value"), str) or "from" not in turn:
            raise RowProblem(f"turn {number} is {shown(turn)}; expected {{'from': ..., 'value': text}}")
        if "<video>" in turn["value"]:
            raise RowProblem(VIDEO)
        seen += turn["value"].count(PLACEHOLDER)
        turns.append(Turn(_role(turn["from"], format, number), _split(turn["value"], left)))
    _match_count(seen, len(names))
    return turns, names


def _from_messages(raw: Any) -> tuple[list[Turn], list[str]]:
    if isinstance(raw, list):
        raw = {"messages": raw}
    raw = _object(raw)
    _refuse_video(raw)
    key = _turn_key(raw, ("messages", "conversations", "conversation"), "messages")
    listed = _image_names(raw, "sharegpt") if ("images" in raw or "image" in raw) else None
    names: list[str] = [] if listed is None else listed
    left = iter(range(len(names)))
    turns, seen = [], 0
    for number, turn in enumerate(_list(raw[key], key), 1):
        if not isinstance(turn, dict) or "role" not in turn or "content" not in turn:
            raise RowProblem(f"turn {number} is {shown(turn)}; expected {{'role': ..., 'content': ...}}")
        role, content = _role(turn["role"], "messages", number), turn["content"]
        if isinstance(content, str):
            content = [{"type": "text", "text": content}]
        parts: list[Text | ImageRef] = []
        for part in _list(content, f"content of turn {number}"):
            text, image = _part(part, number)
            if text is not None and listed is not None:
                seen += text.count(PLACEHOLDER)
                parts.extend(_split(text, left))
            elif text is not None:
                parts.append(Text(text))
            elif image is None:  # {"type": "image"}: the next of the row's own list
                seen += 1
                parts.append(ImageRef(next(left, -1)))
            elif listed is not None:
                raise RowProblem(f"turn {number} names an image and the row has an image list too; keep one of them")
            else:
                parts.append(ImageRef(len(names)))
                names.append(image)
        turns.append(Turn(role, tuple(parts)))
    if listed is not None or seen:
        _match_count(seen, len(listed or ()))
    if not names and any(PLACEHOLDER in turn.text for turn in turns):
        raise RowProblem(
            f"writes {PLACEHOLDER} in its text, but names no image; list it under 'images', or write the content as "
            'parts: {"type": "image", "image": FILE}'
        )
    return turns, names


def _part(part: Any, number: int) -> tuple[str | None, str | None]:
    """(text, None) of a text part, (None, name or None) of an image part."""
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return part["text"], None
    if isinstance(kind, str) and kind.startswith("video"):
        raise RowProblem(VIDEO)
    if kind == "image":
        given = [part[key] for key in ("image", "path", "url") if part.get(key) is not None]
    elif kind == "image_url":
        inner = part.get("image_url")
        given = [inner.get("url") if isinstance(inner, dict) else inner]
    else:
        raise RowProblem(f"turn {number} has the part {shown(part)}; expected type text or image")
    if not given:
        return None, None
    if len(given) > 1 or not isinstance(given[0], str):
        raise RowProblem(f"turn {number} has the image part {shown(part)}; expected one path in image, path or url")
    return None, given[0]


def _split(text: str, left: Any) -> tuple[Text | ImageRef, ...]:
    """Cut a text at its placeholders; each takes the next image number (-1 when none is left: counted later)."""
    parts: list[Text | ImageRef] = []
    for number, piece in enumerate(text.split(PLACEHOLDER)):
        if number:
            parts.append(ImageRef(next(left, -1)))
        if piece:
            parts.append(Text(piece))
    return tuple(parts)


def _image_names(raw: dict[str, Any], format: str) -> list[str]:
    """The row's image list. `image` and `images` may each hold one name or a list; not both may be there."""
    given = {key: raw[key] for key in ("image", "images") if raw.get(key) not in (None, [], "")}
    if len(given) > 1:
        raise RowProblem("has both 'image' and 'images'; keep one of them")
    if format == "llava" and "images" in given:
        raise RowProblem("has 'images', but llava rows write 'image'; set format: sharegpt for this data set")
    for key, value in given.items():
        names = [value] if isinstance(value, str) else value
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise RowProblem(f"{key!r} is {shown(value)}; expected a file name or a list of file names")
        return list(names)
    return []


def _turn_key(raw: dict[str, Any], keys: tuple[str, ...], format: str) -> str:
    present = [key for key in keys if key in raw]
    if len(present) != 1:
        found = f"both {present[0]!r} and {present[1]!r}" if present else f"the keys {shown(sorted(map(str, raw)))}"
        raise RowProblem(f"has {found}; a {format} row has one of {', '.join(map(repr, keys))}")
    return present[0]


def _role(name: Any, format: str, number: int) -> str:
    known = ROLES[format]
    if not isinstance(name, str) or name not in known:
        raise RowProblem(f"turn {number} has the unknown role {shown(name)}; {format} knows {', '.join(known)}")
    return known[name]


def _match_count(placeholders: int, images: int) -> None:
    if placeholders != images:
        raise RowProblem(
            f"has {placeholders} {PLACEHOLDER} placeholder(s) in its text and {images} image(s); they must be as many"
        )


def check_turns(turns: Sequence[Turn], answered: bool = True) -> None:
    """What any conversation must be, and with `answered` one to learn from. Raises `RowProblem`."""
    if not turns:
        raise RowProblem("the conversation is empty")
    spoken = [turn for turn in turns if turn.role != "system"]
    if answered and not any(turn.role == "assistant" for turn in spoken):
        raise RowProblem("has no assistant turn, so there is nothing to learn from it")
    if spoken and spoken[0].role == "assistant":
        raise RowProblem("begins with an assistant turn; there is no prompt that it answers")
    for number, turn in enumerate(turns, 1):
        if not turn.text.isascii() and any("\ud800" <= letter <= "\udfff" for letter in turn.text):
            raise RowProblem(f"turn {number} holds half a character (a lone surrogate); mend its text")
        if turn.role == "assistant" and not turn.text.strip():
            raise RowProblem(f"turn {number} is an assistant turn without text")


def _refuse_video(raw: dict[str, Any]) -> None:
    if raw.get("video") or raw.get("videos"):
        raise RowProblem(VIDEO)


def _object(raw: Any) -> dict[str, Any]:
    if not isinstance(raw, dict):
        raise RowProblem(f"is {shown(raw)}; expected an object with the conversation")
    return raw


def _list(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise RowProblem(f"{name} is {shown(value)}; expected a list")
    return value


def shown(value: Any) -> str:
    """The beginning of a value, for an error."""
    text = _REPR.repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
