"""Resolves references within a YAML file (OmegaConf's ``${a.b}``).

Each value is computed once, after the values that it refers to. So a cycle is found on the way, and a text that grows
exponentially (each of fifty keys holding the next one twice) is measured before it is built.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from octavo.config.yaml.document import Document, Path, scalar
from octavo.config.yaml.problems import ConfigError, Place, Problem, dotted
from octavo.importers.source.keys import iter_leaves

#: the innermost references of a text
WITHIN = re.compile(r"\$\{([^${}]*)\}")
_SIGNS = re.compile(r"\$\{|\}")
#: maximum length of a chain of references; characters of one value, and of all values together
_MOST_STEPS, _MOST_OF_ONE, _MOST_OF_ALL = 64, 1 << 16, 1 << 22
_FIX = "write the value out"


class ResolvedValue(NamedTuple):
    """A value with its references resolved.

    refers  names in the text as it was written
    open    names that remain: only a running process knows them (``${act:gelu}``), or the file has no such key
    """

    value: Any
    refers: tuple[str, ...]
    open: tuple[str, ...]


def resolve(document: Document) -> dict[Path, ResolvedValue]:
    """Resolve the leaves of a document. Raises ConfigError for cycles, and for values beyond the bounds."""
    resolver = _Resolver(document)
    return {
        path: ResolvedValue(value := resolver.resolve_value(path), _reference_names(written), _reference_names(value))
        for path, written in resolver.leaves.items()
    }


def place_of(document: Document, path: Path) -> Place:
    """Return the place of a value in the file; for a value that an alias inserts, the place of its mapping."""
    while path and path not in document.places:
        path = path[:-1]
    return document.places[path]


def _reference_names(value: Any) -> tuple[str, ...]:
    texts = value if isinstance(value, list) else [value]
    return tuple(match[1] for text in texts if isinstance(text, str) for match in WITHIN.finditer(text))


class _Resolver:
    def __init__(self, document: Document) -> None:
        self.document, self.root = document, document.value
        self.leaves: dict[Path, Any] = {path: value for path, value in iter_leaves(document.value) if path}
        self.values: dict[Path, Any] = {}
        self.chain: dict[Path, None] = {}  # keys whose values are being computed, the outermost first
        self.characters = 0

    def resolve_value(self, path: Path) -> Any:
        if path not in self.values:
            if path in self.chain or len(self.chain) == _MOST_STEPS:
                raise self.cycle_error(path)
            self.chain[path] = None
            written = self.leaves[path]
            items = written if isinstance(written, list) else [written]
            values = [
                self.resolve_text(item, path) if isinstance(item, str) and "${" in item else item for item in items
            ]
            self.values[path] = values if isinstance(written, list) else values[0]
            del self.chain[path]
        return self.values[path]

    def cycle_error(self, path: Path) -> ConfigError:
        """Return the error for a cycle, or for a chain that is too long, at the key where it begins."""
        chain = [*self.chain]
        if path in self.chain:
            chain = [*chain[chain.index(path) :], path]
            description = "refers to itself"
        else:
            description = f"refers to itself, or through more than {_MOST_STEPS} others"
        names = [dotted(key) for key in chain]
        shown = " -> ".join([*names[:4], *(["..."] if len(names) > 5 else []), *names[4:][-1:]])
        return self.make_error(chain[0], f"{self.leaves[chain[0]]!r:.60} {description}: {shown}")

    def make_error(self, path: Path, reason: str) -> ConfigError:
        return ConfigError([Problem(place_of(self.document, path), dotted(path), reason, _FIX)])

    def resolve_text(self, written: str, path: Path) -> Any:
        """Resolve the references in a text, inner ones first. A text that is only a reference gets the type of the
        value that it refers to."""
        parts: list[list[str]] = [[]]  # pieces of the text, and of each reference that has begun and not ended
        at = size = 0
        for sign in _SIGNS.finditer(written):
            parts[-1].append(written[at : sign.start()])
            at = sign.end()
            if sign[0] == "${":
                parts.append([])
                continue
            if len(parts) == 1:  # a bracket outside any reference
                parts[0].append("}")
                continue
            inside = "".join(parts.pop())
            known, value = self.lookup(inside, path)
            if known and len(parts) == 1 and at == len(written) and not "".join(parts[0]):
                return value
            replacement = str(value) if known and not isinstance(value, list) else f"${{{inside}}}"
            size += len(replacement)
            self.characters += len(replacement)
            if size > _MOST_OF_ONE or self.characters > _MOST_OF_ALL:
                raise self.make_error(path, f"{written!r:.60} becomes a text of over {size:,} characters")
            parts[-1].append(replacement)
        parts[-1].append(written[at:])
        return "${".join("".join(part) for part in parts)

    def lookup(self, inside: str, path: Path) -> tuple[bool, Any]:
        """Return (whether it is known, its value) for a reference in the value at ``path``."""
        if inside.startswith("oc.env:"):
            _, comma, default = inside.partition(",")
            return bool(comma), scalar(default) if comma else None
        name = inside.lstrip(".")
        if ":" in inside or not name:
            return False, None
        # Each leading dot goes one section up from the key that holds the reference.
        up = len(inside) - len(name)
        keys: Path = (*(path[:-up] if up else ()), *name.split("."))
        if keys in self.leaves:
            return True, self.resolve_value(keys)
        return False, None
