"""Reads a mapping of Python as a configuration: a copy of its values as YAML would have them.

Accepted are mappings with text as keys, lists, tuples, text, numbers, booleans, None, paths, scalars of numpy, and
sections that were built in Python. Every other value is a problem at its key. The limits are the same as for YAML text.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from pydantic import BaseModel

from octavo.config.yaml.document import MAX_LEVELS, MAX_VALUES, Document, Path
from octavo.config.yaml.problems import Place, Problem, describe_value, dotted


def read_python(value: Mapping[str, object], source: str) -> Document:
    """Return a copy of ``value`` as a :class:`Document`. Never raises: problems are in ``.problems``. ``source`` is the
    name of the mapping in messages."""
    reader = _Reader(source)
    copy = reader.copy(value, ())
    if reader.too_large is not None:
        document = Document(broken=True)
        document.problems.append(Problem(reader.place, "", reader.too_large, "pass rows as train_data of octavo.run"))
        return document
    assert isinstance(copy, dict)
    reader.document.value = copy
    return reader.document


class _Reader:
    def __init__(self, source: str) -> None:
        self.document, self.place = Document(), Place(source)
        self.count = 0
        self.too_large: str | None = None

    def copy(self, value: object, path: Path) -> object:
        self.count += 1
        if self.count > MAX_VALUES:
            self.too_large = f"it holds more than {MAX_VALUES:,} values"
        elif len(path) > MAX_LEVELS:  # also of a mapping that contains itself
            self.too_large = f"it is nested in more than {MAX_LEVELS} levels"
        if self.too_large is not None:
            return None
        self.document.places[path] = self.place
        if isinstance(value, BaseModel):  # a section
            value = value.model_dump(mode="json", exclude_unset=True)
        if isinstance(value, Mapping):
            return {key: self.copy(entry, (*path, key)) for key, entry in value.items() if self.is_word(key, path)}
        if isinstance(value, list | tuple):
            return [self.copy(entry, (*path, index)) for index, entry in enumerate(value)]
        return self.scalar(value, path)

    def is_word(self, key: object, path: Path) -> bool:
        if isinstance(key, str):
            return True
        reason = f"a key must be text, found {describe_value(key)} ({type(key).__name__})"
        self.problem((*path, str(key)), reason, "write it as text, or remove it")
        return False

    def scalar(self, value: object, path: Path) -> object:
        # numpy need not be imported here to recognize its scalars
        if type(value).__module__ == "numpy" and getattr(value, "ndim", None) == 0:
            value = value.item()  # type: ignore[attr-defined]
        if isinstance(value, os.PathLike):
            value = os.fspath(value)
        # Subclasses, such as members of an IntEnum, would not compare or print as plain values do.
        for kind in (bool, int, float, str):
            if isinstance(value, kind):
                return kind(value)
        if value is None:
            return None
        fix = "write text, a number, true or false, a list or a mapping"
        if hasattr(value, "tolist"):
            fix = "write a list: .tolist()"
        elif callable(value):
            fix = "pass reward functions as rewards of octavo.run"
        elif hasattr(value, "column_names"):
            fix = "pass rows as train_data or eval_data of octavo.run"
        reason = f"expected a value of a configuration, found {describe_value(value)} ({type(value).__name__})"
        self.problem(path, reason, fix)
        return None

    def problem(self, path: Path, reason: str, fix: str) -> None:
        self.document.problems.append(Problem(self.place, dotted(path), reason, fix))
