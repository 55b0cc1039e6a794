"""Chat templates: programs in Jinja that come with a model folder.

transformers runs them in a sandbox, which keeps them from files and from Python's insides, not from running forever;
here they are checked before and counted while they run.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from jinja2 import nodes
from transformers.utils.chat_template_utils import _compile_jinja_template

from octavo import reading
from octavo.models.errors import ModelError
from octavo.models.folder import summary

#: lines of a template that one rendering may run; published ones run a few dozen for each turn
LINES = 1_000_000
_FACTOR = 10_000  # the largest number that a template may multiply by: text times a number is that much text


def check(template: object, where: object) -> None:
    """That a chat template can be compiled, and multiplies by no number that alone fills the memory.

    Raises ModelError, with the line; `where` is the file that it stands in.
    """
    shown = reading.printable(where)
    if not isinstance(template, str):
        raise ModelError(f"{shown}: the chat template is a {type(template).__name__}, not text.")
    try:
        parsed = _compile_jinja_template("").environment.parse(template)
        for node in parsed.find_all((nodes.Pow, nodes.Mul)):
            large = [c for c in node.find_all(nodes.Const) if isinstance(c.value, int) and abs(c.value) > _FACTOR]
            if isinstance(node, nodes.Pow) or large:
                raise ModelError(
                    f"{shown}: the chat template raises or multiplies by a huge number (line {node.lineno})."
                )
        _compile_jinja_template(template)  # which works out what is constant, so only now
    except ModelError:
        raise
    except Exception as error:  # no Jinja, too deep, or a constant that cannot be worked out
        line = getattr(error, "lineno", None)
        at = "" if line is None else f" (line {line})"
        raise ModelError(f"{shown}: the chat template cannot be compiled{at}: {_told(error)}.") from error


def render(processor: Any, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = False) -> str:
    """The text of a conversation by the chat template of a tokenizer or processor.

    Raises ModelError where the template fails or refuses the conversation, in its own words, and where it runs more
    than LINES lines.
    """
    try:
        with _counted():
            return processor.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=add_generation_prompt
            )
    except Exception as error:  # a stranger's program: it fails in any way there is
        raise ModelError(
            f"the model's chat template fails: {_told(error)}. Mend it, or take the model's own."
        ) from error


@contextmanager
def _counted() -> Iterator[None]:
    """Count the lines that templates run in this thread; too many raise there and then. Other code runs untouched."""
    left, former = LINES, sys.gettrace()

    def line(frame: Any, event: str, argument: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise RuntimeError(f"it runs more than {LINES} lines for one conversation")
        return line

    def call(frame: Any, event: str, argument: Any) -> Any:
        return line if frame.f_code.co_filename == "<template>" else None

    sys.settrace(call)
    try:
        yield
    finally:
        sys.settrace(former)


def _told(error: BaseException) -> str:
    return reading.printable(summary(error) or type(error).__name__)
