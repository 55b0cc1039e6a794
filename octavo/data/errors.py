"""What can be wrong with data: a whole file (`DataError`), one row of it (`BadSample`), or a worker (`WorkerDied`)."""

from __future__ import annotations

import math
import reprlib
from pathlib import Path
from typing import Any

from octavo.base.safe_read import printable

MOST = 1000  # characters of a reason, and a tenth of it of an id: rows may hold megabytes


_REPR = reprlib.Repr()  # what is shown of a value costs the same, however large the value
_REPR.maxstring = _REPR.maxother = 80


class DataError(ValueError):
    """A data set that cannot be used as it was asked for. The message names the file, the finding and the fix.

    quotes  whether it may hold words of a row, which a run that encrypts what it writes does not print
    """

    quotes = False


class QuotingError(DataError):
    """The same, of which the message shows what stands in rows."""

    quotes = True


class BadSample(DataError):
    """One row that cannot be trained on.

    Attributes: `file` (the data file), `row` (counted from 0, in file order), `reason` (one sentence) and
    `id` (the row's own id, where it has one). With `on_bad_sample: skip` such a row is left out and listed.
    """

    action = "skipped"
    quotes = True

    def __init__(self, file: str | Path, row: int, reason: str, id: str | None = None) -> None:
        self.file, self.row, self.reason = str(file), row, printable(_cut(reason, MOST))
        self.id = None if id is None else printable(_cut(id, MOST // 10))
        named = f" (id {self.id})" if id is not None else ""
        super().__init__(f"{printable(file)}, row {row}{named}: {self.reason}")

    # Exceptions pickle by their args; ours are the four fields, not the finished sentence.
    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        return type(self), (self.file, self.row, self.reason, self.id)

    def record(self) -> dict[str, Any]:
        """The line written to `skipped.jsonl`."""
        return {"file": self.file, "row": self.row, "id": self.id, "action": self.action, "reason": self.reason}


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."


class RowProblem(ValueError):
    """Why a row is not what it should be. Who knows its file and number turns it into a `BadSample`."""


class ImageProblem(ValueError):
    """An image, sound or video that cannot be used; the message is the reason of a `BadSample`."""


class Mismatch(ValueError):
    """Processor and conversation do not go together; becomes a `BadSample`."""


def shown(value: Any) -> str:
    """The beginning of a value, for an error."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN, a missing value" if math.isnan(value) else f"{'-' * (value < 0)}Infinity"
    text = _REPR.repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


class LongSample(BadSample):
    """A row longer than `seq_length` that `on_long` says to leave out. Always left out, never an error."""

    action = "dropped"


class WorkerDied(RuntimeError):
    """A process that prepares rows (`data.workers`) died or hangs. The message names it, what is known and the fix."""
