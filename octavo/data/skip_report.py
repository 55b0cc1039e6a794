"""The list of rows that were left out, cut or noted: `skipped.jsonl`, one line for each row and reason."""

from __future__ import annotations

import fcntl
import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from octavo.base import encryption
from octavo.base.safe_read import describe_file_type
from octavo.data.errors import DataError

# Actions of rows that are noted and trained on unchanged:
CONTROL = "with control tokens"  # the text spells control tokens
LEFT_OUT = "with reasoning left out"  # the chat template does not write all reasoning
NOTED = (CONTROL, LEFT_OUT)


def left_out(answers: int) -> list[tuple[str, str]]:
    """(action, reason) for a row in which this number of answers lost their reasoning."""
    why = (
        f"the chat template leaves the reasoning of {answers} earlier answer(s) out, so these are not learned as "
        "answers; set data.split_turns: true, or data.template_args.preserve_thinking: true if the template reads it"
    )
    return [(LEFT_OUT, why)]


Key = tuple[str, int, str, int | None]  # file, row, action, and the question if rows are split


def _key(record: Mapping[str, Any]) -> Key:
    return record["file"], record["row"], record["action"], record.get("question")


class SkipReport:
    """Writes records of rows that were left out, cut or noted, and counts them.

    Several processes (ranks, a resumed run) may share one file: under a lock each first reads what the others wrote,
    so that no row (or question of a split row) is listed twice for the same action. `path=None` only counts; in a file
    whose name ends in `.aes` the lines are encrypted.
    `counts` maps an action (skipped, dropped, cut, and those in `NOTED`) to the number of rows that this process met,
    `first` to the record of the first.
    """

    def __init__(self, path: str | Path | None) -> None:
        self.path = None if path is None else Path(path)
        self.counts: Counter[str] = Counter()
        self.first: dict[str, Mapping[str, Any]] = {}
        self._met: set[Key] = set()
        self._listed: set[Key] = set()
        self._read = 0
        self._encrypted = self.path is not None and self.path.suffix == encryption.SUFFIX

    def add(self, record: Mapping[str, Any]) -> None:
        """Count a row, and list it unless it is in the file. Raises `DataError` if the path is no regular file."""
        key = _key(record)
        if key in self._met:
            return
        self._met.add(key)
        self.counts[record["action"]] += 1
        self.first.setdefault(record["action"], record)
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists() and (what := describe_file_type(self.path)):
            raise DataError(f"{self.path} is {what}, and rows that are left out are listed in it; remove it")
        with self.path.open("ab+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            self._catch_up(file)
            if key not in self._listed:
                # A file name may have bytes that are not UTF-8; they are escaped as JSON does ("\\udcff").
                line = json.dumps(record, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"
                file.write(encryption.encrypt_line(line) if self._encrypted else line)
                file.flush()

    def _catch_up(self, file: BinaryIO) -> None:
        """Read the lines that other processes added since the last call."""
        file.seek(self._read)
        text = file.read()
        if text and not text.endswith(b"\n"):  # a writer was killed within a line: end that line
            file.write(b"\n")
        self._read += len(text)
        for line in text.splitlines():
            try:
                record = json.loads(encryption.decrypt_line(line, self.path) if self._encrypted else line)
                self._listed.add(_key(record))
            except (ValueError, KeyError, TypeError, RecursionError, encryption.Damaged):
                continue
