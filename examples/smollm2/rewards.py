"""The reward of grpo.yaml: how many words an answer shares with the reference answer."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

_WORD = re.compile(r"\w+")


def word_overlap(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    """Return the F1 score of each completion's words against its reference answer's words, 0 to 1.

    Words that the reference does not have lower the score, so that long answers score low whatever they say.
    """
    return [_f1(_words(text), _words(wanted)) for text, wanted in zip(completions, answer, strict=True)]


def _words(text: str) -> Counter[str]:
    return Counter(_WORD.findall(text.lower()))


def _f1(text: Counter[str], wanted: Counter[str]) -> float:
    shared = (text & wanted).total()
    return 2 * shared / (text.total() + wanted.total()) if shared else 0.0
