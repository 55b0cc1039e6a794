"""The reward of grpo.yaml: an entry of a glossary begins with the name that it explains, and a verb follows."""

from __future__ import annotations

import re
from typing import Any

_NEXT_WORD = re.compile(r"(?:\([^)]*\))?`?\s+(\w+)")  # after a name, its arguments and its closing backtick


def glossary(completions: list[str], name: list[str], **columns: Any) -> list[float]:
    """Return 1 / (1 + n) for each completion, n the number of words before the first mention of its row's name. It is
    halved unless the next word looks like a verb in the third person: it ends in s, and is not "is".

    "`ast.parse` parses a file" has 1, "`ast.parse` is a function" 1/2, "The `ast.parse` function" 1/4, and an answer
    without the name 0. Whether an answer is true does not count.
    """
    return [_score(text, wanted) for text, wanted in zip(completions, name, strict=True)]


def _score(text: str, name: str) -> float:
    mention = re.search(rf"(?<![\w.]){re.escape(name)}(?!\w)", text)
    if mention is None:
        return 0.0
    word = _NEXT_WORD.match(text, mention.end())
    is_verb = word is not None and word[1].endswith("s") and word[1] != "is"
    return (1.0 if is_verb else 0.5) / (1 + len(re.findall(r"\w+", text[: mention.start()])))
