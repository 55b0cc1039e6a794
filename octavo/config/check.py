"""Converts a tree to a Config, or reports every problem with its line and message
(:mod:`octavo.config.error_texts`)."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from octavo.config.config import Config, check_rules
from octavo.config.error_texts import describe_error, is_written_elsewhere, meant_key
from octavo.config.merge import Tree
from octavo.config.rules import general
from octavo.config.yaml.document import Path
from octavo.config.yaml.problems import MAX_SHOWN, ConfigError, Place, Problem, dotted

#: keys of another trainer at the top, from which on a file is taken for one of another framework
FLAT = 3
#: placeholders for required keys, so that rules over the other keys can be checked
_REQUIRED: tuple[tuple[str, str, Any], ...] = (
    ("model", "path", "-"), ("data", "train", [{"path": "-"}]), ("train", "phase", "sft"),
    ("rl", "rewards", ["exact_match"]),
)  # fmt: skip


def to_config(tree: Tree) -> Config:
    """Validate; raises :class:`ConfigError` with all problems of files, overrides, types and rules together.

    Beyond :data:`MAX_SHOWN` problems of types, messages and rules are skipped: searching names to suggest is
    expensive.
    """
    if tree.broken:
        raise ConfigError(tree.problems)
    problems = list(tree.problems)
    wrong_paths: list[Path] = []
    num_unlisted = 0
    translated: dict[Path, str] = {}
    # A value that could not be read is None in the tree, which is not a second problem.
    unread = {problem.key for problem in tree.problems}
    order = _order(tree)
    try:
        config: Config | None = Config.model_validate(tree.value, context={"rules": "later"})
    except ValidationError as error:
        details = [d for d in error.errors(include_url=False) if d["type"] != "default_factory_not_called"]
        unknown = [tuple(d["loc"]) for d in details if d["type"] == "extra_forbidden"]
        translated = {path: key for path in unknown if (key := meant_key(path)) is not None}
        details = _without_consequences(_drop_duplicates(details), tree, set(translated.values()))
        details.sort(key=lambda detail: order(tree.place(tuple(detail["loc"]))))
        reported = [d for d in details if d.get("input") is not None or dotted(tuple(d["loc"])) not in unread]
        num_unlisted = len(reported[MAX_SHOWN:])
        problems += _mention_import([_problem(detail, tree) for detail in reported[:MAX_SHOWN]], translated)
        wrong_paths = [tuple(detail["loc"]) for detail in details]
        config = None if num_unlisted else _without_wrong_values(tree.value, wrong_paths)
    if config is not None:
        extends_failed = any(problem.key == "extends" for problem in problems)
        for finding in check_rules(config):
            # A key that is absent because `extends` failed, or has another trainer's name, is not a second problem.
            named = {dotted(path) for path in (finding.path, *finding.needs)} & set(translated.values())
            in_stage = any(path[:2] == ("train", "stages") for path in wrong_paths)  # which may have had it
            if finding.reason == general.ABSENT and (extends_failed or named or in_stage):
                continue
            if dotted(finding.path) not in unread and not any(
                _overlaps(path, b) for path in (finding.path, *finding.needs) for b in wrong_paths
            ):
                problems.append(Problem(tree.place(finding.path), dotted(finding.path), finding.reason, finding.fix))
    if problems or config is None:
        raise ConfigError(sorted(dict.fromkeys(problems), key=lambda problem: order(problem.place)), num_unlisted)
    return config


def _drop_duplicates(details: list[ErrorDetails]) -> list[ErrorDetails]:
    """For a key that takes a word or a whole number, pydantic reports why a value is neither; keep only the number's
    error, under the name of the key."""
    remaining: list[ErrorDetails] = []
    for detail in details:
        last = str(detail["loc"][-1]) if detail["loc"] else ""
        if last == "constrained-int":
            detail = {**detail, "loc": detail["loc"][:-1]}
        if not last.startswith("literal["):
            remaining.append(detail)
    return remaining


def _without_consequences(details: list[ErrorDetails], tree: Tree, meant: set[str]) -> list[ErrorDetails]:
    """Drop errors that follow from others: keys that a broken `extends` would have set, keys that are there under a
    name of another trainer (``meant``), and lists that count as empty because their entries are wrong."""
    extends_failed = any(problem.key == "extends" for problem in tree.problems)
    places = [tuple(detail["loc"]) for detail in details]

    def follows(detail: ErrorDetails) -> bool:
        here = tuple(detail["loc"])
        if detail["type"] == "too_short":
            return any(place != here and place[: len(here)] == here for place in places)
        return detail["type"] == "missing" and (extends_failed or is_written_elsewhere(here, meant))

    return [detail for detail in details if not follows(detail)]


def _mention_import(problems: list[Problem], translated: Mapping[Path, str]) -> list[Problem]:
    """Let the first of several keys of another trainer at the top of a file name the command that translates files."""
    flat = {dotted(path) for path in translated if len(path) == 1}
    of_files = [number for number, problem in enumerate(problems) if problem.place.source.endswith((".yaml", ".yml"))]
    at_top = [number for number in of_files if problems[number].key in flat]
    if len(at_top) >= FLAT:
        first = problems[at_top[0]]
        hint = f"`octavo import {first.place.source} -o my.yaml` translates files of other frameworks"
        problems[at_top[0]] = dataclasses.replace(first, fix=f"{first.fix} {hint}")
    return problems


def _order(tree: Tree) -> Callable[[Place], tuple[int, int, int]]:
    """Return a sort key: by file in order of appearance, then by line and column; overrides come last, in their
    order."""
    overrides = dict.fromkeys(tree.overrides)
    files = dict.fromkeys(p.source for p in tree.places.values() if p.line is not None and p.source not in overrides)
    position = {source: number for number, source in enumerate([*files, *overrides])}
    return lambda place: (position.get(place.source, -1), place.line or 0, place.column or 0)


def _overlaps(path: Path, wrong_path: Path) -> bool:
    return path[: len(wrong_path)] == wrong_path or wrong_path[: len(path)] == path


def _without_wrong_values(value: dict[str, Any], wrong_paths: list[Path]) -> Config | None:
    """Validate the configuration without its wrong values, so that the rules over the other keys can be checked too."""
    for whole_lists in (False, True):  # a list entry may be invalid without the key that was removed from it
        repaired = copy.deepcopy(value)
        for path in wrong_paths:
            _remove(repaired, path, whole_lists)
        for section, key, filler in _REQUIRED:
            if section != "rl" or isinstance(repaired.get("rl"), dict):  # an optional section
                repaired.setdefault(section, {}).setdefault(key, filler)
        try:
            return Config.model_validate(repaired, context={"rules": "later"})
        except ValidationError:
            continue
    return None


def _remove(node: Any, path: Path, whole_lists: bool) -> None:
    """Remove ``path``; for an entry of a list remove the list, because the other entries would change places."""
    for depth, part in enumerate(path):
        last = depth == len(path) - 1
        if not isinstance(node, dict) or part not in node:
            return
        entry = isinstance(node[part], list) and (whole_lists or depth >= len(path) - 2)
        if last or entry:
            del node[part]
            return
        node = node[part]
        if isinstance(node, list):
            following = path[depth + 1]
            assert isinstance(following, int)
            _remove(node[following], path[depth + 2 :], whole_lists)
            return


def _problem(detail: ErrorDetails, tree: Tree) -> Problem:
    path: Path = tuple(detail["loc"])
    if detail["type"] == "missing" and isinstance(path[-1], int):
        path = path[:-1]  # a list of fixed length is reported as a whole
    reason, fix = describe_error(detail, path)
    return Problem(tree.place(path), dotted(path), reason, fix)
