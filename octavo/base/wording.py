"""Words in messages: a noun after its number, and the nearest name that exists for one that does not.

Configurations, commands and Python answer an unknown name alike.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping

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


def typing_error(name: str, meanings: Mapping[str, str], most: int = 2) -> str | None:
    """Return the valid name of which ``name`` is a typing error, or None.

    ``meanings``: valid name -> its meaning, the preferred ones of equal meaning first. A typing error is at most
    ``most`` inserted, omitted, replaced or exchanged letters, one in names of less than 10 letters, none in names of
    less than 3. Case, ``-`` and ``_`` do not matter. A name with one word more or less than a valid one is another
    name, not a typing error of it. If the nearest names differ in meaning, none is returned: any of them would be a
    guess.
    """
    if len(name) > LONGEST:
        return None
    close: list[str] = []
    for valid in meanings:
        one, other = _form(name), _form(valid)
        size = max(len(one), len(other))
        limit = min(most, 0 if size < 3 else 1 if size < 10 else 2)
        # Words of very different length are not compared letter by letter, which takes most of the time.
        if abs(len(one) - len(other)) > limit or (one != other and _has_one_word_more(name, valid)):
            continue
        edits = _edits(one, other)
        if edits > limit or edits > most:
            continue
        if edits < most:
            close, most = [], edits
        close.append(valid)
    return close[0] if len({meanings[valid] for valid in close}) == 1 else None


def did_you_mean(name: object, valid: Iterable[str]) -> str:
    """Return " Did you mean 'blockwise'?" for an error message, with a leading space, or nothing."""
    if not isinstance(name, str):
        return ""
    names = tuple(valid)
    close = typing_error(name, {v: v for v in names}) or nearest(name, names, 0.8)
    return f" Did you mean {close!r}?" if close else ""


def _has_one_word_more(name: str, valid: str) -> bool:
    words, others = (set(text.lower().replace("-", "_").strip("_").split("_")) for text in (name, valid))
    return words > others or words < others


def _edits(one: str, other: str) -> int:
    """Return the number of letters to insert, omit or replace, or of neighbours to exchange, between two words."""
    before: list[int] = []
    row = list(range(len(other) + 1))
    for i, letter in enumerate(one, 1):
        before, last, row = row, before, [i]
        for j, letter_of_other in enumerate(other, 1):
            edits = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (letter != letter_of_other))
            if i > 1 and j > 1 and letter == other[j - 2] and one[i - 2] == letter_of_other:
                edits = min(edits, last[j - 2] + 1)
            row.append(edits)
    return row[-1]


def _form(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")
