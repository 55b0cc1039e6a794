"""Answers of rendered conversations, found by marks: what a template writes around texts is the same for all texts.

Prefixes (`template.py`) take two renderings an answer, and fail where a template writes an earlier turn otherwise than
a last one: Qwen3.5 opens a prompt with "<think>", writes the last answer behind a block of thinking, earlier ones bare.
So a conversation is rendered with a mark in place of each text, of each reasoning, and of the tool's name where an
answer says nothing else. What stands between the marks is the template's own, the glue. Where glue and a row's texts
give the row's rendering, character by character, its answers stand where those of the marks do; where they do not, the
row is refused. Splitting it at its questions (`splitting.py`) needs none of this, and costs what was said before again.

The glue is remembered for each sequence of roles, so that most rows are rendered once.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from octavo.data.encoding.template import (
    READ_AS,
    Message,
    Render,
    TemplateProblem,
    answer_spans,
    rendered,
    without_glue,
)

Spans = list[tuple[int, int]]
SHAPES = 1024  # sequences of roles that are remembered
_KEYS = {"role", "content", *READ_AS}


class Answers:
    """Answers of conversations of one template; `ends` are the tokenizer's special tokens."""

    def __init__(self, ends: Sequence[str]) -> None:
        self.ends = tuple(ends)
        self._shapes: dict[Hashable, _Shape | None] = {}

    def spans(
        self, whole: str, messages: Sequence[Message], render: Render, reach: int | None = None, given: int = 0
    ) -> Spans:
        """What `answer_spans` returns, also where prefixes do not tell; raises `TemplateProblem` as it does."""
        shape, texts = self._shape(messages, render), _texts(messages)
        found = None if shape is None else shape.spans(whole, texts)
        if found is None:
            try:
                return answer_spans(whole, messages, render, self.ends, reach, given)
            except TemplateProblem:
                found = _learned(messages, render, self.ends, ended=False).spans(whole, texts)
                if found is None:
                    raise
        return [(start, end) for start, end in found[given:] if reach is None or start < reach]

    def _shape(self, messages: Sequence[Message], render: Render) -> _Shape | None:
        """That of messages of these roles, learned when they come a second time."""
        if any(not message.keys() <= _KEYS for message in messages):
            return None
        kinds = tuple(map(_kind, messages))
        if kinds not in self._shapes:
            if len(self._shapes) < SHAPES:
                self._shapes[kinds] = None
            return None
        shape = self._shapes[kinds]
        if shape is None:
            shape = self._shapes[kinds] = _learned(messages, render, self.ends)
        return shape


class _Piece(NamedTuple):
    """A text of a message that a mark can stand for; a `spare` one, reasoning, may be missing in a rendering."""

    text: str
    spare: bool = False


@dataclass(frozen=True)
class _Shape:
    """What a template writes around the texts of messages: `glue` before each that is `there`, and behind the last.
    Edges of answers are (number of the glue, characters into it)."""

    glue: tuple[str, ...] = ()
    there: tuple[bool, ...] = ()
    answers: tuple[tuple[tuple[int, int], tuple[int, int]], ...] = ()

    def spans(self, whole: str, texts: Sequence[_Piece]) -> Spans | None:
        """The answers in a rendering of `texts`; None where it is another."""
        if len(texts) != len(self.there) or not self.glue or not whole.startswith(self.glue[0]):
            return None
        starts, at = [0], len(self.glue[0])  # of each glue
        written = [piece.text for piece, there in zip(texts, self.there, strict=True) if there]
        for text, behind in zip(written, self.glue[1:], strict=True):
            form = next((form for form in _forms(text) if whole.startswith(form + behind, at)), None)
            if form is None:
                return None
            starts.append(at + len(form))
            at += len(form) + len(behind)
        if at != len(whole):
            return None
        return [(starts[first] + into, starts[last] + upto) for (first, into), (last, upto) in self.answers]


def _forms(text: str) -> Iterator[str]:
    """A text as templates write it: as it is, or stripped."""
    return iter(dict.fromkeys((text, text.lstrip("\n"), text.rstrip(), text.strip("\n"), text.strip())))


def _learned(messages: Sequence[Message], render: Render, ends: Sequence[str], ended: bool = True) -> _Shape:
    """The shape of messages; one that nothing fits where the template does not write texts as they are, nor where some
    answer has no end-of-turn token, unless none has and not `ended`: prefixes then go by a row's own last words."""
    marks = (f"text{number:06}" for number in itertools.count())
    given = [_marked(message, marks) for message in messages]
    pieces = _texts(given)
    try:
        whole = rendered(given, render)
        answers = _found(whole, given, render, ends)
    except TemplateProblem:
        return _Shape()
    there = tuple(piece.text in whole for piece in pieces)
    texts = [piece.text for piece, written in zip(pieces, there, strict=True) if written]
    places = [whole.find(text) for text in texts]
    lost = any(not piece.spare for piece, written in zip(pieces, there, strict=True) if not written)
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
    return _Shape(tuple(whole[start:stop] for start, stop in zip(starts, stops, strict=True)), there, edges)


def _found(whole: str, messages: Sequence[Message], render: Render, ends: Sequence[str]) -> Spans:
    """The answers of messages whose texts are marks: by prefixes, else by the marks. Raises `TemplateProblem`."""
    try:
        return answer_spans(whole, messages, render, ends)
    except TemplateProblem:
        return _by_marks(whole, messages, render, ends)


def _by_marks(whole: str, messages: Sequence[Message], render: Render, ends: Sequence[str]) -> Spans:
    """Each answer begins behind what there is of its prompt's opening, and ends where it does as the last one."""
    spans: Spans = []
    at = 0
    answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    opening = _opening(messages[: answers[-1]], render) if answers else ""
    for number in answers:
        own = [piece.text for piece in _texts([messages[number]]) if piece.text in whole]
        alone = rendered(messages[: number + 1], render)
        if not own or own[-1] not in alone:
            raise TemplateProblem(f"the chat template does not write message {number + 1}")
        first, last = whole.find(own[0]), whole.find(own[-1]) + len(own[-1])
        tail = alone.partition(own[-1])[2]
        if not whole.startswith(tail, last):
            raise TemplateProblem(f"the chat template ends message {number + 1} otherwise where others follow")
        start = at + _behind(opening, whole[at:first])
        at = last + len(tail)
        spans.append((start, without_glue(whole, start, at, ends)))
    return spans


def _opening(messages: Sequence[Message], render: Render) -> str:
    """What the generation prompt adds to messages."""
    before, prompt = (rendered(messages, render, generate) for generate in (False, True))
    return prompt[len(before) :] if prompt.startswith(before) else ""


def _behind(opening: str, text: str) -> int:
    """Where the longest beginning of `opening` that `text` has ends in it; the end of the text where it has none."""
    for length in range(len(opening), 0, -1):
        place = text.rfind(opening[:length])
        if place >= 0:
            return place + length
    return len(text)


def _texts(messages: Sequence[Message]) -> list[_Piece]:
    """What marks can stand for, in the order in which templates write it; blank texts have no place of their own."""
    found: list[_Piece] = []
    for message in messages:
        content = message["content"]
        said = [content] if isinstance(content, str) else [part["text"] for part in content if "text" in part]
        said = [text for text in said if text.strip()]
        if not said and message.get("tool_calls"):
            said = [message["tool_calls"][0]["function"]["name"]]
        reasoning = message.get(READ_AS[0]) or ""
        found += [_Piece(reasoning, spare=True)] if reasoning.strip() else []
        found += map(_Piece, said)
    return found


def _marked(message: Message, marks: Iterator[str]) -> Message:
    """A message in which the next marks stand for its texts, in the order of `_texts`."""
    made = dict(message)
    if (message.get(READ_AS[0]) or "").strip():
        made |= dict.fromkeys(READ_AS, next(marks))
    content = message["content"]
    if isinstance(content, str):
        made["content"] = next(marks) if content.strip() else content
    else:
        made["content"] = [{**part, "text": next(marks)} if part.get("text", "").strip() else part for part in content]
    if message.get("tool_calls") and made["content"] == content:
        first, *others = message["tool_calls"]
        made["tool_calls"] = [{**first, "function": {**first["function"], "name": next(marks)}}, *others]
    return made


def _kind(message: Message) -> Hashable:
    """What of a message but its texts decides what is written around them."""
    content: Any = message["content"]
    said = [content] if isinstance(content, str) else [part.get("text") for part in content]
    texts = tuple(text is None or (text if not text.strip() else False) for text in said)
    reasoning = message.get(READ_AS[0])
    return message["role"], isinstance(content, str), texts, reasoning if not (reasoning or "").strip() else False
