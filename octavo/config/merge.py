"""Merges files and overrides into one tree of plain values that records where each of its keys was written.

Later settings win: the files of ``extends`` in their order, then the file itself, then ``key=value``. Mappings are
merged, everything else (including lists) is replaced. Paths are made absolute, relative to the file that contains them.
"""

from __future__ import annotations

import os
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path as FilePath
from typing import Any

from octavo.base.hub import is_name, split_revision
from octavo.base.safe_read import Unreadable, decode, read_bytes
from octavo.base.wording import nearest
from octavo.config.sections.text_types import is_reward_path, is_url, path_problem, python_name
from octavo.config.yaml.document import MAX_CHARACTERS, MAX_LEVELS, Document, Path, read_text, read_value
from octavo.config.yaml.problems import Place, Problem, describe_value, dotted
from octavo.config.yaml.python_values import read_python

#: limit of files per configuration; files that extend each other in pairs are read 2, 4, 8 ... times
MAX_FILES = 100


@dataclass
class Tree:
    """Merged values with the :class:`Place` of each path, and every problem of reading them."""

    source: str
    value: dict[str, Any] = field(default_factory=dict)
    places: dict[Path, Place] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    broken: bool = False
    overrides: list[str] = field(default_factory=list)
    files: int = 0

    def problem(self, place: Place, key: str, reason: str, fix: str = "") -> None:
        self.problems.append(Problem(place, key, reason, fix))

    def place(self, path: Path) -> Place:
        """Return the place where ``path`` was written, or else the place of the closest enclosing key."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.places:
                return self.places[path[:length]]
        return Place(self.source)


def read_file(tree: Tree, path: FilePath, chain: tuple[FilePath, ...] = (), origin: Place | None = None) -> None:
    """Merge a file, its ``extends`` first, into ``tree``. ``chain``: the files being read, to detect a cycle."""
    tree.files += 1
    why = path_problem(str(path))
    if tree.files > MAX_FILES:
        why = f"is one file more than the limit of {MAX_FILES}"
    if why is not None:
        reason = f"{describe_value(str(path))} {why}"
        tree.problem(origin or Place(str(path)), "extends" if origin else "", reason, "name a YAML file")
        tree.broken = True
        return
    shown = display_path(path)
    real = FilePath(os.path.realpath(path))  # Path.resolve raises if symbolic links form a loop
    if real in chain:
        names = " -> ".join(display_path(p) for p in (*chain[chain.index(real) :], real))
        reason = f"the files extend each other ({names})"
        tree.problem(origin or Place(shown), "extends", reason, "remove one of the `extends`")
        tree.broken = True
        return
    text = _text(tree, path, shown, origin)
    if text is not None:
        _merge_document(tree, read_text(text, shown), path.parent, (*chain, real))


def read_string(tree: Tree, text: str, base: FilePath) -> None:
    """Merge YAML text into ``tree``; its relative paths and ``extends`` are relative to the folder ``base``."""
    _merge_document(tree, read_text(text, tree.source), base, ())


def read_mapping(tree: Tree, value: Mapping[str, object]) -> None:
    """Merge a mapping of Python into ``tree``, by a copy; its relative paths and ``extends`` are relative to the
    working directory."""
    _merge_document(tree, read_python(value, tree.source), FilePath.cwd(), ())


def apply_override(tree: Tree, text: str) -> None:
    """Apply one ``a.b.0.c=value``. A problem names the override's text."""
    place = Place(f"override `{text}`")
    tree.overrides.append(place.source)
    name, equals, right = text.partition("=")
    parts = name.strip().split(".")
    if not equals or not all(parts):
        fix = "write key=value, e.g. train.lr=3e-4"
        if text.endswith((".yaml", ".yml")):
            fix = "name one FILE.yaml; use `extends:` in the file to merge another one"
        tree.problem(place, "", "not of the form key=value", fix)
        return
    if len(parts) > MAX_LEVELS:
        tree.problem(place, "", f"the key has {len(parts):,} parts", "octavo schema lists the keys")
        return
    if parts[0] == "extends":
        tree.problem(place, "extends", "an override cannot extend files", "write it in the file")
        return
    value, problems = read_value(right, place.source)
    tree.problems += [Problem(p.place, name.strip(), p.reason, p.fix) for p in problems]
    if not problems:
        _set(tree, parts, value, place)


def _set(tree: Tree, parts: list[str], value: Any, place: Place) -> None:
    node: Any = tree.value
    path: Path = ()
    for depth, part in enumerate(parts):
        last = depth == len(parts) - 1
        index = _step(tree, node, path, part, place)
        if index is None:
            return
        path = (*path, index)
        present = node.get(index) if isinstance(node, dict) else node[index]
        if not last and present is not None:
            node = present
            continue
        for place_of, further in reversed([*enumerate(parts)][depth + 1 :]):  # sections that are not written yet
            if further.isdecimal():
                where = dotted(parts[:place_of])
                reason = f"there is no list here, so no entry {further}"
                tree.problem(place, where, reason, f"set the whole list: {where}=[...]")
                return
            value = {further: value}
        value = _absolute(value, path, FilePath.cwd())
        if isinstance(present, dict) and isinstance(value, dict):
            replaced = list(_merge(path, present, value))
        else:
            node[index] = value
            replaced = [path]
        if present is None:  # nothing below it has a place yet
            tree.places[path] = place
        else:
            _replace_places(tree, dict.fromkeys(replaced, place), set(replaced))
        return


def _step(tree: Tree, node: Any, path: Path, part: str, place: Place) -> str | int | None:
    """Return the key or list index that ``part`` means in ``node``; None, with a problem in ``tree``, if it has no
    meaning."""
    where = dotted(path)
    fix = f"set the whole list: {where}=[...]"
    if isinstance(node, list):
        if part.isdecimal() and len(part) < 10 and int(part) < len(node):
            return int(part)
        entries = f"the entries 0 to {len(node) - 1}" if len(node) > 1 else "one entry, 0" if node else "no entries"
        tree.problem(place, where, f"has {entries}; found `{part}`", f"name one of them, or {fix}")
        return None
    if isinstance(node, dict):
        if part.isdecimal():
            tree.problem(place, dotted((*path, part)), f"there is no list at `{where}`", fix)
            return None
        return part
    tree.problem(
        place, dotted((*path, part)), f"`{where}` is {describe_value(node)} and has no keys", f"set `{where}` itself"
    )
    return None


def _merge_document(tree: Tree, document: Document, folder: FilePath, chain: tuple[FilePath, ...]) -> None:
    extends = document.value.pop("extends", None)
    place = document.places.get(("extends",), Place(tree.source))
    if isinstance(extends, str):
        extends = [extends]
    names = isinstance(extends, list) and bool(extends) and all(isinstance(e, str) and e for e in extends)
    if extends is not None and not names:
        reason = f"expected a file name or a list of them, found {describe_value(extends)}"
        tree.problem(place, "extends", reason, "write `extends: base.yaml`")
        extends = None
    for target in extends or ():
        read_file(tree, FilePath(os.path.expanduser(os.path.join(folder, target))), chain, place)
    tree.problems += document.problems
    tree.broken = tree.broken or document.broken
    value = _absolute(document.value, (), folder)
    _replace_places(tree, document.places, set(_merge((), tree.value, value)))


def _is_no_file(text: str) -> bool:
    """Return True if the `path` of a data set is a URL, or names rows of a program."""
    return is_url(text) or python_name(text) is not None


def _merge(path: Path, node: dict[str, Any], value: dict[str, Any]) -> Iterator[Path]:
    """Merge ``value`` into ``node`` at ``path``; yields each path that is replaced completely."""
    for key, child in value.items():
        here = (*path, key)
        if isinstance(child, dict) and isinstance(node.get(key), dict):
            yield from _merge(here, node[key], child)
        else:
            node[key] = child
            yield here


def _replace_places(tree: Tree, places: Mapping[Path, Place], replaced: Container[Path]) -> None:
    """Set the tree's places at and below the ``replaced`` paths to those in ``places``."""

    def below(path: Path) -> bool:
        return any(path[:length] in replaced for length in range(1, len(path) + 1))

    unchanged = {path: place for path, place in tree.places.items() if not below(path)}
    tree.places = unchanged | {path: place for path, place in places.items() if below(path)}


def _absolute(value: Any, path: Path, folder: FilePath) -> Any:
    """``value`` with every file path in it made absolute; ``path``: its path in the configuration."""
    if isinstance(value, dict):
        return {key: _absolute(child, (*path, key), folder) for key, child in value.items()}
    if isinstance(value, list):
        return [_absolute(child, (*path, index), folder) for index, child in enumerate(value)]
    if path[:2] == ("train", "stages"):  # a stage has keys of `data`
        path = path[3:]
    is_twin = path in (("model", "fp8_twin"), ("model", "fp8_twin", "name"))
    if is_twin and isinstance(value, str) and is_name(split_revision(value)[0], folder):
        return value
    is_path = (
        is_twin
        or path in (("model", "path"), ("fp8", "plan"), ("lora", "adapter"), ("data", "cache"))
        or path in (("model", "image_encoder", "path"), ("model", "foundation", "path"))
        or path == ("model", "foundation", "chat_template")
        or (len(path) == 4 and path[0] == "data" and path[1] in ("train", "eval") and path[3] in ("path", "images"))
    )
    if path[:2] == ("rl", "rewards") and len(path) in (3, 4) and path[3:] in ((), ("reward",)):
        is_path = isinstance(value, str) and is_reward_path(value)
    if path[-1:] == ("path",) and isinstance(value, str) and is_name(value, folder):
        return value  # of the Hugging Face hub
    if path[:1] == ("data",) and path[-1:] == ("path",) and isinstance(value, str) and _is_no_file(value):
        return value
    if is_path and isinstance(value, str) and value and not path_problem(value):
        return os.path.normpath(os.path.join(folder.absolute(), os.path.expanduser(value)))
    return value


def _text(tree: Tree, path: FilePath, shown: str, origin: Place | None) -> str | None:
    place, key = (origin, "extends") if origin else (Place(shown), "")
    try:
        return decode(read_bytes(path, limit=4 * MAX_CHARACTERS), shown, encoding="utf-8-sig")
    except Unreadable as error:
        reason, fix = str(error).removesuffix("."), ""
        if isinstance(error.__cause__, FileNotFoundError):
            reason, fix = f"there is no file {shown}", _suggest_file(path)
    tree.problem(place, key, reason, fix)
    tree.broken = True
    return None


def _suggest_file(path: FilePath) -> str:
    if not path.parent.is_dir():
        return f"there is no folder {display_path(path.parent)} either"
    names = sorted(p.name for p in islice(path.parent.iterdir(), 1000) if p.suffix in (".yaml", ".yml"))
    close = nearest(path.name, names)
    if close:
        return f"did you mean {display_path(path.parent / close)}?"
    return f"the folder has {', '.join(names[:8])}" if names else "its folder has no YAML file"


def display_path(path: FilePath) -> str:
    """Return the name of a file for a message: relative to the working directory if it is inside."""
    absolute = FilePath(os.path.normpath(path.absolute()))
    here = FilePath.cwd()
    return str(absolute.relative_to(here)) if absolute.is_relative_to(here) else str(absolute)
