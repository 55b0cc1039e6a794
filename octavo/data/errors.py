"""Errors of a data file (`DataError`), of one row (`BadSample`) and of a worker process (`WorkerDied`)."""

from __future__ import annotations

import math
import reprlib
from pathlib import Path

from octavo.base.safe_read import printable
from octavo.config.sections.text_types import python_name

MAX_QUOTED_CHARS = 1000  # limit of a quoted reason; an id gets a tenth of it. Values in rows may have megabytes.


_REPR = reprlib.Repr()  # abbreviates without formatting the whole value, however large it is
_REPR.maxstring = _REPR.maxother = 80


class DataError(ValueError):
    """A data set that cannot be used as configured. The message names the file, the problem and the fix.

    quotes  True if the message may quote a row; a run that encrypts its files does not print such messages
    """

    quotes = False


class QuotingError(DataError):
    """A `DataError` whose message quotes rows."""

    quotes = True


class NoUsableRow(DataError):
    """Data sets of which no row can be used: one line each. `quotes`: whether a line quotes a row."""

    def __init__(self, *lines: str, quotes: bool) -> None:
        super().__init__("\n".join(lines))
        self.lines, self.quotes = lines, quotes

    def __add__(self, other: NoUsableRow) -> NoUsableRow:
        return NoUsableRow(*self.lines, *other.lines, quotes=self.quotes or other.quotes)


class BadSample(DataError):
    """One row that cannot be trained on.

    Attributes: `file` (the data file), `row` (counted from 0, in file order), `reason` (one sentence) and
    `id` (the row's id, or None). With `on_bad_sample: skip` such a row is skipped and listed.
    """

    action = "skipped"
    quotes = True

    def __init__(self, file: str | Path, row: int, reason: str, id: str | None = None) -> None:
        self.file, self.row, self.reason = str(file), row, printable(_shorten(reason, MAX_QUOTED_CHARS))
        self.id = None if id is None else printable(_shorten(id, MAX_QUOTED_CHARS // 10))
        id_text = f" (id {self.id})" if id is not None else ""
        super().__init__(f"{printable(row_place(self.file, row))}{id_text}: {self.reason}")

    # Exceptions pickle their args, which here are the four fields and not the finished message.
    def __reduce__(self) -> tuple[type, tuple[str, int, str, str | None]]:
        return type(self), (self.file, self.row, self.reason, self.id)

    def record(self) -> dict[str, str | int | None]:
        """Return the line written to `skipped.jsonl`."""
        return {"file": self.file, "row": self.row, "id": self.id, "action": self.action, "reason": self.reason}


def row_place(file: str, row: int) -> str:
    """Return the place of a row for a message: its file and its number, or the argument of `octavo.run` and the
    index in it."""
    name = python_name(file)
    return f"{file}, row {row}" if name is None else f"{name}[{row}]"


def _shorten(text: str, max_chars: int) -> str:
    return text if len(text) <= max_chars else text[: max_chars - 3] + "..."


class RowProblem(ValueError):
    """A row with a wrong structure. Converted to a `BadSample` where the file and the row number are known."""


class MediaProblem(ValueError):
    """An image, audio or video file that cannot be used. The message becomes the reason of a `BadSample`."""


class Mismatch(ValueError):
    """A conversation that the processor or the model does not accept. Converted to a `BadSample`."""


def quote_value(value: object) -> str:
    """Return the first 80 characters of a value's repr, for an error message."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN, a missing value" if math.isnan(value) else f"{'-' * (value < 0)}Infinity"
    text = _REPR.repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


class LongSample(BadSample):
    """A row longer than `seq_length` with `on_long: drop`. It is always dropped, never an error."""

    action = "dropped"


class WorkerDied(RuntimeError):
    """A data worker process (`data.workers`) died or hangs. The message names the process, its rows and the fix."""
