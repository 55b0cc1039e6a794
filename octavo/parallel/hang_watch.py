"""Where each rank is, so that the ranks that wait for a hanging rank can name it.

A failed collective does not say which rank is missing. So a thread of every rank writes a heartbeat to the store of the
rendezvous: how many marks of the run the rank has passed (all ranks pass the same ones), the last mark in words, and
the line that its main thread executes. Heartbeats are read only after a collective has failed. A rank whose heartbeat
no longer changes has died or is stopped. A rank that has passed fewer marks than the reader, or as many and waits in no
collective, is the missing one.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import torch.distributed as dist
from torch.distributed import distributed_c10d

BEATS = 2.5  # intervals between two readings of a heartbeat: a running process has written one by then
NAMED = 4  # ranks that a message names


class _Cloneable(Protocol):
    """A store's `clone`, which torch's stubs lack."""

    def clone(self) -> dist.Store: ...


@dataclass
class Marks:
    """The marks that the main thread has passed: ``count`` of them, the last one described by ``place``. A mark is the
    start of something that all ranks do."""

    count: int = 0
    place: str = "the start"


class Pulse:
    """Writes this rank's heartbeat to the shared ``store`` every ``every`` seconds until :meth:`stop`."""

    def __init__(self, store: dist.Store, rank: int, size: int, every: float, marks: Marks) -> None:
        self.rank, self.size, self.every, self.marks = rank, size, every, marks
        # A clone per thread: a client's calls are serialized, and one that waits would hold up the others.
        cloneable = cast(_Cloneable, store)
        self._store, self._main = cloneable.clone(), threading.get_ident()
        self._ended = threading.Event()
        threading.Thread(target=self._beat, args=(cloneable.clone(),), name="pulse", daemon=True).start()

    def stop(self) -> None:
        self._ended.set()

    def missing(self) -> list[str]:
        """A clause for each rank that the others wait for; if none lags, a clause for every other rank."""
        first = self._look()
        if first is None:
            return ["rank 0, which holds the store of the rendezvous, no longer answers"]
        time.sleep(BEATS * self.every)
        second = self._look() or first
        gone = [rank for rank, beat in first.items() if second is not first and second.get(rank) == beat]
        late = [
            rank for rank, beat in first.items()
            if rank not in gone and (beat["marks"], beat["waits"]) < (self.marks.count, True)
        ]  # fmt: skip
        clauses = [f"rank {rank} has died or is stopped; it was last seen at {_where(first[rank])}" for rank in gone]
        clauses += [f"rank {rank} has not come further than {_where(second.get(rank, first[rank]))}" for rank in late]
        return clauses or [f"rank {rank} is at {_where(beat)}" for rank, beat in second.items()]

    def _beat(self, store: dist.Store) -> None:
        beats = 0
        while not self._ended.is_set():
            beats += 1
            beat = {"beats": beats, "marks": self.marks.count, "place": self.marks.place, **_line_of(self._main)}
            try:
                store.set(_key(self.rank), json.dumps(beat))
            except RuntimeError:  # the rank that holds the store has ended; ranks that wait for it report that
                return
            self._ended.wait(self.every)

    def _look(self) -> dict[int, dict[str, Any]] | None:
        """The heartbeats of the other ranks; None if the store does not answer, e.g. because the process that holds it
        is stopped. A daemon thread asks, because the call may never return."""
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


def _line_of(thread: int) -> dict[str, str | bool]:
    """The file, line and function that a thread executes, and whether it waits for other ranks there."""
    frame = sys._current_frames().get(thread)
    if frame is None:
        return {"line": "its main thread has ended", "waits": False}
    file, waits, line, name = Path(frame.f_code.co_filename), False, frame.f_lineno, frame.f_code.co_name
    while frame is not None and not waits:
        waits = frame.f_code.co_filename in (__file__, distributed_c10d.__file__)
        frame = frame.f_back
    return {"line": f"{file.parent.name}/{file.name}:{line}, {name}", "waits": waits}


def missing_words(pulse: Pulse) -> str:
    """:meth:`Pulse.missing` as one clause of at most :data:`NAMED` ranks."""
    clauses = pulse.missing()
    rest = f", and {len(clauses) - NAMED} more" if len(clauses) > NAMED else ""
    return "; ".join(clauses[:NAMED]) + rest
