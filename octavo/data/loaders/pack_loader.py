"""The stream of packs that a rank trains on: same packs for any number of ranks and workers, exact after a resume.

The rows of a mixture are taken a window at a time, the last window of an epoch with what is left of it, counted
(:mod:`octavo.data.loaders.token_counts`) and put into packs (:mod:`octavo.data.batching.packing`), and the packs of a
window come in an order of the seed's. So what the n-th pack holds follows from data, settings and seed alone, where a
run is, from two numbers, window and pack, and how many packs an epoch has, from token counts (`PackLoader.count`).
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from functools import lru_cache
from itertools import chain, islice
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

from octavo.data.batching import packing
from octavo.data.batching.collate import Place, collate_pack
from octavo.data.encoding.encode import Encoder
from octavo.data.errors import BadSample, DataError
from octavo.data.loaders.loader import AT_ONCE, CACHE_BYTES, Steps, run_workers
from octavo.data.loaders.token_counts import Counts, Lengths
from octavo.data.order import Mixture, permutation


class Pack(NamedTuple):
    """Numbers of rows in the stream of a mixture, and the tokens of each that there is room for; 0 for one that is
    known to be left out."""

    rows: tuple[int, ...]
    lengths: tuple[int, ...]


_EMPTY = Pack((), ())


class PackLoader(Steps):
    """Yields, for each step, the packs of this rank, each a micro-batch (`collate_pack`).

    Step t takes `global_batch` packs of the stream, from `place` on. They are dealt to the `world` ranks by what they
    cost; who has one less than others has an empty one, so that all ranks run as many forwards. A row that is bad or
    too long leaves its place in its pack empty; it changes no other pack.

    `place` is that of the first pack after the steps that were yielded: (window, pack in it, checksum of the window's
    packs). Store it, and give it back. `known`: what was counted of each data set. `shared`: how many ranks share the
    tokens of a pack. For the rest see `Steps`.
    """

    def __init__(
        self,
        mixture: Mixture,
        encoder: Encoder,
        known: Sequence[Counts],
        window: int,
        global_batch: int,
        rank: int = 0,
        world: int = 1,
        place: tuple[int, int, int] = (0, 0, 0),
        workers: int = 0,
        on_bad: str = "error",
        report_path: str | Path | None = None,
        cache_bytes: int = CACHE_BYTES,
        timeout: float = float("inf"),
        shared: int = 1,
    ) -> None:
        if global_batch < 1:
            raise DataError(f"global_batch {global_batch}; give each step 1 or more packs")
        super().__init__(mixture, encoder, rank, world, workers, on_bad, report_path, cache_bytes, timeout)
        self.window, self.global_batch, self.place, self.shared = window, global_batch, place, shared
        self._lengths = Lengths(mixture, encoder, window, known, place[0], rank, world, min(1, workers), timeout)
        self.packs = lru_cache(maxsize=4)(self._packs)

    @property
    def rows(self) -> int:
        window, number, _ = self.place
        begun = self.packs(window)[:number] if number else ()
        return self._lengths.rows(window).start + sum(len(pack.rows) for pack in begun)

    def count(self, epochs: float) -> int:
        """How many packs so many rounds of the mixture make, from its beginning; of the window that the last one ends
        in, as large a part as of its rows. Nobody trains meanwhile: all workers count."""
        self._lengths.workers = self.workers
        rows, found, window = epochs * self.mixture.round, 0, 0
        while (own := self._lengths.rows(window)).start < rows:
            share = min(1, (rows - own.start) / len(own))
            found += ceil(round(share * len(self.packs(window)), 9))
            window += 1
        return found

    def close(self) -> None:
        """Stop the workers, and the process that counts."""
        super().close()
        self._lengths.close()

    def _packs(self, window: int) -> tuple[Pack, ...]:
        """The packs of a window in the order in which they are trained on."""
        lengths = self._lengths.of(window)
        good = [row for row, length in enumerate(lengths) if length]
        left = [row for row, length in enumerate(lengths) if not length]
        found = packing.pack([lengths[row] for row in good], self.encoder.seq_length)
        packs = [[good[n] for n in one] for one in found]
        packs = packs or [[]]
        for number, row in enumerate(left):  # who trains the pack says why
            packs[number % len(packs)].append(row)
        first = self._lengths.rows(window).start
        made = [Pack(tuple(first + row for row in one), tuple(lengths[row] for row in one)) for one in packs]
        return tuple(made[n] for n in permutation(len(made), self.mixture.seed, 4, window))

    def steps(self, place: tuple[int, int, int]) -> Iterator[tuple[list[Pack], tuple[int, int, int], int]]:
        """(this rank's packs, the place behind the step, a checksum of all ranks') of each step, from a place on."""
        stream = self._from(place)
        while True:
            step = list(islice(stream, self.global_batch))
            mine = packing.deal([packing.cost(pack.lengths) for pack, _ in step], self.world)[self.rank]
            yield [step[n][0] for n in mine], step[-1][1], crc32(repr([pack for pack, _ in step]).encode())

    def _from(self, place: tuple[int, int, int]) -> Iterator[tuple[Pack, tuple[int, int, int]]]:
        """Each pack of the stream, and the place behind it. Raises `DataError` where the window that a place lies in
        makes other packs than it did."""
        window, number, before = place
        while True:
            packs = self.packs(window)
            now = crc32(repr(packs).encode())
            if number and now != before:
                rows = self._lengths.rows(window)
                raise DataError(
                    f"rows {rows[0]} to {rows[-1]} of the order make other packs than they did when this "
                    "checkpoint was written: one that could not be used then can be now, or the other way round. Put "
                    "its image or file back as it was, or begin a new run"
                )
            for at in range(number, len(packs)):
                yield packs[at], (window, at + 1, now) if at + 1 < len(packs) else (window + 1, 0, 0)
            window, number = window + 1, 0

    def _stream(self) -> Generator[list[Any], None, None]:
        chunks = _Chunks(self)
        if self.workers and self.rank < self.global_batch:  # later ranks never have a row
            made = run_workers(self._processed, chunks, self.workers, self.timeout)
        else:
            made = (list(zip(chunk, self._processed[chunk], strict=True)) for chunk in chunks)
        rows = chain.from_iterable(made)
        try:
            for mine, behind, plan in self.steps(self.place):
                spare = [_EMPTY] * (-(-self.global_batch // self.world) - len(mine))
                batches = [self._batch(pack, rows, plan) for pack in [*mine, *spare]]
                self.place = behind
                if self._ahead is not None:
                    # The files of this window are here since it was counted.
                    self._ahead.at(self._lengths.rows(behind[0]).stop)
                yield batches
        finally:
            if self._ahead is not None:
                self._ahead.close()
            made.close()

    def _batch(self, pack: Pack, rows: Iterator[tuple[Place, Any]], plan: int) -> dict[str, Any]:
        found = [self._judge.admit(*self._fitting(*next(rows), room)) for room in pack.lengths]
        samples = [sample for sample in found if sample is not None]
        return collate_pack(samples, self.encoder.pad_id, self.encoder.seq_length, plan, self.shared)

    def _fitting(self, place: Place, made: Any, room: int) -> tuple[Place, Any]:
        """A row, or the error that it is where there is less room than it takes."""
        if isinstance(made, DataError) or len(made.input_ids) <= room:
            return place, made
        was = f"{room} were counted when packs were planned: did its image change?" if room else "it was left out then."
        return place, BadSample(
            made.file, made.row, f"has {len(made.input_ids)} tokens, and {was} Empty the data cache (data.cache) and "
            "start a new run", made.id,
        )  # fmt: skip


class _Chunks:
    """The places of this rank's rows, in pieces that are made together: the sampler of the worker processes too."""

    step = AT_ONCE

    def __init__(self, loader: PackLoader) -> None:
        self.loader, self.place = loader, loader.place

    def __iter__(self) -> Iterator[list[Place]]:
        for mine, _, _ in self.loader.steps(self.place):
            for pack in mine:
                places = [self.loader.mixture.row(number) for number in pack.rows]
                yield from (places[first : first + AT_ONCE] for first in range(0, len(places), AT_ONCE))
