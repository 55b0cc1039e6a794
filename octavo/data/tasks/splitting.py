"""Conversations split at their questions (`data.split_turns`): a row for each question, with all that was said before.

    Q1 T1 A1 Q2 T2 A2   ->   Q1 T1 A1  |  Q1 A1 Q2 T2 A2

Templates leave out the reasoning (T) of answers before the last question, so that a row of several questions teaches
the last one's alone. Split, each answer is the last of a row, behind the prompt that a model is given, and is learned
there and nowhere else: what was said before is context. Calls of tools, what comes back and the answer to it belong to
one question; what follows the last answer of all is left out.

How many questions each row has is found once, from its turns alone, and kept in a file of the cache: int64
[rows + 1], where the questions of each row begin and the last ones end. So a data set that is split has a length, an
order and a place to go on from as any other has.
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
from octavo.data.tasks.prompts import turns_of

FORM = 1  # of the file; rises when the same rows give another
TOLD = 1000  # rows between words on how far the look through them has come


class SplitSource(Protocol):
    """What is split: a `Source`."""

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


class Split:
    """The rows of a source, split: `len(split)`, `split[i]` (a `Conversation`; raises `BadSample`), and what the order
    asks of a `Source`. `place(i)`: (row of the file, which of its questions, from 0)."""

    def __init__(self, source: SplitSource, file: Path) -> None:
        self.source, self.file = source, file
        self.name, self.rows, self.window = source.name, source.rows, source.window
        self._map()

    def _map(self) -> None:
        size = self.file.stat().st_size
        self._begins: Any = np.memmap(self.file, "<i8", "r") if size == 8 * (len(self.source) + 1) else None
        if self._begins is None:
            raise DataError(f"{self.file}, a file of the data cache, is damaged ({size} bytes for "
                            f"{len(self.source)} rows); remove it")  # fmt: skip

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_begins"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._map()

    def __len__(self) -> int:
        return int(self._begins[-1])

    def place(self, number: int) -> tuple[int, int]:
        if not 0 <= number < len(self):
            raise IndexError(f"{self.name} makes {len(self)} rows of its questions, asked for row {number}")
        row = int(np.searchsorted(self._begins, number, "right")) - 1
        return row, number - int(self._begins[row])

    def __getitem__(self, number: int) -> Conversation:
        row, nth = self.place(number)
        conversation = self.source[row]
        found, known = questions(conversation.turns), int(self._begins[row + 1] - self._begins[row])
        if len(found) != known:
            raise DataError(f"{self.name}, row {row}: has {len(found)} question(s), and had {known} when they were "
                            f"counted; begin a new run without {self.file}")  # fmt: skip
        return first_turns(conversation, *found[nth])

    @property
    def shards(self) -> Sequence[int] | None:
        """As of a `Source`."""
        if (sizes := self.source.shards) is None:
            return None
        return np.diff(self._begins[np.cumsum(sizes)], prepend=0)


def questions(turns: Sequence[Turn]) -> list[tuple[int, int]]:
    """(turns up to the last answer, answers before it) of each question that has an answer to learn. Turns of the user
    behind one another ask one question."""
    found = []
    before = answers = stop = 0
    learned = False
    for number, turn in enumerate(turns, 1):
        if turn.role == "assistant":
            answers, stop, learned = answers + 1, number, learned or turn.learned
        elif turn.role == "user" and answers > before:
            found += [(stop, before)] if learned else []
            before, learned = answers, False
    return [*found, (stop, before)] if learned else found


def first_turns(conversation: Conversation, stop: int, given: int) -> Conversation:
    """The first `stop` turns, of which the `given` first answers are context."""
    turns = conversation.turns[:stop]
    kinds = {"images": ImageRef, "sounds": AudioRef, "videos": VideoRef}
    counts = {name: sum(isinstance(p, kind) for turn in turns for p in turn.parts) for name, kind in kinds.items()}
    files: dict[str, Any] = {name: getattr(conversation, name)[:count] for name, count in counts.items()}
    return replace(conversation, turns=turns, context_answers=given, **files)


def split(source: SplitSource, folder: Path | None = None, say: cache.Say = cache.quiet, more: str = "") -> Split:
    """A source split at its questions, their number out of the cache or found now. `more`: what else of the data set
    decides what its rows are. Raises `DataError` where the cache cannot be used."""

    def write(file: Path, progress: Callable[[float], None]) -> None:
        counts = np.ones(len(source), np.int64)  # of a bad row one: it is told when it is read
        for row in range(len(source)):
            with suppress(BadSample, RowProblem):
                counts[row] = len(questions(turns_of(source.raw(row), source.format)))
            if row % TOLD == 0:
                progress(row / len(source))
        np.concatenate([[0], np.cumsum(counts)]).astype("<i8").tofile(file)

    key = json.dumps([FORM, source.format, len(source), more])
    return Split(source, cache.cached_file(folder, source.rows.path, write, say, key, "questions"))
