"""Access to keys with a common prefix: ``lr`` for ``training.lr``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.importers.common.draft import Draft


class PrefixedDraft:
    """A draft limited to a section of the source file; calling it with ``"lr"`` returns the full name of the key.

    names   keys that another version renamed -> their names in this file
    """

    def __init__(self, draft: Draft, prefix: str = "", names: Mapping[str, str] | None = None) -> None:
        self.draft, self.prefix, self.names = draft, prefix, names or {}

    def __call__(self, key: str) -> str:
        return f"{self.prefix}{self.names.get(key, key)}"

    def has(self, key: str) -> bool:
        return self.draft.has(self(key))

    def number(self, key: str, default: float | None = None) -> Any:
        return self.draft.number(self(key), default)

    def integer(self, key: str, default: int | None = None) -> Any:
        return self.draft.integer(self(key), default)

    def flag(self, key: str) -> bool | None:
        return self.draft.flag(self(key))

    def text(self, key: str) -> str | None:
        return self.draft.text(self(key))

    def words(self, key: str) -> list[str]:
        return self.draft.words(self(key))

    def set(self, target: str, value: Any, *keys: str, why: str = "") -> None:
        self.draft.set(target, value, *(self(key) for key in keys), why=why)

    def mark_default(self, *keys: str, why: str) -> None:
        self.draft.mark_default(*(self(key) for key in keys), why=why)

    def mark_unsupported(self, *keys: str, why: str) -> None:
        self.draft.mark_unsupported(*(self(key) for key in keys), why=why)

    def mark_ignored(self, *keys: str, why: str) -> None:
        self.draft.mark_ignored(*(self(key) for key in keys), why=why)
