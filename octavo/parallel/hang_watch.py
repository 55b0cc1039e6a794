"""Heartbeats of ranks, so that ranks that wait for a hanging rank can name it.

A failed collective does not say which rank is missing. So a thread of every rank writes a heartbeat to the rendezvous
store: how many phases of the run the rank has entered (all ranks enter the same ones), the name of the current phase,
and the line that its main thread executes. Heartbeats are read only after a collective has failed. A rank whose
heartbeat no longer changes has died or is stopped. A rank that has entered fewer phases than the reader, or as many
without waiting in a collective, is the missing one.
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

READ_INTERVALS = 2.5  # heartbeat intervals between two reads: a running process has written a new one by then
MAX_NAMED = 4  # ranks named in a message


class _Cloneable(Protocol):
    """A store with `clone`, which is missing from torch's stubs."""

    def clone(self) -> dist.Store: ...


@dataclass
class Progress:
    """The phases that the main thread has entered: their ``count`` and the name of the last one, ``phase``. All ranks
    enter the same phases in the same order."""

    count: int = 0
    phase: str = "the start"


class Heartbeat:
    """Writes this rank's heartbeat to the shared ``store`` every ``interval`` seconds until :meth:`stop`."""

    def __init__(self, store: dist.Store, rank: int, size: int, interval: float, progress: Progress) -> None:
        self.rank, self.size, self.interval, self.progress = rank, size, interval, progress
        # One clone per thread: a client serializes its calls, and one that waits would block the others.
        cloneable = cast(_Cloneable, store)
        self._store, self._main = cloneable.clone(), threading.get_ident()
        self._ended = threading.Event()
        threading.Thread(target=self._beat, args=(cloneable.clone(),), name="heartbeat", daemon=True).start()

    def stop(self) -> None:
        self._ended.set()

    def missing(self) -> list[str]:
        """Return a clause for each rank that the others wait for; if no rank is behind, a clause for every other
        rank."""
        first = self._read_beats()
        if first is None:
            return ["rank 0, which holds the store of the rendezvous, no longer answers"]
        time.sleep(READ_INTERVALS * self.interval)
        second = self._read_beats() or first
        stopped = [rank for rank, beat in first.items() if second is not first and second.get(rank) == beat]
        behind = [
            rank for rank, beat in first.items()
            if rank not in stopped and (beat["phases"], beat["waits"]) < (self.progress.count, True)
        ]  # fmt: skip
        clauses = [
            f"rank {rank} has died or is stopped; it was last seen at {_position(first[rank])}" for rank in stopped
        ]
        clauses += [f"rank {rank} has not got past {_position(second.get(rank, first[rank]))}" for rank in behind]
        return clauses or [f"rank {rank} is at {_position(beat)}" for rank, beat in second.items()]

    def _beat(self, store: dist.Store) -> None:
        beats = 0
        while not self._ended.is_set():
            beats += 1
            beat = {
                "beats": beats,
                "phases": self.progress.count,
                "phase": self.progress.phase,
                **_current_line(self._main),
            }
            try:
                store.set(_key(self.rank), json.dumps(beat))
            except RuntimeError:  # the rank that holds the store has ended; ranks that wait for it report it
                return
            self._ended.wait(self.interval)

    def _read_beats(self) -> dict[int, dict[str, Any]] | None:
        """Return the heartbeats of the other ranks, or None if the store does not answer, e.g. because the process that
        holds it is stopped. A daemon thread makes the call, because it may never return."""
        answer: dict[int, dict[str, Any]] = {}
        done = threading.Event()

        def read() -> None:
            try:
                for rank in (r for r in range(self.size) if r != self.rank):
                    has_beat = self._store.check([_key(rank)])
                    no_beat = {"beats": 0, "phases": 0, "phase": "the start", "line": "no line yet", "waits": False}
                    answer[rank] = json.loads(self._store.get(_key(rank))) if has_beat else no_beat
            except RuntimeError:
                return
            done.set()

        threading.Thread(target=read, name="read_heartbeats", daemon=True).start()
        return answer if done.wait(max(1.0, READ_INTERVALS * self.interval)) else None


def _key(rank: int) -> str:
    return f"heartbeat_{rank}"


def _position(beat: dict[str, Any]) -> str:
    return f"{beat['phase']} ({beat['line']})"


def _current_line(thread: int) -> dict[str, str | bool]:
    """Return the file, line and function that a thread executes, and whether it waits for other ranks there."""
    frame = sys._current_frames().get(thread)
    if frame is None:
        return {"line": "its main thread has ended", "waits": False}
    file, waits, line, name = Path(frame.f_code.co_filename), False, frame.f_lineno, frame.f_code.co_name
    while frame is not None and not waits:
        waits = frame.f_code.co_filename in (__file__, distributed_c10d.__file__)
        frame = frame.f_back
    return {"line": f"{file.parent.name}/{file.name}:{line}, {name}", "waits": waits}


def describe_missing(heartbeat: Heartbeat) -> str:
    """Join the clauses of :meth:`Heartbeat.missing` about at most :data:`MAX_NAMED` ranks."""
    clauses = heartbeat.missing()
    rest = f", and {len(clauses) - MAX_NAMED} more" if len(clauses) > MAX_NAMED else ""
    return "; ".join(clauses[:MAX_NAMED]) + rest
