"""The result of a rule, a :class:`Finding`; and the check of globs that rules share."""

from __future__ import annotations

import re
from dataclasses import dataclass

from octavo.config.yaml.document import Path


@dataclass(frozen=True)
class Finding:
    """A broken rule at ``path``; ``needs`` are further keys that it depends on."""

    path: Path
    reason: str
    fix: str
    needs: tuple[Path, ...] = ()


def finding(key: str, reason: str, fix: str, *needs: str) -> Finding:
    """Make a finding from keys as the user writes them, such as ``fp8.rules.0.match``."""
    return Finding(_path(key), reason, fix, tuple(_path(need) for need in needs))


def _path(key: str) -> Path:
    return tuple(int(part) if part.isdecimal() else part for part in key.split("."))


def glob_problem(pattern: str) -> str | None:
    """Return why ``pattern`` is not a glob over dotted module names, or None if it is."""
    if re.search(r"\s", pattern) or not pattern:
        return "module names have no spaces" if pattern else "it is empty"
    if "/" in pattern or "\\" in pattern:
        return "module names are joined by dots, not slashes"
    if re.search(r"[\^$|(){}+\[\]]", pattern):
        return (
            "it is not a regular expression: only *, ? (within a segment) and ** (any number of segments) are special"
        )
    for segment in pattern.split("."):
        if not segment:
            return "it has an empty segment (two dots in a row, or a dot at an end)"
        if "**" in segment and segment != "**":
            return f"** must be a whole segment, not part of `{segment}`"
    return None
