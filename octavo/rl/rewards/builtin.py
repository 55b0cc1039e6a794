"""The built-in rewards: each returns 1.0 for a correct completion and 0.0 for a wrong one.

A function takes the completions, a list of texts, and columns of the same length; `answer` is the reference, a text or
a list of accepted texts. It raises for a row that cannot be scored (no reference, or a reference without a number); the
worker then finds the rows. The worker also runs this file (`worker.py`), so it does not import Octavo.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from math import isinf
from typing import Any

_NUMBER = re.compile(r"(?<![\w.])[-+]?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)?(?:\.\d+|(?<=\d))(?:[eE][-+]?\d+)?")
_BOXED = re.compile(r"\\boxed\{\W*(?:\\text\{)?([A-Z])\W*\}")
_CHOSEN = re.compile(  # a lower-case letter may be the article "a", so it counts only at the end of a sentence
    r"(?i:answer(?![a-z])|(?:correct|right|best)\s+(?:option|choice|letter|one)\b|\b(?:I|we)(?:\s+would|'d)?\s+(?:choose|pick"
    r"|select|go\s+with)\b)\W*(?i:(?:is|would\s+be|should\s+be|must\s+be)\b\W*)?(?i:(?:option|choice)\b\W*)?"
    r"(?:(?!I\s+[a-z])([A-Z])(?!'?\w)|([a-z])(?=[^\w\n]*(?:$|\n|<)|[).,;:!?\]*]+\s))"
)
_BEGINS = re.compile(
    r"\W*([A-Z])(?:[).:\]*]|\s*$|\s*\n|\s+[-\u2013\u2014]\s|(?<!I),(?!\s*[A-Z]\b)"
    r"|,?\s+(?:because|since|is\s+(?:the\s+)?(?:correct|right|best|answer))\b)"
    r"|\W*(?i:option|choice)\W+([A-Z])(?!'?\w)|\W*([A-Za-z])\W*$"
)
_NAMED = re.compile(r"\(([A-Z])\)|\b(?i:option|choice)\W+([A-Z])(?!'?\w)")
_WORD = re.compile(r"(?<![\\A-Za-z])(?!(?:and|arc|cos|cot|csc|exp|inf|infinity|log|sec|sin|sqrt|tan)\b)[A-Za-z]{3,}")


class CannotJudge(ValueError):
    """Raised for a row that cannot be scored; the message needs no line number."""

    plain = True


def exact_match(completions: Sequence[str], answer: Sequence[Any]) -> list[float]:
    """1.0 where the completion equals the reference, except for white space around either."""
    return _judge(completions, answer, lambda text, truth: text.strip() == truth.strip())


def number(completions: Sequence[str], answer: Sequence[Any], tolerance: float = 1e-6) -> list[float]:
    """1.0 where the completion's last number equals the reference's: |a - b| <= tolerance * max(1, |b|).

    "1,234.5", "-3" and "1e-3" are numbers; for fractions and formulas use `math`.
    """

    def equal(text: str, truth: str) -> bool:
        expected, actual = last_number(truth), last_number(text)
        if expected is None or isinf(expected):
            raise CannotJudge(f"the reference {truth[:60]!r} has no number{'' if expected is None else ' below 1e308'}")
        return actual is not None and abs(actual - expected) <= tolerance * max(1.0, abs(expected))

    return _judge(completions, answer, equal)


def choice(completions: Sequence[str], answer: Sequence[Any]) -> list[float]:
    r"""1.0 where the completion chooses the reference's letter. The letter is searched in this order: "\boxed{B}";
    "The answer is B", "Answer: b", "The correct option is B", "I choose B"; at the beginning "B", "b.", "B) two",
    "B: two", "B, since ...", "B because ...", "B is right", "Option B ..."; anywhere "(B)", "option B". The last match
    of a form counts, and a completion that chooses nothing is wrong."""

    def equal(text: str, truth: str) -> bool:
        expected = letter(truth)
        if expected is None:
            raise CannotJudge(f"the reference {truth[:60]!r} has no letter")
        return letter(text) == expected

    return _judge(completions, answer, equal)


def regex(completions: Sequence[str], answer: Sequence[Any] | None = None, pattern: str = "") -> list[float]:
    """1.0 where the pattern matches. If it has a group, as in `pattern: "Answer: (.*)"`, the group of the last match
    must also equal the reference, except for white space."""
    compiled = re.compile(pattern)
    if not compiled.groups:
        return [float(compiled.search(text) is not None) for text in completions]
    if answer is None:
        raise CannotJudge(f"the pattern {pattern!r} has a group, but no row has an answer to compare it with")

    def equal(text: str, truth: str) -> bool:
        *_, last = [None, *compiled.finditer(text)]
        return last is not None and (last.group(1) or "").strip() == truth.strip()

    return _judge(completions, answer, equal)


def format(completions: Sequence[str], pattern: str = "") -> list[float]:
    """1.0 where the pattern matches the whole completion without surrounding white space; a dot matches line breaks."""
    compiled = re.compile(pattern, re.DOTALL)
    return [float(compiled.fullmatch(text.strip()) is not None) for text in completions]


def math(completions: Sequence[str], answer: Sequence[Any]) -> list[float]:
    """1.0 where the completion's answer equals the reference as mathematics: fractions, roots, sets, intervals, LaTeX;
    by math-verify (the extra `math`). In a completion of several lines the answer must be in $...$ or \\boxed{...}, or
    be a number. A reference of words without a digit cannot be judged."""
    from math_verify import parse, verify

    def equal(text: str, truth: str) -> bool:
        expected = parse(truth) if _marked(truth) else parse(f"${truth}$") or parse(truth)
        words = not _marked(truth) and _WORD.search(truth) and not re.search(r"\d", truth)
        if not expected or words:
            raise CannotJudge(f"the reference {truth[:60]!r} is not an expression that math-verify can parse")
        bare = text.strip()
        return bool(
            verify(expected, parse(text))
            or (bare and not _marked(bare) and "\n" not in bare and verify(expected, parse(f"${bare}$")))
        )

    return _judge(completions, answer, equal)


#: name -> function and its required arguments
BUILTIN: dict[str, tuple[Callable[..., list[float]], tuple[str, ...]]] = {
    "exact_match": (exact_match, ()),
    "number": (number, ()),
    "choice": (choice, ()),
    "regex": (regex, ("pattern",)),
    "format": (format, ("pattern",)),
    "math": (math, ()),
}


def _marked(text: str) -> bool:
    """Return whether a text marks its mathematics."""
    return any(mark in text for mark in ("$", "\\boxed", "\\(", "\\["))


def last_number(text: str) -> float | None:
    """Return the last number of a text, or None."""
    last = None
    for last in _NUMBER.finditer(text):  # noqa: B007
        pass
    return None if last is None else float(last.group().replace(",", ""))


def letter(text: str) -> str | None:
    """Return the letter that a text chooses, or None; see :func:`choice`."""
    for pattern, where in ((_BOXED, -1), (_CHOSEN, -1), (_BEGINS, 0), (_NAMED, -1)):
        matches = [pattern.match(text)] if where == 0 else list(pattern.finditer(text))
        if matches and (last := matches[where]) is not None:
            return next(group for group in last.groups() if group).upper()
    return None


def _judge(completions: Sequence[str], answer: Sequence[Any], equal: Callable[[str, str], bool]) -> list[float]:
    values = []
    for text, truth in zip(completions, answer, strict=True):
        if truth is None or truth == []:
            raise CannotJudge("the row has no answer to compare with")
        values.append(
            float(any(equal(text, reference) for reference in (truth if isinstance(truth, list) else [truth])))
        )
    return values
