"""Words in messages: a noun after its number, and the nearest name that exists for one that does not.

Configurations, commands and Python answer an unknown name alike.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

LONGEST = 100  # a longer name is no typing error, and the comparison takes quadratic time


def count_noun(number: int, noun: str) -> str:
    """Return a number and its noun, in the plural unless the number is 1: 0 files, 1 tensor, 3 micro-batches."""
    ending = "es" if noun.endswith(("ch", "s", "x")) else "s"
    return f"{number} {noun}{'' if number == 1 else ending}"


def format_time(seconds: float) -> str:
    """Return a time as "40 s" or "3 min 10 s", rounded to ten seconds."""
    tens = max(10, round(seconds / 10) * 10)
    return f"{tens} s" if tens < 60 else f"{tens // 60} min {tens % 60} s".removesuffix(" 0 s")


def nearest(name: str, valid: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the most similar valid name, or None if none is similar. Case, ``-`` and ``_`` do not matter."""
    if len(name) > LONGEST:
        return None
    by_form = {_form(v): v for v in valid}
    close = difflib.get_close_matches(_form(name), by_form, n=1, cutoff=cutoff)
    return by_form[close[0]] if close else None


def did_you_mean(name: object, valid: Iterable[str]) -> str:
    """Return " Did you mean 'blockwise'?" for an error message, with a leading space, or nothing."""
    close = nearest(name, valid, 0.7) if isinstance(name, str) else None
    return f" Did you mean {close!r}?" if close else ""


def _form(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")
