"""The draft of a translation: reads keys of the source framework, sets keys of Octavo, and records each outcome.

The module of a framework reads values (:meth:`Draft.number`, ``flag``, ``text``, ...), sets keys of Octavo (``set``),
or records why it does not (``mark_default``, ``mark_unsupported``, ``mark_ignored``, ``mark_many``). Every key that it
reads or names in a table exists in that framework; any other key is reported as unknown. So there is no separate list
of names that could disagree with the code, and no key is forgotten.
"""

from __future__ import annotations

import fnmatch
import math
import os
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice, takewhile
from pathlib import Path
from typing import Any, NoReturn

from octavo.base import safe_read
from octavo.base.hub import is_name
from octavo.base.wording import nearest
from octavo.config.sections.text_types import is_url
from octavo.config.yaml.problems import ConfigError, Place, Problem, describe_value
from octavo.importers.common.key_outcomes import Kind, Row, Setting
from octavo.importers.errors import TranslateError
from octavo.importers.source.keys import SourceConfig, SourceKey
from octavo.importers.source.root_folder import Folder

#: reasons for keys without a known value
_OPEN = "the script does not set this variable ({}); pass --set {}=VALUE"
_RUN = (
    "the value is only known when the script runs ({}), and the importer runs nothing; write the value into the script"
)
_REFERS = "the value refers to {}, which is only known at run time"
_EMPTY = "empty, same as absent"
#: limit of numbers: larger ones are mistakes, and their products could overflow a float
LARGEST = float(1 << 63)
#: maximum number of words of a key, and of unknown keys that get a suggestion (each takes milliseconds)
_MAX_WORDS, _MAX_SUGGESTIONS = 10_000, 40
_FLAGS = {"true": True, "false": False, "yes": True, "no": False, "on": True, "off": False, "1": True, "0": False}


class Draft:
    """A translation in progress.

    folder          the folder that relative paths start from; files outside it are not read
    out             the output file
    num_processes   the number of processes, or None if the user did not set it
    num_rows        the number of rows of the data, or None if unknown

    An invalid value (a word instead of a number) is recorded with its line, and reading continues with the default, so
    that all such values are reported at once: :meth:`finish` raises for them.
    """

    def __init__(
        self,
        source_config: SourceConfig,
        folder: Folder,
        out: Path,
        *,
        num_processes: int | None = None,
        num_rows: int | None = None,
    ) -> None:
        self.source_keys = {entry.key: entry for entry in source_config.source_keys}
        self.command, self.referenced = source_config.words, source_config.referenced
        self.folder, self.root = folder, folder.root
        self.out_dir, self.num_processes, self.num_rows = out.parent, num_processes, num_rows
        self.out_name = out.stem
        self.rows: dict[str, Row] = {}
        self.settings: dict[str, Setting] = {}
        self.read_keys: set[str] = set()
        self.patterns: list[str] = []
        self.notes: list[str] = []
        self.problems: dict[Problem, None] = {}
        self.files: dict[str, str] = {}
        self.dataset_paths: dict[str, str] = {}  # data.train.0 -> its path relative to the folder
        self._noted: set[str] = set()
        self._order = {key: number for number, key in enumerate(self.source_keys)}
        self._sorted = sorted(self.source_keys)

    # ---- reading keys

    def has(self, key: str) -> bool:
        """Whether a key has a known value, or is a flag whose value was an empty variable."""
        return self.value(key) is not None or self._is_bare(key)

    def value(self, key: str) -> Any:
        """Return the value of a key as it was written; None if it is absent, empty, or open."""
        self.read_keys.add(key)
        entry = self.source_keys.get(key)
        return None if entry is None or entry.open or entry.bare else entry.value

    def _is_bare(self, key: str) -> bool:
        return key in self.source_keys and self.source_keys[key].bare

    def number(self, key: str, default: float | None = None) -> Any:
        """Return a number, or ``default`` if the key has no value. 0 is a value."""
        return self._number(key, self.value(key), default)

    def number_in(self, key: str, name: str) -> Any:
        """Return a number of a mapping (:meth:`mapping`), or None if it has no such name."""
        inner = f"{key}.{name}"
        return self._number(inner if inner in self.source_keys else key, self.mapping(key).get(name), None)

    def _number(self, key: str, value: Any, default: float | None) -> Any:
        if isinstance(value, str):
            value = as_number(value)
        if value is None:
            return default
        if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST:
            return value
        self._add_problem(
            key, "a number" if isinstance(value, str | bool | list | dict) else "a finite number below 2^63"
        )
        return default

    def integer(self, key: str, default: int | None = None) -> Any:
        """Return a whole number, or ``default`` if the key has no value."""
        value = self.number(key, default)
        if value is None or value == int(value):
            return None if value is None else int(value)
        self._add_problem(key, "a whole number")
        return default

    def flag(self, key: str) -> bool | None:
        value = True if self._is_bare(key) else self.value(key)
        if value is None or isinstance(value, bool):
            return value
        known = _FLAGS.get(str(value).lower())
        return self._add_problem(key, "true or false") if known is None else known

    def text(self, key: str) -> str | None:
        value = self.value(key)
        if isinstance(value, dict | list):
            return self._add_problem(key, "a word")
        return None if value is None else str(value).lower() if isinstance(value, bool) else str(value)

    def words(self, key: str, split: str = ",") -> list[str]:
        """Return a list of words, from a list or from a text separated by ``split``."""
        value = self.value(key)
        if value is None:
            return []
        if isinstance(value, dict) or (isinstance(value, list) and any(isinstance(v, dict | list) for v in value)):
            return self._add_problem(key, "words") or []
        parts = value if isinstance(value, list) else [value]
        words = [word for part in parts for word in (w.strip() for w in str(part).split(split or "\0")) if word]
        return words if len(words) <= _MAX_WORDS else self._add_problem(key, f"at most {_MAX_WORDS:,} words") or []

    def scalar(self, key: str) -> Any:
        """Return a single value: a word, a number, or a boolean."""
        value = self.value(key)
        if isinstance(value, dict | list) or (isinstance(value, float) and not math.isfinite(value)):
            return self._add_problem(key, "a word, a number, true or false")
        return value

    def numbers(self, key: str) -> list[float]:
        """Return a list of numbers, from a list or from a comma-separated text."""
        numbers = [as_number(word) for word in self.words(key)]
        if any(isinstance(value, str) or not abs(value) <= LARGEST for value in numbers):
            return self._add_problem(key, "numbers") or []
        return [float(value) for value in numbers]

    def mapping(self, key: str) -> dict[str, Any]:
        """Return a mapping, from JSON in a text or from the leaves of a YAML mapping."""
        value = self.value(key)
        if isinstance(value, str):
            try:
                value = safe_read.parse_json(value, key, wanted=None)
            except safe_read.Unreadable:
                return self._add_problem(key, "a mapping (JSON)") or {}
        if value is not None and not isinstance(value, dict):
            return self._add_problem(key, "a mapping") or {}
        inner = {k.removeprefix(f"{key}."): self.source_keys[k].value for k in self.keys_under(f"{key}.")}
        return dict(value or {}) | inner

    def keys_under(self, prefix: str) -> list[str]:
        """Return the keys that begin with a prefix, in the order of the files."""
        first = bisect_left(self._sorted, prefix)
        keys = takewhile(lambda key: key.startswith(prefix), islice(self._sorted, first, None))
        return sorted(keys, key=self._order.__getitem__)

    def list_entries(self, prefix: str) -> list[str]:
        """Return the entries of a list of mappings: ``datasets.0``, ``datasets.1`` for ``datasets.0.path``,
        ``datasets.1.path`` (flags may leave some out)."""
        heads = {key[len(prefix) + 1 :].partition(".")[0] for key in self.keys_under(f"{prefix}.")}
        numbers = [head for head in heads if head.isdecimal() and head.isascii()]
        return [f"{prefix}.{head}" for head in sorted(numbers, key=lambda head: (len(head), head))]

    def add(self, entries: Iterable[SourceKey], prefix: str) -> None:
        """Add the keys of another file that a key names."""
        for entry in entries:
            self.source_keys.setdefault(f"{prefix}{entry.key}", replace(entry, key=f"{prefix}{entry.key}"))
        self._order = {key: number for number, key in enumerate(self.source_keys)}
        self._sorted = sorted(self.source_keys)

    # ---- setting keys, and the outcome of each

    def set(self, target: str, value: Any, *keys: str, why: str = "") -> None:
        """Set Octavo's key ``target``. Its value comes from ``keys``, or is the framework's default if none of them is
        present."""
        self.read_keys.update(key for key in keys if key)
        source = tuple(self.source_keys[key] for key in dict.fromkeys(keys) if self.has(key))
        before = self.settings.get(target)
        for key in dict.fromkeys(keys):
            if (entry := self.source_keys.get(key)) is not None and entry.open:
                why = f"{why}; FILL IN: {key} is not set in the script".removeprefix("; ")
                self.add_note(
                    f"FILL IN: set {target}; {key} is {entry.value}, which the script does not set, so {value} is a "
                    "placeholder"
                )
        self.settings[target] = Setting(value, source or (before.source if before else ()), why)
        for entry in source:
            self._add_outcome(entry, "translated", why, (target, value))

    def set_outside(self, what: str, value: Any, *keys: str, why: str = "") -> None:
        """Record keys that become a command-line option or an environment variable instead of a key of the file."""
        self.read_keys.update(keys)
        for key in keys:
            if self.has(key):
                self._add_outcome(self.source_keys[key], "translated", why, (what, value))

    def mark_default(self, *keys: str, why: str) -> None:
        """Record keys that request Octavo's default behavior."""
        self._mark("default", keys, why)

    def mark_unsupported(self, *keys: str, why: str, affects_training: bool = True) -> None:
        """Record keys without an equivalent, with the reason and the alternative. Keys with ``affects_training=False``
        never count as lost."""
        self._mark("none", keys, why)
        for key in () if affects_training else keys:
            if key in self.rows:
                self.rows[key].affects_training = False

    def mark_ignored(self, *keys: str, why: str) -> None:
        """Record keys that had no effect in the other framework."""
        self._mark("dead", keys, why)

    def refuse(self, key: str, why: str) -> NoReturn:
        """Raise TranslateError for a kind of run that cannot be translated."""
        entry = self.source_keys[key]
        raise TranslateError(f"{entry.place}: {key}: {describe_value(entry.value)} cannot be translated: {why}.")

    def mark_invalid(self, key: str, wanted: str, fix: str = "") -> None:
        """Record an invalid value as an error, with its line."""
        self._add_problem(key, wanted, fix)

    def mark_many(self, kind: Kind, reasons: Mapping[str, str]) -> None:
        """Record the outcome of keys (or globs) that have none yet. ``reasons``: reason -> names separated by
        spaces."""
        for why, names in reasons.items():
            for name in names.split():
                self.read_keys.add(name)
                if not any(sign in name for sign in "*?["):
                    self._mark(kind, (name,), why, late=True)
            if patterns := [name for name in names.split() if any(sign in name for sign in "*?[")]:
                self.patterns += patterns
                # A key that was read but has no known value gets its reason in `finish`.
                matches = [
                    k
                    for k in filter(_compile_globs(patterns), self.source_keys)
                    if not (k in self.read_keys and self.source_keys[k].open)
                ]
                self._mark(kind, matches, why, late=True)
                for key in matches:  # environment variables that are not read above
                    if key.startswith("$") and key in self.rows:
                        self.rows[key].affects_training = False

    def add_note(self, text: str) -> None:
        """Add a note that does not belong to a single key."""
        if text not in self._noted:
            self._noted.add(text)
            self.notes.append(text)

    def path(self, text: str, *, hub: bool = True) -> str:
        """Return a path of the source, relative to the folder of the output file."""
        if not text or text.startswith(("/", "~", "$")) or is_url(text):
            return text
        if hub and is_name(text, self.root) and not self.folder.exists(text):
            return text
        return os.path.relpath(self.root / text, self.out_dir)

    def finish(self) -> None:
        """Record the outcome of all remaining keys: no known value, empty, or unknown. Raises ConfigError for invalid
        values."""
        if self.problems:
            raise ConfigError([*self.problems])
        context = self.settings.get("parallel.context")
        if context is not None and "data.packing" in self.settings and not self.settings["data.packing"].source:
            self.add_note(
                f"parallel.context: {context.value} needs that many processes and packed rows: train.global_batch "
                "counts packs, each with several samples; lower it to keep the number of samples per step"
            )
        self._note_unsure()
        for name in self.folder.refused:
            self.add_note(f"{name} is outside {self.root} and was not read; set --root to a folder that contains it")
        known = sorted(name for name in self.read_keys if not any(sign in name for sign in "*?["))
        matched, suggestions_left = _compile_globs(self.patterns), _MAX_SUGGESTIONS
        for key, entry in self.source_keys.items():
            if key in self.rows:
                continue
            # A key that was read, or matches a pattern, exists in the framework; any other one may be misspelled.
            is_known = key in self.read_keys or matched(key)
            if entry.open:
                yaml = entry.place.source.endswith((".yaml", ".yml", ".json"))
                settable = [name for name in entry.open if name.isidentifier()]
                text = _REFERS if yaml else _OPEN if settable else _RUN
                why = text.format(", ".join(entry.open), settable[0] if settable else "")
                self.rows[key] = Row(entry, "none", why)
            elif is_known and entry.value in (None, "", [], {}):
                self.rows[key] = Row(entry, "default", _EMPTY)
            elif not is_known and key in self.referenced:
                self.rows[key] = Row(entry, "default", "only used by keys that refer to it")
            elif is_known:
                self.rows[key] = Row(entry, "none", "not used by the translation")
            else:
                close = nearest(key, known) if suggestions_left else None
                suggestions_left -= suggestions_left > 0
                why = "Octavo does not know this key of the framework" + (f"; did you mean {close}?" if close else "")
                self.rows[key] = Row(entry, "unknown", why)

    # ---- helpers

    def _note_unsure(self) -> None:
        """Add a note for each line of a script that was not evaluated, with the keys that it may change."""
        changed: dict[tuple[str, int], list[str]] = {}
        for entry in self.source_keys.values():
            for line in entry.unsure:
                changed.setdefault((entry.place.source, line), []).append(entry.key)
        for (source, line), keys in changed.items():
            names = ", ".join(keys[:8]) + (f" and {len(keys) - 8} more" if len(keys) > 8 else "")
            self.add_note(
                f"{Place(source, line)} is not evaluated and may change {names}; the translated values ignore that line"
            )

    def _mark(self, kind: Kind, keys: Iterable[str], why: str, late: bool = False) -> None:
        for key in keys:
            self.read_keys.add(key)
            entry = self.source_keys.get(key)
            if entry is None or (entry.value is None and not entry.open) or (late and key in self.rows):
                continue
            self._add_outcome(entry, kind, why)

    def _add_outcome(self, entry: SourceKey, kind: Kind, why: str, target: tuple[str, Any] | None = None) -> None:
        row = self.rows.get(entry.key)
        if row is None:
            self.rows[entry.key] = Row(entry, kind, why, (target,) if target else ())
        else:
            if row.kind == "default" and kind != "default":
                row.kind = kind
            row.extend(why, target)

    def _add_problem(self, key: str, wanted: str, fix: str = "") -> Any:
        entry = self.source_keys[key]
        problem = Problem(
            entry.place,
            key,
            f"expected {wanted}, found {describe_value(entry.value)}",
            fix or "correct it in this file",
        )
        self.problems[problem] = None
        return None


def _compile_globs(patterns: Sequence[str]) -> Callable[[str], object]:
    """Compile globs to one regular expression, because a file may have 50,000 keys. Returns its match function."""
    return re.compile("|".join(map(fnmatch.translate, patterns)) or r"(?!)").match


def as_number(text: str) -> float | str:
    """Convert a text to a number if possible. PyYAML reads 1e-4 as a text, and all frameworks convert it."""
    try:
        number = float(text.strip().replace("_", ""))
    except ValueError:
        return text
    return int(number) if abs(number) <= LARGEST and number == int(number) and "e" not in text.lower() else number


def choice(draft: Draft, key: str, known: Mapping[str, Any]) -> Any:
    """Return the value that ``known`` has for a word. An unknown word is an error that suggests the closest one."""
    word = draft.text(key)
    if word is None:
        return None
    if word.lower() in known:
        return known[word.lower()]
    close = nearest(word, known)
    draft.mark_invalid(key, f"one of {', '.join(known)}", f"did you mean {close}?" if close else "")
    return None


def globs(words: Sequence[str]) -> list[str]:
    """Return names of modules, which PEFT matches by suffix, as globs over full names."""
    return [word if "*" in word else f"**.{word}" for word in words]
