"""What is wrong with a configuration: where, which key, what was found, and the fix. All of it at once."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from octavo.base.safe_read import printable

#: as many problems are told one by one
MOST_TOLD = 20


@dataclass(frozen=True)
class Place:
    """A spot in a configuration: ``source`` is a file name or an override's text; line and column count from 1."""

    source: str
    line: int | None = None
    column: int | None = None

    def __str__(self) -> str:
        source = brief(self.source)
        return source if self.line is None else f"{source}:{self.line}"


@dataclass(frozen=True)
class Problem:
    """One thing to mend. ``key`` is dotted (``data.train.0.path``) and empty where the whole file is meant."""

    place: Place
    key: str
    reason: str
    fix: str = ""

    def __str__(self) -> str:
        where = f"{self.place}: {brief(self.key, 100)}: " if self.key else f"{self.place}: "
        return where + brief(self.reason, 600) + (f"; {brief(self.fix, 600)}" if self.fix else "")


class ConfigError(ValueError):
    """A configuration that cannot be used. ``problems`` holds the first :data:`MOST_TOLD` of those that were found, in
    the order of the files; ``more`` counts the rest."""

    def __init__(self, problems: Sequence[Problem], more: int = 0):
        self.problems: tuple[Problem, ...] = tuple(problems[:MOST_TOLD])
        self.more = more + len(problems) - len(self.problems)
        lines = [str(problem) for problem in self.problems]
        if len(lines) == 1 and not self.more:
            super().__init__(lines[0])
        else:
            rest = [f"and {self.more:,} more"] if self.more else []
            count = f"{len(lines) + self.more:,} problems in the configuration:"
            super().__init__("\n  ".join([count, *lines, *rest]))


def nearest(name: str, valid: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The valid name most like ``name``, or None where nothing is close. Case and ``-`` against ``_`` do not count."""
    if len(name) > 100:  # nobody's slip, and the comparison takes quadratic time
        return None
    by_form = {v.lower().replace("-", "_"): v for v in valid}
    close = difflib.get_close_matches(name.lower().replace("-", "_"), by_form, n=1, cutoff=cutoff)
    return by_form[close[0]] if close else None


def dotted(path: Sequence[str | int]) -> str:
    """``("data", "train", 0)`` as the user writes it: ``data.train.0``."""
    return ".".join(str(part) for part in path)


def named(value: object) -> str:
    """A value as a message shows it: short, quoted where it is text, with its YAML kind where that is the surprise."""
    if value is None:
        return "nothing (null)"
    if isinstance(value, bool):
        return f"{str(value).lower()} (a boolean)"
    if isinstance(value, dict):
        return "a mapping" if value else "an empty mapping"
    if isinstance(value, (list, tuple)):
        return f"a list of {len(value)}" if value else "an empty list"
    return brief(repr(value), 60)


def brief(text: str, most: int = 300) -> str:
    """``text`` as one printable line of about ``most`` characters."""
    return printable(text if len(text) <= most else text[: most - 3] + "...")
