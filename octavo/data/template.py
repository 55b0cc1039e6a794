"""Which characters of a rendered conversation are the assistant's.

A chat template is a program; nobody marks in its output what is prompt and what is answer. So the conversation is
rendered in growing prefixes: the messages before an answer with the generation prompt end where the answer begins
(that is exactly what a model is given when it generates), and the messages up to the answer end where it ends.
Both must be prefixes of the whole rendering; a template for which they are not gives a `TemplateProblem`.

That is two renderings an answer. Most templates write texts as they are, between words that follow from the roles:
`Answers` learns these from a conversation of placeholders of the same roles, and where they and a row's texts give the
whole rendering, character by character, its answers stand where those of the placeholders do. So are answers found that
prefixes do not tell, because they begin like what follows them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.data.conversations import Conversation, ImageRef, Text, Turn
from octavo.data.sounds import AudioRef

Message = dict[str, Any]
Render = Callable[[Sequence[Message], bool], str]
SHAPES = 1024  # sequences of roles that are remembered


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


#: of images and sounds, as templates ask for them (older ones of Qwen2-Audio by a key alone)
_PLACE: dict[type, dict[str, Any]] = {ImageRef: {"type": "image"}, AudioRef: {"type": "audio", "audio_url": ""}}


def _message(turn: Turn, parts: bool) -> Message:
    content = [
        {"type": "text", "text": part.text} if isinstance(part, Text) else _PLACE[type(part)] for part in turn.parts
    ]
    more = {"tool_calls": list(turn.calls)} if turn.calls else {}
    if turn.name is not None:
        more["name"] = turn.name
    return {"role": turn.role, "content": content if parts else turn.text, **more}


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
            raise TemplateProblem(_no_prefix(number, "the prompt before it", prompt, whole))
        if reach is not None and len(prompt) >= reach:
            break
        until = whole if number == len(messages) - 1 else _rendered(render, messages[: number + 1], False)
        if not until.startswith(prompt):
            raise TemplateProblem(_no_prefix(number, "the prompt before it", prompt, until))
        end = _end(whole, until, len(prompt), message)
        if end is None:
            raise TemplateProblem(_no_prefix(number, "the conversation up to its end", until, whole))
        spans.append((len(prompt), _without_glue(whole, len(prompt), end, ends)))
    return spans


class Answers:
    """Answers of conversations of one template; `ends` as `answer_spans` has them."""

    def __init__(self, ends: Sequence[str]) -> None:
        self.ends = tuple(ends)
        self._shapes: dict[Hashable, _Shape | None] = {}

    def spans(
        self, whole: str, messages: Sequence[Message], render: Render, reach: int | None = None, given: int = 0
    ) -> list[tuple[int, int]]:
        """What `answer_spans` returns, or raises."""
        shape, texts = self._shape(messages, render), _texts(messages)
        # An answer of no words has no place of its own: prefixes say where it ends.
        found = shape.spans(whole, texts) if shape is not None and all(map(str.strip, texts)) else None
        if found is None:
            return answer_spans(whole, messages, render, self.ends, reach, given)
        return [(start, end) for start, end in found[given:] if reach is None or start < reach]

    def _shape(self, messages: Sequence[Message], render: Render) -> _Shape | None:
        """That of messages of these roles, learned when they come a second time."""
        if any(message.keys() != {"role", "content"} for message in messages):
            return None
        kinds = tuple((message["role"], _kinds(message["content"])) for message in messages)
        if kinds not in self._shapes:
            if len(self._shapes) < SHAPES:
                self._shapes[kinds] = None
            return None
        shape = self._shapes[kinds]
        if shape is None:
            shape = self._shapes[kinds] = _learned(messages, render, self.ends)
        return shape


@dataclass(frozen=True)
class _Shape:
    """What a template writes around the texts of messages: `glue` before each and behind the last. Edges of answers are
    (number of the glue, characters into it)."""

    glue: tuple[str, ...] = ()
    answers: tuple[tuple[tuple[int, int], tuple[int, int]], ...] = ()

    def spans(self, whole: str, texts: Sequence[str]) -> list[tuple[int, int]] | None:
        """The answers in a rendering of `texts`; None where it is another."""
        if len(texts) + 1 != len(self.glue):
            return None
        if "".join(itertools.chain(*zip(self.glue, (*texts, ""), strict=True))) != whole:
            return None
        at = [0]
        for glue, text in zip(self.glue, texts, strict=False):
            at.append(at[-1] + len(glue) + len(text))
        return [(at[first] + start, at[last] + end) for (first, start), (last, end) in self.answers]


def _learned(messages: Sequence[Message], render: Render, ends: Sequence[str]) -> _Shape:
    """The shape of messages; one that nothing fits where the template does not write texts as they are."""
    marks = iter(f"text{number:06}" for number in itertools.count())
    given = [{"role": message["role"], "content": _marked(message["content"], marks)} for message in messages]
    texts = _texts(given)
    try:
        whole = rendered(given, render)
        answers = answer_spans(whole, given, render, ends)
    except TemplateProblem:
        return _Shape()
    # Each text once and in order; and an end-of-turn token behind each answer, or a text's own last words might be one.
    places = [whole.find(text) for text in texts]
    ended = all(whole[start:end].endswith(tuple(ends)) for start, end in answers)
    if not ended or -1 in places or places != sorted(places) or any(whole.count(text) > 1 for text in texts):
        return _Shape()
    starts = [0, *(place + len(text) for place, text in zip(places, texts, strict=True))]  # of each glue
    stops = [*places, len(whole)]

    def edge(position: int) -> tuple[int, int]:
        number = next(n for n, stop in enumerate(stops) if position <= stop)
        return number, position - starts[number]

    edges = tuple((edge(start), edge(end)) for start, end in answers)
    if any(into < 0 for pair in edges for _, into in pair):
        return _Shape()
    return _Shape(tuple(whole[start:stop] for start, stop in zip(starts, stops, strict=True)), edges)


def _texts(messages: Sequence[Message]) -> list[str]:
    found = []
    for message in messages:
        content = message["content"]
        found += [content] if isinstance(content, str) else [part["text"] for part in content if "text" in part]
    return found


def _kinds(content: Any) -> Hashable:
    return None if isinstance(content, str) else tuple("text" in part for part in content)


def _marked(content: Any, marks: Iterator[str]) -> Any:
    if isinstance(content, str):
        return next(marks)
    return [{**part, "text": next(marks)} if "text" in part else part for part in content]


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
    content = message["content"]
    words = content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
    for answer in (words, words.strip()):  # templates write it as it is, or stripped
        at = until.rfind(answer)
        if at >= start and whole.startswith(until[at:], start):
            return start + len(until) - at
    return None


def _without_glue(text: str, start: int, end: int, ends: Sequence[str]) -> int:
    """Leave out white space behind the end-of-turn token. Where there is no such token it is the end signal: kept."""
    bare = text[start:end].rstrip()
    return start + len(bare) if any(bare.endswith(token) for token in ends) else end


def _rendered(render: Render, messages: Sequence[Message], prompt: bool) -> str:
    try:
        return render(messages, prompt)
    # Templates are programs of strangers: jinja's TemplateError (raise_exception), and Python errors out of jinja.
    except Exception as cause:
        roles = ", ".join(message["role"] for message in messages)
        raise TemplateProblem(
            f"the chat template refuses the roles {roles} ({type(cause).__name__}: {cause})"
        ) from cause


def _no_prefix(number: int, what: str, prefix: str, whole: str) -> str:
    at = next((i for i, (a, b) in enumerate(zip(prefix, whole, strict=False)) if a != b), min(len(prefix), len(whole)))
    return (
        f"the chat template writes message {number + 1} so that its answer cannot be found: rendered alone, {what} "
        f"reads {prefix[at : at + 40]!r} at character {at}, in the whole conversation {whole[at : at + 40]!r}; use a "
        f"template whose earlier turns do not change when later ones are added, or keep one answer a conversation"
    )
