"""Several replicas of an engine, in separate processes, as one engine.

The prompts of a call are cut into chunks of a fixed number of prompts. A replica generates one chunk at a time, always
whole and with the same settings, so that a chunk's completions do not depend on the replica that generates it or on how
often it was tried. The trainer holds everything that must not be lost: the chunks and their states, the finished
completions, and the weights. A replica that dies, is late, or has other weights loses only the chunk that it has, which
is generated again.

    waiting -> with a replica -> finished
       ^             |
       +-------------+   the replica was lost or late, or had other weights

How processes are started, reached and ended is the :class:`Transport`'s.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, cast

from octavo.base.wording import count_noun
from octavo.generation.engines.interface import Generation, StaleWeightsError
from octavo.generation.engines.manifest import Manifest, Pieces
from octavo.generation.errors import GenerationError
from octavo.generation.request import Completion, Prompt, Sampling

POLL = 0.5
"""Seconds after which waiting looks at deadlines and reports progress, and a lost replica is tried again."""
MAX_FAULTS = 3
"""How often in a row a replica may have other weights than it was sent, and how often a chunk may be lost."""


class ReplicaLostError(GenerationError):
    """A replica's process ended, or cannot be reached."""


class Transport(Protocol):
    """Starts replicas and calls their methods, one call at a time:

    update(version, manifest, pieces)                  -> the digest of its weights
    generate(version, (prompts, sampling, group))      -> (version of its weights, completions)

    is_concurrent  whether calls run next to other work of this process; else a pool works when it is asked for results
    """

    is_concurrent: bool

    def start(self) -> int:
        """Start the replicas, without waiting until they are ready. Returns their number."""

    def send(self, name: str, piece: object) -> object:
        """Make a piece of weights, or a chunk, available to all replicas. Returns what `call` takes in its place."""

    def call(self, replica: int, method: str, *arguments: object) -> object:
        """Begin a call, also of a replica that was lost. Returns a handle."""

    def wait(self, handles: Iterable[object], seconds: float) -> list[object]:
        """Wait until a call has ended, or for `seconds`, also without handles. Returns the handles of ended calls."""

    def result(self, handle: object) -> object:
        """Return the result of a call that has ended. Raises ReplicaLostError if its replica was lost, and the
        GenerationError of the call."""

    def restart(self, replica: int) -> None:
        """End the process of a replica, and start another."""

    def now(self) -> float:
        """Return the time in seconds, from any start."""

    def describe(self, replica: int) -> str:
        """Return where a replica runs, for messages."""

    def close(self) -> None:
        """End all replicas."""


@dataclass(frozen=True)
class Event:
    """Something that happened to a replica: `lost`, `late`, `stale` or `other weights`. `chunk` is the number of the
    chunk that it had, or None."""

    kind: str
    replica: int
    chunk: int | None
    reason: str


@dataclass
class Chunk:
    """A part of the prompts of a call: its first prompt's index, and its state."""

    number: int
    first: int
    prompts: Sequence[Prompt]
    sent: object = None
    faults: int = 0  # how often it was lost with its replica
    completions: list[Completion] | None = None

    def place(self, completions: Iterable[Completion]) -> None:
        """Store copies of the completions of the chunk, with prompts counted as in the call. (What a transport returns
        may be read-only views of memory that it would keep for them.)"""
        self.completions = [
            replace(
                c,
                prompt=c.prompt + self.first,
                tokens=c.tokens.copy(),
                logps=c.logps.copy(),
                entropy=c.entropy.copy(),
            )
            for c in completions
        ]


@dataclass
class _Replica:
    """What the trainer knows of a replica: the version that it has, and its current call."""

    number: int
    version: int | None = None
    pieces: frozenset[str] = frozenset()
    call: _Call | None = None
    failed_updates: int = 0  # in a row
    lost_since: float | None = None


@dataclass(frozen=True)
class _Call:
    """A call that has begun: the version that it is for, with its digest and pieces, and its chunk; without one it is
    an update."""

    handle: object
    version: int | None
    digest: str
    pieces: frozenset[str]
    chunk: Chunk | None
    since: float


def unfinished(chunks: Sequence[Chunk]) -> list[Chunk]:
    """Return the chunks without completions."""
    return [chunk for chunk in chunks if chunk.completions is None]


class _Running:
    """A call of a pool; see :class:`octavo.generation.engines.Generation`."""

    def __init__(self, pool: ReplicaPool, chunks: Sequence[Chunk], group: int) -> None:
        self.pool, self.chunks, self.group = pool, chunks, group
        self.thread: threading.Thread | None = None
        self.error: Exception | None = None

    def work(self, progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Work until all chunks have completions, the pool is closed, or an error is kept for the result."""
        try:
            while unfinished(self.chunks) and not self.pool.is_closed:
                self._report(progress)
                self.pool.work()
        except Exception as error:
            self.error = error

    def join(self) -> None:
        """Wait for the end of the work."""
        if self.thread is not None:
            self.thread.join()
        elif self.error is None:
            self.work()

    def result(self, progress: Callable[[int, int], None] = lambda done, total: None) -> list[Completion]:
        """See :class:`octavo.generation.engines.Generation`."""
        if self.thread is None:
            self.work(progress)
        else:
            while self.thread.is_alive():
                self._report(progress)
                self.thread.join(POLL)
        if self.error is not None:
            raise self.error
        if unfinished(self.chunks):
            raise GenerationError("the replicas were closed before their completions were there.")
        completions = [c for chunk in self.chunks for c in chunk.completions or ()]
        return sorted(completions, key=lambda c: (c.prompt, c.sample))

    def _report(self, progress: Callable[[int, int], None]) -> None:
        total = sum(len(chunk.prompts) for chunk in self.chunks)
        progress(self.group * (total - sum(len(c.prompts) for c in unfinished(self.chunks))), self.group * total)


class ReplicaPool:
    """Replicas as one engine; see the module's docstring.

    chunk     prompts of a chunk
    timeout   seconds that a call may take before its replica is ended and started again, and that the pool waits for
              any replica if all are lost
    log       called with a line about each event
    observe   called with each event
    """

    shares_weights = False

    def __init__(
        self,
        transport: Transport,
        *,
        chunk: int,
        timeout: float,
        log: Callable[[str], None] = lambda text: None,
        observe: Callable[[Event], None] = lambda event: None,
    ) -> None:
        self.transport, self.chunk, self.timeout = transport, chunk, timeout
        self._log, self._observe = log, observe
        self._replicas = [_Replica(number) for number in range(transport.start())]
        self._version: int | None = None
        self._manifest = Manifest(())
        self._sent: dict[str, object] = {}  # pieces of the current version
        self._chunks: list[Chunk] = []  # of the current call
        self._running: _Running | None = None
        self.is_closed = False
        self.generated: dict[int, int] = {}  # replica -> completions since the start

    def update(self, version: int, manifest: Manifest, pieces: Pieces) -> str:
        """See :meth:`octavo.generation.engines.RolloutEngine.update`. Replicas that are lost meanwhile receive the
        weights when they are back."""
        self._wait_for_running()
        new = {name: self.transport.send(name, piece) for name, piece in pieces.items()}
        self._sent = {name: sent for name, sent in {**self._sent, **new}.items() if name in manifest.pieces}
        if missing := [name for name in manifest.pieces if name not in self._sent]:
            raise GenerationError(f"the weights of version {version} are incomplete: {missing[0]} was never sent.")
        self._version, self._manifest = version, manifest
        while not self.work():
            pass
        return manifest.digest

    def generate(self, version: int, prompts: Sequence[Prompt], sampling: Sampling, group: int = 1) -> Generation:
        """See :meth:`octavo.generation.engines.RolloutEngine.generate`: a thread gives the replicas their work. The
        result raises GenerationError if no replica could be reached for `timeout` seconds, and if a chunk was lost with
        its replica three times."""
        running = self._start(version, prompts, sampling, group)
        if self.transport.is_concurrent:
            running.thread = threading.Thread(target=running.work, name="replicas", daemon=True)
            running.thread.start()
        return running

    def _start(self, version: int, prompts: Sequence[Prompt], sampling: Sampling, group: int) -> _Running:
        self._wait_for_running()
        if version != self._version:
            raise StaleWeightsError(f"the replicas have the weights of version {self._version}, not of {version}.")
        self._chunks = [
            Chunk(number, first, prompts[first : first + self.chunk])
            for number, first in enumerate(range(0, len(prompts), self.chunk))
        ]
        for chunk in self._chunks:  # sent once: a node that has it needs it no second time
            chunk.sent = self.transport.send(f"chunk {chunk.number}", (chunk.prompts, sampling, group))
        self._running = _Running(self, self._chunks, group)
        return self._running

    def _wait_for_running(self) -> None:
        """Let a generation end whose result was not asked for yet; its errors are raised with the result."""
        if self._running is not None:
            self._running.join()

    def release(self) -> int:
        return 0

    def close(self) -> None:
        self.is_closed, self._sent = True, {}
        self._wait_for_running()
        self.transport.close()

    # --- one round ----------------------------------------------------------------------------------------------------

    def work(self) -> bool:
        """Give idle replicas something to do, and wait for a call to end. Returns whether every replica that can be
        reached has the current weights and is idle."""
        for replica in self._replicas:
            if replica.call is None:
                self._begin(replica)
        busy = {r.call.handle: r for r in self._replicas if r.call is not None}
        for handle in self.transport.wait(list(busy), POLL):
            self._end(busy[handle])
        for replica in self._replicas:
            if replica.call is not None and self.transport.now() - replica.call.since > self.timeout:
                self._fault(replica, "late", f"no answer in {self.timeout:g} s", restart=True)
        self._check_reachable()
        ready = [r for r in self._replicas if r.call is None and r.version == self._version]
        return bool(ready) and all(r in ready or r.lost_since is not None for r in self._replicas)

    def _begin(self, replica: _Replica) -> None:
        chunk = None
        if replica.version != self._version:
            missing = {name: sent for name, sent in self._sent.items() if name not in replica.pieces}
            handle = self.transport.call(replica.number, "update", self._version, self._manifest, missing)
        else:
            running = {id(r.call.chunk) for r in self._replicas if r.call is not None}
            chunk = next((chunk for chunk in unfinished(self._chunks) if id(chunk) not in running), None)
            if chunk is None:
                return
            handle = self.transport.call(replica.number, "generate", self._version, chunk.sent)
        pieces, now = frozenset(self._sent), self.transport.now()
        replica.call = _Call(handle, self._version, self._manifest.digest, pieces, chunk, now)

    def _end(self, replica: _Replica) -> None:
        """Take the result of a call."""
        call = replica.call
        assert call is not None
        try:
            result = cast("tuple[int, list[Completion]] | str", self.transport.result(call.handle))
        except ReplicaLostError as error:
            self._fault(replica, "lost", str(error))
            return
        except StaleWeightsError as error:
            self._fault(replica, "stale", str(error))
            return
        except BaseException:
            replica.call = replica.version = None
            raise
        # An update returns a digest, and a chunk a version and completions; both must be the trainer's.
        if isinstance(result, str) and result != call.digest:
            self._fault(replica, "other weights", "its digest is not the trainer's", restart=True)
            return
        if not isinstance(result, str) and result[0] != call.version:
            self._fault(replica, "stale", f"it answered with the weights of version {result[0]}", restart=True)
            return
        replica.call = replica.lost_since = None
        if isinstance(result, str):
            replica.version, replica.pieces, replica.failed_updates = call.version, call.pieces, 0
        elif call.chunk is not None:
            call.chunk.place(result[1])
            self.generated[replica.number] = self.generated.get(replica.number, 0) + len(result[1])

    def _fault(self, replica: _Replica, kind: str, reason: str, restart: bool = False) -> None:
        """Record an event; the chunk of the replica waits again. A replica that is still lost is no further event."""
        call = replica.call
        assert call is not None
        was_lost, chunk = replica.lost_since is not None, call.chunk
        replica.call = replica.version = None
        replica.pieces = frozenset()
        if kind == "lost" and not was_lost:
            replica.lost_since = self.transport.now()
        if kind != "lost" or not was_lost or chunk is not None:
            self._observe(Event(kind, replica.number, None if chunk is None else chunk.number, reason))
            again = "" if chunk is None else f"; its {count_noun(len(chunk.prompts), 'prompt')} are generated again"
            self._log(f"note: {self.transport.describe(replica.number)} {_SAYS[kind]} ({reason}){again}")
        if restart:
            self.transport.restart(replica.number)
        # A replica that is lost may come back; one that fails again and again would be started again for ever.
        if chunk is None and kind != "lost":
            replica.failed_updates += 1
            if replica.failed_updates >= MAX_FAULTS:
                raise GenerationError(
                    f"{self.transport.describe(replica.number)} did not take the weights {MAX_FAULTS} times in a row "
                    f"({reason}). Nothing was learned from it. Raise rl.engine.timeout if it needs longer to read the "
                    "model; check that every node has the same model.path, and the same versions of octavo and torch."
                )
        if chunk is not None:
            chunk.faults += 1
            if chunk.faults >= MAX_FAULTS:
                raise GenerationError(
                    f"{count_noun(chunk.faults, 'replica')} were lost one after the other with the same prompts (from "
                    f"{chunk.prompts[0].name or f'prompt {chunk.first}'} on; the last one: {reason}). If they ran out "
                    "of memory, lower rl.slots or rl.engine.chunk; if they are slow, raise rl.engine.timeout."
                )

    def _check_reachable(self) -> None:
        """Raise GenerationError if all replicas have been lost for `timeout` seconds."""
        since = [replica.lost_since for replica in self._replicas]
        if all(lost is not None and self.transport.now() - lost > self.timeout for lost in since):
            raise GenerationError(
                f"none of {count_noun(len(since), 'replica')} could be reached for {self.timeout:g} s. The last "
                "checkpoint is not affected: start the nodes again, and resume."
            )


_SAYS = {
    "lost": "was lost",
    "late": "is late and was ended",
    "stale": "has other weights than the trainer",
    "other weights": "did not receive the trainer's weights",
}
