"""The outcome of a key: exactly one of five kinds, so that no key is dropped silently."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from octavo.importers.source.keys import SourceKey

Kind = Literal["translated", "default", "none", "dead", "unknown"]

#: kind -> heading in the report
HEADINGS: dict[Kind, str] = {
    "translated": "Translated",
    "default": "Already the default",
    "none": "No equivalent",
    "dead": "Had no effect",
    "unknown": "Unknown keys",
}


@dataclass
class Row:
    """The outcome of one source key.

    targets           the keys of Octavo that it became, with their values
    affects_training  false if results do not depend on it (octavo/importers/lost_keys.py decides by name)
    """

    source_key: SourceKey
    kind: Kind
    why: str = ""
    targets: tuple[tuple[str, Any], ...] = ()
    affects_training: bool = True

    def extend(self, why: str, target: tuple[str, Any] | None = None) -> None:
        """Add a second reason or target of the same key."""
        if why and why not in self.why:
            self.why = f"{self.why}; {why}" if self.why else why
        if target is not None and target not in self.targets:
            self.targets = (*self.targets, target)


@dataclass(frozen=True)
class Setting:
    """One key of Octavo: its value, the source keys it came from, and the reason if that is not obvious."""

    value: Any
    source: tuple[SourceKey, ...]
    why: str = ""
