"""The draft of a translation: it reads their keys, sets ours, and writes down what became of each.

A framework's file asks for a value (:meth:`Draft.number`, ``flag``, ``text``, ...), sets keys of ours (``put``), or
says why it does not (``same``, ``none``, ``dead``, ``table``). Whatever was asked for or named in a table is a key that
the framework has; a key that nobody named is unknown, and stands in the report as such. So no list of names can
disagree with the code, and no key can be forgotten.
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
from octavo.config.sections.text_types import is_url
from octavo.config.yaml.problems import ConfigError, Place, Problem, named, nearest
from octavo.importers.common.key_outcomes import Kind, Row, Setting
from octavo.importers.errors import TranslateError
from octavo.importers.source.keys import Foreign, Given
from octavo.importers.source.root_folder import Folder

#: of what a script or a file leaves open, the value cannot be known
_OPEN = "its value is a variable that the script does not set ({}); give it with --set {}=VALUE"
_RUN = "its value is what only a run of the script would give ({}), and nothing is run; write it out there"
_REFERS = "its value refers to {}, which only a running process there knows"
_EMPTY = "empty there, as if it were absent"
#: of a number that is read: above it are only slips, and their products would leave what a float holds
LARGEST = float(1 << 63)
#: words of one key; unknown keys that are compared with all known ones (each costs milliseconds)
_MOST_WORDS, _SUGGESTIONS = 10_000, 40
_FLAGS = {"true": True, "false": False, "yes": True, "no": False, "on": True, "off": False, "1": True, "0": False}


class Draft:
    """``folder``: the one that their relative paths are seen from, and outside of which nothing is read; ``out``: the
    file that is written; ``world``: the number of processes, and ``sizes``: the rows of the data, where they are given.

    A value that is nonsense (a word where a number belongs) is noted with its line; what is asked for goes on with what
    is usual there, so that all such values are found at once, and :meth:`finish` raises for them."""

    def __init__(
        self,
        foreign: Foreign,
        folder: Folder,
        out: Path,
        *,
        world: int | None = None,
        sizes: int | None = None,
    ) -> None:
        self.given = {given.key: given for given in foreign.given}
        self.command, self.referred = foreign.words, foreign.referred
        self.folder, self.root = folder, folder.root
        self.home, self.world, self.sizes = out.parent, world, sizes
        self.home_name = out.stem
        self.rows: dict[str, Row] = {}
        self.settings: dict[str, Setting] = {}
        self.asked: set[str] = set()
        self.patterns: list[str] = []
        self.notes: list[str] = []
        self.problems: dict[Problem, None] = {}
        self.files: dict[str, str] = {}
        self.sets: dict[str, str] = {}  # data.train.0 -> its path as it is seen from the folder
        self._noted: set[str] = set()
        self._order = {key: number for number, key in enumerate(self.given)}
        self._sorted = sorted(self.given)

    # ---- what was given

    def has(self, key: str) -> bool:
        """Whether a key has a value that can be known, or is a flag whose value was an empty variable."""
        return self.value(key) is not None or self._bare(key)

    def value(self, key: str) -> Any:
        """The value of a key as it was found; None where it is absent, empty, or open."""
        self.asked.add(key)
        found = self.given.get(key)
        return None if found is None or found.open or found.bare else found.value

    def _bare(self, key: str) -> bool:
        return key in self.given and self.given[key].bare

    def number(self, key: str, usual: float | None = None) -> Any:
        """A number; ``usual`` where none is given. 0 is what was asked for, not what is usual."""
        return self._number(key, self.value(key), usual)

    def number_in(self, key: str, name: str) -> Any:
        """A number within a mapping (:meth:`mapping`); None where it has none of that name."""
        inner = f"{key}.{name}"
        return self._number(inner if inner in self.given else key, self.mapping(key).get(name), None)

    def _number(self, key: str, value: Any, usual: float | None) -> Any:
        if isinstance(value, str):
            value = as_number(value)
        if value is None:
            return usual
        if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST:
            return value
        self._wrong(key, "a number" if isinstance(value, str | bool | list | dict) else "a finite number below 2^63")
        return usual

    def whole(self, key: str, usual: int | None = None) -> Any:
        """A whole number; ``usual`` where none is given."""
        value = self.number(key, usual)
        if value is None or value == int(value):
            return None if value is None else int(value)
        self._wrong(key, "a whole number")
        return usual

    def flag(self, key: str) -> bool | None:
        value = True if self._bare(key) else self.value(key)
        if value is None or isinstance(value, bool):
            return value
        known = _FLAGS.get(str(value).lower())
        return self._wrong(key, "true or false") if known is None else known

    def text(self, key: str) -> str | None:
        value = self.value(key)
        if isinstance(value, dict | list):
            return self._wrong(key, "a word")
        return None if value is None else str(value).lower() if isinstance(value, bool) else str(value)

    def words(self, key: str, split: str = ",") -> list[str]:
        """Several words: a list, or a text with commas between."""
        value = self.value(key)
        if value is None:
            return []
        if isinstance(value, dict) or (isinstance(value, list) and any(isinstance(v, dict | list) for v in value)):
            return self._wrong(key, "words") or []
        parts = value if isinstance(value, list) else [value]
        found = [word for part in parts for word in (w.strip() for w in str(part).split(split or "\0")) if word]
        return found if len(found) <= _MOST_WORDS else self._wrong(key, f"at most {_MOST_WORDS:,} words") or []

    def scalar(self, key: str) -> Any:
        """A single value of any kind: a word, a number, true or false."""
        value = self.value(key)
        if isinstance(value, dict | list) or (isinstance(value, float) and not math.isfinite(value)):
            return self._wrong(key, "a word, a number, true or false")
        return value

    def numbers(self, key: str) -> list[float]:
        """Several numbers: a list, or a text with commas between."""
        found = [as_number(word) for word in self.words(key)]
        if any(isinstance(value, str) or not abs(value) <= LARGEST for value in found):
            return self._wrong(key, "numbers") or []
        return [float(value) for value in found]

    def mapping(self, key: str) -> dict[str, Any]:
        """A mapping: of YAML (then its keys are leaves of their own, which are taken here), or JSON in a text."""
        value = self.value(key)
        if isinstance(value, str):
            try:
                value = safe_read.parse_json(value, key, wanted=None)
            except safe_read.Unreadable:
                return self._wrong(key, "a mapping (JSON)") or {}
        if value is not None and not isinstance(value, dict):
            return self._wrong(key, "a mapping") or {}
        inner = {k.removeprefix(f"{key}."): self.given[k].value for k in self.under(f"{key}.")}
        return dict(value or {}) | inner

    def under(self, prefix: str) -> list[str]:
        """The keys that begin with a prefix, in the order of the files."""
        first = bisect_left(self._sorted, prefix)
        found = takewhile(lambda key: key.startswith(prefix), islice(self._sorted, first, None))
        return sorted(found, key=self._order.__getitem__)

    def entries(self, prefix: str) -> list[str]:
        """The entries of a list of mappings: ``datasets.0``, ``datasets.1`` of ``datasets.0.path``, ``datasets.1.path``
        (flags may leave some out)."""
        heads = {key[len(prefix) + 1 :].partition(".")[0] for key in self.under(f"{prefix}.")}
        numbers = [head for head in heads if head.isdecimal() and head.isascii()]
        return [f"{prefix}.{head}" for head in sorted(numbers, key=lambda head: (len(head), head))]

    def add(self, given: Iterable[Given], prefix: str) -> None:
        """Keys of a further file, which a key of theirs names."""
        for one in given:
            self.given.setdefault(f"{prefix}{one.key}", replace(one, key=f"{prefix}{one.key}"))
        self._order = {key: number for number, key in enumerate(self.given)}
        self._sorted = sorted(self.given)

    # ---- what becomes of it

    def put(self, target: str, value: Any, *keys: str, why: str = "") -> None:
        """``target`` of ours gets a value, which comes from these keys; from none that is there: their default."""
        self.asked.update(key for key in keys if key)
        source = tuple(self.given[key] for key in dict.fromkeys(keys) if self.has(key))
        before = self.settings.get(target)
        for key in dict.fromkeys(keys):
            if (given := self.given.get(key)) is not None and given.open:
                why = f"{why}; to be filled in: {key} is open".removeprefix("; ")
                self.note(f"{target} is to be filled in: {key} is {given.value}, which is open; {value} stands there")
        self.settings[target] = Setting(value, source or (before.source if before else ()), why)
        for given in source:
            self._row(given, "translated", why, (target, value))

    def told(self, what: str, value: Any, *keys: str, why: str = "") -> None:
        """Keys that become something outside the file: an option of a command, a variable of the environment."""
        self.asked.update(keys)
        for key in keys:
            if self.has(key):
                self._row(self.given[key], "translated", why, (what, value))

    def same(self, *keys: str, why: str) -> None:
        """Equal to what Octavo does anyway."""
        self._say("default", keys, why)

    def none(self, *keys: str, why: str, apart: bool = False) -> None:
        """Nothing here does that: why, and what to do instead. ``apart``: no number of the training depends on it."""
        self._say("none", keys, why)
        for key in keys if apart else ():
            if key in self.rows:
                self.rows[key].apart = True

    def dead(self, *keys: str, why: str) -> None:
        """It did nothing there."""
        self._say("dead", keys, why)

    def refuse(self, key: str, why: str) -> NoReturn:
        """A run of a kind that is not translated: nothing that stands in its place would be that run."""
        given = self.given[key]
        raise TranslateError(f"{given.place}: {key}: {named(given.value)} is not translated: {why}.")

    def wrong(self, key: str, wanted: str, fix: str = "") -> None:
        """The value is nonsense: an error, with its line."""
        self._wrong(key, wanted, fix)

    def table(self, kind: Kind, reasons: Mapping[str, str]) -> None:
        """Reasons, each with the keys (or globs over them) that it is true of, for keys of which nothing was said."""
        for why, names in reasons.items():
            for name in names.split():
                self.asked.add(name)
                if not any(sign in name for sign in "*?["):
                    self._say(kind, (name,), why, late=True)
            if patterns := [name for name in names.split() if any(sign in name for sign in "*?[")]:
                self.patterns += patterns
                # what is open and was asked for has its own reason (finish)
                found = [
                    k for k in filter(_any_of(patterns), self.given) if not (k in self.asked and self.given[k].open)
                ]
                self._say(kind, found, why, late=True)
                for key in found:  # a variable of the environment that nothing here reads
                    if key.startswith("$") and key in self.rows:
                        self.rows[key].apart = True

    def note(self, text: str) -> None:
        """Something to know that is of no single key."""
        if text not in self._noted:
            self._noted.add(text)
            self.notes.append(text)

    def path(self, text: str, *, hub: bool = True) -> str:
        """A path of theirs as it is seen from the folder of the file that is written."""
        if not text or text.startswith(("/", "~", "$")) or is_url(text):
            return text
        if hub and is_name(text, self.root) and not self.folder.there(text):
            return text
        return os.path.relpath(self.root / text, self.home)

    def finish(self) -> None:
        """Everything of which nothing was said: open, empty, or unknown. Raises ConfigError for values of nonsense."""
        if self.problems:
            raise ConfigError([*self.problems])
        shared = self.settings.get("parallel.context")
        if shared is not None and "data.packing" in self.settings and not self.settings["data.packing"].source:
            self.note(
                f"parallel.context: {shared.value} needs as many processes, and packed rows: train.global_batch "
                f"counts packs, "
                "of which each holds several samples; lower it to keep the samples of a step"
            )
        self._note_unsure()
        for name in self.folder.refused:
            self.note(f"{name} is outside of {self.root} and was not read; give --root with a folder that holds it")
        known = sorted(name for name in self.asked if not any(sign in name for sign in "*?["))
        matched, left = _any_of(self.patterns), _SUGGESTIONS
        for key, given in self.given.items():
            if key in self.rows:
                continue
            theirs = key in self.asked or matched(key)
            if given.open:
                yaml = given.place.source.endswith((".yaml", ".yml", ".json"))
                settable = [name for name in given.open if name.isidentifier()]
                text = _REFERS if yaml else _OPEN if settable else _RUN
                why = text.format(", ".join(given.open), settable[0] if settable else "")
                self.rows[key] = Row(given, "none", why)
            elif theirs and given.value in (None, "", [], {}):
                self.rows[key] = Row(given, "default", _EMPTY)
            elif not theirs and key in self.referred:
                self.rows[key] = Row(given, "default", "a value that other keys refer to")
            elif theirs:
                self.rows[key] = Row(given, "none", "nothing that was translated depends on it")
            else:
                close = nearest(key, known) if left else None
                left -= left > 0
                why = "no key of this framework that Octavo knows" + (f"; did you mean {close}?" if close else "")
                self.rows[key] = Row(given, "unknown", why)

    # ---- within

    def _note_unsure(self) -> None:
        """Lines of a script that were not followed, with the keys that they may change."""
        changed: dict[tuple[str, int], list[str]] = {}
        for given in self.given.values():
            for line in given.unsure:
                changed.setdefault((given.place.source, line), []).append(given.key)
        for (source, line), keys in changed.items():
            names = ", ".join(keys[:8]) + (f" and {len(keys) - 8} more" if len(keys) > 8 else "")
            self.note(f"{Place(source, line)} is not followed and may change {names}: the values are those without it")

    def _say(self, kind: Kind, keys: Iterable[str], why: str, late: bool = False) -> None:
        for key in keys:
            self.asked.add(key)
            given = self.given.get(key)
            if given is None or (given.value is None and not given.open) or (late and key in self.rows):
                continue
            self._row(given, kind, why)

    def _row(self, given: Given, kind: Kind, why: str, target: tuple[str, Any] | None = None) -> None:
        row = self.rows.get(given.key)
        if row is None:
            self.rows[given.key] = Row(given, kind, why, (target,) if target else ())
        else:
            if row.kind == "default" and kind != "default":
                row.kind = kind
            row.more(why, target)

    def _wrong(self, key: str, wanted: str, fix: str = "") -> Any:
        given = self.given[key]
        problem = Problem(given.place, key, f"{named(given.value)}, where {wanted} belongs", fix or "correct it there")
        self.problems[problem] = None
        return None


def _any_of(patterns: Sequence[str]) -> Callable[[str], object]:
    """Whether a text matches one of several globs. One expression for all of them: a file may have 50,000 keys."""
    return re.compile("|".join(map(fnmatch.translate, patterns)) or r"(?!)").match


def as_number(text: str) -> float | str:
    """PyYAML reads 1e-4 as a text, and whoever takes it makes a number of it; so do we."""
    try:
        found = float(text.strip().replace("_", ""))
    except ValueError:
        return text
    return int(found) if abs(found) <= LARGEST and found == int(found) and "e" not in text.lower() else found


def choice(draft: Draft, key: str, known: Mapping[str, Any]) -> Any:
    """The meaning of one of several words; an unknown one is nonsense, with the nearest."""
    word = draft.text(key)
    if word is None:
        return None
    if word.lower() in known:
        return known[word.lower()]
    close = nearest(word, known)
    draft.wrong(key, f"one of {', '.join(known)}", f"did you mean {close}?" if close else "")
    return None


def globs(words: Sequence[str]) -> list[str]:
    """Names of modules as PEFT takes them, by their end, as globs over whole names."""
    return [word if "*" in word else f"**.{word}" for word in words]
