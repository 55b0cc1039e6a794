"""Globs on dotted module names, for rules, components and freezing.

A pattern is anchored (it must match the whole name) and works on segments: ``*`` and ``?`` stay within one segment,
``**`` matches zero or more segments. ``**.layers.0.**`` matches everything in each layer 0,
``model.layers.*.mlp.*_proj`` the projections of all MLPs.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from functools import lru_cache


@lru_cache(maxsize=4096)
def compile_glob(pattern: str) -> re.Pattern[str]:
    """Compile a glob to a regular expression. Raises ValueError for an empty segment, or ``**`` next to other text."""
    segments = pattern.split(".")
    if any(not s for s in segments):
        raise ValueError(f"the pattern {pattern!r} has an empty segment; write names like 'model.layers.*.mlp.**'")
    if any("**" in s and s != "**" for s in segments):
        raise ValueError(f"in the pattern {pattern!r} '**' must stand alone between dots, as in '**.q_proj'")
    # Repeated wildcards would make matching exponential: collapse them.
    segments = [s for s, before in zip(segments, ["", *segments], strict=False) if not s == before == "**"]
    segments = [s if s == "**" else re.sub(r"[*?]+", _normalize_wildcards, s) for s in segments]
    out, dot = "", False  # dot: the next segment must be preceded by one
    for i, segment in enumerate(segments):
        last = i == len(segments) - 1
        if segment != "**":
            body = "".join("[^.]*" if c == "*" else "[^.]" if c == "?" else re.escape(c) for c in segment)
            out += (r"\." if dot else "") + body
            dot = True
        elif last:
            out += r"(?:\.[^.]+)*" if dot else ".*"
        else:
            out += (r"\." if dot else "") + r"(?:[^.]+\.)*"
            dot = False
    return re.compile(out)


def _normalize_wildcards(run: re.Match[str]) -> str:
    """Rewrite ``*?*?`` as ``??*``."""
    return "?" * run[0].count("?") + "*" * ("*" in run[0])


def matches(pattern: str, name: str) -> bool:
    """Return True if ``pattern`` matches the whole dotted ``name``."""
    return compile_glob(pattern).fullmatch(name) is not None


def covers(pattern: str, name: str) -> bool:
    """Return True if ``pattern`` matches ``name`` or a module that contains it: ``model.visual`` covers its
    children."""
    segments = name.split(".")
    regex = compile_glob(pattern)
    return any(regex.fullmatch(".".join(segments[:i])) for i in range(len(segments), 0, -1))


def template(name: str) -> str:
    """Replace the numbers of ``name`` by ``*``, so that repeated layers have the same result."""
    return ".".join("*" if s.isdigit() else s for s in name.split("."))


def nearest(pattern: str, names: Iterable[str], count: int = 3) -> list[str]:
    """Return the names closest to a pattern that matched none; repeated layers appear once, with ``*``."""
    wanted = [s for s in pattern.split(".") if s != "**"]
    text = ".".join(wanted)
    scores: dict[str, float] = {}
    for name in dict.fromkeys(template(n) for n in names):
        segments = name.split(".")
        tails = {name} | {".".join(segments[i : i + len(wanted)]) for i in range(len(segments))}
        scores[name] = max(difflib.SequenceMatcher(None, text, t).ratio() for t in tails)
    best = sorted(scores, key=lambda n: -scores[n])
    return [n for n in best[:count] if scores[n] > 0.3]
