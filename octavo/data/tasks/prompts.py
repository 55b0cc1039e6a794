"""Prompts: what a model is asked, the answer it is held against, and what else a reward may want to know.

    {"prompt": "What is 2 + 3?", "answer": 5, "level": "easy"}
    {"prompt": [{"role": "user", "content": "<image>Which digit?"}], "images": ["7.png"], "answer": "7"}

(for `answer` also `completion`, a text or the assistant's turn) and every conversation (`conversations.py`): its last
assistant turn becomes the reference answer, all before it is the prompt. A row's own `answer` (text, a number, or a
list of them) comes first; a row may have none. A `prompt` that ends with the user's turn is asked as it stands. Images
of a row with `prompt` that places none stand before its first user turn. All other keys are columns for rewards.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from octavo.data.encoding.encode import Encoder
from octavo.data.encoding.processor_calls import Encoding
from octavo.data.encoding.sample import Sample
from octavo.data.errors import BadSample, DataError
from octavo.data.formats.media_kinds import KEYS as MEDIA_KEYS
from octavo.data.rows.audio_refs import PLACEHOLDER as SOUND
from octavo.data.rows.audio_refs import AudioRef
from octavo.data.rows.conversations import (
    PLACEHOLDER,
    ROLES,
    Conversation,
    ImageRef,
    Name,
    RowProblem,
    Text,
    Turn,
    bad_sample_context,
    check_turns,
    conversation_of,
    is_learned,
    parse,
    read_turns,
    reasoning_of,
    shown,
)
from octavo.data.rows.foreign import check_row, check_turn, check_turn_text, check_variables
from octavo.data.rows.image_refs import ImageFile, Picture
from octavo.data.rows.missing_values import is_missing
from octavo.data.rows.video_refs import VIDEO, VideoRef

TURN_KEYS = ("prompt", "messages", "conversations", "conversation")
ALPACA = ("instruction", "input", "output", "system", "history")
COLUMNS = ("answer", "prompt", "messages", "images", "videos")  # for rewards, of every prompt
ANSWERS = "a text, a number, or a list of them"


@dataclass(frozen=True)
class PromptRow:
    """A row that is asked. `answer`: the reference, several where any of them is right, or None; `columns`: further
    keys of the row, as JSON has them (of bytes only how many), and `prompt` (words of the last turn), `messages` (all
    turns: role, content), `images` and `videos` (files); `reasoning`: what is thought before the answer, where a row
    says it."""

    conversation: Conversation
    answer: str | list[str] | None = None
    columns: dict[str, Any] = field(default_factory=dict)
    reasoning: str | None = None


@dataclass(frozen=True)
class PromptSample(Sample):
    """An encoded prompt: a `Sample` without labels, whose tokens end with what opens the answer. `pictures`: its image
    files, for who judges the answer. `number`: which row of the data stream it is, the same for any number of ranks and
    after a resume."""

    answer: str | list[str] | None = None
    columns: dict[str, Any] = field(default_factory=dict)
    pictures: tuple[ImageFile, ...] = ()
    number: int = -1

    @property
    def nbytes(self) -> int:
        """Memory of the arrays, and about that of columns and files."""
        files = sum(len(picture.data) for picture in self.pictures if isinstance(picture, Picture))
        return super().nbytes + len(json.dumps(self.columns)) + files


class PromptEncoder(Encoder):
    """Encodes prompts. One that leaves no room for an answer of `reserve` tokens is left out or an error, never cut.
    Videos become the images that they are to the tower, as the generation engine takes them."""

    ways = "drop"

    def __init__(self, processor: Any, seq_length: int, **options: Any) -> None:
        super().__init__(processor, seq_length, **options)
        if self.on_long == "cut":
            raise DataError("data.on_long is cut, and the end of a prompt is what is asked; set it to drop or error")
        if self.train_on_prompt:
            raise DataError("data.train_on_prompt is true, and completions alone are learned from; leave it out")

    def encoding(self, row: PromptRow) -> Encoding[PromptSample]:  # type: ignore[override]
        """Raises as `Encoder.encode` does."""
        of = row.conversation
        if of.videos and (why := getattr(self.processor, "why_not_images", None)):
            why = f"holds a video, which the generation engine does not take: {why}; use a Qwen3-VL or InternVL"
            raise BadSample(of.source, of.row, why, of.id)
        made = self._videos_as_images((yield from super().encoding(of, None)))
        return PromptSample(**vars(made), answer=row.answer, columns=row.columns, pictures=of.images)

    def _videos_as_images(self, sample: Sample) -> Sample:
        """A sample with the frames of its videos as images."""
        if "video_grid_thw" not in sample.extra:
            return sample
        kinds = sample.mm_token_type_ids
        assert kinds is not None  # processors that take videos return token types
        arrays = {"input_ids": sample.input_ids[None], "mm_token_type_ids": kinds[None],
                  "pixel_values": sample.pixel_values, "image_grid_thw": sample.image_grid_thw}  # fmt: skip
        arrays |= {name: one.values for name, one in sample.extra.items()}
        converted = self.processor.as_images({name: torch.from_numpy(x) for name, x in arrays.items() if x is not None})
        return replace(
            sample,
            input_ids=converted["input_ids"][0].numpy(),
            mm_token_type_ids=converted["mm_token_type_ids"][0].numpy(),
            pixel_values=converted["pixel_values"].numpy(),
            image_grid_thw=converted["image_grid_thw"].numpy(),
            images=len(converted["image_grid_thw"]),
            extra={name: one for name, one in sample.extra.items() if name in converted},
            films=(),
            videos=0,
        )


def parse_prompt(raw: Any, format: str, *, file: str | Path, row: int, images: Path) -> PromptRow:
    """One decoded row as a `PromptRow`; `format` is "prompt" or one that SFT knows. Raises `BadSample`."""
    with bad_sample_context(raw, file, row) as identity:
        check_variables(raw)
        prompt, names, answer, reasoning = _read(raw, format)
        fields = raw if isinstance(raw, dict) else {}
        columns = {key: _without_bytes(fields[key]) for key in extra_columns(fields, format)}
        count = sum(isinstance(part, ImageRef) for turn in prompt for part in turn.parts)
        words: dict[str, Any] = {"prompt": prompt[-1].text, "messages": [_message(turn) for turn in prompt]}
        asks = conversation_of(raw, prompt, names[:count], images, file=file, row=row, identity=identity)
        named = {"images": [str(path) for path in asks.images], "videos": [str(path) for path in asks.videos]}
        return PromptRow(asks, answer, columns | words | named, reasoning)


def _read(raw: Any, format: str) -> tuple[list[Turn], list[Name], str | list[str] | None, str | None]:
    """(the prompt of a row, the names of its images, the answer, what is thought before it). Raises `RowProblem`."""
    if format != "prompt":
        turns, names = read_turns(raw, format)
    elif isinstance(raw, dict) and "prompt" in raw:
        turns, names = read_prompt_turns(raw, as_messages(raw["prompt"], "user"))
    else:
        raise RowProblem(f"is {shown(raw)}; expected an object with 'prompt', as other rows of the file have")
    fields = raw if isinstance(raw, dict) else {}
    reasoning = None
    if fields.get("answer") is None:
        content, reasoning = _completion_text(fields.get("completion"))
        answer = _reference(content)
    else:
        answer = _reference(fields["answer"])
    whole = format == "prompt" and bool(turns) and turns[-1].role in ("user", "tool")
    prompt, said = _split_answer(turns, answer is not None or whole)
    if answer is None and said is not None:
        answer, reasoning = said.text, said.reasoning
    if "completions" in fields:
        raise RowProblem("has a key 'completions', the name by which rewards are given what was generated; rename it")
    return prompt, names, answer, reasoning


def _without_bytes(value: Any) -> Any:
    """A value as JSON can say it: bytes, which tables have, become the text "<1234 bytes>"."""
    if isinstance(value, dict):
        return {key: _without_bytes(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_without_bytes(entry) for entry in value]
    return f"<{len(value)} bytes>" if isinstance(value, bytes) else value


def extra_columns(keys: Iterable[str], format: str) -> list[str]:
    """Which keys of rows are columns for rewards and no more."""
    own = (
        *TURN_KEYS,
        *MEDIA_KEYS,
        "system",
        "answer",
        "completion",
        "completions",
        *(ALPACA if format == "alpaca" else ()),
    )
    return [key for key in keys if key not in own]


def parse_answered(raw: Any, format: str, *, file: str | Path, row: int, images: Path) -> Conversation:
    """A row as a conversation: one with `prompt` ends with its `answer`, the first where several are right; all others
    are read as `parse` does. Raises `BadSample`."""
    if format != "prompt":
        return parse(raw, format, file=file, row=row, images=images)
    found = parse_prompt(raw, format, file=file, row=row, images=images)
    with bad_sample_context(raw, file, row):
        check_row(raw)
        turn = raw.get("completion")
        turn = turn[-1] if isinstance(turn, list) and turn else turn
        if isinstance(turn, dict) and raw.get("answer") is None and not is_learned(turn, 1):
            raise RowProblem("has a completion that is context (weight 0), so there is nothing to learn from it")
        answer = _answer(found.answer, found.reasoning)
    return replace(found.conversation, turns=(*found.conversation.turns, answer))


def turns_of(raw: Any, format: str) -> list[Turn]:
    """The turns of what `parse_answered` makes of a row, whose files it does not look for. Raises `RowProblem`."""
    if format != "prompt":
        turns = read_turns(raw, format)[0]
    else:
        prompt, _, answer, reasoning = _read(raw, format)
        turns = [*prompt, _answer(answer, reasoning)]
    check_turns(turns)
    return turns


def _answer(answer: str | list[str] | None, reasoning: str | None) -> Turn:
    """The turn with which a prompt is answered, by the first answer where several are right. Raises `RowProblem`."""
    if answer is None:
        raise RowProblem("has a prompt and no answer to learn from or to be held against; give it one, or remove it")
    return Turn("assistant", (Text(answer if isinstance(answer, str) else answer[0]),), reasoning=reasoning)


def number_prompts(rows: Sequence[tuple[int, Any]], micro_batch: int, pad_id: int) -> list[PromptSample]:
    """What a step of prompts is to a `Loader`: this rank's prompts with their numbers, without those left out."""
    return [replace(made, number=number) for number, made in rows if made is not None]


def as_messages(value: Any, role: str) -> list[Any]:
    """A text that `role` says, one turn or a list of turns, with role/content or from/value, as role/content. Raises
    `RowProblem` for a list of turns that is a text."""
    if isinstance(value, str):
        check_turn_text(value)
        return [{"role": role, "content": value}]
    turns = value if isinstance(value, list) else [value]
    return [_with_role(turn) if isinstance(turn, dict) and {"from", "value"} <= turn.keys() else turn for turn in turns]


def _with_role(turn: dict[str, Any]) -> dict[str, Any]:
    if "role" in turn:
        return turn
    more = {key: value for key, value in turn.items() if key not in ("from", "value")}
    if turn["from"] == "function_call":
        return {"role": "assistant", "content": None, "tool_calls": turn["value"], **more}
    return {"role": ROLES["sharegpt"].get(str(turn["from"]), turn["from"]), "content": turn["value"], **more}


def read_prompt_turns(raw: dict[str, Any], messages: list[Any]) -> tuple[list[Turn], list[Name]]:
    """The turns of messages, and the names of their images or the row's. Where the row lists images and no turn places
    any, they stand before the words of the first user turn, as TRL puts them. Raises `RowProblem`."""
    listed = {key: raw[key] for key in (*MEDIA_KEYS, "system") if key in raw}
    if messages and any(listed.get(key) for key in ("image", "images")) and not any(map(_places_images, messages)):
        names = listed.get("image") or listed.get("images")
        count = len(names) if isinstance(names, list) else 1
        first = next((n for n, turn in enumerate(messages) if isinstance(turn, dict) and turn.get("role") == "user"), 0)
        content = messages[first].get("content") if isinstance(messages[first], dict) else None
        if isinstance(content, str):
            messages = [*messages]
            messages[first] = messages[first] | {"content": PLACEHOLDER * count + content}
        elif isinstance(content, list):
            messages = [*messages]
            messages[first] = messages[first] | {"content": [*[{"type": "image"}] * count, *content]}
    return read_turns({**listed, "messages": messages}, "messages")


def _places_images(turn: Any) -> bool:
    content = turn.get("content") if isinstance(turn, dict) else None
    parts = content if isinstance(content, list) else [content]
    return any(
        PLACEHOLDER in part if isinstance(part, str) else
        isinstance(part, dict) and (part.get("type") in ("image", "image_url") or PLACEHOLDER in str(part.get("text")))
        for part in parts
    )  # fmt: skip


def _split_answer(turns: Sequence[Turn], answered: bool) -> tuple[list[Turn], Turn | None]:
    """(the prompt, the answer behind it or None): cut before the last assistant turn; where the row brings an answer of
    its own, before one that ends the conversation."""
    spoken = [number for number, turn in enumerate(turns) if turn.role == "assistant"]
    cut = bool(spoken) and (not answered or spoken[-1] == len(turns) - 1)
    prompt = list(turns[: spoken[-1]] if cut else turns)
    said = turns[spoken[-1]] if cut else None
    check_turns([*prompt, said] if said else prompt, answered=False)
    if said is not None and said.calls:
        raise RowProblem("calls a tool in its last answer, and completions are text; name the reference in 'answer'")
    if said is not None and (held := next((part for part in said.parts if not isinstance(part, Text)), None)):
        what = {ImageRef: "an image", AudioRef: "a sound"}.get(type(held), "a video")
        raise RowProblem(f"has {what} in its last answer, and completions are text; name the reference in 'answer'")
    if not prompt or prompt[-1].role not in ("user", "tool"):
        ends = f"ends with a turn of the {prompt[-1].role}" if prompt else "is empty"
        raise RowProblem(f"has a prompt that {ends}; it must end with the user's or a tool's")
    return prompt, said


def _completion_text(completion: Any) -> tuple[Any, str | None]:
    """The words of a completion, and its reasoning: a text, or the one turn of the assistant that it is."""
    turns = completion if isinstance(completion, list) else [completion]
    if len(turns) == 1 and isinstance(turns[0], dict) and turns[0].get("role") == "assistant":
        check_turn(turns[0], 1, "assistant")
        return turns[0].get("content"), reasoning_of(turns[0], "assistant", 1)
    return completion, None


def _reference(answer: Any) -> str | list[str] | None:
    if isinstance(answer, list) and answer:
        return [_text(one) for one in answer]
    return None if answer is None else _text(answer)


def _text(answer: Any) -> str:
    if isinstance(answer, str):
        return answer
    if isinstance(answer, int | float) and not isinstance(answer, bool) and not is_missing(answer):
        return repr(answer)
    raise RowProblem(f"has the answer {shown(answer)}; expected {ANSWERS}")


def _message(turn: Turn) -> dict[str, str]:
    words = {ImageRef: PLACEHOLDER, AudioRef: SOUND, VideoRef: VIDEO.placeholder}
    said = (part.text if isinstance(part, Text) else words[type(part)] for part in turn.parts)
    return {"role": turn.role, "content": "".join(said)}
