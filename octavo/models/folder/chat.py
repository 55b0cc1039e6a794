"""Runs chat templates, which are untrusted programs: each is tried once under limits, and every rendering is bounded.

jinja's sandbox denies access to files and attributes, but not nested loops, `"a" * 10**11` or `10 ** 10**10`. So a
template is tried when its processor is loaded, on short conversations, in a child process with limited time and memory:
Python cannot interrupt a power or limit the length of a string. A row may still take a different path through the
template, so every rendering also has a deadline, which costs a few microseconds and interrupts Python code. The length
is checked before a tokenizer receives the text: for 100 MB, tokenizers need minutes and gigabytes, and panic.
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

#: limit of CPU seconds of the trial and of each rendering; published templates take milliseconds
SECONDS = 5
#: limit of wall-clock seconds of the trial, long enough for a busy machine
TRIAL_TIMEOUT = 120
#: limit of bytes that the trial may allocate in addition to the memory of the process
MEMORY = 1 << 30
#: limit of characters that a template may write for a few words, and of the template itself
LENGTH = 1 << 20
#: limit of additional characters per character of a conversation: JSON escapes, indentation
GROWTH = 8
#: the files in which a folder may have its template, in order of precedence
FILES = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")

_TURNS = (("user", "What is this?"), ("assistant", "A word."))
_CONVERSATIONS = (_TURNS[:1], _TURNS, (("system", "Be brief."), *_TURNS, _TURNS[0]), _TURNS * 10)
_checked: set[str] = set()
_PLAIN_KEYS = ({"role", "content"}, {"role", "content", "reasoning_content", "thinking"})
#: variables of a template that come from the conversation and the tokenizer
_RESERVED = re.compile("(messages|tools|documents|add_generation_prompt|continue_final_message|.*_tokens?)$")


def check_template(processor: Any, folder: Path) -> None:
    """Try the chat template of a processor or tokenizer, if it has one; once per template and process.

    Raises ModelError, naming the file, for a template that does not terminate, that exceeds the limits of memory or
    length, or that rejects every conversation: user; user and assistant; with a system message; twenty turns.
    """
    template = processor.chat_template
    key = f"{type(processor).__name__} {template!r} {getattr(processor, 'template_args', {})!r}"
    if not template or key in _checked:
        return
    if why := _run_trial(processor) if len(key) <= LENGTH else f"has {len(key):,} characters; the limit is {LENGTH:,}":
        file = next((folder / name for name in FILES if (folder / name).exists()), folder)
        raise ModelError(
            f"{file}: the chat template {safe_read.printable(why)}. Use the template of the original model."
        )
    _checked.add(key)


def _run_trial(processor: Any) -> str | None:
    """Render a template in a child process and return its fault as the end of a sentence, or None if it has none."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        _render_and_exit(processor, writer)
    os.close(writer)
    with open(reader, "rb") as pipe:
        is_ready = select.select([pipe], [], [], TRIAL_TIMEOUT)[0]
        if not is_ready:
            os.kill(child, signal.SIGKILL)
        result = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if not is_ready or status == -signal.SIGXCPU:
        return f"does not terminate: a few words took more than {SECONDS} s of processor time"
    if status:
        return f"crashes the process that runs it ({signal.Signals(-status).name if status < 0 else status})"
    lengths, errors = json.loads(result)
    if memory := [error for error in errors if error.startswith("MemoryError")]:
        return f"needs more than {MEMORY >> 20} MiB of memory for a few words ({memory[0]})"
    if max(lengths, default=0) > LENGTH:
        return f"writes {max(lengths):,} characters or more for a few words"
    return None if lengths else f"rejects every conversation that was tried ({errors[0]})"


def _render_and_exit(processor: Any, writer: int) -> NoReturn:
    """Render in the child process, write lengths and errors as JSON, and exit without the parent's exit handlers."""
    code = 1
    try:
        _set_limit(resource.RLIMIT_CORE, 0)
        _set_limit(resource.RLIMIT_CPU, SECONDS)
        statm = Path("/proc/self/statm")
        if statm.exists():  # other systems do not report the current size, to which the limit must be added
            _set_limit(resource.RLIMIT_AS, int(statm.read_text().split()[0]) * resource.getpagesize() + MEMORY)
        lengths, errors = [], []
        for turns in _CONVERSATIONS:
            try:
                lengths.append(len(_render_turns(processor, turns)))
            except LongRendering as long:
                lengths.append(long.length)
            except BaseException as error:
                errors.append(f"{type(error).__name__}: {' '.join(str(error)[:300].split())}")
        os.write(writer, json.dumps([lengths, errors]).encode())
        code = 0
    finally:
        os._exit(code)


def _set_limit(which: int, limit: int) -> None:
    hard = resource.getrlimit(which)[1]
    resource.setrlimit(which, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def _render_turns(processor: Any, turns: Sequence[tuple[str, str]]) -> str:
    parts = any(getattr(processor, name, None) is not None for name in ("image_processor", "sound_limits"))
    messages = [{"role": role, "content": [{"type": "text", "text": text}] if parts else text} for role, text in turns]
    return str(processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=turns[-1][0] == "user"))


def render(processor: Any, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = False) -> str:
    """Render a conversation with the template of a processor or tokenizer. Raises ModelError with the template's
    error."""
    try:
        with deadline():
            text = processor.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=add_generation_prompt
            )
            return check_rendering(text, messages)
    except ModelError:
        raise
    except Exception as cause:  # templates raise jinja's errors and any of Python's
        roles = ", ".join(str(message["role"]) for message in messages)
        message = " ".join(f"{type(cause).__name__}: {cause}".split())[:400]
        raise ModelError(f"the chat template rejects the roles {roles} ({safe_read.printable(message)}).") from cause


@contextmanager
def deadline() -> Iterator[None]:
    """Context that interrupts a rendering after `SECONDS` of this thread's CPU time, with a ModelError.

    A signal handler checks the CPU time every second, so a suspended machine causes no error. Only the main thread
    receives signals, so other threads have no limit. A timer of the caller is restored afterwards.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    start = time.thread_time()

    def check_time(*_: object) -> None:
        if time.thread_time() - start >= SECONDS:
            raise ModelError(f"the chat template does not terminate: this conversation took more than {SECONDS} s")

    handler = signal.signal(signal.SIGALRM, check_time)
    timer = signal.setitimer(signal.ITIMER_REAL, 1.0, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, signal.SIG_DFL if handler is None else handler)


def render_plain(
    owner: Any, tokenizer: Any, conversation: Any, options: Mapping[str, Any], variables: Mapping[str, Any]
) -> str | None:
    """Render a conversation with the template of `owner`, a processor or tokenizer, and `variables`, without
    transformers' wrapper. For a few words the wrapper costs three times as much as the template, and locating the
    answers of a row takes two renderings per answer. Returns None if the wrapper might have an effect: for
    conversations with anything other than roles, texts, reasoning under both of its names and placeholders of images.
    """
    is_plain = type(owner.chat_template) is str and options.keys() <= {"tokenize", "add_generation_prompt"}
    if not is_plain or options.get("tokenize", True) or type(conversation) is not list or not conversation:
        return None
    for message in conversation:
        if type(message) is not dict or message.keys() not in _PLAIN_KEYS or type(message["role"]) is not str:
            return None
        if type(message.get("thinking", "")) is not str or message.get("reasoning_content") != message.get("thinking"):
            return None
        content = message["content"]
        if type(content) is not str and not (type(content) is list and all(map(_is_plain, content))):
            return None
    template = _compile_jinja_template(owner.chat_template)
    # Same arguments as in transformers' render_jinja_template.
    template_context = {
        **tokenizer.special_tokens_map,
        **variables,
        "add_generation_prompt": options.get("add_generation_prompt", False),
    }
    pieces = template.generate(messages=conversation, tools=None, documents=None, **template_context)
    return _join(pieces, _length_limit(conversation, variables))


def _length_limit(*values: object) -> int:
    """Return the maximum number of characters in a rendering of these values."""
    count, level = 0, list(values)
    while level:
        next_level: list[object] = []
        for value in level:
            if isinstance(value, str):
                count += len(value)
            elif isinstance(value, Mapping):
                next_level += value
                next_level += value.values()
            elif isinstance(value, list | tuple):
                next_level += value
        level = next_level
    return LENGTH + GROWTH * count


def _join(pieces: Iterable[str], limit: int) -> str:
    """Join the pieces of a rendering. Raises ModelError as soon as they are longer than `limit`."""
    parts, length = [], 0
    for piece in pieces:
        parts.append(piece)
        length += len(piece)
        if length > limit:
            raise _length_error(length, limit)
    return "".join(parts)


class LongRendering(ModelError):
    """Raised for a rendering of at least `length` characters, which is above the limit."""

    length = 0


def _length_error(length: int, limit: int) -> LongRendering:
    error = LongRendering(
        f"the chat template writes {length:,} characters or more for a conversation of "
        f"{(limit - LENGTH) // GROWTH:,}; the limit is {limit:,}. Use the template of the original model"
    )
    error.length = length
    return error


def check_rendering(rendering: Any, *sources: object) -> Any:
    """Return a rendering, one or several texts, after checking it; values that are not texts are returned as they are.
    `sources`: the conversation and its tools. Raises ModelError for a text that is far longer than these, and for a
    lone surrogate, which tokenizers reject."""
    for text in rendering if isinstance(rendering, list) else [rendering]:
        if not isinstance(text, str):
            return rendering
        if len(text) > LENGTH and len(text) > (limit := _length_limit(*sources)):
            raise _length_error(len(text), limit)
        try:
            text.encode()
        except UnicodeEncodeError as cause:
            raise ModelError(
                f"the chat template writes a lone surrogate (\\u{ord(text[cause.start]):04x}), which tokenizers "
                "reject; correct the template, or the text that it renders"
            ) from cause
    return rendering


def _is_plain(part: object) -> bool:
    return type(part) is dict and (
        part == {"type": "image"}
        or (part.keys() == {"type", "text"} and part["type"] == "text" and type(part["text"]) is str)
    )


class WithDeadline:
    """Base class for processors: applies a deadline and `check_rendering` in `apply_chat_template`. `template_args`:
    variables of the template for every rendering."""

    template_args: Mapping[str, Any] = MappingProxyType({})
    tokenizer: Any

    def apply_chat_template(self, conversation: Any, *args: Any, **kwargs: Any) -> Any:
        variables = self.template_args
        with deadline():
            text = None if args else render_plain(self, self.tokenizer, conversation, kwargs, variables)
            if text is None:
                text = super().apply_chat_template(conversation, *args, **{**variables, **kwargs})  # type: ignore[misc]
            return check_rendering(text, conversation, kwargs)


def template_variables(template: str) -> set[str]:
    """Return the variables that a template reads and only the caller can set."""
    parsed = _compile_jinja_template(template).environment.parse(template)
    return {name for name in meta.find_undeclared_variables(parsed) if not _RESERVED.match(name)}


def set_template_args(processor: Any, args: Mapping[str, Any], folder: Path) -> None:
    """Set the variables of a processor's chat template, and try the template with them (`check_template`). Raises
    ModelError for a variable that the template does not read, which jinja would silently ignore."""
    rejected = f"{folder}: the chat template does not accept the variable %s (data.template_args)"
    if reserved := [name for name in args if _RESERVED.match(name)]:
        raise ModelError(f"{rejected % reserved[0]}, which is reserved for Octavo. Remove it.")
    processor.template_args = dict(args)
    check_template(processor, folder)
    template = processor.chat_template
    known = template_variables(template) if args and type(template) is str else set()
    for name in (name for name in args if name not in known):
        matches = get_close_matches(name, known, 1, 0.7)
        fix = f"Did you mean {matches[0]}?" if matches else f"It reads {', '.join(sorted(known)) or 'none'}."
        raise ModelError(f"{rejected % safe_read.printable(name)}, which it does not read. {fix}")
