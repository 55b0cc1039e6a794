"""Tokenizers that multiply a text: a normalizer is data of the model's folder, and may replace a letter by megabytes.

The tokenizers library allocates what it is asked to and aborts the process where that fails, which no handler of
Python's catches. So what a normalizer and a decoder can make of a text is bounded when the tokenizer is loaded, by what
they say: a chain of replacements multiplies, so its factors do. Forms of Unicode (NFKC) grow by a known small factor.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from pathlib import Path
from typing import Any

from octavo.base.safe_read import printable
from octavo.models.errors import ModelError

#: how many times as long a text may become; published tokenizers have 1 to 11 ("<|newline|>" for a line break)
GROWTH = 64
#: characters that may be added to a text once
ADDED = 1 << 16


def check_growth(tokenizer: Any, folder: Path) -> None:
    """That no normalizer or decoder of a tokenizer multiplies texts. Raises ModelError with the file and the part."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    for name in ("normalizer", "decoder"):
        part = getattr(backend, name, None)
        if part is None:
            continue
        whole = 1.0
        for number, step in enumerate(_steps(json.loads(part.__getstate__())), 1):
            whole *= _factor(step)
            added = len(step.get("prepend") or "")
            much = f"up to {whole:,.0f} times as long, and {GROWTH} times" if whole > GROWTH else ""
            much = f"{added:,} characters longer, and {ADDED:,}" if added > ADDED else much
            if much:
                raise ModelError(
                    f"{folder}/tokenizer.json: its {name} makes a text {much} are the most. Take the tokenizer of the "
                    f"original model. (Step {number}: {printable(json.dumps(step)[:80])})"
                )


def _steps(part: Any) -> list[dict[str, Any]]:
    """The steps of a part, those of sequences in their place."""
    if not isinstance(part, dict):
        return []
    inner = part.get("normalizers") or part.get("decoders")
    if part.get("type") != "Sequence" or not isinstance(inner, list):
        return [part]
    return [step for one in inner for step in _steps(one)]


def _factor(step: dict[str, Any]) -> float:
    """How many times as long a text may become by a step."""
    if step.get("type") == "Precompiled":
        return _longest(step.get("precompiled_charsmap"))
    if step.get("type") != "Replace":
        return 1.0
    pattern, content = step.get("pattern") or {}, step.get("content") or ""
    text = pattern.get("String")
    if text is not None:
        return max(1.0, len(content) / len(text)) if text else 1.0 + len(content)
    return max(1.0, len(content) + _matches_nothing(pattern.get("Regex") or ""))


def _matches_nothing(pattern: str) -> bool:
    """Whether an expression may match between any two characters; so it does if Python does not know its syntax."""
    try:
        return re.compile(pattern).match("") is not None
    except (re.error, RecursionError, OverflowError):
        return True


def _longest(charsmap: Any) -> float:
    """Characters that SentencePiece's table of replacements makes of one at most, beyond the 18 of Unicode's own: the
    table is a trie behind its size in bytes, then all replacements, each with a zero behind it."""
    try:
        raw = base64.b64decode(charsmap or "")
    except (binascii.Error, TypeError, ValueError):
        return 1.0  # the library has read it, or none would be loaded
    texts = raw[4 + int.from_bytes(raw[:4], "little") :].split(b"\0")
    return max(1.0, max(map(len, texts)) / 64)
