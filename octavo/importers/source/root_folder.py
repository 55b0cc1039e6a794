"""Files that a configuration names, seen from one folder and never outside it: links are followed before that is
asked. What is outside is not read, and the report says so."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from octavo.base import safe_read
from octavo.config.sections.text_types import not_a_path
from octavo.importers.errors import TranslateError

#: bytes of a file that a configuration names
_LIMIT = 16 << 20


class Folder:
    """The folder that relative paths are seen from (``--root``). ``refused`` holds the names that lead out of it;
    ``homes``: the folders of the files that were given, from which some of their paths are seen too."""

    def __init__(self, root: Path, homes: Iterable[Path] = ()) -> None:
        self.root, self.homes = root, tuple(dict.fromkeys(homes))
        self._inside = os.path.realpath(root)
        self.refused: dict[str, None] = {}

    def file(self, *names: str) -> Path | None:
        """The regular file of a path, as ``("model", "config.json")``, seen from the folder; None where there is none,
        or where it is outside the folder."""
        path = self._path(*names)
        if path is None or not os.path.isfile(path):
            return None
        if path.is_relative_to(self._inside):
            return path
        self.refused["/".join(names)] = None
        return None

    def named(self, name: str) -> Path | None:
        """A file that a script sources, or a configuration takes keys from: seen from the folder, or from that of the
        file that names it."""
        if Path(name).is_absolute():
            return self.file(name)
        return next((file for home in (self.root, *self.homes) if (file := self.file(str(home / name)))), None)

    def there(self, *names: str) -> bool:
        """Whether a path of this folder is a file or a folder."""
        path = self._path(*names)
        return path is not None and path.is_relative_to(self._inside) and os.path.exists(path)

    def json(self, *names: str) -> dict[str, Any]:
        """The object of a JSON file; empty where there is none. Raises TranslateError for one that is damaged."""
        file = self.file(*names)
        return {} if file is None else safe_read.read_json(file, TranslateError, _LIMIT)

    def text(self, *names: str) -> str | None:
        """The text of a file; None where there is none. Raises TranslateError for what is no UTF-8."""
        file = self.file(*names)
        return None if file is None else safe_read.read_text(file, TranslateError, _LIMIT)

    def begins(self, *names: str) -> str:
        """The first character of a text file that is no space; empty where there is none."""
        file = self.file(*names)
        if file is None:
            return ""
        with safe_read.open_file(file, TranslateError) as opened:
            return opened.read(4096).decode("utf-8-sig", "replace").lstrip()[:1]

    def _path(self, *names: str) -> Path | None:
        path = str(self.root.joinpath(*names))
        # the name of no file (a NUL, 5,000 letters): asking for it would raise
        return None if not_a_path(path) else Path(os.path.realpath(path))


def section(config: Any, key: str) -> dict[str, Any]:
    """An object within JSON that somebody else wrote; empty where something else is there."""
    found = config.get(key) if isinstance(config, dict) else None
    return found if isinstance(found, dict) else {}


def whole(config: Any, key: str) -> int | None:
    """A whole number from 1 within such JSON; None where something else is there."""
    found = config.get(key) if isinstance(config, dict) else None
    return found if type(found) is int and found > 0 else None
