"""Prompts: the input of a model, the reference answer, and further columns for rewards.

    {"prompt": "What is 2 + 3?", "answer": 5, "level": "easy"}
    {"prompt": [{"role": "user", "content": "<image>Which digit?"}], "images": ["7.png"], "answer": "7"}

(in place of `answer` also `completion`, a text or an assistant's turn) and every conversation (`conversations.py`): its
last assistant turn becomes the reference answer, all turns before it are the prompt. A key `answer` (text, a number, or
a list of them) takes precedence; a row may have no answer. A `prompt` that ends with a user's turn is used unchanged.
If a `prompt` places none of the row's images, they come before its first user turn. All other keys are columns for
rewards.
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
from octavo.data.errors import BadSample, DataError, row_place
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
    is_learned,
    make_conversation,
    parse,
    quote_value,
    read_reasoning,
    read_turns,
)
from octavo.data.rows.foreign import check_row, check_turn, check_turn_text, check_variables
from octavo.data.rows.image_refs import ImageFile, InlineImage
from octavo.data.rows.missing_values import is_missing
from octavo.data.rows.video_refs import VIDEO, VideoRef

TURN_KEYS = ("prompt", "messages", "conversations", "conversation")
ALPACA = ("instruction", "input", "output", "system", "history")
COLUMNS = ("answer", "prompt", "messages", "images", "videos")  # columns for rewards that every prompt has
ANSWERS = "a text, a number, or a list of them"


@dataclass(frozen=True)
class PromptRow:
    """A prompt. `answer`: the reference, a list if several are right, or None; `columns`: further keys of the row as
    JSON values (for bytes only their number), and `prompt` (text of the last turn), `messages` (all turns: role,
    content), `images` and `videos` (files); `reasoning`: before the reference answer, if the row has it."""

    conversation: Conversation
    answer: str | list[str] | None = None
    columns: dict[str, Any] = field(default_factory=dict)
    reasoning: str | None = None


@dataclass(frozen=True)
class PromptSample(Sample):
    """An encoded prompt: a `Sample` without labels, whose tokens end with the generation prompt. `pictures`: its image
    files, for reward functions. `number`: of the row in the data stream, the same for any number of ranks and after a
    resume. `place`: its file and row, for messages."""

    answer: str | list[str] | None = None
    columns: dict[str, Any] = field(default_factory=dict)
    pictures: tuple[ImageFile, ...] = ()
    number: int = -1
    place: str = ""

    @property
    def nbytes(self) -> int:
        """Memory of the arrays, and approximately of columns and files."""
        files = sum(len(picture.data) for picture in self.pictures if isinstance(picture, InlineImage))
        return super().nbytes + len(json.dumps(self.columns)) + files


class PromptEncoder(Encoder):
    """Encodes prompts. One that leaves no space for an answer of `reserve` tokens is left out or an error, never cut.
    Videos are converted to images, because the generation engine takes only images."""

    on_long_options = "drop"
    rows_kind = "prompts"

    def __init__(self, processor: Any, seq_length: int, **options: Any) -> None:
        super().__init__(processor, seq_length, **options)
        if self.on_long == "cut":
            raise DataError(
                "data.on_long is cut, which would cut the question at the end of a prompt; set it to drop or error"
            )
        if self.train_on_prompt:
            raise DataError("data.train_on_prompt is true, but only completions are learned; remove it")

    def encoding(self, row: PromptRow) -> Encoding[PromptSample]:  # type: ignore[override]
        """Generator that encodes a prompt. Raises as `Encoder.encode` does."""
        conversation = row.conversation
        if conversation.videos and (why := getattr(self.processor, "why_not_images", None)):
            why = f"has a video, which the generation engine does not support: {why}; use Qwen3-VL or InternVL"
            raise BadSample(conversation.source, conversation.row, why, conversation.id)
        sample = self._videos_as_images((yield from super().encoding(conversation, None)))
        return PromptSample(
            **vars(sample),
            answer=row.answer,
            columns=row.columns,
            pictures=conversation.images,
            place=row_place(sample.file, sample.row),
        )

    def _videos_as_images(self, sample: Sample) -> Sample:
        """Convert the videos of a sample to images, one for each frame or pair of frames."""
        if "video_grid_thw" not in sample.extra:
            return sample
        kinds = sample.mm_token_type_ids
        assert kinds is not None  # processors that take videos return token types
        arrays = {"input_ids": sample.input_ids[None], "mm_token_type_ids": kinds[None],
                  "pixel_values": sample.pixel_values, "image_grid_thw": sample.image_grid_thw}  # fmt: skip
        arrays |= {name: entry.values for name, entry in sample.extra.items()}
        converted = self.processor.as_images({name: torch.from_numpy(x) for name, x in arrays.items() if x is not None})
        return replace(
            sample,
            input_ids=converted["input_ids"][0].numpy(),
            mm_token_type_ids=converted["mm_token_type_ids"][0].numpy(),
            pixel_values=converted["pixel_values"].numpy(),
            image_grid_thw=converted["image_grid_thw"].numpy(),
            images=len(converted["image_grid_thw"]),
            extra={name: entry for name, entry in sample.extra.items() if name in converted},
            films=(),
            videos=0,
        )


def parse_prompt(raw: object, format: str, *, file: str | Path, row: int, images: Path) -> PromptRow:
    """One decoded row as a `PromptRow`; `format`: "prompt", or a format of conversations. Raises `BadSample`."""
    with bad_sample_context(raw, file, row) as identity:
        check_variables(raw)
        prompt, names, answer, reasoning = _read_prompt(raw, format)
        fields = raw if isinstance(raw, dict) else {}
        columns = {key: _without_bytes(fields[key]) for key in extra_columns(fields, format)}
        count = sum(isinstance(part, ImageRef) for turn in prompt for part in turn.parts)
        words: dict[str, Any] = {"prompt": prompt[-1].text, "messages": [_to_message(turn) for turn in prompt]}
        conversation = make_conversation(raw, prompt, names[:count], images, file=file, row=row, identity=identity)
        named = {
            "images": [str(path) for path in conversation.images],
            "videos": [str(path) for path in conversation.videos],
        }
        return PromptRow(conversation, answer, columns | words | named, reasoning)


def _read_prompt(raw: object, format: str) -> tuple[list[Turn], list[Name], str | list[str] | None, str | None]:
    """Return (the prompt of a row, the names of its images, the answer, the reasoning before it). Raises
    `RowProblem`."""
    # The answer comes from `answer`, else from `completion`, else from the last assistant turn.
    if format != "prompt":
        turns, names = read_turns(raw, format)
    elif isinstance(raw, dict) and "prompt" in raw:
        turns, names = read_prompt_turns(raw, as_messages(raw["prompt"], "user"))
    else:
        raise RowProblem(f"is {quote_value(raw)}; expected an object with 'prompt', as other rows of the file have")
    fields = raw if isinstance(raw, dict) else {}
    reasoning = None
    if fields.get("answer") is None:
        content, reasoning = _completion_text(fields.get("completion"))
        answer = _parse_reference(content)
    else:
        answer = _parse_reference(fields["answer"])
    ends_with_question = format == "prompt" and bool(turns) and turns[-1].role in ("user", "tool")
    prompt, answer_turn = _split_answer(turns, answer is not None or ends_with_question)
    if answer is None and answer_turn is not None:
        answer, reasoning = answer_turn.text, answer_turn.reasoning
    if "completions" in fields:
        raise RowProblem("has a key 'completions', the name of the argument of rewards for generated text; rename it")
    return prompt, names, answer, reasoning


def _without_bytes(value: Any) -> Any:
    """Convert a value to one that JSON supports: bytes, which tables have, become the text "<1234 bytes>"."""
    if isinstance(value, dict):
        return {key: _without_bytes(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_without_bytes(entry) for entry in value]
    return f"<{len(value)} bytes>" if isinstance(value, bytes) else value


def extra_columns(keys: Iterable[str], format: str) -> list[str]:
    """Return the keys of rows that are only columns for rewards."""
    used = (
        *TURN_KEYS,
        *MEDIA_KEYS,
        "system",
        "answer",
        "completion",
        "completions",
        *(ALPACA if format == "alpaca" else ()),
    )
    return [key for key in keys if key not in used]


def parse_answered(raw: object, format: str, *, file: str | Path, row: int, images: Path) -> Conversation:
    """Parse a row as a conversation: a row with `prompt` ends with its `answer`, the first if several are right; all
    others are parsed as by `parse`. Raises `BadSample`."""
    if format != "prompt":
        return parse(raw, format, file=file, row=row, images=images)
    prompt = parse_prompt(raw, format, file=file, row=row, images=images)
    with bad_sample_context(raw, file, row):
        check_row(raw)
        fields = raw if isinstance(raw, dict) else {}
        turn = fields.get("completion")
        turn = turn[-1] if isinstance(turn, list) and turn else turn
        if isinstance(turn, dict) and fields.get("answer") is None and not is_learned(turn, 1):
            raise RowProblem("has a completion that is context (weight 0), so there is nothing to learn from it")
        answer = _answer_turn(prompt.answer, prompt.reasoning)
    return replace(prompt.conversation, turns=(*prompt.conversation.turns, answer))


def read_answered_turns(raw: object, format: str) -> list[Turn]:
    """Return the turns of the conversation that `parse_answered` returns, without locating its files. Raises
    `RowProblem`."""
    if format != "prompt":
        turns = read_turns(raw, format)[0]
    else:
        prompt, _, answer, reasoning = _read_prompt(raw, format)
        turns = [*prompt, _answer_turn(answer, reasoning)]
    check_turns(turns)
    return turns


def _answer_turn(answer: str | list[str] | None, reasoning: str | None) -> Turn:
    """Return the turn that answers a prompt, with the first answer if several are right. Raises `RowProblem`."""
    if answer is None:
        raise RowProblem("has a prompt without an answer; add one, or remove the row")
    return Turn("assistant", (Text(answer if isinstance(answer, str) else answer[0]),), reasoning=reasoning)


def number_prompts(rows: Sequence[tuple[int, Any]], micro_batch: int, pad_id: int) -> list[PromptSample]:
    """Return this rank's prompts with their numbers, without rows left out (the `gather` of a `Loader` of prompts)."""
    return [replace(sample, number=number) for number, sample in rows if sample is not None]


def as_messages(value: object, role: str) -> list[Any]:
    """Return a text of `role`, one turn, or a list of turns, with role/content or from/value, as messages with
    role/content.
    Raises `RowProblem` for a list of turns written as text."""
    if isinstance(value, str):
        check_turn_text(value)
        return [{"role": role, "content": value}]
    turns = value if isinstance(value, list) else [value]
    return [_with_role(turn) if isinstance(turn, dict) and {"from", "value"} <= turn.keys() else turn for turn in turns]


def _with_role(turn: dict[str, Any]) -> dict[str, Any]:
    if "role" in turn:
        return turn
    others = {key: value for key, value in turn.items() if key not in ("from", "value")}
    if turn["from"] == "function_call":
        return {"role": "assistant", "content": None, "tool_calls": turn["value"], **others}
    return {"role": ROLES["sharegpt"].get(str(turn["from"]), turn["from"]), "content": turn["value"], **others}


def read_prompt_turns(raw: dict[str, Any], messages: list[Any]) -> tuple[list[Turn], list[Name]]:
    """Return the turns of messages, and the names of their images or of the row's images. If the row lists images and
    no turn places any, they come before the text of the first user turn, as in TRL. Raises `RowProblem`."""
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


def _places_images(turn: object) -> bool:
    content = turn.get("content") if isinstance(turn, dict) else None
    parts = content if isinstance(content, list) else [content]
    return any(
        PLACEHOLDER in part if isinstance(part, str) else
        isinstance(part, dict) and (part.get("type") in ("image", "image_url") or PLACEHOLDER in str(part.get("text")))
        for part in parts
    )  # fmt: skip


def _split_answer(turns: Sequence[Turn], answered: bool) -> tuple[list[Turn], Turn | None]:
    """Return (the prompt, the answer after it or None): split before the last assistant turn; if the row has an answer
    in another key (`answered`), only if an assistant turn ends the conversation. Raises `RowProblem`."""
    assistant_turns = [number for number, turn in enumerate(turns) if turn.role == "assistant"]
    has_answer_turn = bool(assistant_turns) and (not answered or assistant_turns[-1] == len(turns) - 1)
    prompt = list(turns[: assistant_turns[-1]] if has_answer_turn else turns)
    answer_turn = turns[assistant_turns[-1]] if has_answer_turn else None
    check_turns([*prompt, answer_turn] if answer_turn else prompt, answered=False)
    if answer_turn is not None and answer_turn.calls:
        raise RowProblem("calls a tool in its last answer, but completions are text; put the reference into 'answer'")
    if answer_turn is not None and (
        media_part := next((part for part in answer_turn.parts if not isinstance(part, Text)), None)
    ):
        what = {ImageRef: "an image", AudioRef: "a sound"}.get(type(media_part), "a video")
        raise RowProblem(f"has {what} in its last answer, but completions are text; put the reference into 'answer'")
    if not prompt or prompt[-1].role not in ("user", "tool"):
        ends = f"ends with a turn of the {prompt[-1].role}" if prompt else "is empty"
        raise RowProblem(f"has a prompt that {ends}; it must end with a user or tool turn")
    return prompt, answer_turn


def _completion_text(completion: object) -> tuple[object, str | None]:
    """Return (text, reasoning) of a completion, which is a text or one turn of the assistant. Raises `RowProblem`."""
    turns = completion if isinstance(completion, list) else [completion]
    if len(turns) == 1 and isinstance(turns[0], dict) and turns[0].get("role") == "assistant":
        check_turn(turns[0], 1, "assistant")
        return turns[0].get("content"), read_reasoning(turns[0], "assistant", 1)
    return completion, None


def _parse_reference(answer: object) -> str | list[str] | None:
    if isinstance(answer, list) and answer:
        return [_answer_text(entry) for entry in answer]
    return None if answer is None else _answer_text(answer)


def _answer_text(answer: object) -> str:
    if isinstance(answer, str):
        return answer
    if isinstance(answer, int | float) and not isinstance(answer, bool) and not is_missing(answer):
        return repr(answer)
    raise RowProblem(f"has the answer {quote_value(answer)}; expected {ANSWERS}")


def _to_message(turn: Turn) -> dict[str, str]:
    placeholders = {ImageRef: PLACEHOLDER, AudioRef: SOUND, VideoRef: VIDEO.placeholder}
    texts = (part.text if isinstance(part, Text) else placeholders[type(part)] for part in turn.parts)
    return {"role": turn.role, "content": "".join(texts)}
