"""Which characters of a rendered conversation are the assistant's: what the loss mask of a chat template is made of.

A chat template is a program; nobody marks in its output what is prompt and what is answer. So the conversation is
rendered in growing prefixes: the messages before an answer with the generation prompt end where the answer begins
(that is exactly what a model is given when it generates), and the messages up to the answer end where it ends.
Both must be prefixes of the whole rendering; a template for which they are not gives a `TemplateProblem`.

Prefixes take two renderings an answer, and fail where a template writes an earlier turn otherwise than a last one:
Qwen3.5 opens a prompt with "<think>", writes the last answer behind a block of thinking, earlier ones bare. So a
conversation is also rendered with a mark in place of each text, of each reasoning, and of the tool's name where an
answer says nothing else. What stands between the marks is the template's own, the glue. Where glue and a row's texts
give the row's rendering, character by character, its answers stand where those of the marks do; where they do not, the
row is refused. Splitting it at its questions (`splitting.py`) needs none of this, and costs what was said before again.
The glue is remembered for each sequence of roles, so that most rows are rendered once.
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
#: what templates call the reasoning of a turn; each is given under both names
READ_AS = ("reasoning_content", "thinking")
Spans = list[tuple[int, int]]
SHAPES = 1024  # sequences of roles that are remembered
_KEYS = {"role", "content", *READ_AS}


class TemplateProblem(ValueError):
    """The chat template and this conversation do not go together."""


def messages(conversation: Conversation, *, parts: bool, system: str | None = None) -> list[Message]:
    """The conversation as chat-template input: content as a list of parts (multimodal processors) or as a text.

    `system` is put in front where the conversation has no system turn of its own.
    """
    turns = list(conversation.turns)
    found = [_message(turn, parts) for turn in turns]
    if system is not None and not any(turn.role == "system" for turn in turns):
        found.insert(0, {"role": "system", "content": [{"type": "text", "text": system}] if parts else system})
    return found


#: of images, sounds and videos, as templates ask for them (older ones of Qwen2-Audio by a key alone)
_PLACE: dict[type, dict[str, Any]] = {
    ImageRef: {"type": "image"},
    AudioRef: {"type": "audio", "audio_url": ""},
    VideoRef: {"type": "video"},
}


def _message(turn: Turn, parts: bool) -> Message:
    content = [
        {"type": "text", "text": part.text} if isinstance(part, Text) else _PLACE[type(part)] for part in turn.parts
    ]
    more: Message = {"tool_calls": list(turn.calls)} if turn.calls else {}
    if turn.name is not None:
        more["name"] = turn.name
    if turn.call is not None:
        more["tool_call_id"] = turn.call
    if turn.reasoning is not None:
        more |= dict.fromkeys(READ_AS, turn.reasoning)
    return {"role": turn.role, "content": content if parts else turn.text, **more}


def texts_of(message: Message) -> list[str]:
    """The texts of a message, between its images."""
    content = message["content"]
    return [content] if isinstance(content, str) else [part["text"] for part in content if "text" in part]


def words_of(message: Message) -> str:
    """The words of a message, without its images."""
    return "".join(texts_of(message))


def check_system(whole: str, messages: Sequence[Message], render: Render, prompt: bool = False) -> None:
    """That a conversation rendered as `whole` says what its system turns do: templates pass over some in silence, as
    Qwen3-VL's over all but the first. Raises `TemplateProblem`."""
    for number, message in enumerate(messages):
        if message["role"] != "system" or words_of(message).strip() in whole:
            continue
        others = [*messages[:number], *messages[number + 1 :]]
        if _rendered(render, others, prompt) == whole:  # else its words were written in another way
            raise TemplateProblem(
                f"the chat template has no place for message {number + 1}, of the system, and would leave it out; put "
                "its words into the first turn of the system, or into the question"
            )


def check_tools(conversation: Conversation, whole: str, without: str) -> None:
    """That a conversation rendered as `whole`, and `without` its tools, says its tools and calls: a template may pass
    over both in silence. Raises `TemplateProblem`."""
    if conversation.tools and whole == without:
        raise TemplateProblem("the chat template has no place for tools, and the row offers some")
    for name in (call["function"]["name"] for turn in conversation.turns for call in turn.calls):
        if name not in whole:
            raise TemplateProblem(f"the chat template has no place for calls of tools, and an assistant calls {name!r}")


def rendered(messages: Sequence[Message], render: Render, prompt: bool = False) -> str:
    """The whole conversation, as a `prompt` with what opens the answer; `render(messages, add_generation_prompt)` gives
    text. Raises `TemplateProblem`."""
    return _rendered(render, messages, prompt)


def answer_spans(
    whole: str,
    messages: Sequence[Message],
    render: Render,
    ends: Sequence[str],
    reach: int | None = None,
    given: int = 0,
) -> list[tuple[int, int]]:
    """The answers of a conversation that was rendered as `whole`.

    `ends` are the tokenizer's special tokens. Returns, for each assistant turn, (start, end) in characters: the answer
    with its end-of-turn token and without the line break that a template glues behind it. Answers that begin behind
    the first `reach` characters are not looked for: each costs two renderings; nor are the first `given` ones, which
    belong to a prompt. Raises `TemplateProblem`.
    """
    spans: list[tuple[int, int]] = []
    answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    for number in answers[given:]:
        message = messages[number]
        prompt = _rendered(render, messages[:number], True)
        if not whole.startswith(prompt):
            raise TemplateProblem(_prefix_problem(number, "the prompt before it", prompt, whole))
        if reach is not None and len(prompt) >= reach:
            break
        until = whole if number == len(messages) - 1 else _rendered(render, messages[: number + 1], False)
        if not until.startswith(prompt):
            raise TemplateProblem(_prefix_problem(number, "the prompt before it", prompt, until))
        end = _end(whole, until, len(prompt), message)
        if end is None:
            raise TemplateProblem(_prefix_problem(number, "the conversation up to its end", until, whole))
        spans.append((len(prompt), trim_glue(whole, len(prompt), end, ends)))
    return spans


def _end(whole: str, until: str, start: int, message: Message) -> int | None:
    """Where the answer that begins at `start` ends in `whole`.

    Some templates (Qwen3's) write an empty thinking block before the last answer only, so that a middle answer
    rendered as the last one differs from itself. Then its words and what follows them must still be the same.
    """
    if whole.startswith(until):
        return len(until)
    if message.get("tool_calls"):  # written by the template: what `until` ends with and `whole` goes on with
        same = (at for at in range(start, len(until)) if whole.startswith(until[at:], start))
        at = next(same, len(until))
        return start + len(until) - at if at < len(until) else None
    words = words_of(message)
    for answer in (words, words.strip()):  # templates write it as it is, or stripped
        at = until.rfind(answer)
        if at >= start and whole.startswith(until[at:], start):
            return start + len(until) - at
    return None


def trim_glue(text: str, start: int, end: int, ends: Sequence[str]) -> int:
    """Leave out white space behind the end-of-turn token. Where there is no such token it is the end signal: kept."""
    bare = text[start:end].rstrip()
    return start + len(bare) if any(bare.endswith(token) for token in ends) else end


def _rendered(render: Render, messages: Sequence[Message], prompt: bool) -> str:
    try:
        return render(messages, prompt)
    # Templates are programs of strangers: jinja's TemplateError (raise_exception), and Python errors out of jinja.
    except Exception as cause:
        if str(cause).startswith("the chat template "):  # its bounds: a sentence already
            raise TemplateProblem(str(cause)) from cause
        roles = ", ".join(message["role"] for message in messages)
        raise TemplateProblem(
            f"the chat template refuses the roles {roles} ({type(cause).__name__}: {cause})"
        ) from cause


def _prefix_problem(number: int, what: str, prefix: str, whole: str) -> str:
    at = next((i for i, (a, b) in enumerate(zip(prefix, whole, strict=False)) if a != b), min(len(prefix), len(whole)))
    return (
        f"the chat template writes message {number + 1} so that its answer cannot be found: rendered alone, {what} "
        f"reads {prefix[at : at + 40]!r} at character {at}, in the whole conversation {whole[at : at + 40]!r}; use a "
        f"template whose earlier turns do not change when later ones are added, or set data.split_turns: true"
    )


# Answers by marks ---------------------------------------------------------------------------------------------------


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
                found = _learn_shape(messages, render, self.ends, ended=False).spans(whole, texts)
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
            shape = self._shapes[kinds] = _learn_shape(messages, render, self.ends)
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


def _learn_shape(messages: Sequence[Message], render: Render, ends: Sequence[str], ended: bool = True) -> _Shape:
    """The shape of messages; one that nothing fits where the template does not write texts as they are, nor where some
    answer has no end-of-turn token, unless none has and not `ended`: prefixes then go by a row's own last words."""
    marks = (f"text{number:06}" for number in itertools.count())
    given = [_with_marks(message, marks) for message in messages]
    pieces = _texts(given)
    try:
        whole = rendered(given, render)
        answers = _find_answers(whole, given, render, ends)
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


def _find_answers(whole: str, messages: Sequence[Message], render: Render, ends: Sequence[str]) -> Spans:
    """The answers of messages whose texts are marks: by prefixes, else by the marks. Raises `TemplateProblem`."""
    try:
        return answer_spans(whole, messages, render, ends)
    except TemplateProblem:
        return _find_by_marks(whole, messages, render, ends)


def _find_by_marks(whole: str, messages: Sequence[Message], render: Render, ends: Sequence[str]) -> Spans:
    """Each answer begins behind what there is of its prompt's opening, and ends where it does as the last one."""
    spans: Spans = []
    at = 0
    answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    opening = _generation_prompt(messages[: answers[-1]], render) if answers else ""
    for number in answers:
        own = [piece.text for piece in _texts([messages[number]]) if piece.text in whole]
        alone = rendered(messages[: number + 1], render)
        if not own or own[-1] not in alone:
            raise TemplateProblem(f"the chat template does not write message {number + 1}")
        first, last = whole.find(own[0]), whole.find(own[-1]) + len(own[-1])
        tail = alone.partition(own[-1])[2]
        if not whole.startswith(tail, last):
            raise TemplateProblem(f"the chat template ends message {number + 1} otherwise where others follow")
        start = at + _end_of_opening(opening, whole[at:first])
        at = last + len(tail)
        spans.append((start, trim_glue(whole, start, at, ends)))
    return spans


def _generation_prompt(messages: Sequence[Message], render: Render) -> str:
    """What the generation prompt adds to messages."""
    before, prompt = (rendered(messages, render, generate) for generate in (False, True))
    return prompt[len(before) :] if prompt.startswith(before) else ""


def _end_of_opening(opening: str, text: str) -> int:
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


def _with_marks(message: Message, marks: Iterator[str]) -> Message:
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
