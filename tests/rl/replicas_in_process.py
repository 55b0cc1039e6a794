"""A transport of replicas in this process, with faults at chosen calls. Its clock moves with each wait."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterable

import numpy as np

from octavo.generation.engines import ReplicaLostError
from octavo.rl.fleet.replica import Replica, ReplicaSettings

Fault = str
"""lost: the process ends before the call; lost after: when the call has ended; hangs; stale: it has no weights any
more; down: it ends, and stays away."""


class ReplicasInProcess:
    """See :class:`octavo.generation.engines.Transport`. `fault(number, method, replica)` is asked before each call,
    which has a number from 0 on; `order` chooses which of the calls that have begun ends next. Arguments and results
    are pickled, as between processes."""

    is_concurrent = False

    def __init__(
        self,
        settings: ReplicaSettings,
        count: int,
        fault: Callable[[int, str, int], Fault | None] = lambda number, method, replica: None,
        order: Callable[[list[int]], int] = lambda handles: 0,
    ) -> None:
        self.settings, self.count, self.fault, self.order = settings, count, fault, order
        self.replicas: dict[int, Replica] = {}
        self.calls: dict[int, tuple[int, str, bytes]] = {}
        self.results: dict[int, object] = {}
        self.hanging: set[int] = set()
        self.down: set[int] = set()
        self.sent: dict[str, int] = {}
        self.clock, self.made, self.is_closed = 0.0, 0, False

    def start(self) -> int:
        return self.count

    def send(self, name: str, piece: object) -> object:
        self.sent[name] = self.sent.get(name, 0) + (piece.nbytes if isinstance(piece, np.ndarray) else 0)
        return piece

    def call(self, replica: int, method: str, *arguments: object) -> int:
        self.made += 1
        self.calls[self.made] = (replica, method, pickle.dumps(arguments))
        return self.made

    def wait(self, handles: Iterable[int], seconds: float) -> list[int]:
        self.clock += seconds
        waiting = [handle for handle in handles if handle not in self.hanging]
        if not waiting:
            return []
        handle = waiting[self.order(waiting) % len(waiting)]
        replica, method, arguments = self.calls[handle]
        fault = self.fault(handle, method, replica)
        if fault == "hangs":
            self.hanging.add(handle)
            return []
        self.results[handle] = self._run(replica, method, pickle.loads(arguments), fault)
        return [handle]

    def _run(self, number: int, method: str, arguments: tuple[object, ...], fault: Fault | None) -> object:
        if fault == "down":
            self.down.add(number)
        if fault in ("lost", "down") or number in self.down:
            self.replicas.pop(number, None)
            return ReplicaLostError("its process ended")
        try:
            if number not in self.replicas:
                self.replicas[number] = Replica(self.settings)
            replica = self.replicas[number]
            if fault == "stale":
                replica._version = None
            result = pickle.loads(pickle.dumps(getattr(replica, method)(*arguments)))
        except Exception as error:  # of the call: `result` raises it
            return error
        if fault == "lost after":
            del self.replicas[number]
            return ReplicaLostError("its process ended")
        return result

    def result(self, handle: int) -> object:
        if isinstance(result := self.results.pop(handle), Exception):
            raise result
        return result

    def restart(self, replica: int) -> None:
        self.replicas.pop(replica, None)
        self.hanging -= {handle for handle, (number, *_) in self.calls.items() if number == replica}

    def now(self) -> float:
        return self.clock

    def describe(self, replica: int) -> str:
        return f"replica {replica + 1} of {self.count} (process {os.getpid()})"

    def close(self) -> None:
        self.is_closed = True
