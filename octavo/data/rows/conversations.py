"""Conversations, and the formats in which rows write them.

- `llava`: `{"id", "image"?, "conversations": [{"from": "human"|"gpt", "value"}]}`; each `<image>` in a value is the
  place of the next image.
- `sharegpt`: the same with more roles and an `images` list (`conversations` or `messages` as the key).
- `messages`: `{"messages": [{"role", "content"}]}` or the bare list; content is text or a list of parts
  (`{"type": "text", "text"}`, `{"type": "image", "image"|"path"|"url"}`).
- `alpaca`: `{"instruction", "input"?, "output", "system"?, "history"?: [[question, answer], ...], "images"?}`.

The first three may have a text `system` if no turn has that role, and reasoning of the assistant as `reasoning_content`
of a turn (or `reasoning`, `thinking`). An image is a file name, or the file as {"bytes", "path"}; the same holds for
sounds under `audio` (:mod:`octavo.data.rows.audio_refs`) and videos under `video` (:mod:`octavo.data.rows.video_refs`).
All become a `Conversation`. This module opens no image and uses no tokenizer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.base.wording import count_noun
from octavo.data.errors import BadSample, MediaProblem, RowProblem, quote_value
from octavo.data.formats import media_kinds
from octavo.data.rows import foreign
from octavo.data.rows.audio_refs import SOUND, AudioRef, SoundFile
from octavo.data.rows.image_refs import ImageFile, InlineImage
from octavo.data.rows.media import is_null_file, locate, parse_file
from octavo.data.rows.tools import Call, parse_calls, parse_tools
from octavo.data.rows.video_refs import VIDEO, VideoFile, VideoRef, check_video_part, videos_with_rate

Name = str | InlineImage  # an image in a row: a file name, or the file itself
PLACEHOLDER = "<image>"
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")  # keys of reasoning in a turn
ROLES = {
    "llava": {"human": "user", "gpt": "assistant", "system": "system"},
    "sharegpt": {
        "human": "user",
        "user": "user",
        "gpt": "assistant",
        "assistant": "assistant",
        "system": "system",
        "function_call": "assistant",
        "observation": "tool",
        "tool": "tool",
    },
    "messages": {"user": "user", "assistant": "assistant", "system": "system", "tool": "tool"},
}
LEARNED_KEYS = ("weight", "loss", "train")  # keys of a turn for whether it is learned


@dataclass(frozen=True)
class Text:
    """A piece of text."""

    text: str


@dataclass(frozen=True)
class ImageRef:
    """The place of an image; `index`: into the conversation's images, in reading order."""

    index: int


@dataclass(frozen=True)
class Turn:
    """One message. `role`: system, user, assistant or tool; `parts`: texts, images, sounds and videos in reading order;
    `calls`: tool calls of an assistant; `name`, `call`: of a tool's answer, the tool's name and the id of the call, if
    the row has them; `reasoning`: of an assistant, if the row has it in a separate field; not `learned`: the row marks
    the turn as context."""

    role: str
    parts: tuple[Text | ImageRef | AudioRef | VideoRef, ...]
    calls: tuple[Call, ...] = ()
    name: str | None = None
    reasoning: str | None = None
    call: str | None = None
    learned: bool = True

    @property
    def text(self) -> str:
        """All text of the turn, without its images."""
        return "".join(part.text for part in self.parts if isinstance(part, Text))


@dataclass(frozen=True)
class Conversation:
    """One row of a data set: its turns, the files of its images, sounds and videos in reading order, its file and row
    number, and the `tools` that it offers. The first `context_answers` answers are context and not learned."""

    turns: tuple[Turn, ...]
    images: tuple[ImageFile, ...] = ()
    source: str = ""
    row: int = 0
    id: str | None = None
    tools: tuple[dict[str, object], ...] = ()
    sounds: tuple[SoundFile, ...] = ()
    context_answers: int = 0
    videos: tuple[VideoFile, ...] = ()


def parse(raw: object, format: str, *, file: str | Path, row: int, images: Path) -> Conversation:
    """One decoded row as a `Conversation`.

    `format`: llava, sharegpt, messages or alpaca; `images`: the folder that image names are relative to and must stay
    inside of. Raises `BadSample`.
    """
    with bad_sample_context(raw, file, row) as identity:
        foreign.check_row(raw)
        turns, names = read_turns(raw, format)
        check_turns(turns)
        return make_conversation(raw, turns, names, images, file=file, row=row, identity=identity)


def make_conversation(
    raw: object, turns: Sequence[Turn], names: Sequence[Name], images: Path, *, file: str | Path, row: int,
    identity: str | None, sounds: bool = True,
) -> Conversation:  # fmt: skip
    """Make a conversation from turns, with the files that they name, each inside the folder `images`, and the tools
    of the row `raw`; without `sounds` its sound files are not located. Raises `RowProblem` and `MediaProblem`."""
    sound_files = SOUND.files(turns, images) if sounds else ()
    videos = VIDEO.files(turns, images, folders=True)
    tools = raw.get("tools") if isinstance(raw, dict) else None
    return Conversation(
        tuple(turns), find_images(names, images), str(file), row, identity,
        () if tools in (None, "", []) else parse_tools(tools), sound_files,
        videos=videos_with_rate(videos, raw) if videos else (),
    )  # fmt: skip


@contextmanager
def bad_sample_context(raw: object, file: str | Path, row: int) -> Iterator[str | None]:
    """Yields the id of the row; a `RowProblem` or `MediaProblem` in the block becomes a `BadSample` of that row."""
    value = raw.get("id") if isinstance(raw, dict) else None
    identity = str(value) if isinstance(value, str | int) else None
    try:
        yield identity
    except (RowProblem, MediaProblem) as cause:
        raise BadSample(file, row, str(cause), identity) from cause


def read_turns(raw: object, format: str) -> tuple[list[Turn], list[Name]]:
    """Return the turns of a row and the names of its images, in reading order. Raises `RowProblem`."""
    if format == "alpaca":
        raw = require_object(raw)
        if "output" not in raw:
            raise RowProblem(
                f"has the keys {quote_value(sorted(map(str, raw)))}; an alpaca row has instruction and output"
            )
        files = {key: raw[key] for key in media_kinds.KEYS if key in raw}
        answer = {"role": "assistant", "content": _get_text(raw, "output")}
        turns, names = _read_message_turns({**files, "messages": [*alpaca_messages(raw), answer]})
        return _place_media(raw, turns), names
    turns, names = _read_message_turns(raw) if format == "messages" else _read_value_turns(raw, format)
    turns = _place_media(raw, turns)
    return [*_system_turn(raw, turns), *turns], names


def _place_media(raw: object, turns: Sequence[Turn]) -> list[Turn]:
    """Turns with a part for each sound and video of the row. Raises `RowProblem`."""
    return VIDEO.place_files(raw, SOUND.place_files(raw, turns, Text), Text)


def _system_turn(raw: object, turns: Sequence[Turn]) -> list[Turn]:
    """Return the turn for the key `system` of a row, unless a turn already has its text. Raises `RowProblem`."""
    text = _get_text(raw, "system") if isinstance(raw, dict) else ""
    system_texts = [turn.text for turn in turns if turn.role == "system"]
    if text and system_texts and system_texts != [text]:
        raise RowProblem(
            f"has the system {quote_value(text)}, but a system turn has {quote_value(system_texts[0])}; keep one"
        )
    return [Turn("system", (Text(text),))] if text and not system_texts else []


def alpaca_messages(raw: dict[str, Any]) -> list[dict[str, str]]:
    """Return the prompt of an alpaca row as messages: its system, its history, and its instruction followed by the
    input.
    Raises `RowProblem`."""
    system, *pieces = (_get_text(raw, key) for key in ("system", "instruction", "input"))
    question = "\n".join(filter(None, pieces))
    if not question.strip() and not raw.get("image") and not raw.get("images"):  # the question may be only an image
        raise RowProblem(
            "has an empty 'instruction' and no 'input', so there is no question; fill one, or remove the row"
        )
    history = raw.get("history") or []
    if not isinstance(history, list) or any(
        not isinstance(pair, list)
        or len(pair) != 2
        or not all(isinstance(history_turns, str) for history_turns in pair)
        for pair in history
    ):
        raise RowProblem(f"has the history {quote_value(history)}; expected a list of [question, answer]")
    history_turns = [("user" if n == 0 else "assistant", text) for pair in history for n, text in enumerate(pair)]
    turns = [("system", system)] if system else []
    return [{"role": role, "content": content} for role, content in (*turns, *history_turns, ("user", question))]


def _get_text(raw: dict[str, Any], key: str) -> str:
    text = "" if raw.get(key) is None else raw[key]
    if not isinstance(text, str):
        raise RowProblem(f"{key!r} is {quote_value(text)}; expected text")
    return text


def find_images(names: Sequence[Name], folder: Path) -> tuple[ImageFile, ...]:
    """Return the files of image names, each located once. Raises `MediaProblem`."""
    places = {name: name if isinstance(name, InlineImage) else locate(folder, name) for name in dict.fromkeys(names)}
    return tuple(places[name] for name in names)


def _read_value_turns(row: object, format: str) -> tuple[list[Turn], list[Name]]:
    """Turns of llava and sharegpt rows (from/value). Raises `RowProblem`."""
    raw = require_object(row)
    key = _find_turn_key(raw, ("conversations", "messages") if format == "sharegpt" else ("conversations",), format)
    names = image_names(raw, format)
    image_indices = iter(range(len(names)))
    turns, num_placeholders = [], 0
    for number, turn in enumerate(_require_list(raw[key], key), 1):
        if not isinstance(turn, dict) or not isinstance(turn.get("value"), str) or "from" not in turn:
            raise RowProblem(f"turn {number} is {quote_value(turn)}; expected {{'from': ..., 'value': text}}")
        _check_keys(turn, number, ("tool_calls", "function_call"), "a turn of function_call of their own")
        role = _map_role(turn["from"], format, number)
        foreign.check_turn(turn, number, role)
        foreign.check_part_text(turn["value"], f"the value of turn {number}")
        reasoning = read_reasoning(turn, role, number)
        if turn["from"] == "function_call" and format == "sharegpt":
            calls = parse_calls(turn["value"], f"turn {number}")
            turns.append(Turn(role, (), calls, reasoning=reasoning, learned=is_learned(turn, number)))
            continue
        num_placeholders += turn["value"].count(PLACEHOLDER)
        learned = is_learned(turn, number)
        turns.append(Turn(role, split_at_images(turn["value"], image_indices), reasoning=reasoning, learned=learned))
    check_image_count(num_placeholders, len(names))
    return turns, names


def _read_message_turns(row: object) -> tuple[list[Turn], list[Name]]:
    """Turns of rows with messages (role/content). Raises `RowProblem`."""
    raw = require_object({"messages": row} if isinstance(row, list) else row)
    key = _find_turn_key(raw, ("messages", "conversations", "conversation"), "messages")
    listed = image_names(raw, "sharegpt") if ("images" in raw or "image" in raw) else None
    names: list[Name] = [] if listed is None else listed
    image_indices = iter(range(len(names)))
    turns, num_placeholders = [], 0
    for number, turn in enumerate(_require_list(raw[key], key), 1):
        raw_calls = turn.get("tool_calls") if isinstance(turn, dict) else None
        calls = () if raw_calls in (None, "", []) else parse_calls(raw_calls, f"turn {number}")
        if not isinstance(turn, dict) or "role" not in turn or ("content" not in turn and not calls):
            raise RowProblem(f"turn {number} is {quote_value(turn)}; expected {{'role': ..., 'content': ...}}")
        _check_keys(turn, number, ("function_call",), "tool_calls")
        role, content = _map_role(turn["role"], "messages", number), turn.get("content")
        foreign.check_turn(turn, number, role)
        name, call = turn.get("name"), turn.get("tool_call_id")
        if (calls and role != "assistant") or not isinstance(name, str | None) or not isinstance(call, str | None):
            raise RowProblem(
                f"turn {number} is {quote_value(turn)}; an assistant calls tools, and names and ids are text"
            )
        if content is None and calls:
            content = []
        if isinstance(content, str):
            foreign.check_part_text(content, f"the content of turn {number}")
            content = [{"type": "text", "text": content}]
        parts: list[Any] = []
        for part in _require_list(content, f"content of turn {number}", "text or a list of parts"):
            if (place := SOUND.part(part, number) or VIDEO.part(part, number)) is not None:
                if isinstance(place, VideoRef):
                    check_video_part(part, number)
                parts.append(place)
                continue
            text, image = _parse_part(part, number)
            foreign.check_part(part, number, role)
            if text is not None and listed is not None:
                num_placeholders += text.count(PLACEHOLDER)
                parts.extend(split_at_images(text, image_indices))
            elif text is not None:
                parts.append(Text(text))
            elif image is None:  # {"type": "image"}: the next of the row's list
                num_placeholders += 1
                parts.append(ImageRef(next(image_indices, -1)))
            elif listed is not None:
                raise RowProblem(f"turn {number} names an image and the row has an image list too; keep one of them")
            else:
                parts.append(ImageRef(len(names)))
                names.append(image)
        reasoning = read_reasoning(turn, role, number)
        name, call = (name, call) if role == "tool" else (None, None)
        turns.append(Turn(role, tuple(parts), calls, name, reasoning, call, is_learned(turn, number)))
    if listed is None and num_placeholders:
        parts_without = count_noun(num_placeholders, "image part")
        raise RowProblem(
            f"has {parts_without} without a file or with null, and no list of images; write "
            '{"type": "image", "image": FILE}, or list the files under \'images\''
        )
    if listed is not None:
        check_image_count(num_placeholders, len(listed))
    if not names and any(PLACEHOLDER in turn.text for turn in turns):
        raise RowProblem(
            f"writes {PLACEHOLDER} in its text, but names no image; list it under 'images', or write the content as "
            'parts: {"type": "image", "image": FILE}'
        )
    return turns, names


def _check_keys(turn: dict[str, Any], number: int, calls: Sequence[str], instead: str) -> None:
    """Check that a turn has no keys that would be ignored: tool calls in the style of another format, or files. Raises
    `RowProblem`."""
    if key := next((key for key in calls if turn.get(key)), None):
        raise RowProblem(f"turn {number} has {key}, which rows of this format do not support; write calls as {instead}")
    if key := next((key for key in media_kinds.KEYS if turn.get(key)), None):
        raise RowProblem(f"turn {number} has {key}; list files in the row, or write the content as parts")


def is_learned(turn: dict[str, Any], number: int) -> bool:
    """Return True if an assistant's turn is learned: 1 or true; 0 or false makes it context. Raises `RowProblem`."""
    flags = {key: turn[key] for key in LEARNED_KEYS if turn.get(key) is not None}
    for key, value in flags.items():
        if not isinstance(value, bool | int | float) or value not in (0, 1):
            raise RowProblem(f"turn {number} has the {key} {quote_value(value)}; expected 1 or 0, true or false")
    return all(flags.values())


def read_reasoning(turn: dict[str, Any], role: str, number: int) -> str | None:
    """Return the reasoning of a turn, or None if it is absent or blank. Raises `RowProblem`."""
    fields = {key: turn[key] for key in REASONING_KEYS if turn.get(key) is not None}
    for key, value in fields.items():
        if not isinstance(value, str):
            raise RowProblem(f"turn {number} has the {key} {quote_value(value)}; expected text")
    texts = {value for value in fields.values() if value.strip()}
    if len(texts) > 1:
        raise RowProblem(f"turn {number} has different reasoning in {' and '.join(fields)}; keep one of them")
    if texts and role != "assistant":
        raise RowProblem(
            f"turn {number}, of the {role}, has {next(iter(fields))}; only an assistant's turn has reasoning"
        )
    return next(iter(texts), None)


def _parse_part(part: object, number: int) -> tuple[str | None, Name | None]:
    """Return (text, None) for a text part, (None, name or None) for an image part."""
    fields = part if isinstance(part, dict) else {}
    kind, text = fields.get("type"), fields.get("text")
    if kind == "text" and isinstance(text, str):
        return text, None
    if kind == "image":
        files = [fields[key] for key in ("image", "path", "url") if not is_null_file(fields.get(key))]
    elif kind == "image_url":
        inner = fields.get("image_url")
        files = [inner.get("url") if isinstance(inner, dict) else inner]
    else:
        raise RowProblem(f"turn {number} has the part {quote_value(part)}; expected type text, image, audio or video")
    if not files:
        return None, None
    name = parse_file(files[0], InlineImage) if len(files) == 1 else None
    if name is None:
        raise RowProblem(
            f"turn {number} has the image part {quote_value(part)}; expected one path in image, path or url"
        )
    return None, name


def split_at_images(text: str, image_indices: Iterator[int]) -> tuple[Text | ImageRef, ...]:
    """Split a text at its placeholders; each takes the next image index from `image_indices` (-1 if none is left, which
    `check_image_count` refuses later)."""
    parts: list[Text | ImageRef] = []
    for number, piece in enumerate(text.split(PLACEHOLDER)):
        if number:
            parts.append(ImageRef(next(image_indices, -1)))
        if piece:
            parts.append(Text(piece))
    return tuple(parts)


def image_names(raw: dict[str, Any], format: str) -> list[Name]:
    """Return the image list of a row: `image` or `images`, each a name or a list of names. Raises `RowProblem`."""
    listed = {key: raw[key] for key in media_kinds.IMAGE.keys if raw.get(key) not in (None, [], "")}
    if len(listed) > 1:
        raise RowProblem("has both 'image' and 'images'; keep one of them")
    if format == "llava" and "images" in listed:
        raise RowProblem("has 'images', but llava rows write 'image'; set format: sharegpt for this data set")
    for key, value in listed.items():
        names = [parse_file(file, InlineImage) for file in (value if isinstance(value, list) else [value])]
        if (valid := [name for name in names if name is not None]) != names:
            raise RowProblem(f"{key!r} is {quote_value(value)}; expected a file name or a list of file names")
        return valid
    return []


def _find_turn_key(raw: dict[str, Any], keys: tuple[str, ...], format: str) -> str:
    present = [key for key in keys if key in raw]
    if len(present) != 1:
        problem = (
            f"both {present[0]!r} and {present[1]!r}" if present else f"the keys {quote_value(sorted(map(str, raw)))}"
        )
        raise RowProblem(f"has {problem}; a {format} row has one of {', '.join(map(repr, keys))}")
    return present[0]


def _map_role(name: object, format: str, number: int) -> str:
    known = ROLES[format]
    if not isinstance(name, str) or name not in known:
        raise RowProblem(f"turn {number} has the unknown role {quote_value(name)}; {format} knows {', '.join(known)}")
    return known[name]


def check_image_count(placeholders: int, images: int) -> None:
    if placeholders != images:
        raise RowProblem(
            f"has {count_noun(placeholders, f'{PLACEHOLDER} placeholder')} in its text and "
            f"{count_noun(images, 'image')}; the numbers must be equal"
        )


def check_turns(turns: Sequence[Turn], answered: bool = True) -> None:
    """Check the structure of a conversation, and with `answered` that it has an answer to learn. Raises
    `RowProblem`."""
    if not turns:
        raise RowProblem("the conversation is empty")
    dialogue = [turn for turn in turns if turn.role != "system"]
    answers = [turn for turn in dialogue if turn.role == "assistant"]
    if answered and not any(turn.learned for turn in answers):
        problem = "no assistant turn that is learned (weight 0)" if answers else "no assistant turn"
        raise RowProblem(f"has {problem}, so there is nothing to learn from it")
    if dialogue and dialogue[0].role == "assistant":
        raise RowProblem("begins with an assistant turn; there is no prompt before it")
    for number, turn in enumerate(turns, 1):
        if has_lone_surrogate(turn.text + (turn.reasoning or "")):
            raise RowProblem(f"turn {number} contains a lone surrogate (half of a UTF-16 pair); fix its text")
        if turn.role == "assistant" and not turn.text.strip() and not turn.calls:
            raise RowProblem(f"turn {number} is an assistant turn without text")
    foreign.check_texts(text for turn in turns for text in (turn.text, turn.reasoning or ""))


def has_lone_surrogate(text: str) -> bool:
    """Return True if a text has a lone surrogate, which no tokenizer accepts."""
    return not text.isascii() and any("\ud800" <= letter <= "\udfff" for letter in text)


def require_object(raw: object) -> dict[str, Any]:
    """Return the row if it is an object. Raises `RowProblem`."""
    if not isinstance(raw, dict):
        raise RowProblem(f"is {quote_value(raw)}; expected an object with the conversation")
    return raw


def _require_list(value: object, name: str, expected: str = "a list") -> list[Any]:
    if not isinstance(value, list):
        raise RowProblem(f"{name} is {quote_value(value)}; expected {expected}")
    return value
