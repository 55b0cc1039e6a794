"""Reads files of other frameworks, with bounds on their size: YAML with interpolations, JSON, scripts and flags."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from octavo.base import safe_read
from octavo.base.safe_read import printable
from octavo.config.yaml.document import Document, read_text
from octavo.config.yaml.problems import ConfigError, Place, Problem, brief, dotted
from octavo.importers.errors import TranslateError
from octavo.importers.shell import interpreter as shell_script
from octavo.importers.source import training_command, yaml_references
from octavo.importers.source.keys import SourceConfig, SourceKey
from octavo.importers.source.root_folder import Folder

#: maximum bytes of a file; those that people write by hand are smaller
LIMIT = 4 << 20
#: maximum keys of a file; the longest published one has about 200
_MOST_KEYS = 100_000
#: reason for a configuration that a script names and that is not read
KEYS = "the configuration of the command: pass it as well, octavo import FILE SCRIPT"
_WORD_KEYS = "a key must be a word"


class Part(NamedTuple):
    """The contents of one file.

    kind    yaml, json, script or flags
    unread  lines that were not read: (place, text, why)
    words   the words of its command other than flags
    """

    path: Path
    kind: str
    source_keys: list[SourceKey]
    unread: list[tuple[Place, str, str]]
    words: set[str]


def read_files(paths: Sequence[Path], known: Mapping[str, str], folder: Folder) -> list[Part]:
    """Read the files. ``known``: variables of scripts with values from the user; ``folder``: the folder that the run
    was started in. Raises ConfigError for files with a wrong syntax, and for text that is not valid Unicode."""
    parts = [Part(path, *_read_file(path, known, folder)) for path in paths]
    for part in parts:
        if len(part.source_keys) > _MOST_KEYS:
            message = f"{printable(part.path.name)} holds {len(part.source_keys):,} keys"
            raise TranslateError(f"{message}, and {_MOST_KEYS:,} are the most here.")
        check_text(part.source_keys)
    return parts


def check_text(entries: Iterable[SourceKey]) -> None:
    """Raise ConfigError for a lone surrogate (left by a program that cut a text) or a NUL in a key or a value, which no
    file, name or report can hold."""
    problems = []
    for entry in entries:
        values = entry.value if isinstance(entry.value, list) else [entry.value]
        for what, text in (("the key", entry.key), *(("its value", text) for text in values)):
            if isinstance(text, str) and (why := _text_error(text)):
                problem_text = f"{what} is no valid Unicode: it {why}"
                problems.append(Problem(entry.place, entry.key, problem_text, "write it again"))
                break
    if problems:
        raise ConfigError(problems)


def _text_error(text: str) -> str | None:
    if text.isprintable() or ("\0" not in text and text.isascii()):
        return None
    if "\0" in text:
        return "holds a NUL character"
    surrogate = next((c for c in text if "\ud800" <= c <= "\udfff"), None)
    return f"holds half a character (\\u{ord(surrogate):04x})" if surrogate else None


def merge_parts(parts: Sequence[Part], first_wins: bool) -> SourceConfig:
    """Merge the keys of the files. ``first_wins``: which file wins if both give a key."""
    by_key: dict[str, SourceKey] = {}
    lost: list[tuple[SourceKey, str]] = []
    names = {part.path.name for part in parts}
    for entry in (entry for part in parts for entry in part.source_keys):
        before = by_key.get(entry.key)
        if before is None or before.place.source == entry.place.source:
            if before is not None:
                lost.append((before, f"set again on line {entry.place.line}, and the last one wins"))
            by_key[entry.key] = entry
        elif first_wins:
            lost.append((entry, f"{before.place} sets it too, and wins"))
        else:
            lost.append((before, f"{entry.place} sets it too, and wins"))
            by_key[entry.key] = entry
    unread = [line for part in parts for line in part.unread if line[2] != KEYS or Path(line[1]).name not in names]
    return SourceConfig(
        tuple(by_key.values()), tuple(part.kind for part in parts), tuple(lost), tuple(unread),
        frozenset(word for part in parts for word in part.words),
        frozenset(name for entry in by_key.values() for name in entry.refers),
    )  # fmt: skip


def _read_file(
    path: Path, known: Mapping[str, str], folder: Folder
) -> tuple[str, list[SourceKey], list[tuple[Place, str, str]], set[str]]:
    text = safe_read.read_text(path, TranslateError, LIMIT, encoding="utf-8-sig")
    name = printable(path.name)

    def find_file(named: str) -> str | None:
        """Return the text of a file that a script sources."""
        file = folder.find(named)
        return None if file is None else safe_read.read_text(file, TranslateError, LIMIT, encoding="utf-8-sig")

    if path.suffix in (".yaml", ".yml", ".json"):
        return _parse_mapping(text, name, path.suffix == ".json")
    if path.suffix in (".sh", ".bash", ".slurm", ".sbatch", ".txt", ".flags", ".args") or text.startswith("#!"):
        return _parse_script(text, name, known, find_file)
    if text.lstrip().startswith(("--", "{")):
        return (
            _parse_script(text, name, known, find_file)
            if text.lstrip().startswith("--")
            else _parse_mapping(text, name, True)
        )
    raise TranslateError(
        f"{name}: {path.suffix or 'a file without ending'} is not read here. Give .yaml, .yml or .json, a launch "
        "script (.sh), or flags in a .txt file."
    )


def _parse_script(
    text: str, name: str, known: Mapping[str, str], find_file: shell_script.FindFile
) -> tuple[str, list[SourceKey], list[tuple[Place, str, str]], set[str]]:
    # Everything in the script that was not read, or not certainly, is listed in the report.
    script = shell_script.read(text, known, name, find_file)
    command = training_command.find_training_command(script, name)
    words = command.words
    skipped = [(Place(name, line or None), what, why) for line, what, why in script.unread]
    if command.enclosing:
        why = f"it trains, and is in {command.enclosing[0]} that is not evaluated: it is used as if that held"
        skipped.append((Place(name, words[0].line or None), _command_text(words), why))
    skipped += [
        (Place(name, other.words[0].line or None), _command_text(other.words), "no command: the one above it ended")
        for other in script.commands
        if other.words[0].text.startswith("--") and not words[0].text.startswith("-")
    ]
    skipped += [
        (
            Place(name, word.line or None),
            word.text,
            f"words of the command that only a run knows ({', '.join(word.open)})",
        )
        for word in training_command.unknown_words(words)
    ]
    if (file := training_command.config_argument(words)) is not None:
        skipped.append((Place(name, file.line or None), file.text, KEYS))
    kind = "flags" if words[0].text.startswith("-") else "script"
    entries = [*training_command.parse_flags(words, name), *training_command.read_environment(script, command, name)]
    return kind, entries, skipped, {word.text for word in words if not word.text.startswith("-")}


def _command_text(words: Sequence[shell_script.Word]) -> str:
    """Return a command as the report shows it."""
    return brief(" ".join(word.text for word in words[:40]), 200)


def _parse_mapping(
    text: str, name: str, json: bool
) -> tuple[str, list[SourceKey], list[tuple[Place, str, str]], set[str]]:
    # JSON is YAML except for tabs between values. Inside strings JSON escapes tabs, so all of them can be replaced.
    document = read_text(text.replace("\t", " ") if json else text, name, "write a mapping: `key: value` lines")
    key_problems = [problem for problem in document.problems if problem.reason == _WORD_KEYS]
    if document.broken or len(key_problems) < len(document.problems):
        raise ConfigError([problem for problem in document.problems if problem not in key_problems])
    entries = _source_keys(document)
    # Keys that are numbers (ids of a tokenizer, devices) are never translated, but they are reported.
    entries += [SourceKey(problem.key, "(a key that is no word)", problem.place) for problem in key_problems]
    return "json" if json else "yaml", entries, [], set()


def _source_keys(document: Document) -> list[SourceKey]:
    return [
        SourceKey(
            _join_surrogates(dotted(path)),
            _join_surrogates(value),
            yaml_references.place_of(document, path),
            still_open,
            refers,
        )
        for path, (value, refers, still_open) in yaml_references.resolve(document).items()
    ]


def _join_surrogates(value: Any) -> Any:
    """Join the surrogate pairs that JSON writes for characters beyond 16 bits (``"\\ud83d\\ude00"``)."""
    if isinstance(value, list):
        return [_join_surrogates(item) for item in value]
    if not isinstance(value, str) or value.isprintable() or value.isascii():
        return value
    return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")
