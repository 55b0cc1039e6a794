"""The list of rows that were left out, cut or worth a word: `skipped.jsonl`, a line for each and its reason, once."""

from __future__ import annotations

import fcntl
import json
from collections import Counter
from pathlib import Path
from typing import Any

from octavo.base import encryption
from octavo.base.safe_read import kind_of
from octavo.data.errors import DataError

# Rows that are worth a word, and are trained on as they are:
CONTROL = "with control tokens"  # whose words spell some
LEFT_OUT = "with reasoning left out"  # of which the chat template does not write all
NOTED = (CONTROL, LEFT_OUT)


def left_out(answers: int) -> list[tuple[str, str]]:
    """(action, reason) of a row of which so many answers lost their reasoning."""
    why = (
        f"the chat template leaves the reasoning of {answers} earlier answer(s) out, so these are not learned as "
        "answers; set data.split_turns: true, or data.template_args.preserve_thinking: true if the template reads it"
    )
    return [(LEFT_OUT, why)]


Key = tuple[str, int, str, int | None]  # file, row, action, and question of a row that is split


def _key(record: dict[str, Any]) -> Key:
    return record["file"], record["row"], record["action"], record.get("question")


class SkipReport:
    """Writes records of rows left out or cut, and counts them.

    Several processes (ranks, a resumed run) may share one file: under a lock each first reads what the others wrote,
    so no row (and no question of one that is split) is listed twice for the same reason. `path=None` counts only; of a
    path that ends in `.aes` the lines are encrypted.
    `counts` maps action (skipped, dropped, cut, and those `NOTED`) to rows that this process met, `first` to the first
    of them.
    """

    def __init__(self, path: str | Path | None) -> None:
        self.path = None if path is None else Path(path)
        self.counts: Counter[str] = Counter()
        self.first: dict[str, dict[str, Any]] = {}
        self._met: set[Key] = set()
        self._listed: set[Key] = set()
        self._read = 0
        self._encrypted = self.path is not None and self.path.suffix == encryption.SUFFIX

    def add(self, record: dict[str, Any]) -> None:
        """Count a row, and list it where nobody has."""
        key = _key(record)
        if key in self._met:
            return
        self._met.add(key)
        self.counts[record["action"]] += 1
        self.first.setdefault(record["action"], record)
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists() and (what := kind_of(self.path)):
            raise DataError(f"{self.path} is {what}, and rows that are left out are listed in it; remove it")
        with self.path.open("ab+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            self._catch_up(file)
            if key not in self._listed:
                # A file's name may hold bytes that are no text; "\\udcff" is how JSON writes them.
                line = json.dumps(record, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"
                file.write(encryption.encrypted_line(line) if self._encrypted else line)
                file.flush()

    def _catch_up(self, file: Any) -> None:
        file.seek(self._read)
        text = file.read()
        if text and not text.endswith(b"\n"):  # a writer was killed in the middle of a line: leave it behind
            file.write(b"\n")
        self._read += len(text)
        for line in text.splitlines():
            try:
                found = json.loads(encryption.decrypted_line(line, self.path) if self._encrypted else line)
                self._listed.add(_key(found))
            except (ValueError, KeyError, TypeError, RecursionError, encryption.Damaged):
                continue
