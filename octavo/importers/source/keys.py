"""The keys of somebody else's file as they were found: each with its value, its line, and who gave it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from octavo.config.yaml.problems import Place


@dataclass(frozen=True)
class Given:
    """One key. ``key`` is dotted (``training.lr``), a flag without its dashes (``micro_batch_size``), or ``$NAME`` of
    the environment. ``open`` names variables of a script that nothing sets: the value is then unknown; ``refers`` names
    keys of the same file that stood in the value; ``unsure``: lines of a script that were not followed and may give
    another value; ``bare``: a flag whose value was an empty variable."""

    key: str
    value: Any
    place: Place
    open: tuple[str, ...] = ()
    refers: tuple[str, ...] = ()
    unsure: tuple[int, ...] = ()
    bare: bool = False


@dataclass(frozen=True)
class Foreign:
    """All that was read: keys in the order of the files, and what else the report must say.

    kinds   the kinds of the files: yaml, json, script, flags
    lost    keys that another file overrides: (key, who wins)
    unread  lines of scripts that set or start something and were not read: (place, text, why)
    words   what stands in a command beside its flags
    referred  keys whose values stand in others (``${a.b}``)
    """

    given: tuple[Given, ...]
    kinds: tuple[str, ...]
    lost: tuple[tuple[Given, str], ...] = ()
    unread: tuple[tuple[Place, str, str], ...] = ()
    words: frozenset[str] = field(default_factory=frozenset)
    referred: frozenset[str] = field(default_factory=frozenset)

    @property
    def keys(self) -> frozenset[str]:
        return frozenset(given.key for given in self.given)


def flat(value: Any, path: tuple[str | int, ...] = ()) -> Iterable[tuple[tuple[str | int, ...], Any]]:
    """The leaves of nested mappings: scalars, lists of scalars, and what is empty. Lists of mappings are gone into."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from flat(inner, (*path, key))
    elif isinstance(value, list) and any(isinstance(entry, dict | list) for entry in value):
        for index, inner in enumerate(value):
            yield from flat(inner, (*path, index))
    else:
        yield path, value
