"""The list of rows that were left out: `skipped.jsonl`, one line a row, each row once."""

from __future__ import annotations

import fcntl
import json
from collections import Counter
from pathlib import Path
from typing import Any


class SkipReport:
    """Writes records of rows left out or cut, and counts them.

    Several processes (ranks, a resumed run) may share one file: under a lock each first reads what the others wrote,
    so no row is listed twice. `path=None` counts only. `counts` maps action (skipped, dropped, cut) to rows that
    this process met.
    """

    def __init__(self, path: str | Path | None) -> None:
        self.path = None if path is None else Path(path)
        self.counts: Counter[str] = Counter()
        self._met: set[tuple[str, int]] = set()
        self._listed: set[tuple[str, int]] = set()
        self._read = 0

    def add(self, record: dict[str, Any]) -> None:
        """Count a row, and list it where nobody has."""
        key = (record["file"], record["row"])
        if key in self._met:
            return
        self._met.add(key)
        self.counts[record["action"]] += 1
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            self._catch_up(file)
            if key not in self._listed:
                file.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
                file.flush()

    def _catch_up(self, file: Any) -> None:
        file.seek(self._read)
        text = file.read()
        if text and not text.endswith(b"\n"):  # a writer was killed in the middle of a line: leave it behind
            file.write(b"\n")
        self._read += len(text)
        for line in text.splitlines():
            try:
                found = json.loads(line)
                self._listed.add((found["file"], found["row"]))
            except (ValueError, KeyError, TypeError):
                continue
