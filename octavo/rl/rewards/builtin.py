"""The rewards that need no code: each gives 1.0 for what is right and 0.0 for what is not.

A function takes the completions, a list of texts, and columns of the same length; `answer` is the reference, a text, or
a list of texts of which any is right. It raises where a row cannot be judged (no reference, one that holds no number);
the worker then finds the rows. This file is run by the worker too (`worker.py`), so it imports nothing of Octavo.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from math import isinf
from typing import Any

_NUMBER = re.compile(r"(?<![\w.])[-+]?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)?(?:\.\d+|(?<=\d))(?:[eE][-+]?\d+)?")
_BEGINS = re.compile(r"\W*([A-Z])(?:[).:\]*]|\s*$|\s*\n)|\W*([A-Za-z])\W*$")
_BOXED = re.compile(r"\\boxed\{\W*(?:\\text\{)?([A-Z])\W*\}")
_ANSWER = re.compile(r"(?i:answer)\W*(?:(?i:is|would be)\W*)?(?:(?i:option|choice)\W*)?(?!I\s+[a-z])([A-Z])(?![\w'])")
_BRACKETED = re.compile(r"\(([A-Z])\)")


class Unjudged(ValueError):
    """Why a row cannot be judged: a sentence that needs no line number."""

    plain = True


def exact_match(completions: Sequence[str], answer: Sequence[Any]) -> list[float]:
    """The reference, but for white space around either."""
    return _judge(completions, answer, lambda text, truth: text.strip() == truth.strip())


def number(completions: Sequence[str], answer: Sequence[Any], tolerance: float = 1e-6) -> list[float]:
    """The last number of the completion is that of the reference: |a - b| <= tolerance * max(1, |b|).

    "1,234.5" is a number, "-3" and "1e-3" are; fractions and formulas are for `math`.
    """

    def equal(text: str, truth: str) -> bool:
        right, said = last_number(truth), last_number(text)
        if right is None or isinf(right):
            raise Unjudged(f"the reference {truth[:60]!r} holds no number{'' if right is None else ' below 1e308'}")
        return said is not None and abs(said - right) <= tolerance * max(1.0, abs(right))

    return _judge(completions, answer, equal)


def choice(completions: Sequence[str], answer: Sequence[Any]) -> list[float]:
    r"""The letter that the completion chooses is that of the reference, as in "B", "(B) two", "b.", "The answer is B.",
    "\boxed{B}". What was said last counts; a completion that chooses nothing is wrong."""

    def equal(text: str, truth: str) -> bool:
        right = letter(truth)
        if right is None:
            raise Unjudged(f"the reference {truth[:60]!r} names no letter")
        return letter(text) == right

    return _judge(completions, answer, equal)


def regex(completions: Sequence[str], answer: Sequence[Any] | None = None, pattern: str = "") -> list[float]:
    """The pattern is found. Where it has a group, what the group holds in the last place is the reference as well, but
    for white space: `pattern: "Answer: (.*)"`."""
    compiled = re.compile(pattern)
    if not compiled.groups:
        return [float(compiled.search(text) is not None) for text in completions]
    if answer is None:
        raise Unjudged(f"the pattern {pattern!r} has a group, and no row has an answer for it")

    def equal(text: str, truth: str) -> bool:
        *_, last = [None, *compiled.finditer(text)]
        return last is not None and (last.group(1) or "").strip() == truth.strip()

    return _judge(completions, answer, equal)


def format(completions: Sequence[str], pattern: str = "") -> list[float]:
    """The whole completion, without white space around it, has the form of the pattern; a dot takes line breaks."""
    compiled = re.compile(pattern, re.DOTALL)
    return [float(compiled.fullmatch(text.strip()) is not None) for text in completions]


def math(completions: Sequence[str], answer: Sequence[Any]) -> list[float]:
    """The completion's answer equals the reference as mathematics: fractions, roots, sets, intervals, LaTeX; by
    math-verify (the extra `math`)."""
    from math_verify import parse, verify

    def equal(text: str, truth: str) -> bool:
        marked = "$" in truth or "\\boxed" in truth
        right = parse(truth) if marked else parse(f"${truth}$") or parse(truth)
        if not right:
            raise Unjudged(f"the reference {truth[:60]!r} is no mathematics that math-verify reads")
        return bool(verify(right, parse(text)))

    return _judge(completions, answer, equal)


#: name -> function, and the arguments that it must be given
BUILTIN: dict[str, tuple[Callable[..., list[float]], tuple[str, ...]]] = {
    "exact_match": (exact_match, ()),
    "number": (number, ()),
    "choice": (choice, ()),
    "regex": (regex, ("pattern",)),
    "format": (format, ("pattern",)),
    "math": (math, ()),
}


def last_number(text: str) -> float | None:
    """The last number of a text, or None."""
    found = None
    for found in _NUMBER.finditer(text):  # noqa: B007
        pass
    return None if found is None else float(found.group().replace(",", ""))


def letter(text: str) -> str | None:
    """The letter that a text chooses, or None: in a box, behind "answer", at its beginning, in brackets."""
    for pattern, where in ((_BOXED, -1), (_ANSWER, -1), (_BEGINS, 0), (_BRACKETED, -1)):
        found = [pattern.match(text)] if where == 0 else list(pattern.finditer(text))
        if found and (last := found[where]) is not None:
            return next(group for group in last.groups() if group).upper()
    return None


def _judge(completions: Sequence[str], answer: Sequence[Any], equal: Callable[[str, str], bool]) -> list[float]:
    values = []
    for text, truth in zip(completions, answer, strict=True):
        if truth is None or truth == []:
            raise Unjudged("the row has no answer to compare with")
        values.append(float(any(equal(text, one) for one in (truth if isinstance(truth, list) else [truth]))))
    return values
