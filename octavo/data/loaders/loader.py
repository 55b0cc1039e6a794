"""The stream of batches that a rank trains on: same rows for any number of workers, exact after a resume."""

from __future__ import annotations

import itertools
import math
import multiprocessing
import os
import signal
import threading
import time
from collections import OrderedDict
from collections.abc import Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, Dataset

from octavo.data.batching.collate import Gather, Place, micro_batches
from octavo.data.batching.prefetch import make_prefetcher
from octavo.data.errors import BadSample, DataError, LongSample, WorkerDied
from octavo.data.order import Mixture
from octavo.data.skip_report import SkipReport
from octavo.data.tasks.splitting import Split

CACHE_BYTES = 512 << 20
AT_ONCE = 8  # rows that are made in one call of the processor: it costs them less, and they wait for each other
AHEAD = 8  # rows that a worker has ready, or two calls' worth
POLL = 5.0  # seconds between looks at workers, as torch takes where it is given no timeout
WAITS = 0.75  # of the timeout a row may take: its worker is named before other ranks say that this one does not come


class Encoded(Protocol):
    """A row as numbers: a `Sample`, a `PromptSample`, a `Pair`."""

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


class Encodes(Protocol):
    """What makes rows of a source numbers. Raises `DataError`."""

    @property
    def pad_id(self) -> int: ...

    def encode_all(self, rows: Sequence[Any], /) -> Sequence[Encoded | DataError]: ...


class Processed(Dataset):
    """Rows by (source, row), read and encoded together; a bad row comes back as its error instead of raising it.

    Keeps what it made in memory up to `cache_bytes`, the least recently used first to go: epochs after the first
    decode no image.
    """

    def __init__(self, sources: tuple[Any, ...], encoder: Encodes, cache_bytes: int = CACHE_BYTES) -> None:
        self.sources, self.encoder, self.cache_bytes = sources, encoder, cache_bytes
        self._kept: OrderedDict[tuple[int, int], Encoded | DataError] = OrderedDict()
        self._bytes = 0

    def __getitem__(self, places: Sequence[Place]) -> list[Encoded | DataError]:
        found = {place: self._kept[place] for place in places if place in self._kept}
        read: dict[Place, Any] = {}
        for source, row in dict.fromkeys(place for place in places if place not in found):
            try:
                read[source, row] = self.sources[source][row]
            except DataError as bad:
                found[source, row] = _bare(bad)
        for place, made in zip(read, self.encoder.encode_all(list(read.values())), strict=True):
            found[place] = _bare(made) if isinstance(made, DataError) else made
        for place in dict.fromkeys(places):
            self._keep(place, found[place])
        return [found[place] for place in places]

    def _keep(self, place: Place, made: Encoded | DataError) -> None:
        if place in self._kept:
            self._kept.move_to_end(place)
            return
        size = _size(made)
        if size > self.cache_bytes:
            return
        self._kept[place] = made
        self._bytes += size
        while self._bytes > self.cache_bytes:
            _, old = self._kept.popitem(last=False)
            self._bytes -= _size(old)


def _bare(bad: DataError) -> DataError:
    """An error without its causes, which hold the row and its pixels, in fields and in frames; the sentence has what
    they say."""
    bad.__cause__ = bad.__context__ = None
    return bad.with_traceback(None)


def _size(made: Encoded | DataError) -> int:
    # A kilobyte for the objects around the arrays.
    return (0 if isinstance(made, DataError) else made.nbytes) + 1024


class Judge:
    """Decides what becomes of a bad row: error, or out and listed. Shared by `Loader` and `EvalSet`."""

    def __init__(self, sources: tuple[Any, ...], on_bad: str, report_path: str | Path | None) -> None:
        if on_bad not in ("error", "skip"):
            raise DataError(f"on_bad_sample is {on_bad!r}; it must be error or skip")
        self.sources, self.on_bad, self.report = sources, on_bad, SkipReport(report_path)
        self._bad: list[set[int]] = [set() for _ in sources]

    def admit(self, place: tuple[int, int], made: Encoded | DataError) -> Any:
        """What was made, or None for a row that is left out. Raises the row's error, and `DataError` where a data set
        has no good row at all."""
        if not isinstance(made, DataError):
            for action, reason in made.notes:
                named = {"file": made.file, "row": made.row, "id": made.id}
                self._list(place, {**named, "action": action, "reason": reason})
            return made
        if not isinstance(made, BadSample) or (self.on_bad == "error" and not isinstance(made, LongSample)):
            raise made
        self._list(place, made.record())
        source, row = place
        self._bad[source].add(row)
        if len(self._bad[source]) == len(self.sources[source]):
            raise DataError(
                f"{made.file}: every one of its {len(self.sources[source])} rows was left out; "
                f"the last one (row {made.row}) because it {made.reason}"
            )
        return None

    def _list(self, place: tuple[int, int], record: dict[str, Any]) -> None:
        """Put a row into the report; of a row that is split with the number of the question, from 1."""
        source, row = place
        of = self.sources[source]
        self.report.add({**record, "question": of.place(row)[1] + 1} if isinstance(of, Split) else record)


class Steps:
    """Micro-batches of a rank, step by step and without end: what streams of rows and of packs have in common.

    `workers=0` reads inline and keeps processed samples in memory, up to `cache_bytes`; more read ahead in processes of
    their own. The batches are the same; a worker that has not brought a row within `timeout` seconds is named.
    `report_path` is the file that lists the rows left out; `report.counts` counts them. `rows` counts the rows of the
    mixture that were consumed by the steps that were yielded, not by what workers have prepared; `place` is that of the
    next pack, in a stream of packs.
    """

    place = (0, 0, 0)

    def __init__(
        self, mixture: Mixture, encoder: Any, rank: int, world: int, workers: int, on_bad: str,
        report_path: str | Path | None, cache_bytes: int, timeout: float,
    ) -> None:  # fmt: skip
        if not 0 <= rank < world:
            raise DataError(f"rank {rank} of {world} process(es); ranks count from 0")
        self.mixture, self.encoder, self.rank, self.world = mixture, encoder, rank, world
        self.workers, self.timeout = workers, timeout
        self._judge = Judge(mixture.sources, on_bad, report_path)
        self._processed = Processed(mixture.sources, encoder, 0 if workers else cache_bytes)
        self._ahead = make_prefetcher(mixture)
        self._steps: Generator[list[Any], None, None] | None = None

    @property
    def report(self) -> SkipReport:
        """Counts and list of the rows left out so far."""
        return self._judge.report

    def __iter__(self) -> Iterator[list[Any]]:
        """The one endless stream; a second `iter` goes on where the first stopped."""
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


class Loader(Steps):
    """Yields, for each step, the micro-batches of this rank, or what else `gather` makes of its rows.

    Step t takes the rows [start_row + t*G, start_row + (t+1)*G) of the mixture, G = `global_batch`; rank r of
    `world` takes those from r G / world to (r + 1) G / world, rounded down: equal slices, or some with a row more,
    for which the others have a place that is left out. A slice is cut into micro-batches of up to `micro_batch` rows.
    A row that is left out makes its micro-batch smaller; an empty one is a fully masked row, so that all ranks run as
    many forwards. Store `rows`, and give it back as `start_row`. For the rest see `Steps`.

    `gather(rows, micro_batch, pad_id)` is given the (number in the stream, sample or None) of a step's rows; with
    `neighbours` and several ranks also `before=`, the nearest sample before them in the step, whose last row comes
    before its first (None: other ranks have none).
    """

    def __init__(
        self,
        mixture: Mixture,
        encoder: Encodes,
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
        gather: Gather = micro_batches,
        neighbours: bool = False,
    ) -> None:
        if micro_batch < 1 or global_batch < 1:
            raise DataError(f"global_batch {global_batch} in micro-batches of {micro_batch}; give each 1 or more rows")
        super().__init__(mixture, encoder, rank, world, workers, on_bad, report_path, cache_bytes, timeout)
        self.micro_batch, self.global_batch, self.rows, self.gather = micro_batch, global_batch, start_row, gather
        first, stop = (global_batch * nth // world for nth in (rank, rank + 1))
        self.mine = range(first, stop)  # of each step
        self.others = global_batch - len(self.mine) if neighbours else 0  # rows that `before` may be one of

    def at(self, number: int) -> Any:
        """What is made of a row of the stream, by its number. Raises its error."""
        [made] = self._processed[[self.mixture.row(number)]]
        if isinstance(made, DataError):
            raise made
        return made

    def _stream(self) -> Generator[list[Any], None, None]:
        first = self.mine.start
        others = [(first - n) % self.global_batch for n in range(1, self.others + 1)]  # the nearest one before first
        numbers = [*self.mine, *others[:1]]
        spare = [(-1, None)] * (-(-self.global_batch // self.world) - len(self.mine))  # for the row that others have
        places = _Places(self.mixture, self.rows, numbers, self.global_batch)
        chunks = _Chunks(places, len(numbers))
        if self.workers and numbers:
            made = run_workers(self._processed, chunks, self.workers, self.timeout)
        else:
            made = (list(zip(chunk, self._processed[chunk], strict=True)) for chunk in chunks)
        rows = itertools.chain.from_iterable(made)
        try:
            while True:
                taken = [(self.rows + n, self._judge.admit(*next(rows))) for n in numbers]
                more = {"before": taken.pop()[1] or self._nearest(others[1:])} if others else {}
                gathered = self.gather(taken + spare, self.micro_batch, self.encoder.pad_id, **more)
                self.rows += self.global_batch
                if self._ahead is not None:
                    self._ahead.at(self.rows)  # from the first step on: workers are forked by then
                yield gathered
        finally:
            if self._ahead is not None:
                self._ahead.close()
            made.close()

    def _nearest(self, numbers: Sequence[int]) -> Any:
        """The first of these rows of the step that is not left out; it is rare that one is asked for, and read here."""
        places = (self.mixture.row(self.rows + n) for n in numbers)
        return next(filter(None, (self._judge.admit(place, *self._processed[[place]]) for place in places)), None)


class _Places:
    """The (source, row) of each row that a rank consumes, without end: of steps of `stride` rows, from the row `start`
    on, those with `numbers`."""

    def __init__(self, mixture: Mixture, start: int, numbers: Sequence[int], stride: int) -> None:
        self.mixture, self.start, self.numbers, self.stride = mixture, start, numbers, stride

    def __iter__(self) -> Iterator[Place]:
        for step in itertools.count(self.start, self.stride):
            for n in self.numbers:
                yield self.mixture.row(step + n)


class _Chunks:
    """Places in pieces that are made together, each of up to `AT_ONCE` rows of one step of `step` rows. The sampler of
    the worker processes too."""

    def __init__(self, places: Iterable[Place], step: int) -> None:
        self.places, self.step = places, step

    def __iter__(self) -> Iterator[list[Place]]:
        places = iter(self.places)
        while rows := list(itertools.islice(places, self.step)):
            yield from (rows[first : first + AT_ONCE] for first in range(0, len(rows), AT_ONCE))


class _WithPlaces(Dataset):
    def __init__(self, processed: Any) -> None:
        self.processed = processed

    def __getitem__(self, places: list[Place]) -> list[tuple[Place, Any]]:
        return list(zip(places, self.processed[places], strict=True))


class Places(Protocol):
    """Places in pieces that are made together, each of up to `step`: the sampler of worker processes."""

    @property
    def step(self) -> int: ...

    def __iter__(self) -> Iterator[list[Place]]: ...


def run_workers(
    processed: Any, chunks: Places, workers: int, timeout: float = math.inf, ahead: int | None = None
) -> Generator[list[tuple[Place, Any]], None, None]:
    """(place, what `processed` makes of it) in order, made by worker processes, `ahead` pieces each (None: about
    :data:`AHEAD` rows). A worker that dies, or has not brought its next rows within `timeout` seconds, ends the run
    with its name and the fix."""
    outer = signal.getsignal(signal.SIGCHLD)
    stream = iter(
        DataLoader(
            _WithPlaces(processed),
            batch_size=None,
            sampler=chunks,
            num_workers=workers,
            collate_fn=list,
            prefetch_factor=ahead or max(2, AHEAD // min(AT_ONCE, chunks.step)),
            timeout=min(POLL, timeout / 4),
            worker_init_fn=_begin_worker,
            # Its own generator: the loader must not draw from the run's, or the number of workers would change it.
            generator=torch.Generator(),
        )
    )
    # Torch answers a worker's death with an exception out of a signal handler, that is in the middle of whatever the
    # trainer is doing, a checkpoint for example. Without it `next` notices, within five seconds.
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, outer)
    processes = list(getattr(stream, "_workers", ()))
    try:
        for number in itertools.count():
            patience = time.monotonic() + WAITS * timeout
            while True:
                try:
                    item = next(stream)
                    break
                except RuntimeError as cause:
                    if "timed out" not in str(cause):
                        raise _explain(cause, processes) from cause
                    if time.monotonic() > patience:
                        raise _hangs(processed, chunks, number, processes, timeout) from cause
            yield item
    finally:
        shut = getattr(stream, "_shutdown_workers", None)
        if shut is not None:
            shut()


def _begin_worker(worker: int) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    # A signal to the trainer's whole group (a terminal that closes, Ctrl-C) asks the trainer to save, which may need
    # rows; and none that reaches a worker may ring the trainer's bell, which a fork shares.
    signal.set_wakeup_fd(-1)
    if hasattr(os, "setpgid"):
        os.setpgid(0, 0)
    trainer = multiprocessing.parent_process()
    # Not os.getppid() where the trainer itself is the parent: it may have died before this line.
    if trainer is None or multiprocessing.get_start_method() == "forkserver":
        parent = os.getppid()
    else:
        assert trainer.pid is not None  # it has started
        parent = trainer.pid
    threading.Thread(target=_end_with, args=(parent,), name="end with the trainer", daemon=True).start()


def _end_with(parent: int) -> None:
    """End this process when its parent has ended, however that came about.

    Torch's worker notices too, but then waits for ever to hand its last rows over: nobody empties the pipe after a
    `kill -9`. So not an orderly exit. Asked once a second, because a parent that is killed tells nobody, and Linux's
    own signal for it comes when the *thread* that made the worker ends.
    """
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def _explain(cause: RuntimeError, processes: list[Any]) -> RuntimeError:
    dead = [(n, process) for n, process in enumerate(processes) if not process.is_alive() and process.exitcode != 0]
    if not dead:
        return cause
    named = ", ".join(f"worker {n} (pid {process.pid}, {_fate(process.exitcode)})" for n, process in dead)
    return WorkerDied(
        f"data {named} died. A kill (signal 9) is mostly the machine running out of memory: lower data.workers or "
        f"data.max_pixels. To see the fault itself, set data.workers=0, which reads in the training process"
    )


def _hangs(processed: Any, chunks: Places, number: int, processes: list[Any], timeout: float) -> WorkerDied:
    """The error of the `number`-th rows, which do not come: workers take turns. That one is ended."""
    worker = number % len(processes)
    rows: dict[int, list[int]] = {}
    for source, row in next(itertools.islice(iter(chunks), number, None)):
        rows.setdefault(source, []).append(row)
    named = ", ".join(f"{', '.join(map(str, found))} of {processed.sources[n].name}" for n, found in rows.items())
    processes[worker].kill()
    return WorkerDied(
        f"data worker {worker} (pid {processes[worker].pid}) hangs: it did not bring row {named} "
        f"in {WAITS * timeout:g} s (run.timeout: {timeout:g} s). Look at what is named "
        "and its images (on a file system that answers?), or raise run.timeout"
    )


def _fate(code: int | None) -> str:
    return f"killed by signal {-code}" if code is not None and code < 0 else f"exit code {code}"
