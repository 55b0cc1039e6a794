"""Stores the results of a call in two files that are complete at any time: tests.json and suites.json.

Both contain calls (time, budget, machine) and jobs by name. A job that runs again replaces its earlier results; jobs of
other calls are kept. All changes are events, and the files are the sum of the events: if the folder is not writable,
the events are printed as JSON lines instead, and `collect` makes files from them.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from octavo.base import atomic_write

FILES = {"tests": "tests.json", "suite": "suites.json"}
MARK = "octavo-gpu"  # the key by which a printed line is known
_PLACES = re.compile(rf"{re.escape(str(Path(__file__).resolve().parents[2]))}/|(?:/[\w.+-]+)+/(?:site|dist)-packages/")

Event = dict[str, Any]


class StoreError(ValueError):
    """A folder that cannot be used."""


class Store:
    """The files of a folder. ``unsaved``: how many events were printed and are in no file."""

    def __init__(self, folder: Path, log: Callable[[str], None]) -> None:
        self.folder, self.log = folder, log
        self.unsaved = 0
        self._waiting: dict[str, list[Event]] = {kind: [] for kind in FILES}
        self._full = ""
        self._lock: int | None = None
        try:
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                if atomic_write.why_no_space(folder, error) is None:
                    raise  # on a full disk there is nothing to lock, and each write will fail and be printed
            self.files = {kind: _read(folder / name) for kind, name in FILES.items()}
            if folder.exists():
                self._lock = os.open(folder, os.O_RDONLY)
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise StoreError(f"another call writes to {folder}; wait for it, or name another --out.") from error
        except OSError as error:
            raise StoreError(f"{folder} cannot be used: {error.strerror}. Name another --out.") from error

    def close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)

    def apply(self, kind: str, job: str, event: Event) -> None:
        """Note an event of a job, without where packages and this tree lie on this machine; `save` writes it."""
        event = _placeless(event)
        self._waiting[kind].append({MARK: [kind, job], **event})
        add(self.files[kind], job, event)

    def save(self) -> None:
        """Write what is new, a file at a time; print it where that fails."""
        for kind, name in FILES.items():
            if not self._waiting[kind]:
                continue
            try:
                atomic_write.write_text(self.folder / name, json.dumps(self.files[kind], indent=1, default=str) + "\n")
            except OSError as error:
                if not self._full:
                    self._full = error.strerror or str(error)
                    self.log(f"{self.folder} cannot be written ({self._full}): results follow as lines of JSON")
                    self._print([{MARK: [k, ""], "call": c, "what": w} for k in FILES for c, w in self._calls(k)])
                self._print(self._waiting[kind])
                self.unsaved += len(self._waiting[kind])
            self._waiting[kind].clear()

    def _calls(self, kind: str) -> Iterable[tuple[str, Any]]:
        """Of what calls there are, this one: a log that is collected elsewhere has to say where it ran."""
        return list(self.files[kind]["calls"].items())[-1:]

    def _print(self, events: Iterable[Event]) -> None:
        for event in events:
            self.log(json.dumps(event, default=str))

    @property
    def trouble(self) -> str:
        """What a person has to know of the files, empty where all is in them."""
        if not self.unsaved:
            return ""
        return (
            f"{self.folder} could not be written ({self._full}): {self.unsaved} results are above as lines of JSON "
            "and may be in no file; `python -m benchmarks.gpu --collect LOG --out DIR` makes files of them"
        )


def add(file: dict[str, Any], job: str, event: Event) -> None:
    """What an event changes in a file."""
    if "call" in event:  # its name and what it is
        file["calls"].pop(event["call"], None)  # the last is the one that writes
        file["calls"][event["call"]] = event["what"]
        return
    if "began" in event:  # replaces what an earlier call recorded of it
        file["jobs"][job] = {"call": event["began"], "state": "under way", "lost": [], "cut": []}
        file["jobs"][job] |= {"tests": {}} if event["tests"] else {"rows": [], "absent": []}
        return
    call = next(reversed(file["calls"]), "")
    entry = file["jobs"].setdefault(job, {"call": call, "state": "not begun", "lost": [], "cut": []})
    for key in ("rows", "absent", "lost", "cut"):
        if new := [line for line in event.get(key, ()) if line not in entry.get(key, ())]:
            entry.setdefault(key, []).extend(new)
    if "test" in event:
        node, outcome, seconds, why = event["test"]
        entry.setdefault("tests", {})[node] = {"outcome": outcome, "seconds": seconds} | ({"why": why} if why else {})
    entry.update({key: event[key] for key in ("state", "seconds", "collected") if key in event})


def collect(lines: Iterable[str], store: Store) -> int:
    """Make files of the lines of JSON that a call printed; how many there were."""
    count = 0
    for line in lines:
        if line.startswith(f'{{"{MARK}": ['):
            event = json.loads(line)
            kind, job = event.pop(MARK)
            store.apply(kind, job, event)
            count += 1
    store.save()
    return count


def _placeless(value: Any) -> Any:
    """Tracebacks name files as they are imported: torch/cuda/graphs.py, octavo/train/step/cuda_graphs.py."""
    if isinstance(value, dict):
        return {key: _placeless(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_placeless(item) for item in value]
    return _PLACES.sub("", value) if isinstance(value, str) else value


def _read(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {"command": "make gpu", "calls": {}, "jobs": {}}
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        assert isinstance(stored["jobs"], dict) and isinstance(stored["calls"], dict)
        return stored
    except (ValueError, KeyError, TypeError, AssertionError) as error:
        raise StoreError(
            f"{path} is not what a call wrote ({error!r}); move it away, or name another --out."
        ) from error
