"""Types of text in a configuration: text without lone surrogates, and valid file paths."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^/]*.")
_PYTHON = "python:"


def path_problem(text: str) -> str | None:
    """Return why no file can have this name, or None. The limits are Linux's: 255 bytes per name, 4,095 per path."""
    if "\0" in text:
        return "contains a NUL character, which a file name cannot have"
    encoded = text.encode("utf-8", "surrogatepass")
    names = encoded.split(b"/")
    longest = max(map(len, names))
    if len(names) > 200:  # each is a folder that would be created
        return f"is not a path: {len(names):,} names deep"
    if len(encoded) > 4095 or longest > 255:
        return f"is not a path: {len(encoded):,} bytes, its longest name {longest:,} (at most 4,095 and 255)"
    return None


def is_url(text: str) -> bool:
    """Return True if a path is a URL, such as s3://bucket/folder."""
    return _URL.match(text) is not None


def python_name(text: str) -> str | None:
    """Return NAME of `python:NAME`, which names rows or a reward function that a program passes to `octavo.run`; None
    for any other text."""
    return text.removeprefix(_PYTHON) if text.startswith(_PYTHON) else None


def python_path(name: str) -> str:
    """Return `python:NAME`, the text for which `python_name` returns `name`."""
    return _PYTHON + name


def absent_rows_text(path: str) -> str:
    """Return the sentence about rows `python:NAME` that this process does not have."""
    return (
        f"{path} are rows that a Python program passed to octavo.run as {python_name(path)}, and they are not in this "
        "process; continue in that program, or name a file"
    )


def is_reward_path(word: str) -> bool:
    """Return True if the name of a reward is a function of a Python file or a folder, not a built-in reward."""
    return ".py:" in word or "/" in word or word.startswith((".", "~"))


def _check_characters(value: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise PydanticCustomError("half_character", "contains a lone surrogate") from None
    return value


def _check_path(value: str) -> str:
    if why := path_problem(value):
        raise PydanticCustomError("no_path", "{why}", {"why": why})
    return value


Text = Annotated[str, AfterValidator(_check_characters)]
Letters = Annotated[Text, Field(min_length=1)]
"""A text of at least one character."""
FilePath = Annotated[Text, AfterValidator(_check_path)]
