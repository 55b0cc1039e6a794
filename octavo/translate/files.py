"""Files of others, read with bounds: YAML with its interpolations, JSON, launch scripts and flags."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from octavo import reading
from octavo.config.document import Document, read_text, scalar
from octavo.config.problems import ConfigError, Place, Problem, brief, dotted
from octavo.translate import launch, shell
from octavo.translate.given import Foreign, Given, TranslateError, flat

#: bytes of a file that somebody wrote by hand
LIMIT = 4 << 20
_WITHIN = re.compile(r"\$\{([^${}]*)\}")
#: why a file that a script names is not read
KEYS = "the file of its keys: give it too, octavo import FILE SCRIPT"
_WORD_KEYS = "a key must be a word"
#: how many rounds of interpolations within interpolations are followed
_ROUNDS = 8


def read(paths: Sequence[Path], known: Mapping[str, str], first_wins: bool, root: Path) -> Foreign:
    """All keys of one or two files. ``known``: variables of scripts that the user gives; ``root``: the folder that they
    were started in. Where both files give a key, the first wins, or the second does. Raises ConfigError for files that
    cannot be read as what they are."""
    given: dict[str, Given] = {}
    kinds, lost, unread, words, referred = [], [], [], set(), set()
    for path in paths:
        kind, found, skipped, seen = _one(path, known, root)
        referred |= {name for entry in found for name in entry.refers}
        skipped = [line for line in skipped if line[2] != KEYS or Path(line[1]).name not in {p.name for p in paths}]
        kinds.append(kind)
        unread += skipped
        words |= seen
        for entry in found:
            before = given.get(entry.key)
            if before is None or before.place.source == entry.place.source:
                if before is not None:
                    lost.append((before, f"given again on line {entry.place.line}, and the last one wins"))
                given[entry.key] = entry
            elif first_wins:
                lost.append((entry, f"{before.place} gives it too, and wins there"))
            else:
                lost.append((before, f"{entry.place} gives it too, and wins there"))
                given[entry.key] = entry
    return Foreign(
        tuple(given.values()), tuple(kinds), tuple(lost), tuple(unread), frozenset(words), frozenset(referred)
    )


def _one(
    path: Path, known: Mapping[str, str], root: Path
) -> tuple[str, list[Given], list[tuple[Place, str, str]], set[str]]:
    text = reading.read_text(path, TranslateError, LIMIT, encoding="utf-8-sig")
    name = path.name

    def look(named: str) -> str | None:
        """A file that a script sources: as seen from the folder it was started in, or from its own. None is read
        outside ``root``, wherever links lead."""
        home = root.resolve()
        for file in (root / named, path.parent / named):
            if len(named) < 4096 and "\0" not in named and file.is_file() and file.resolve().is_relative_to(home):
                return reading.read_text(file.resolve(), TranslateError, LIMIT, encoding="utf-8-sig")
        return None

    if path.suffix in (".yaml", ".yml", ".json"):
        return _mapping(text, name, path.suffix == ".json")
    if path.suffix in (".sh", ".bash", ".slurm", ".sbatch", ".txt", ".flags", ".args") or text.startswith("#!"):
        return _script(text, name, known, look)
    if text.lstrip().startswith(("--", "{")):
        return _script(text, name, known, look) if text.lstrip().startswith("--") else _mapping(text, name, True)
    raise TranslateError(
        f"{name}: {path.suffix or 'a file without ending'} is not read here. Give .yaml, .yml or .json, a launch "
        "script (.sh), or flags in a .txt file."
    )


def _script(
    text: str, name: str, known: Mapping[str, str], look: shell.Look
) -> tuple[str, list[Given], list[tuple[Place, str, str]], set[str]]:
    script = shell.read(text, known, name, look)
    command = launch.command_of(script, name)
    words = command.words
    skipped = [(Place(name, line or None), what, why) for line, what, why in script.unread]
    if command.within:
        why = f"it trains, and stands in {command.within[0]} that is not judged: it is taken as if that held"
        skipped.append((Place(name, words[0].line or None), _line_of(words), why))
    skipped += [
        (Place(name, other.words[0].line or None), _line_of(other.words), "no command: the one above it ended")
        for other in script.commands
        if other.words[0].text.startswith("--") and not words[0].text.startswith("-")
    ]
    skipped += [
        (
            Place(name, word.line or None),
            word.text,
            f"words of the command that only a run knows ({', '.join(word.open)})",
        )
        for word in launch.unplaced(words)
    ]
    if (file := launch.configuration(words)) is not None:
        skipped.append((Place(name, file.line or None), file.text, KEYS))
    kind = "flags" if words[0].text.startswith("-") else "script"
    found = [*launch.flags(words, name), *launch.environment(script, command, name)]
    return kind, found, skipped, {word.text for word in words if not word.text.startswith("-")}


def _line_of(words: Sequence[shell.Word]) -> str:
    """A command as the report lists it."""
    return brief(" ".join(word.text for word in words[:40]), 200)


def _mapping(text: str, name: str, json: bool) -> tuple[str, list[Given], list[tuple[Place, str, str]], set[str]]:
    # JSON is YAML but for tabs between its values; within them there are none
    document = read_text(text.replace("\t", " ") if json else text, name, "write a mapping: `key: value` lines")
    odd = [problem for problem in document.problems if problem.found == _WORD_KEYS]
    if document.broken or len(odd) < len(document.problems):
        raise ConfigError([problem for problem in document.problems if problem not in odd])
    found = _leaves(document, name)
    # keys that are numbers (a tokenizer's ids, devices): their values are not ours either, but they are told
    found += [Given(problem.key, "(a key that is no word)", problem.place) for problem in odd]
    return "json" if json else "yaml", found, [], set()


def _leaves(document: Document, name: str) -> list[Given]:
    begun = {path: tuple(_open(value)) for path, value in flat(document.value) if path}
    values = _resolved(document, name)
    return [
        Given(dotted(path), value, _place(document, path), tuple(_open(value)), begun.get(path, ()))
        for path, value in flat(values)
        if path
    ]


def _place(document: Document, path: tuple[str | int, ...]) -> Place:
    while path and path not in document.places:
        path = path[:-1]
    return document.places[path]


def _open(value: Any) -> list[str]:
    return [found[1] for found in _WITHIN.finditer(value)] if isinstance(value, str) else []


def _resolved(document: Document, name: str) -> dict[str, Any]:
    """The values with ``${a.b}`` in the place of what stands there (OmegaConf); calls of resolvers
    (``${act:gelu}``) stay open, ``${oc.env:NAME,default}`` gives its default."""
    root = document.value
    values = {path: value for path, value in flat(root) if path}
    for _ in range(_ROUNDS):
        changed = False
        for path, value in list(values.items()):
            if not isinstance(value, str) or "${" not in value:
                continue
            filled = _filled(value, path, root, values)
            if filled != value or type(filled) is not type(value):
                values[path], changed = filled, True
                _set(root, path, filled)
        if not changed:
            break
    for path, value in values.items():
        inside = _open(value)
        if inside and all(_there(name, root) for name in inside):
            found = f"{value!r} refers to itself, or through more than {_ROUNDS} others"
            raise ConfigError([Problem(_place(document, path), dotted(path), found, "write the value out")])
    return root


def _filled(value: str, path: tuple, root: dict, values: dict) -> Any:
    def look(inside: str) -> Any:
        if inside.startswith("oc.env:"):
            return scalar(inside.partition(",")[2]) if "," in inside else None
        if ":" in inside or not inside:
            return None
        keys = inside.lstrip(".").split(".")
        at: Any = root
        for key in keys:
            at = at.get(key) if isinstance(at, dict) else None
        return at if not isinstance(at, dict | list) else None

    whole = _WITHIN.fullmatch(value)
    if whole:
        found = look(whole[1])
        # a key that is there and empty makes an empty value
        return found if found is not None else None if _there(whole[1], root) else value
    return _WITHIN.sub(lambda m: m[0] if (found := look(m[1])) is None else str(found), value)


def _there(inside: str, root: dict) -> bool:
    at: Any = root
    for key in inside.lstrip(".").split("."):
        if not isinstance(at, dict) or key not in at:
            return False
        at = at[key]
    return True


def _set(root: Any, path: tuple, value: Any) -> None:
    for key in path[:-1]:
        root = root[key]
    root[path[-1]] = value
