"""What can be wrong with data: a whole file (`DataError`), one row of it (`BadSample`), or a worker (`WorkerDied`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any


class DataError(ValueError):
    """A data set that cannot be used as it was asked for. The message names the file, the finding and the fix."""


class BadSample(DataError):
    """One row that cannot be trained on.

    Attributes: `file` (the data file), `row` (counted from 0, in file order), `reason` (one sentence) and
    `id` (the row's own id, where it has one). With `on_bad_sample: skip` such a row is left out and listed.
    """

    action = "skipped"

    def __init__(self, file: str | Path, row: int, reason: str, id: str | None = None) -> None:
        self.file, self.row, self.reason, self.id = str(file), row, reason, id
        named = f" (id {id})" if id is not None else ""
        super().__init__(f"{self.file}, row {row}{named}: {reason}")

    # Exceptions pickle by their args; ours are the four fields, not the finished sentence.
    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        return type(self), (self.file, self.row, self.reason, self.id)

    def record(self) -> dict[str, Any]:
        """The line written to `skipped.jsonl`."""
        return {"file": self.file, "row": self.row, "id": self.id, "action": self.action, "reason": self.reason}


class LongSample(BadSample):
    """A row longer than `seq_length` that `on_long` says to leave out. Always left out, never an error."""

    action = "dropped"


class WorkerDied(RuntimeError):
    """A process that prepares rows (`data.workers`) died or hangs. The message names it, what is known and the fix."""
