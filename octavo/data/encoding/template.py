"""Which characters of a rendered conversation are the assistant's.

A chat template is a program; nobody marks in its output what is prompt and what is answer. So the conversation is
rendered in growing prefixes: the messages before an answer with the generation prompt end where the answer begins
(that is exactly what a model is given when it generates), and the messages up to the answer end where it ends.
Both must be prefixes of the whole rendering; a template for which they are not gives a `TemplateProblem`.

Where that is so of a template, and cheaper ways to find answers, is the matter of `answers.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from octavo.data.rows.audio_refs import AudioRef
from octavo.data.rows.conversations import Conversation, ImageRef, Text, Turn
from octavo.data.rows.video_refs import VideoRef

Message = dict[str, Any]
Render = Callable[[Sequence[Message], bool], str]
#: what templates call the reasoning of a turn; each is given under both names
READ_AS = ("reasoning_content", "thinking")


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
            raise TemplateProblem(_no_prefix(number, "the prompt before it", prompt, whole))
        if reach is not None and len(prompt) >= reach:
            break
        until = whole if number == len(messages) - 1 else _rendered(render, messages[: number + 1], False)
        if not until.startswith(prompt):
            raise TemplateProblem(_no_prefix(number, "the prompt before it", prompt, until))
        end = _end(whole, until, len(prompt), message)
        if end is None:
            raise TemplateProblem(_no_prefix(number, "the conversation up to its end", until, whole))
        spans.append((len(prompt), without_glue(whole, len(prompt), end, ends)))
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


def without_glue(text: str, start: int, end: int, ends: Sequence[str]) -> int:
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


def _no_prefix(number: int, what: str, prefix: str, whole: str) -> str:
    at = next((i for i, (a, b) in enumerate(zip(prefix, whole, strict=False)) if a != b), min(len(prefix), len(whole)))
    return (
        f"the chat template writes message {number + 1} so that its answer cannot be found: rendered alone, {what} "
        f"reads {prefix[at : at + 40]!r} at character {at}, in the whole conversation {whole[at : at + 40]!r}; use a "
        f"template whose earlier turns do not change when later ones are added, or set data.split_turns: true"
    )
