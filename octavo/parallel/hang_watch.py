"""Where each rank is, so that a rank which hangs is named by those that wait for it.

A collective that fails says only that somebody did not come. So every rank keeps a beat in the store that the ranks met
at: how many marks of the run it has passed (all ranks pass the same ones), the last of them in words, and the line that
its main thread stands in, seen from outside by a thread. Nobody reads beats before a collective fails. Then a rank
whose beat stands still has died or is stopped; one that has passed fewer marks than the reader, or as many and waits
for nobody, is the one that is waited for.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed import distributed_c10d

BEATS = 2.5  # between two looks: in that time a process that runs has beaten
NAMED = 4  # ranks that a message names


@dataclass
class Marks:
    """What the main thread has passed: ``count`` marks, the last of them ``place``, in words. Each is the beginning of
    something that all ranks do."""

    count: int = 0
    place: str = "the start"


class Pulse:
    """The beat of this rank, every ``every`` seconds until :meth:`stop`. ``store``: ``torch.distributed``'s, shared."""

    def __init__(self, store: Any, rank: int, size: int, every: float, marks: Marks) -> None:
        self.rank, self.size, self.every, self.marks = rank, size, every, marks
        self._store, self._main = store.clone(), threading.get_ident()
        self._ended = threading.Event()
        threading.Thread(target=self._beat, args=(store.clone(),), name="pulse", daemon=True).start()

    def stop(self) -> None:
        self._ended.set()

    def missing(self) -> list[str]:
        """A clause for each rank that the others wait for; for all others, where none of them is behind."""
        first = self._look()
        if first is None:
            return ["rank 0, at which the ranks meet, no longer answers"]
        time.sleep(BEATS * self.every)
        second = self._look() or first
        gone = [rank for rank, beat in first.items() if second is not first and second.get(rank) == beat]
        late = [
            rank for rank, beat in first.items()
            if rank not in gone and (beat["marks"], beat["waits"]) < (self.marks.count, True)
        ]  # fmt: skip
        found = [f"rank {rank} has died or is stopped; it was last seen at {_where(first[rank])}" for rank in gone]
        found += [f"rank {rank} has not come further than {_where(second.get(rank, first[rank]))}" for rank in late]
        return found or [f"rank {rank} is at {_where(beat)}" for rank, beat in second.items()]

    def _beat(self, store: Any) -> None:
        beats = 0
        while not self._ended.is_set():
            beats += 1
            beat = {"beats": beats, "marks": self.marks.count, "place": self.marks.place, **_stands(self._main)}
            try:
                store.set(_key(self.rank), json.dumps(beat))
            except RuntimeError:  # the store went with the rank that keeps it, which whoever waits for it will say
                return
            self._ended.wait(self.every)

    def _look(self) -> dict[int, dict[str, Any]] | None:
        """The beats of the other ranks; None where the store does not answer, as when the process that keeps it is
        stopped: it is asked in a thread, which may wait for ever."""
        answer: dict[int, dict[str, Any]] = {}
        done = threading.Event()

        def ask() -> None:
            try:
                for rank in (r for r in range(self.size) if r != self.rank):
                    known = self._store.check([_key(rank)])
                    none = {"beats": 0, "marks": 0, "place": "the start", "line": "no line yet", "waits": False}
                    answer[rank] = json.loads(self._store.get(_key(rank))) if known else none
            except RuntimeError:
                return
            done.set()

        threading.Thread(target=ask, name="look", daemon=True).start()
        return answer if done.wait(max(1.0, BEATS * self.every)) else None


def _key(rank: int) -> str:
    return f"pulse_{rank}"


def _where(beat: dict[str, Any]) -> str:
    return f"{beat['place']} ({beat['line']})"


def _stands(thread: int) -> dict[str, Any]:
    """File, line and function that a thread stands in, and whether it waits there for other ranks."""
    frame = sys._current_frames().get(thread)
    if frame is None:
        return {"line": "its main thread has ended", "waits": False}
    file, waits, line, name = Path(frame.f_code.co_filename), False, frame.f_lineno, frame.f_code.co_name
    while frame is not None and not waits:
        waits = frame.f_code.co_filename in (__file__, distributed_c10d.__file__)
        frame = frame.f_back
    return {"line": f"{file.parent.name}/{file.name}:{line}, {name}", "waits": waits}


def missing_words(pulse: Pulse) -> str:
    """What :meth:`Pulse.missing` found, as one clause; of many ranks the first."""
    found = pulse.missing()
    more = f", and {len(found) - NAMED} more" if len(found) > NAMED else ""
    return "; ".join(found[:NAMED]) + more
