"""The keys of another framework's file as they were written, each with its value and its place."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from octavo.config.yaml.problems import Place


@dataclass(frozen=True)
class SourceKey:
    """One key of a file.

    key     dotted (``training.lr``), a flag without its dashes (``micro_batch_size``), or ``$NAME`` of the environment
    open    variables of a script that nothing sets; the value is then unknown
    refers  keys of the same file that the value refers to
    unsure  lines of a script that were not followed and may set another value
    bare    whether it is a flag whose value was an empty variable
    """

    key: str
    value: Any
    place: Place
    open: tuple[str, ...] = ()
    refers: tuple[str, ...] = ()
    unsure: tuple[int, ...] = ()
    bare: bool = False


@dataclass(frozen=True)
class SourceConfig:
    """Everything that was read: keys in the order of the files, and the rest for the report.

    kinds   the kinds of the files: yaml, json, script, flags
    overridden    keys that another value overrides: (key, which one wins)
    unread  lines of scripts that set or start something and were not read: (place, text, why)
    words   the words of the commands other than flags
    referenced  keys that other values refer to (``${a.b}``)
    """

    source_keys: tuple[SourceKey, ...]
    kinds: tuple[str, ...]
    overridden: tuple[tuple[SourceKey, str], ...] = ()
    unread: tuple[tuple[Place, str, str], ...] = ()
    words: frozenset[str] = field(default_factory=frozenset)
    referenced: frozenset[str] = field(default_factory=frozenset)

    @property
    def keys(self) -> frozenset[str]:
        return frozenset(entry.key for entry in self.source_keys)


def iter_leaves(value: Any, path: tuple[str | int, ...] = ()) -> Iterable[tuple[tuple[str | int, ...], Any]]:
    """Yield (path, value) of the leaves: scalars, lists of scalars, and empty values. Lists of mappings are entered."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from iter_leaves(inner, (*path, key))
    elif isinstance(value, list) and any(isinstance(entry, dict | list) for entry in value):
        for index, inner in enumerate(value):
            yield from iter_leaves(inner, (*path, index))
    else:
        yield path, value
