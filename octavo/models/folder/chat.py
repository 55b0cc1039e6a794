"""Chat templates are programs of strangers: tried once under limits, and never left to run for ever.

jinja's sandbox keeps a template from files and attributes, not from loops within loops, `"a" * 10**11` or
`10 ** 10**10`. So a template is tried when its processor is loaded, on short conversations in a child process whose
time and memory are limited: Python alone cannot interrupt a power or cap a string. A row may still lead it elsewhere,
so every rendering has a deadline too; that one costs a few microseconds, and stops what Python itself runs. And each is
held against a bound of its length before a tokenizer gets it: of 100 MB these need minutes and gigabytes, and panic.
"""

from __future__ import annotations

import json
import os
import re
import resource
import select
import signal
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

from jinja2 import meta
from transformers.utils.chat_template_utils import _compile_jinja_template

from octavo.base import safe_read
from octavo.models.errors import ModelError

#: processor time of the trial, and of any rendering; published templates take milliseconds
SECONDS = 5
#: by the clock, for a trial on a machine that is busy with other things
PATIENCE = 120
#: bytes that the trial may take beyond what the process has
MEMORY = 1 << 30
#: characters that a template may write for a few words, and of the template itself
LENGTH = 1 << 20
#: characters that a template may write for each one of a conversation beyond that: escapes and indents of JSON
GROWTH = 8
#: where a folder keeps its template, the file that wins first
FILES = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")

_TURNS = (("user", "What is this?"), ("assistant", "A word."))
_CONVERSATIONS = (_TURNS[:1], _TURNS, (("system", "Be brief."), *_TURNS, _TURNS[0]), _TURNS * 10)
_tried: set[str] = set()
_PLAIN = ({"role", "content"}, {"role", "content", "reasoning_content", "thinking"})
#: variables of a template that come from the conversation and the tokenizer
_GIVEN = re.compile("(messages|tools|documents|add_generation_prompt|continue_final_message|.*_tokens?)$")


def check_template(processor: Any, folder: Path) -> None:
    """Try a processor's or a tokenizer's chat template, once a process for each template; nothing where there is none.

    Raises ModelError, naming the file, for one that does not end, that takes or writes more than any template needs,
    or that refuses every conversation: user; user and assistant; with a system message; twenty turns.
    """
    template = processor.chat_template
    kind = f"{type(processor).__name__} {template!r} {getattr(processor, 'template_args', {})!r}"
    if not template or kind in _tried:
        return
    if why := _trial(processor) if len(kind) <= LENGTH else f"has {len(kind):,} characters, and no template has":
        file = next((folder / name for name in FILES if (folder / name).exists()), folder)
        raise ModelError(
            f"{file}: the chat template {safe_read.printable(why)}. Take the template of the original model."
        )
    _tried.add(kind)


def _trial(processor: Any) -> str | None:
    """What is wrong with a template, found in a child process; None for nothing."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        _render_and_exit(processor, writer)
    os.close(writer)
    with open(reader, "rb") as pipe:
        answered = select.select([pipe], [], [], PATIENCE)[0]
        if not answered:
            os.kill(child, signal.SIGKILL)
        found = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if not answered or status == -signal.SIGXCPU:
        return f"does not end: {SECONDS} s of processor time were not enough for a few words"
    if status:
        return f"ends the process that runs it ({signal.Signals(-status).name if status < 0 else status})"
    lengths, errors = json.loads(found)
    if memory := [error for error in errors if error.startswith("MemoryError")]:
        return f"needs more than {MEMORY >> 20} MiB of memory for a few words ({memory[0]})"
    if max(lengths, default=0) > LENGTH:
        return f"writes {max(lengths):,} characters or more for a few words"
    return None if lengths else f"refuses every conversation that was tried ({errors[0]})"


def _render_and_exit(processor: Any, writer: int) -> NoReturn:
    """The child: renders, writes lengths and errors as JSON and ends without any of the parent's last words."""
    code = 1
    try:
        _limit(resource.RLIMIT_CORE, 0)
        _limit(resource.RLIMIT_CPU, SECONDS)
        statm = Path("/proc/self/statm")
        if statm.exists():  # elsewhere nothing says how much there is already
            _limit(resource.RLIMIT_AS, int(statm.read_text().split()[0]) * resource.getpagesize() + MEMORY)
        lengths, errors = [], []
        for turns in _CONVERSATIONS:
            try:
                lengths.append(len(_rendered(processor, turns)))
            except LongRendering as long:
                lengths.append(long.length)
            except BaseException as error:
                errors.append(f"{type(error).__name__}: {' '.join(str(error)[:300].split())}")
        os.write(writer, json.dumps([lengths, errors]).encode())
        code = 0
    finally:
        os._exit(code)


def _limit(which: int, most: int) -> None:
    hard = resource.getrlimit(which)[1]
    resource.setrlimit(which, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def _rendered(processor: Any, turns: Any) -> str:
    parts = any(getattr(processor, name, None) is not None for name in ("image_processor", "sound_limits"))
    messages = [{"role": role, "content": [{"type": "text", "text": text}] if parts else text} for role, text in turns]
    return str(processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=turns[-1][0] == "user"))


def render(processor: Any, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = False) -> str:
    """A conversation's text by the template of a processor or tokenizer. Raises ModelError in the template's words."""
    try:
        with deadline():
            text = processor.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=add_generation_prompt
            )
            return checked(text, messages)
    except ModelError:
        raise
    except Exception as cause:  # a stranger's program: jinja's errors, and Python's out of jinja
        roles = ", ".join(str(message["role"]) for message in messages)
        said = " ".join(f"{type(cause).__name__}: {cause}".split())[:400]
        raise ModelError(f"the chat template refuses the roles {roles} ({safe_read.printable(said)}).") from cause


@contextmanager
def deadline() -> Iterator[None]:
    """Ends a rendering that has taken `SECONDS` of this thread's processor time, with a ModelError.

    A signal looks every second, so that a machine that stood still harms nobody. Only a process's main thread gets
    signals: elsewhere nothing is limited. A timer that somebody else had set goes on behind.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    begun = time.thread_time()

    def look(*_: Any) -> None:
        if time.thread_time() - begun >= SECONDS:
            raise ModelError(f"the chat template does not end: {SECONDS} s were not enough for this conversation")

    handler = signal.signal(signal.SIGALRM, look)
    timer = signal.setitimer(signal.ITIMER_REAL, 1.0, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, signal.SIG_DFL if handler is None else handler)


def written(
    owner: Any, tokenizer: Any, conversation: Any, options: Mapping[str, Any], more: Mapping[str, Any]
) -> str | None:
    """A conversation by the template of `owner`, a processor or tokenizer, and the variables `more`, without what
    transformers does around it: of a few words that costs thrice what the template does, and finding the answers of a
    row takes two renderings for each. None where it might do something: for anything but roles, texts, reasoning under
    both its names and places of images.
    """
    plain = type(owner.chat_template) is str and options.keys() <= {"tokenize", "add_generation_prompt"}
    if not plain or options.get("tokenize", True) or type(conversation) is not list or not conversation:
        return None
    for message in conversation:
        if type(message) is not dict or message.keys() not in _PLAIN or type(message["role"]) is not str:
            return None
        if type(message.get("thinking", "")) is not str or message.get("reasoning_content") != message.get("thinking"):
            return None
        content = message["content"]
        if type(content) is not str and not (type(content) is list and all(map(_plain, content))):
            return None
    template = _compile_jinja_template(owner.chat_template)
    asked = options.get("add_generation_prompt", False)
    named = {**tokenizer.special_tokens_map, **more}
    pieces = template.generate(messages=conversation, tools=None, documents=None, add_generation_prompt=asked, **named)
    return _joined(pieces, _most(conversation, more))


def _most(*given: Any) -> int:
    """Characters that a rendering of these values may have."""
    count, level = 0, list(given)
    while level:
        below: list[Any] = []
        for value in level:
            if isinstance(value, str):
                count += len(value)
            elif isinstance(value, Mapping):
                below += value
                below += value.values()
            elif isinstance(value, list | tuple):
                below += value
        level = below
    return LENGTH + GROWTH * count


def _joined(pieces: Iterable[str], most: int) -> str:
    """A rendering by its pieces, which ends when they are too many. Raises ModelError."""
    parts, length = [], 0
    for piece in pieces:
        parts.append(piece)
        length += len(piece)
        if length > most:
            raise _too_long(length, most)
    return "".join(parts)


class LongRendering(ModelError):
    """A rendering of at least `length` characters, which are too many."""

    length = 0


def _too_long(length: int, most: int) -> LongRendering:
    error = LongRendering(
        f"the chat template writes {length:,} characters or more for a conversation that gives it "
        f"{(most - LENGTH) // GROWTH:,}, and {most:,} are the most; take the template of the original model"
    )
    error.length = length
    return error


def checked(rendering: Any, *given: Any) -> Any:
    """What a template wrote, if it is a text (or several) that tokenizers take; what is no text goes through. `given`:
    what it was written for, the conversation and its tools. Raises ModelError for one that is far longer than these,
    and for half a character (a lone surrogate)."""
    for text in rendering if isinstance(rendering, list) else [rendering]:
        if not isinstance(text, str):
            return rendering
        if len(text) > LENGTH and len(text) > (most := _most(*given)):
            raise _too_long(len(text), most)
        try:
            text.encode()
        except UnicodeEncodeError as cause:
            raise ModelError(
                f"the chat template writes half a character (the lone surrogate \\u{ord(text[cause.start]):04x}), "
                "which no tokenizer takes; mend the template, or the text that it is given"
            ) from cause
    return rendering


def _plain(part: Any) -> bool:
    return type(part) is dict and (
        part == {"type": "image"}
        or (part.keys() == {"type", "text"} and part["type"] == "text" and type(part["text"]) is str)
    )


class WithDeadline:
    """Mixed into processors: their `apply_chat_template` under a deadline, and `checked`. `template_args`: variables of
    the template that every rendering is given."""

    template_args: Mapping[str, Any] = MappingProxyType({})

    def apply_chat_template(self, conversation: Any, *args: Any, **kwargs: Any) -> Any:
        more = self.template_args
        with deadline():
            text = None if args else written(self, self.tokenizer, conversation, kwargs, more)  # type: ignore[attr-defined]
            if text is None:
                text = super().apply_chat_template(conversation, *args, **{**more, **kwargs})  # type: ignore[misc]
            return checked(text, conversation, kwargs)


def variables(template: str) -> set[str]:
    """What a template that was tried reads, and nobody but its caller gives it."""
    parsed = _compile_jinja_template(template).environment.parse(template)
    return {name for name in meta.find_undeclared_variables(parsed) if not _GIVEN.match(name)}


def give(processor: Any, args: Mapping[str, Any], folder: Path) -> None:
    """Give a processor's chat template variables, and try it with them (`check_template`). Raises ModelError for one
    that it does not read: jinja passes over such in silence."""
    refused = f"{folder}: the chat template has no place for the variable %s (data.template_args)"
    if own := [name for name in args if _GIVEN.match(name)]:
        raise ModelError(f"{refused % own[0]}, which Octavo sets itself. Remove it.")
    processor.template_args = dict(args)
    check_template(processor, folder)
    template = processor.chat_template
    known = variables(template) if args and type(template) is str else set()
    for name in (name for name in args if name not in known):
        close = get_close_matches(name, known, 1, 0.7)
        fix = f"Did you mean {close[0]}?" if close else f"It reads {', '.join(sorted(known)) or 'none'}."
        raise ModelError(f"{refused % safe_read.printable(name)}, which it does not read. {fix}")
