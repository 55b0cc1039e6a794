"""Evaluates conditions of a launch script from its own values: ``[ "$MODE" = full ]``, ``[[ ... ]]``, ``test``. The
result is True, False, or None if it is only known when the script runs."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from octavo.importers.shell.expansion import Expander, Word, glob_pattern
from octavo.importers.shell.syntax import Condition, ShellWord

_WHOLE = re.compile(r"[+-]?[0-9]{1,18}")
_OCTAL = re.compile(r"[+-]?0[0-9]")
_NUMBERS: dict[str, Callable[[int, int], bool]] = {
    "-eq": lambda a, b: a == b,
    "-ne": lambda a, b: a != b,
    "-lt": lambda a, b: a < b,
    "-le": lambda a, b: a <= b,
    "-gt": lambda a, b: a > b,
    "-ge": lambda a, b: a >= b,
}


def evaluate_test(words: Sequence[Word]) -> bool | None:
    """Evaluate ``test`` with some words, or ``[`` without its closing bracket."""
    if any(word.open or word.unsure for word in words):
        return None
    texts = [word.text for word in words]
    negated = len(texts) in (2, 4) and texts[0] == "!"
    answer = _plain(texts[1:] if negated else texts)
    return answer if answer is None or not negated else not answer


def _plain(texts: list[str]) -> bool | None:
    if not texts:
        return False
    if len(texts) == 1:
        return bool(texts[0])
    if len(texts) == 2 and texts[0] in ("-n", "-z"):
        return bool(texts[1]) == (texts[0] == "-n")
    if len(texts) == 3 and texts[1] in ("=", "==", "!="):
        return (texts[0] == texts[2]) == (texts[1] != "!=")
    if len(texts) == 3 and texts[1] in _NUMBERS and all(_WHOLE.fullmatch(text) for text in (texts[0], texts[2])):
        return _NUMBERS[texts[1]](int(texts[0]), int(texts[2]))
    return None


def evaluate_condition(expander: Expander, node: Condition) -> bool | None:
    """Evaluate ``[[ ... ]]`` with one comparison."""
    words = node.words
    negated = False
    while words and isinstance(words[0], ShellWord) and words[0].literal == "!":
        words, negated = words[1:], not negated
    if any(isinstance(word, str) for word in words):
        for word in words:
            if isinstance(word, ShellWord):
                expander.expand_text(word)
        return None
    answer = _comparison(expander, [word for word in words if isinstance(word, ShellWord)])
    return answer if answer is None or not negated else not answer


def _comparison(expander: Expander, words: list[ShellWord]) -> bool | None:
    sign = words[1].literal if len(words) == 3 else None
    if sign in ("=", "==", "!="):
        left, pattern = expander.expand_text(words[0]), glob_pattern(expander, words[2], 2, expander.case_sensitive)
        if left.open or left.unsure or pattern is None or len(left.text) > 1000:
            return None
        expander.charge(10 * len(left.text))
        return (pattern.fullmatch(left.text) is not None) == (sign != "!=")
    if len(words) == 3 and sign not in _NUMBERS:
        for word in words:
            expander.expand_text(word)
        return None
    if len(words) not in (1, 2, 3):
        return None
    plain = [expander.expand_text(word) for word in words]
    # [[ evaluates arithmetic, in which 010 is 8 and 08 is invalid; [ compares decimal numbers.
    if sign in _NUMBERS and any(_OCTAL.match(word.text) for word in (plain[0], plain[2])):
        return None
    return evaluate_test(plain)
