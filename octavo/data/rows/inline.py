"""Files that stand in the rows themselves, as `datasets` writes them: {"bytes": ..., "path": ...}."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar


@dataclass(frozen=True)
class Inline:
    """A file by its bytes. `name`: what it was called, if at all."""

    data: bytes
    name: str = ""
    what: ClassVar[str] = "file"

    def __str__(self) -> str:
        """A name that tells it from others."""
        return f"{self.name or self.what} ({hashlib.sha256(self.data).hexdigest()[:12]})"


T = TypeVar("T", bound=Inline)


def file_named(value: Any, kind: type[T]) -> str | T | None:
    """A file as rows name it: its name, or its bytes, which become a `kind`. None: neither."""
    if isinstance(value, str):
        return value
    if not isinstance(value, dict) or not {"bytes", "path"} & value.keys():
        return None
    data, path = value.get("bytes"), value.get("path")
    if isinstance(data, bytes) and isinstance(path, str | None):
        return kind(data, path or "")
    return path if data is None and isinstance(path, str) else None


def no_file(value: Any) -> bool:
    """Null, or what a table makes of it: {"bytes", "path"} with neither."""
    return value is None or (
        isinstance(value, dict) and value.keys() <= {"bytes", "path"} and not any(v is not None for v in value.values())
    )
