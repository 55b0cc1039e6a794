"""The stream of batches of a rank. The rows do not depend on the number of workers, and a resume continues exactly."""

from __future__ import annotations

import itertools
import math
import multiprocessing
import os
import signal
import threading
import time
from collections import OrderedDict
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, Dataset

from octavo.data.batching.collate import Gather, Place, make_micro_batches
from octavo.data.batching.prefetch import make_prefetcher
from octavo.data.errors import BadSample, DataError, LongSample, WorkerDied
from octavo.data.order import Mixture
from octavo.data.skip_report import SkipReport
from octavo.data.tasks.splitting import SplitRows

CACHE_BYTES = 512 << 20
ROWS_PER_CALL = 8  # rows encoded in one processor call: cheaper per row, but all wait for the slowest one
PREFETCH_ROWS = 8  # rows that a worker prepares in advance, but at least two calls
POLL_SECONDS = 5.0  # seconds between checks of the workers, torch's default without a timeout
TIMEOUT_SHARE = (
    0.75  # share of the timeout for a row: the worker is reported before other ranks time out waiting for this one
)


class EncodedRow(Protocol):
    """An encoded row: a `Sample`, a `PromptSample`, a `Pair`."""

    @property
    def file(self) -> str: ...

    @property
    def row(self) -> int: ...

    @property
    def id(self) -> str | None: ...

    @property
    def nbytes(self) -> int: ...

    @property
    def notes(self) -> list[tuple[str, str]]: ...


class RowEncoder(Protocol):
    """The interface of an encoder, which turns rows of a source into samples.

    seq_length       the most tokens of a row
    reserve          further tokens of train.seq_length, which are kept free for an answer
    on_long          drop, cut or error, of which on_long_options are possible
    rows_kind        what the rows are, for messages
    """

    seq_length: int
    reserve: int
    on_long: str
    on_long_options: str
    rows_kind: str

    @property
    def pad_id(self) -> int: ...

    def encode_all(self, rows: Sequence[Any], /) -> Sequence[EncodedRow | DataError]: ...


class EncodedRows(Dataset):
    """Encodes rows by (source, row), several at a time. A bad row is returned as its error, not raised.

    A cache of `cache_bytes` holds the most recently used rows: if all fit, later epochs decode no images.
    """

    def __init__(self, sources: tuple[Any, ...], encoder: RowEncoder, cache_bytes: int = CACHE_BYTES) -> None:
        self.sources, self.encoder, self.cache_bytes = sources, encoder, cache_bytes
        self._cache: OrderedDict[tuple[int, int], EncodedRow | DataError] = OrderedDict()
        self._bytes = 0

    def __getitem__(self, places: Sequence[Place]) -> list[EncodedRow | DataError]:
        rows = {place: self._cache[place] for place in places if place in self._cache}
        read: dict[Place, Any] = {}
        for source, row in dict.fromkeys(place for place in places if place not in rows):
            try:
                read[source, row] = self.sources[source][row]
            except DataError as bad:
                rows[source, row] = _without_causes(bad)
        for place, encoded in zip(read, self.encoder.encode_all(list(read.values())), strict=True):
            rows[place] = _without_causes(encoded) if isinstance(encoded, DataError) else encoded
        for place in dict.fromkeys(places):
            self._keep(place, rows[place])
        return [rows[place] for place in places]

    def _keep(self, place: Place, encoded: EncodedRow | DataError) -> None:
        if place in self._cache:
            self._cache.move_to_end(place)
            return
        size = _size(encoded)
        if size > self.cache_bytes:
            return
        self._cache[place] = encoded
        self._bytes += size
        while self._bytes > self.cache_bytes:
            _, old = self._cache.popitem(last=False)
            self._bytes -= _size(old)


def _without_causes(bad: DataError) -> DataError:
    """Return an error without its causes and traceback, whose frames would keep the row and its pixels in memory. The
    message contains the text of the causes."""
    bad.__cause__ = bad.__context__ = None
    return bad.with_traceback(None)


def _size(encoded: EncodedRow | DataError) -> int:
    # A kilobyte for the objects around the arrays.
    return (0 if isinstance(encoded, DataError) else encoded.nbytes) + 1024


class BadRowPolicy:
    """Handles bad rows as configured: raises the error, or skips and lists the row. Used by `Loader` and `EvalSet`."""

    def __init__(self, sources: tuple[Any, ...], on_bad: str, report_path: str | Path | None) -> None:
        if on_bad not in ("error", "skip"):
            raise DataError(f"on_bad_sample is {on_bad!r}; it must be error or skip")
        self.sources, self.on_bad, self.report = sources, on_bad, SkipReport(report_path)
        self._bad: list[set[int]] = [set() for _ in sources]

    def admit(self, place: tuple[int, int], encoded: EncodedRow | DataError) -> Any:
        """Return the encoded row, or None for a row that is left out. Raises the row's error, and `DataError` if every
        row of a data set is bad."""
        if not isinstance(encoded, DataError):
            for action, reason in encoded.notes:
                row_info = {"file": encoded.file, "row": encoded.row, "id": encoded.id}
                self._list(place, {**row_info, "action": action, "reason": reason})
            return encoded
        bad = self.refuse(encoded)
        self.record(place, bad)
        source, row = place
        self._bad[source].add(row)
        if len(self._bad[source]) == len(self.sources[source]):
            raise DataError(
                f"{bad.file}: all {len(self.sources[source])} rows were left out; "
                f"the last one (row {bad.row}) because it {bad.reason}"
            )
        return None

    def refuse(self, bad: DataError) -> BadSample:
        """Return the error of a row that is left out, and raise any other."""
        if not isinstance(bad, BadSample) or (self.on_bad == "error" and not isinstance(bad, LongSample)):
            raise bad
        return bad

    def record(self, place: Place, bad: BadSample) -> None:
        """List a row that is left out in the report."""
        self._list(place, bad.record())

    def _list(self, place: tuple[int, int], record: Mapping[str, Any]) -> None:
        """Add a row to the report. A split row gets the number of its question, from 1."""
        source, row = place
        rows = self.sources[source]
        self.report.add({**record, "question": rows.place(row)[1] + 1} if isinstance(rows, SplitRows) else record)


class StepStream:
    """An endless stream of a rank's micro-batches by step: the base class of `Loader` and `PackLoader`.

    With `workers=0` rows are encoded in this process, which caches up to `cache_bytes` of them; otherwise `workers`
    processes encode rows in advance. The batches are the same. If a worker delivers no row within `timeout` seconds,
    `WorkerDied` is raised. `report_path` is the file that lists the rows left out; `report.counts` counts them. `rows`
    is the number of rows of the mixture in the steps yielded so far, without those that workers have prepared. `place`
    is the position of the next pack in a stream of packs.
    """

    pack_position = (0, 0, 0)

    def __init__(
        self, mixture: Mixture, encoder: Any, rank: int, world: int, workers: int, on_bad: str,
        report_path: str | Path | None, cache_bytes: int, timeout: float,
    ) -> None:  # fmt: skip
        if not 0 <= rank < world:
            raise DataError(f"rank {rank} of {world} process(es); ranks count from 0")
        self.mixture, self.encoder, self.rank, self.world = mixture, encoder, rank, world
        self.workers, self.timeout = workers, timeout
        self.policy = BadRowPolicy(mixture.sources, on_bad, report_path)
        self.encoded = EncodedRows(mixture.sources, encoder, 0 if workers else cache_bytes)
        self._prefetcher = make_prefetcher(mixture)
        self._steps: Generator[list[Any], None, None] | None = None

    @property
    def report(self) -> SkipReport:
        """The report of the rows left out so far."""
        return self.policy.report

    def __iter__(self) -> Iterator[list[Any]]:
        """Return the endless stream. A second `iter` continues where the first one stopped."""
        if self._steps is None:
            self._steps = self._stream()
        return self._steps

    def __next__(self) -> list[Any]:
        return next(iter(self))

    def close(self) -> None:
        """Stop the workers."""
        if self._steps is not None:
            self._steps.close()
            self._steps = None

    def _stream(self) -> Generator[list[Any], None, None]:
        raise NotImplementedError


class Loader(StepStream):
    """Yields, for each step, the micro-batches of this rank, or another result of `gather` for its rows.

    Step t takes the rows [start_row + t*G, start_row + (t+1)*G) of the mixture, G = `global_batch`; rank r of
    `world` takes those from r G / world to (r + 1) G / world, rounded down: slices of equal length, or some with one
    row more, for which the other ranks count a row as left out. A slice is cut into micro-batches of up to
    `micro_batch` rows. A row that is left out makes its micro-batch smaller; an empty one is a fully masked row, so
    that all ranks run the same number of forwards. To resume, pass the stored `rows` as `start_row`. For the other
    arguments see `StepStream`.

    `gather(rows, micro_batch, pad_id)` receives (number in the stream, sample or None) for each row of the step. With
    `needs_previous` and several ranks it also receives `before=`, the nearest sample before them in the step, which is
    cyclic, or None if the other ranks have no sample.
    """

    def __init__(
        self,
        mixture: Mixture,
        encoder: RowEncoder,
        micro_batch: int,
        global_batch: int,
        rank: int = 0,
        world: int = 1,
        start_row: int = 0,
        workers: int = 0,
        on_bad: str = "error",
        report_path: str | Path | None = None,
        cache_bytes: int = CACHE_BYTES,
        timeout: float = math.inf,
        gather: Gather = make_micro_batches,
        needs_previous: bool = False,
    ) -> None:
        if micro_batch < 1 or global_batch < 1:
            raise DataError(f"global_batch {global_batch} in micro-batches of {micro_batch}; give each 1 or more rows")
        super().__init__(mixture, encoder, rank, world, workers, on_bad, report_path, cache_bytes, timeout)
        self.micro_batch, self.global_batch, self.rows, self.gather = micro_batch, global_batch, start_row, gather
        first, stop = (global_batch * nth // world for nth in (rank, rank + 1))
        self.local_rows = range(first, stop)  # this rank's rows of each step
        self.num_candidates = (
            global_batch - len(self.local_rows) if needs_previous else 0
        )  # number of candidates for `before`

    def at(self, number: int) -> Any:
        """Return the encoded row with this number in the stream. Raises the row's error."""
        [encoded] = self.encoded[[self.mixture.row(number)]]
        if isinstance(encoded, DataError):
            raise encoded
        return encoded

    def _stream(self) -> Generator[list[Any], None, None]:
        first = self.local_rows.start
        candidates = [(first - n) % self.global_batch for n in range(1, self.num_candidates + 1)]  # nearest row first
        numbers = [*self.local_rows, *candidates[:1]]
        padding = [(-1, None)] * (
            -(-self.global_batch // self.world) - len(self.local_rows)
        )  # if other ranks have one more
        places = _RowPlaces(self.mixture, self.rows, numbers, self.global_batch)
        chunks = _RowChunks(places, len(numbers))
        if self.workers and numbers:
            processed = run_workers(self.encoded, chunks, self.workers, self.timeout)
        else:
            processed = (list(zip(chunk, self.encoded[chunk], strict=True)) for chunk in chunks)
        rows = itertools.chain.from_iterable(processed)
        try:
            while True:
                admitted = [(self.rows + n, self.policy.admit(*next(rows))) for n in numbers]
                extra = {"before": admitted.pop()[1] or self._nearest(candidates[1:])} if candidates else {}
                gathered = self.gather(admitted + padding, self.micro_batch, self.encoder.pad_id, **extra)
                self.rows += self.global_batch
                if self._prefetcher is not None:
                    self._prefetcher.prefetch_from(
                        self.rows
                    )  # not before the first step: its thread must start after the forks
                yield gathered
        finally:
            if self._prefetcher is not None:
                self._prefetcher.close()
            processed.close()

    def _nearest(self, numbers: Sequence[int]) -> Any:
        """Return the first of these rows of the step that is not left out, or None. It is rarely needed, so it is
        encoded in this process."""
        places = (self.mixture.row(self.rows + n) for n in numbers)
        return next(filter(None, (self.policy.admit(place, *self.encoded[[place]]) for place in places)), None)


class _RowPlaces:
    """The endless sequence of (source, row) that a rank consumes: the rows `numbers` of each step, where steps have
    `stride` rows and begin at the row `start`."""

    def __init__(self, mixture: Mixture, start: int, numbers: Sequence[int], stride: int) -> None:
        self.mixture, self.start, self.numbers, self.stride = mixture, start, numbers, stride

    def __iter__(self) -> Iterator[Place]:
        for step in itertools.count(self.start, self.stride):
            for n in self.numbers:
                yield self.mixture.row(step + n)


class _RowChunks:
    """Places in chunks that are encoded together: up to `ROWS_PER_CALL` rows of one step, which has `step` rows. Also
    the sampler of the worker processes."""

    def __init__(self, places: Iterable[Place], step: int) -> None:
        self.places, self.step = places, step

    def __iter__(self) -> Iterator[list[Place]]:
        places = iter(self.places)
        while rows := list(itertools.islice(places, self.step)):
            yield from (rows[first : first + ROWS_PER_CALL] for first in range(0, len(rows), ROWS_PER_CALL))


class _PlacedRows(Dataset):
    def __init__(self, processed: Any) -> None:
        self.processed = processed

    def __getitem__(self, places: list[Place]) -> list[tuple[Place, Any]]:
        return list(zip(places, self.processed[places], strict=True))


class ChunkSampler(Protocol):
    """The sampler of worker processes: chunks of up to `step` places that are processed together."""

    @property
    def step(self) -> int: ...

    def __iter__(self) -> Iterator[list[Place]]: ...


def run_workers(
    processed: Any, chunks: ChunkSampler, workers: int, timeout: float = math.inf, ahead: int | None = None
) -> Generator[list[tuple[Place, Any]], None, None]:
    """Yield (place, result of `processed` for it) in order, computed by worker processes, each up to `ahead` chunks in
    advance, or about :data:`PREFETCH_ROWS` rows if None. Raises WorkerDied, with the worker and the fix, if a worker
    dies or delivers no rows within `timeout` seconds."""
    handler = signal.getsignal(signal.SIGCHLD)
    stream = iter(
        DataLoader(
            _PlacedRows(processed),
            batch_size=None,
            sampler=chunks,
            num_workers=workers,
            collate_fn=list,
            prefetch_factor=ahead or max(2, PREFETCH_ROWS // min(ROWS_PER_CALL, chunks.step)),
            timeout=min(POLL_SECONDS, timeout / 4),
            worker_init_fn=_init_worker,
            # A separate generator: draws from the global one would make the run depend on the number of workers.
            generator=torch.Generator(),
        )
    )
    # Torch reports a worker's death by an exception from a signal handler, which may interrupt any code of the trainer,
    # a checkpoint for example. Without the handler `next` detects it within five seconds.
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, handler)
    processes = list(getattr(stream, "_workers", ()))
    try:
        for number in itertools.count():
            deadline = time.monotonic() + TIMEOUT_SHARE * timeout
            while True:
                try:
                    item = next(stream)
                    break
                except RuntimeError as cause:
                    if "timed out" not in str(cause):
                        raise _worker_error(cause, processes) from cause
                    if time.monotonic() > deadline:
                        raise _hang_error(processed, chunks, number, processes, timeout) from cause
            yield item
    finally:
        shutdown = getattr(stream, "_shutdown_workers", None)
        if shutdown is not None:
            shutdown()


def _init_worker(worker: int) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    # A signal to the trainer's process group (a closed terminal, Ctrl-C) makes the trainer save, which may need rows,
    # so workers must not receive it. And a signal to a worker must not wake the trainer: forks share the wakeup pipe.
    signal.set_wakeup_fd(-1)
    if hasattr(os, "setpgid"):
        os.setpgid(0, 0)
    trainer = multiprocessing.parent_process()
    # os.getppid() would be wrong if the trainer is the parent and died before this line.
    if trainer is None or multiprocessing.get_start_method() == "forkserver":
        parent = os.getppid()
    else:
        assert trainer.pid is not None  # it has started
        parent = trainer.pid
    threading.Thread(target=_exit_with_parent, args=(parent,), name="end with the trainer", daemon=True).start()


def _exit_with_parent(parent: int) -> None:
    """Exit this process when its parent has ended for any reason.

    Torch's worker detects this too, but then waits forever to deliver its last rows, because no process reads the pipe
    after a `kill -9`; so this exits at once. The parent is polled once per second: a killed process sends no signal,
    and Linux's parent-death signal is sent when the *thread* that created the worker ends.
    """
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def _worker_error(cause: RuntimeError, processes: list[Any]) -> RuntimeError:
    dead = [(n, process) for n, process in enumerate(processes) if not process.is_alive() and process.exitcode != 0]
    if not dead:
        return cause
    workers = ", ".join(f"worker {n} (pid {process.pid}, {_describe_exit(process.exitcode)})" for n, process in dead)
    return WorkerDied(
        f"data {workers} died. Signal 9 usually means that the machine ran out of memory: lower data.workers or "
        "data.max_pixels. To see the error itself, set data.workers=0, which reads rows in the training process"
    )


def _hang_error(processed: Any, chunks: ChunkSampler, number: int, processes: list[Any], timeout: float) -> WorkerDied:
    """Kill the worker of chunk `number`, which has not been delivered, and return the error. Chunks are assigned to
    workers round-robin."""
    worker = number % len(processes)
    rows: dict[int, list[int]] = {}
    for source, row in next(itertools.islice(iter(chunks), number, None)):
        rows.setdefault(source, []).append(row)
    row_names = ", ".join(f"{', '.join(map(str, listed))} of {processed.sources[n].name}" for n, listed in rows.items())
    processes[worker].kill()
    return WorkerDied(
        f"data worker {worker} (pid {processes[worker].pid}) hangs: it did not return row {row_names} within "
        f"{TIMEOUT_SHARE * timeout:g} s (run.timeout: {timeout:g} s). Check these rows and their images (does their "
        "file system respond?), or raise run.timeout"
    )


def _describe_exit(code: int | None) -> str:
    return f"killed by signal {-code}" if code is not None and code < 0 else f"exit code {code}"
