"""Locates the assistant's answers in a rendered conversation, as character spans, for the loss mask.

A chat template is a program, and its output does not mark prompts and answers. So the conversation is rendered in
growing prefixes: the messages before an answer, with the generation prompt, end where the answer begins (exactly the
input of a model that generates it), and the messages up to the answer end where the answer ends. Both must be prefixes
of the whole rendering; for other templates a `TemplateProblem` is raised.

Prefixes take two renderings per answer, and fail if a template writes an earlier turn differently from the last one:
Qwen3.5 opens a prompt with "<think>" and writes a thinking block before the last answer, but not before earlier ones.
So a conversation is also rendered with a mark in place of each text, each reasoning, and the name of the tool if an
answer is only a call. The text between the marks, the glue, comes from the template. If glue and texts of a row
reproduce its rendering character by character, its answers are at the positions of the marks; otherwise the row is
rejected. Splitting a row at its questions (`splitting.py`) needs none of this, but repeats the earlier turns for each
question. The glue is cached for each sequence of roles, so that most rows are rendered once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from octavo.data.rows.audio_refs import AudioRef
from octavo.data.rows.conversations import Conversation, ImageRef, Text, Turn
from octavo.data.rows.video_refs import VideoRef

Message = dict[str, Any]
Render = Callable[[Sequence[Message], bool], str]
#: the names under which templates read the reasoning of a turn; it is passed under both
REASONING_FIELDS = ("reasoning_content", "thinking")
Spans = list[tuple[int, int]]
MAX_SHAPES = 1024  # limit of cached sequences of roles
_KEYS = {"role", "content", *REASONING_FIELDS}


class TemplateProblem(ValueError):
    """The chat template cannot write this conversation."""


def messages(conversation: Conversation, *, parts: bool, system: str | None = None) -> list[Message]:
    """Convert a conversation to the input of a chat template: contents are lists of parts (multimodal processors) or
    text.

    `system` is prepended if the conversation has no system turn.
    """
    turns = list(conversation.turns)
    result = [_message(turn, parts) for turn in turns]
    if system is not None and not any(turn.role == "system" for turn in turns):
        result.insert(0, {"role": "system", "content": [{"type": "text", "text": system}] if parts else system})
    return result


#: parts for images, sounds and videos; templates test the type, older ones of Qwen2-Audio the presence of a key
_MEDIA_PARTS: dict[type, dict[str, Any]] = {
    ImageRef: {"type": "image"},
    AudioRef: {"type": "audio", "audio_url": ""},
    VideoRef: {"type": "video"},
}


def _message(turn: Turn, parts: bool) -> Message:
    content = [
        {"type": "text", "text": part.text} if isinstance(part, Text) else _MEDIA_PARTS[type(part)]
        for part in turn.parts
    ]
    message: Message = {"role": turn.role, "content": content if parts else turn.text}
    if turn.calls:
        message["tool_calls"] = list(turn.calls)
    if turn.name is not None:
        message["name"] = turn.name
    if turn.call is not None:
        message["tool_call_id"] = turn.call
    if turn.reasoning is not None:
        message |= dict.fromkeys(REASONING_FIELDS, turn.reasoning)
    return message


def message_texts(message: Message) -> list[str]:
    """Return the texts of a message, without its images."""
    content = message["content"]
    return [content] if isinstance(content, str) else [part["text"] for part in content if "text" in part]


def message_text(message: Message) -> str:
    """Return all text of a message as one string, without its images."""
    return "".join(message_texts(message))


def check_system(whole: str, messages: Sequence[Message], render: Render, prompt: bool = False) -> None:
    """Check that a conversation rendered as `whole` contains all its system turns: templates silently leave some out,
    Qwen3-VL's all except the first. Raises `TemplateProblem`."""
    for number, message in enumerate(messages):
        if message["role"] != "system" or message_text(message).strip() in whole:
            continue
        others = [*messages[:number], *messages[number + 1 :]]
        if _render(render, others, prompt) == whole:  # else the template wrote its words in another form
            raise TemplateProblem(
                f"the chat template would drop message {number + 1}, a system message; put its text into the first "
                "system turn, or into the question"
            )


def check_tools(conversation: Conversation, whole: str, without: str) -> None:
    """Check that a conversation rendered as `whole`, and `without` its tools, contains its tools and calls: a template
    may silently leave out both. Raises `TemplateProblem`."""
    if conversation.tools and whole == without:
        raise TemplateProblem("the chat template does not support tools, but the row has some")
    for name in (call["function"]["name"] for turn in conversation.turns for call in turn.calls):
        if name not in whole:
            raise TemplateProblem(f"the chat template does not support tool calls, but an assistant calls {name!r}")


def render_messages(messages: Sequence[Message], render: Render, prompt: bool = False) -> str:
    """Render a conversation, with the generation prompt if `prompt` is true. `render(messages, add_generation_prompt)`
    returns text. Raises `TemplateProblem`."""
    return _render(render, messages, prompt)


def answer_spans(
    whole: str,
    messages: Sequence[Message],
    render: Render,
    ends: Sequence[str],
    reach: int | None = None,
    context: int = 0,
) -> list[tuple[int, int]]:
    """Locate the answers in a conversation that was rendered as `whole`.

    `ends` are the tokenizer's special tokens. Returns (start, end) in characters for each assistant turn: the answer
    with its end-of-turn token and without the line break that a template appends. Answers that begin after the first
    `reach` characters are not located, because each takes two renderings, nor are the first `context` answers, which
    belong to a prompt. Raises `TemplateProblem`.
    """
    spans: list[tuple[int, int]] = []
    answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    for number in answers[context:]:
        message = messages[number]
        prompt = _render(render, messages[:number], True)
        if not whole.startswith(prompt):
            raise TemplateProblem(_prefix_problem(number, "the prompt before it", prompt, whole))
        if reach is not None and len(prompt) >= reach:
            break
        up_to_answer = whole if number == len(messages) - 1 else _render(render, messages[: number + 1], False)
        if not up_to_answer.startswith(prompt):
            raise TemplateProblem(_prefix_problem(number, "the prompt before it", prompt, up_to_answer))
        end = _find_answer_end(whole, up_to_answer, len(prompt), message)
        if end is None:
            raise TemplateProblem(_prefix_problem(number, "the conversation up to its end", up_to_answer, whole))
        spans.append((len(prompt), trim_glue(whole, len(prompt), end, ends)))
    return spans


def _find_answer_end(whole: str, up_to_answer: str, start: int, message: Message) -> int | None:
    """Return the end in `whole` of the answer that begins at `start`, or None if it cannot be located.

    Some templates (Qwen3's) write an empty thinking block only before the last answer, so that an earlier answer
    rendered as the last one differs from its final form. Then its text and the text after it must still be equal.
    """
    if whole.startswith(up_to_answer):
        return len(up_to_answer)
    if message.get(
        "tool_calls"
    ):  # the template writes them: find the end of `up_to_answer` that also follows in `whole`
        matches = (
            position for position in range(start, len(up_to_answer)) if whole.startswith(up_to_answer[position:], start)
        )
        position = next(matches, len(up_to_answer))
        return start + len(up_to_answer) - position if position < len(up_to_answer) else None
    words = message_text(message)
    for answer in (words, words.strip()):  # templates write it unchanged or stripped
        position = up_to_answer.rfind(answer)
        if position >= start and whole.startswith(up_to_answer[position:], start):
            return start + len(up_to_answer) - position
    return None


def trim_glue(text: str, start: int, end: int, ends: Sequence[str]) -> int:
    """Return the end of an answer, without white space after the end-of-turn token. If there is no such token, the
    white space is the only end signal and is kept."""
    bare = text[start:end].rstrip()
    return start + len(bare) if any(bare.endswith(token) for token in ends) else end


def _render(render: Render, messages: Sequence[Message], prompt: bool) -> str:
    try:
        return render(messages, prompt)
    # Templates are third-party programs: jinja's TemplateError (raise_exception), and any Python error within jinja.
    except Exception as cause:
        if str(cause).startswith("the chat template "):  # a complete message, for an exceeded limit
            raise TemplateProblem(str(cause)) from cause
        roles = ", ".join(message["role"] for message in messages)
        raise TemplateProblem(
            f"the chat template rejects the roles {roles} ({type(cause).__name__}: {cause})"
        ) from cause


def _prefix_problem(number: int, what: str, prefix: str, whole: str) -> str:
    at = next((i for i, (a, b) in enumerate(zip(prefix, whole, strict=False)) if a != b), min(len(prefix), len(whole)))
    return (
        f"the chat template writes message {number + 1} so that its answer cannot be found: rendered by itself, {what} "
        f"reads {prefix[at : at + 40]!r} at character {at}, in the whole conversation {whole[at : at + 40]!r}; use a "
        f"template whose earlier turns do not change when later ones are added, or set data.split_turns: true"
    )


# Answers by marks ---------------------------------------------------------------------------------------------------


class Answers:
    """Locates answers in conversations of one template; `ends` are the tokenizer's special tokens."""

    def __init__(self, ends: Sequence[str]) -> None:
        self.ends = tuple(ends)
        self._shapes: dict[Hashable, _Shape | None] = {}

    def spans(
        self, whole: str, messages: Sequence[Message], render: Render, reach: int | None = None, context: int = 0
    ) -> Spans:
        """Return the result of `answer_spans`, also for templates whose prefixes differ. Raises `TemplateProblem`."""
        shape, texts = self._shape(messages, render), _text_pieces(messages)
        spans = None if shape is None else shape.spans(whole, texts)
        if spans is None:
            try:
                return answer_spans(whole, messages, render, self.ends, reach, context)
            except TemplateProblem:
                spans = _learn_shape(messages, render, self.ends, ended=False).spans(whole, texts)
                if spans is None:
                    raise
        return [(start, end) for start, end in spans[context:] if reach is None or start < reach]

    def _shape(self, messages: Sequence[Message], render: Render) -> _Shape | None:
        """Return the shape for messages with these roles, which is computed when they occur a second time, else
        None."""
        if any(not message.keys() <= _KEYS for message in messages):
            return None
        kinds = tuple(map(_shape_key, messages))
        if kinds not in self._shapes:
            if len(self._shapes) < MAX_SHAPES:
                self._shapes[kinds] = None
            return None
        shape = self._shapes[kinds]
        if shape is None:
            shape = self._shapes[kinds] = _learn_shape(messages, render, self.ends)
        return shape


class _Piece(NamedTuple):
    """A text of a message that a mark can replace. An optional piece (reasoning) may be missing in a rendering."""

    text: str
    is_optional: bool = False


@dataclass(frozen=True)
class _Shape:
    """The text that a template writes around the texts of messages: `glue` before each text that is `written`, and
    after the last one. The edges of answers are (index of the glue, characters into it)."""

    glue: tuple[str, ...] = ()
    written: tuple[bool, ...] = ()
    answers: tuple[tuple[tuple[int, int], tuple[int, int]], ...] = ()

    def spans(self, whole: str, texts: Sequence[_Piece]) -> Spans | None:
        """Return the answers in a rendering of `texts`, or None if the shape does not reproduce the rendering."""
        if len(texts) != len(self.written) or not self.glue or not whole.startswith(self.glue[0]):
            return None
        starts, at = [0], len(self.glue[0])  # of each glue
        written = [piece.text for piece, is_written in zip(texts, self.written, strict=True) if is_written]
        for text, following in zip(written, self.glue[1:], strict=True):
            form = next((form for form in _written_forms(text) if whole.startswith(form + following, at)), None)
            if form is None:
                return None
            starts.append(at + len(form))
            at += len(form) + len(following)
        if at != len(whole):
            return None
        return [(starts[first] + into, starts[last] + upto) for (first, into), (last, upto) in self.answers]


def _written_forms(text: str) -> Iterator[str]:
    """Yield the forms in which templates write a text: unchanged, or stripped."""
    return iter(dict.fromkeys((text, text.lstrip("\n"), text.rstrip(), text.strip("\n"), text.strip())))


def _learn_shape(messages: Sequence[Message], render: Render, ends: Sequence[str], ended: bool = True) -> _Shape:
    """Compute the shape of messages. It is empty, and matches no rendering, if the template changes texts or if some
    answer has no end-of-turn token; if no answer has one, it is empty only if `ended`."""
    marks = (f"text{number:06}" for number in itertools.count())
    marked = [_with_marks(message, marks) for message in messages]
    pieces = _text_pieces(marked)
    try:
        whole = render_messages(marked, render)
        answers = _find_answers(whole, marked, render, ends)
    except TemplateProblem:
        return _Shape()
    in_whole = tuple(piece.text in whole for piece in pieces)
    texts = [piece.text for piece, written in zip(pieces, in_whole, strict=True) if written]
    places = [whole.find(text) for text in texts]
    lost = any(not piece.is_optional for piece, written in zip(pieces, in_whole, strict=True) if not written)
    # Without an end-of-turn token, the end of an answer depends on the last words of a row, not on the shape.
    closed = [whole[start:end].endswith(tuple(ends)) for start, end in answers]
    if not all(closed) and (ended or any(closed)):
        return _Shape()
    if lost or places != sorted(places) or any(whole.count(text) > 1 for text in texts):
        return _Shape()
    starts = [0, *(place + len(text) for place, text in zip(places, texts, strict=True))]  # of each glue
    stops = [*places, len(whole)]

    def edge(position: int) -> tuple[int, int]:
        number = next(n for n, stop in enumerate(stops) if position <= stop)
        return number, position - starts[number]

    edges = tuple((edge(start), edge(end)) for start, end in answers)
    if any(into < 0 for pair in edges for _, into in pair):
        return _Shape()
    return _Shape(tuple(whole[start:stop] for start, stop in zip(starts, stops, strict=True)), in_whole, edges)


def _find_answers(whole: str, messages: Sequence[Message], render: Render, ends: Sequence[str]) -> Spans:
    """Locate the answers in messages whose texts are marks: by prefixes, else by the marks. Raises
    `TemplateProblem`."""
    try:
        return answer_spans(whole, messages, render, ends)
    except TemplateProblem:
        return _find_by_marks(whole, messages, render, ends)


def _find_by_marks(whole: str, messages: Sequence[Message], render: Render, ends: Sequence[str]) -> Spans:
    """Locate the answers by their marks. An answer begins after the generation prompt, or after the part of it that the
    template writes there, and ends as it does when it is the last message. Raises `TemplateProblem`."""
    spans: Spans = []
    at = 0
    answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    opening = _generation_prompt(messages[: answers[-1]], render) if answers else ""
    for number in answers:
        texts = [piece.text for piece in _text_pieces([messages[number]]) if piece.text in whole]
        as_last = render_messages(messages[: number + 1], render)
        if not texts or texts[-1] not in as_last:
            raise TemplateProblem(f"the chat template does not write message {number + 1}")
        first, last = whole.find(texts[0]), whole.find(texts[-1]) + len(texts[-1])
        tail = as_last.partition(texts[-1])[2]
        if not whole.startswith(tail, last):
            raise TemplateProblem(f"the chat template ends message {number + 1} differently if others follow")
        start = at + _end_of_opening(opening, whole[at:first])
        at = last + len(tail)
        spans.append((start, trim_glue(whole, start, at, ends)))
    return spans


def _generation_prompt(messages: Sequence[Message], render: Render) -> str:
    """Return the text that the generation prompt adds after messages."""
    before, prompt = (render_messages(messages, render, generate) for generate in (False, True))
    return prompt[len(before) :] if prompt.startswith(before) else ""


def _end_of_opening(opening: str, text: str) -> int:
    """Return the end in `text` of the longest prefix of `opening` that it contains, or len(text) if it contains
    none."""
    for length in range(len(opening), 0, -1):
        place = text.rfind(opening[:length])
        if place >= 0:
            return place + length
    return len(text)


def _text_pieces(messages: Sequence[Message]) -> list[_Piece]:
    """Return the nonblank texts that marks can replace, in the order in which templates write them."""
    pieces: list[_Piece] = []
    for message in messages:
        content = message["content"]
        texts = [content] if isinstance(content, str) else [part["text"] for part in content if "text" in part]
        texts = [text for text in texts if text.strip()]
        if not texts and message.get("tool_calls"):
            texts = [message["tool_calls"][0]["function"]["name"]]
        reasoning = message.get(REASONING_FIELDS[0]) or ""
        pieces += [_Piece(reasoning, is_optional=True)] if reasoning.strip() else []
        pieces += map(_Piece, texts)
    return pieces


def _with_marks(message: Message, marks: Iterator[str]) -> Message:
    """Return a message with its texts replaced by the next marks, in the order of `_text_pieces`."""
    marked = dict(message)
    if (message.get(REASONING_FIELDS[0]) or "").strip():
        marked |= dict.fromkeys(REASONING_FIELDS, next(marks))
    content = message["content"]
    if isinstance(content, str):
        marked["content"] = next(marks) if content.strip() else content
    else:
        marked["content"] = [
            {**part, "text": next(marks)} if part.get("text", "").strip() else part for part in content
        ]
    if message.get("tool_calls") and marked["content"] == content:
        first, *others = message["tool_calls"]
        marked["tool_calls"] = [{**first, "function": {**first["function"], "name": next(marks)}}, *others]
    return marked


def _shape_key(message: Message) -> Hashable:
    """Return everything in a message, except its texts, that may change what the template writes around them."""
    content = message["content"]
    parts = [content] if isinstance(content, str) else [part.get("text") for part in content]
    texts = tuple(text is None or (text if not text.strip() else False) for text in parts)
    reasoning = message.get(REASONING_FIELDS[0])
    return message["role"], isinstance(content, str), texts, reasoning if not (reasoning or "").strip() else False
