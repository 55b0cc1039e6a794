"""Rejects tokenizers that multiply texts: a normalizer is data in the model's folder and may replace a letter by
megabytes.

The tokenizers library allocates the memory and aborts the process if that fails, which Python cannot catch. So the
growth of a text by a normalizer and a decoder is bounded when the tokenizer is loaded, from their definitions: the
factors of a chain of replacements are multiplied. Unicode normalization (NFKC) grows by a known small factor.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.base.safe_read import printable
from octavo.models.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: limit of the growth factor of a text; published tokenizers have 1 to 11 ("<|newline|>" for a line break)
MAX_GROWTH = 64
#: limit of characters that are added once per text
MAX_ADDED = 1 << 16


def check_growth(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Raise ModelError, naming the file and the part, if a normalizer or decoder of a tokenizer multiplies texts."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    for name in ("normalizer", "decoder"):
        part = getattr(backend, name, None)
        if part is None:
            continue
        growth = 1.0
        for number, step in enumerate(_steps(json.loads(part.__getstate__())), 1):
            growth *= _growth_factor(step)
            added = len(step.get("prepend") or "")
            fault = f"up to {growth:,.0f} times as long; the limit is {MAX_GROWTH}" if growth > MAX_GROWTH else ""
            fault = f"{added:,} characters longer; the limit is {MAX_ADDED:,}" if added > MAX_ADDED else fault
            if fault:
                raise ModelError(
                    f"{folder}/tokenizer.json: its {name} makes a text {fault}. Use the tokenizer of the "
                    f"original model. (Step {number}: {printable(json.dumps(step)[:80])})"
                )


def _steps(part: object) -> list[dict[str, Any]]:
    """Return the steps of a part, with sequences replaced by their steps."""
    if not isinstance(part, dict):
        return []
    inner = part.get("normalizers") or part.get("decoders")
    if part.get("type") != "Sequence" or not isinstance(inner, list):
        return [part]
    return [step for one in inner for step in _steps(one)]


def _growth_factor(step: dict[str, Any]) -> float:
    """Return the largest growth factor of a text in a step."""
    if step.get("type") == "Precompiled":
        return _charsmap_factor(step.get("precompiled_charsmap"))
    if step.get("type") != "Replace":
        return 1.0
    pattern, content = step.get("pattern") or {}, step.get("content") or ""
    text = pattern.get("String")
    if text is not None:
        return max(1.0, len(content) / len(text)) if text else 1.0 + len(content)
    return max(1.0, len(content) + _matches_empty(pattern.get("Regex") or ""))


def _matches_empty(pattern: str) -> bool:
    """Return whether an expression may match between any two characters; True if Python cannot parse it."""
    try:
        return re.compile(pattern).match("") is not None
    except (re.error, RecursionError, OverflowError):
        return True


def _charsmap_factor(charsmap: Any) -> float:
    """Return the largest growth factor of SentencePiece's table of replacements: the table has its size in bytes, a
    trie, and then all replacements, each ended by a zero. Replacements of up to 64 bytes count as 1: Unicode's own have
    up to 18 characters."""
    try:
        raw = base64.b64decode(charsmap or "")
    except (binascii.Error, TypeError, ValueError):
        return 1.0  # the library has already accepted the table
    texts = raw[4 + int.from_bytes(raw[:4], "little") :].split(b"\0")
    return max(1.0, max(map(len, texts)) / 64)
