"""Reads files that a configuration names, only inside one folder. Links are resolved before that is checked. Files
outside are not read, and the report lists them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from octavo.base import safe_read
from octavo.config.sections.text_types import path_problem
from octavo.importers.errors import TranslateError

#: maximum bytes of a file that a configuration names
_LIMIT = 16 << 20


class Folder:
    """The folder that relative paths start from (``--root``).

    homes    the folders of the translated files, which some of their paths are relative to
    refused  the names of files outside the folder
    """

    def __init__(self, root: Path, homes: Iterable[Path] = ()) -> None:
        self.root, self.search_dirs = root, tuple(dict.fromkeys(homes))
        self._inside = os.path.realpath(root)
        self.refused: dict[str, None] = {}

    def file(self, *names: str) -> Path | None:
        """Return the regular file at a path in the folder, such as ``("model", "config.json")``; None if there is none,
        or if it is outside the folder."""
        path = self._path(*names)
        if path is None or not os.path.isfile(path):
            return None
        if path.is_relative_to(self._inside):
            return path
        self.refused["/".join(names)] = None
        return None

    def find(self, name: str) -> Path | None:
        """Return a file that a script sources, or that a configuration takes keys from, relative to the folder or to
        the folder of the file that names it."""
        if Path(name).is_absolute():
            return self.file(name)
        return next((file for home in (self.root, *self.search_dirs) if (file := self.file(str(home / name)))), None)

    def exists(self, *names: str) -> bool:
        """Whether a path in this folder exists."""
        path = self._path(*names)
        return path is not None and path.is_relative_to(self._inside) and os.path.exists(path)

    def json(self, *names: str) -> dict[str, Any]:
        """Return the object in a JSON file; {} if there is no file. Raises TranslateError for a damaged one."""
        file = self.file(*names)
        return {} if file is None else safe_read.read_json(file, TranslateError, _LIMIT)

    def text(self, *names: str) -> str | None:
        """Return the text of a file; None if there is no file. Raises TranslateError for text that is not UTF-8."""
        file = self.file(*names)
        return None if file is None else safe_read.read_text(file, TranslateError, _LIMIT)

    def first_character(self, *names: str) -> str:
        """Return the first character of a text file that is not white space; "" if there is none."""
        file = self.file(*names)
        if file is None:
            return ""
        with safe_read.open_file(file, TranslateError) as opened:
            return opened.read(4096).decode("utf-8-sig", "replace").lstrip()[:1]

    def _path(self, *names: str) -> Path | None:
        path = str(self.root.joinpath(*names))
        # An impossible file name (with a NUL, or 5,000 letters) would make realpath raise.
        return None if path_problem(path) else Path(os.path.realpath(path))


def get_mapping(config: Any, key: str) -> dict[str, Any]:
    """Return an object within untrusted JSON; {} if the value is not an object."""
    value = config.get(key) if isinstance(config, dict) else None
    return value if isinstance(value, dict) else {}


def get_positive_int(config: Any, key: str) -> int | None:
    """Return a positive whole number within untrusted JSON; None if the value is not one."""
    value = config.get(key) if isinstance(config, dict) else None
    return value if type(value) is int and value > 0 else None
