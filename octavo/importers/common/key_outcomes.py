"""What becomes of each key: exactly one of five things, so that nothing is dropped in silence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from octavo.importers.source.keys import Given

Kind = Literal["translated", "default", "none", "dead", "unknown"]

#: kind -> the heading of its part of a report
HEADINGS: dict[Kind, str] = {
    "translated": "Translated",
    "default": "As Octavo does anyway",
    "none": "Without equivalent here",
    "dead": "Did nothing there",
    "unknown": "Not known there",
}


@dataclass
class Row:
    """One key of theirs. ``targets`` are the keys of ours that it became, with their values; ``apart``: here no number
    depends on it, whatever its name (octavo/importers/lost_keys.py)."""

    given: Given
    kind: Kind
    why: str = ""
    targets: tuple[tuple[str, Any], ...] = ()
    apart: bool = False

    def more(self, why: str, target: tuple[str, Any] | None = None) -> None:
        """A second thing that is said of the same key."""
        if why and why not in self.why:
            self.why = f"{self.why}; {why}" if self.why else why
        if target is not None and target not in self.targets:
            self.targets = (*self.targets, target)


@dataclass(frozen=True)
class Setting:
    """One key of ours: its value, the keys of theirs that it came from, and why where that is not plain."""

    value: Any
    source: tuple[Given, ...]
    why: str = ""
