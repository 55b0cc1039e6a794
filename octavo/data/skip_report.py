"""The report of rows that were skipped, dropped, cut or noted: `skipped.jsonl`, one line per row and reason."""

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

# Actions for rows that are noted and trained on unchanged:
CONTROL_TOKENS = "with control tokens"  # the text contains control tokens
REASONING_LEFT_OUT = "with reasoning left out"  # the chat template does not write all reasoning
NOTED = (CONTROL_TOKENS, REASONING_LEFT_OUT)


def reasoning_notes(answers: int) -> list[tuple[str, str]]:
    """Return the (action, reason) notes for a row in which the template dropped the reasoning of this many answers."""
    reason = (
        f"the chat template leaves the reasoning of {answers} earlier answer(s) out, so these are not learned as "
        "answers; set data.split_turns: true, or data.template_args.preserve_thinking: true if the template reads it"
    )
    return [(REASONING_LEFT_OUT, reason)]


Key = tuple[str, int, str, int | None]  # file, row, action, and the question if rows are split


def _key(record: Mapping[str, Any]) -> Key:
    return record["file"], record["row"], record["action"], record.get("question")


class SkipReport:
    """Counts rows that were skipped, dropped, cut or noted, and writes a record of each to a file.

    Several processes (ranks, a resumed run) may share the file: under a lock, each first reads the lines of the others,
    so that no row (or question of a split row) is listed twice for the same action. With `path=None` rows are only
    counted; in a file whose name ends in `.aes` the lines are encrypted.
    `counts` maps an action (skipped, dropped, cut, or one of `NOTED`) to the number of rows that this process counted,
    `first` maps it to the record of the first of them.
    """

    def __init__(self, path: str | Path | None) -> None:
        self.path = None if path is None else Path(path)
        self.counts: Counter[str] = Counter()
        self.first: dict[str, Mapping[str, Any]] = {}
        self._seen: set[Key] = set()
        self._written: set[Key] = set()
        self._offset = 0
        self._encrypted = self.path is not None and self.path.suffix == encryption.SUFFIX

    def add(self, record: Mapping[str, Any]) -> None:
        """Count a row, and write it unless the file has it. Raises `DataError` if the path is not a regular file."""
        key = _key(record)
        if key in self._seen:
            return
        self._seen.add(key)
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
            if key not in self._written:
                # A file name may have bytes that are not UTF-8; they are escaped as JSON does ("\\udcff").
                line = json.dumps(record, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"
                file.write(encryption.encrypt_line(line) if self._encrypted else line)
                file.flush()

    def _catch_up(self, file: BinaryIO) -> None:
        """Read the lines that other processes have added since the last call."""
        file.seek(self._offset)
        text = file.read()
        if text and not text.endswith(b"\n"):  # a writer was killed within a line: end that line
            file.write(b"\n")
        self._offset += len(text)
        for line in text.splitlines():
            try:
                record = json.loads(encryption.decrypt_line(line, self.path) if self._encrypted else line)
                self._written.add(_key(record))
            except (ValueError, KeyError, TypeError, RecursionError, encryption.Damaged):
                continue
