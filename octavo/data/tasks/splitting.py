"""Splitting of conversations at their questions (`data.split_turns`): a row for each question, with all earlier turns.

    Q1 T1 A1 Q2 T2 A2   ->   Q1 T1 A1  |  Q1 A1 Q2 T2 A2

Templates leave out the reasoning (T) of answers before the last question, so that from a row of several questions only
the reasoning of the last is learned. After the split each answer is the last of a row, after exactly the prompt that a
model receives, and is learned only there: earlier turns are context. Tool calls, their results and the answer to them
belong to one question; turns after the last answer are dropped.

The number of questions in each row is computed once, from its turns only, and stored in a cache file: int64 [rows + 1],
the number of the first question of each row, and the total. So a split data set has a length, an order and a resume
position like any other.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from octavo.data.errors import BadSample, DataError, RowProblem
from octavo.data.formats.arrow_rows import Rows
from octavo.data.rows.audio_refs import AudioRef
from octavo.data.rows.conversations import Conversation, ImageRef, Turn
from octavo.data.rows.video_refs import VideoRef
from octavo.data.storage import cache
from octavo.data.tasks.prompts import read_answered_turns

FORMAT_VERSION = 1  # version of the file; incremented when the same rows give another file
REPORT_EVERY = 1000  # rows between progress reports


class SplittableSource(Protocol):
    """The interface of a `Source` that is split."""

    rows: Rows
    name: str
    format: str
    kind: str
    images: Path
    window: int | None

    @property
    def shards(self) -> Sequence[int] | None: ...

    def __len__(self) -> int: ...

    def __getitem__(self, row: int, /) -> Any: ...

    def raw(self, row: int, /) -> Any: ...


class SplitRows:
    """The rows of a source, split: `len(split)`, `split[i]` (a `Conversation`; raises `BadSample`), and the attributes
    of a `Source` for the order. `place(i)`: (row of the file, index of its question)."""

    def __init__(self, source: SplittableSource, file: Path) -> None:
        self.source, self.file = source, file
        self.name, self.rows, self.window = source.name, source.rows, source.window
        self._map()

    def _map(self) -> None:
        size = self.file.stat().st_size
        if size != 8 * (len(self.source) + 1):
            raise DataError(f"{self.file}, a file of the data cache, is damaged ({size} bytes for "
                            f"{len(self.source)} rows); remove it")  # fmt: skip
        self._begins: np.ndarray = np.memmap(self.file, "<i8", "r")

    def __getstate__(self) -> dict[str, object]:
        return {key: value for key, value in self.__dict__.items() if key != "_begins"}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._map()

    def __len__(self) -> int:
        return int(self._begins[-1])

    def place(self, number: int) -> tuple[int, int]:
        if not 0 <= number < len(self):
            raise IndexError(f"{self.name} makes {len(self)} rows; row {number} was requested")
        row = int(np.searchsorted(self._begins, number, "right")) - 1
        return row, number - int(self._begins[row])

    def __getitem__(self, number: int) -> Conversation:
        row, question_index = self.place(number)
        conversation = self.source[row]
        stops, counted = find_questions(conversation.turns), int(self._begins[row + 1] - self._begins[row])
        if len(stops) != counted:
            raise DataError(f"{self.name}, row {row}: has {len(stops)} question(s), and had {counted} when they were "
                            f"counted; begin a new run without {self.file}")  # fmt: skip
        return take_turns(conversation, *stops[question_index])

    @property
    def shards(self) -> Sequence[int] | None:
        """As of a `Source`."""
        if (sizes := self.source.shards) is None:
            return None
        return np.diff(self._begins[np.cumsum(sizes)], prepend=0)


def find_questions(turns: Sequence[Turn]) -> list[tuple[int, int]]:
    """Return (number of turns up to the last answer, number of earlier answers) of each question with an answer to
    learn. Consecutive turns of the user are one question."""
    stops = []
    before = answers = stop = 0
    learned = False
    for number, turn in enumerate(turns, 1):
        if turn.role == "assistant":
            answers, stop, learned = answers + 1, number, learned or turn.learned
        elif turn.role == "user" and answers > before:
            stops += [(stop, before)] if learned else []
            before, learned = answers, False
    return [*stops, (stop, before)] if learned else stops


def take_turns(conversation: Conversation, stop: int, context: int) -> Conversation:
    """Return the first `stop` turns of a conversation; its first `context` answers are context."""
    turns = conversation.turns[:stop]
    kinds = {"images": ImageRef, "sounds": AudioRef, "videos": VideoRef}
    counts = {name: sum(isinstance(p, kind) for turn in turns for p in turn.parts) for name, kind in kinds.items()}
    files: dict[str, Any] = {name: getattr(conversation, name)[:count] for name, count in counts.items()}
    return replace(conversation, turns=turns, context_answers=context, **files)


def split(
    source: SplittableSource, folder: Path | None = None, log: cache.Log = cache.no_log, depends_on: str = ""
) -> SplitRows:
    """Split a source at its questions; their numbers come from the cache or are counted now. `depends_on`: all
    else in the data set's configuration that determines its rows. Raises `DataError` if the cache cannot be used."""

    def write(file: Path, progress: Callable[[float], None]) -> None:
        counts = np.ones(len(source), np.int64)  # one for a bad row, which is reported when it is used
        for row in range(len(source)):
            with suppress(BadSample, RowProblem):
                counts[row] = len(find_questions(read_answered_turns(source.raw(row), source.format)))
            if row % REPORT_EVERY == 0:
                progress(row / len(source))
        np.concatenate([[0], np.cumsum(counts)]).astype("<i8").tofile(file)

    key = json.dumps([FORMAT_VERSION, source.format, len(source), depends_on])
    return SplitRows(source, cache.cached_file(folder, source.rows.path, write, log, key, "questions"))
