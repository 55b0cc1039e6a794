"""Problems of a configuration: place, key, reason and fix; all of them are reported at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.base.safe_read import printable

#: limit of printed problems; the others are only counted
MAX_SHOWN = 20


@dataclass(frozen=True)
class Place:
    """A position in a configuration: ``source`` is a file name or an override's text; line and column count from 1."""

    source: str
    line: int | None = None
    column: int | None = None

    def __str__(self) -> str:
        source = brief(self.source)
        return source if self.line is None else f"{source}:{self.line}"


@dataclass(frozen=True)
class Problem:
    """One problem. ``key`` is dotted (``data.train.0.path``); empty means the whole file."""

    place: Place
    key: str
    reason: str
    fix: str = ""

    def __str__(self) -> str:
        where = f"{self.place}: {brief(self.key, 100)}: " if self.key else f"{self.place}: "
        return where + brief(self.reason, 600) + (f"; {brief(self.fix, 600)}" if self.fix else "")


class ConfigError(ValueError):
    """A configuration that cannot be used. ``problems`` holds the first :data:`MAX_SHOWN` problems, in the order of
    the files; ``more`` counts the others."""

    def __init__(self, problems: Sequence[Problem], unlisted: int = 0):
        self.problems: tuple[Problem, ...] = tuple(problems[:MAX_SHOWN])
        self.more = unlisted + len(problems) - len(self.problems)
        lines = [str(problem) for problem in self.problems]
        if len(lines) == 1 and not self.more:
            super().__init__(lines[0])
        else:
            rest = [f"and {self.more:,} more"] if self.more else []
            count = f"{len(lines) + self.more:,} problems in the configuration:"
            super().__init__("\n  ".join([count, *lines, *rest]))


def dotted(path: Sequence[str | int]) -> str:
    """``("data", "train", 0)`` as the user writes it: ``data.train.0``."""
    return ".".join(str(part) for part in path)


def describe_value(value: object) -> str:
    """Describe a value for a message: short, text in quotes, with its YAML kind for null, booleans and collections."""
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
