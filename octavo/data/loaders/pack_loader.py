"""The stream of packs of a rank. The packs do not depend on the number of ranks and workers, and a resume continues
exactly.

The rows of a mixture are taken window by window (the last window of an epoch is shorter). Their tokens are counted
(:mod:`octavo.data.loaders.token_counts`), they are packed (:mod:`octavo.data.batching.packing`), and the packs of a
window are shuffled by the seed. So the content of the n-th pack depends only on data, settings and seed; the position
of a run is two numbers, window and pack; and the number of packs in an epoch follows from token counts
(`PackLoader.count`).
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
from octavo.data.loaders.loader import CACHE_BYTES, ROWS_PER_CALL, StepStream, run_workers
from octavo.data.loaders.token_counts import TokenCounts, WindowLengths
from octavo.data.order import Mixture, permutation


class Pack(NamedTuple):
    """The rows of a pack, as numbers in the stream of the mixture, and the tokens planned for each; 0 for a row that is
    left out."""

    rows: tuple[int, ...]
    lengths: tuple[int, ...]


_EMPTY = Pack((), ())


class PackLoader(StepStream):
    """Yields for each step the packs of this rank, each as a micro-batch (`collate_pack`).

    Step t takes `global_batch` packs of the stream, from `pack_position` on. They are distributed over the `world`
    ranks by cost; a rank with one pack less than others gets an empty pack, so that all ranks run the same number of
    forwards. A row that is bad or too long is missing from its pack; other packs do not change.

    `pack_position` is the position of the first pack after the yielded steps: (window, pack in it, checksum of the
    window's packs). To resume, pass the stored `pack_position`. `counts` are the token counts of each data set,
    `context_ranks` is the number of ranks that share the tokens of a pack. For the other arguments see `StepStream`.
    """

    def __init__(
        self,
        mixture: Mixture,
        encoder: Encoder,
        counts: Sequence[TokenCounts],
        window: int,
        global_batch: int,
        rank: int = 0,
        world: int = 1,
        pack_position: tuple[int, int, int] = (0, 0, 0),
        workers: int = 0,
        on_bad: str = "error",
        report_path: str | Path | None = None,
        cache_bytes: int = CACHE_BYTES,
        timeout: float = float("inf"),
        context_ranks: int = 1,
    ) -> None:
        if global_batch < 1:
            raise DataError(f"global_batch {global_batch}; give each step 1 or more packs")
        super().__init__(mixture, encoder, rank, world, workers, on_bad, report_path, cache_bytes, timeout)
        self.window, self.global_batch, self.pack_position, self.context_ranks = (
            window,
            global_batch,
            pack_position,
            context_ranks,
        )
        self._lengths = WindowLengths(
            mixture, encoder, window, counts, pack_position[0], rank, world, min(1, workers), timeout
        )
        # `rows` and checkpoints read the packs of the current window repeatedly, and planning them is slow.
        self.packs = lru_cache(maxsize=4)(self._make_packs)

    @property
    def rows(self) -> int:
        window, number, _ = self.pack_position
        finished = self.packs(window)[:number] if number else ()
        return self._lengths.rows(window).start + sum(len(pack.rows) for pack in finished)

    def count(self, epochs: float) -> int:
        """Return the number of packs in the first `epochs` rounds of the mixture; a last, partial window counts in
        proportion to its rows. All workers count tokens, because training has not started."""
        self._lengths.workers = self.workers
        rows, packs, window = epochs * self.mixture.round, 0, 0
        while (window_rows := self._lengths.rows(window)).start < rows:
            share = min(1, (rows - window_rows.start) / len(window_rows))
            packs += ceil(round(share * len(self.packs(window)), 9))
            window += 1
        return packs

    def close(self) -> None:
        """Stop the workers and the process that counts tokens."""
        super().close()
        self._lengths.close()

    def _make_packs(self, window: int) -> tuple[Pack, ...]:
        """Return the packs of a window in training order."""
        lengths = self._lengths.lengths(window)
        usable = [row for row, length in enumerate(lengths) if length]
        left_out = [row for row, length in enumerate(lengths) if not length]
        numbers = packing.pack([lengths[row] for row in usable], self.encoder.seq_length)
        packs = [[usable[n] for n in members] for members in numbers]
        packs = packs or [[]]
        for number, row in enumerate(
            left_out
        ):  # each joins a pack, so that the rank of the pack reports why the row is left out
            packs[number % len(packs)].append(row)
        first = self._lengths.rows(window).start
        planned = [
            Pack(tuple(first + row for row in members), tuple(lengths[row] for row in members)) for members in packs
        ]
        return tuple(planned[n] for n in permutation(len(planned), self.mixture.seed, 4, window))

    def steps(self, position: tuple[int, int, int]) -> Iterator[tuple[list[Pack], tuple[int, int, int], int]]:
        """Yield for each step from a position on: this rank's packs, the position after the step, and a checksum of
        the packs of all ranks."""
        stream = self._packs_from(position)
        while True:
            step = list(islice(stream, self.global_batch))
            local_packs = packing.assign_to_ranks([packing.pack_cost(pack.lengths) for pack, _ in step], self.world)[
                self.rank
            ]
            yield [step[n][0] for n in local_packs], step[-1][1], crc32(repr([pack for pack, _ in step]).encode())

    def _packs_from(self, position: tuple[int, int, int]) -> Iterator[tuple[Pack, tuple[int, int, int]]]:
        """Yield each pack of the stream and the position after it. Raises `DataError` if the packs in the window of
        `pack_position` differ from those at the time of the checkpoint."""
        window, number, saved_checksum = position
        while True:
            packs = self.packs(window)
            checksum = crc32(repr(packs).encode())
            if number and checksum != saved_checksum:
                rows = self._lengths.rows(window)
                raise DataError(
                    f"rows {rows[0]} to {rows[-1]} of the order are packed differently from when this checkpoint was "
                    "written: a row that could not be used then can be used now, or the reverse. Restore its image or "
                    "file, or start a new run"
                )
            for index in range(number, len(packs)):
                yield packs[index], (window, index + 1, checksum) if index + 1 < len(packs) else (window + 1, 0, 0)
            window, number = window + 1, 0

    def _stream(self) -> Generator[list[Any], None, None]:
        chunks = _RowChunks(self)
        if self.workers and self.rank < self.global_batch:  # higher ranks never have a row
            processed = run_workers(self.encoded, chunks, self.workers, self.timeout)
        else:
            processed = (list(zip(chunk, self.encoded[chunk], strict=True)) for chunk in chunks)
        rows = chain.from_iterable(processed)
        try:
            for local_packs, next_position, checksum in self.steps(self.pack_position):
                padding = [_EMPTY] * (-(-self.global_batch // self.world) - len(local_packs))
                batches = [self._collate(pack, rows, checksum) for pack in [*local_packs, *padding]]
                self.pack_position = next_position
                if self._prefetcher is not None:
                    # The files of this window were downloaded when its tokens were counted.
                    self._prefetcher.prefetch_from(self._lengths.rows(next_position[0]).stop)
                yield batches
        finally:
            if self._prefetcher is not None:
                self._prefetcher.close()
            processed.close()

    def _collate(self, pack: Pack, rows: Iterator[tuple[Place, Any]], checksum: int) -> dict[str, Any]:
        admitted = [self.policy.admit(*self._check_length(*next(rows), planned)) for planned in pack.lengths]
        samples = [sample for sample in admitted if sample is not None]
        return collate_pack(samples, self.encoder.pad_id, self.encoder.seq_length, checksum, self.context_ranks)

    def _check_length(self, place: Place, row: Any, planned: int) -> tuple[Place, Any]:
        """Return the place and its row, or a `BadSample` in place of the row if it has more than `planned` tokens."""
        if isinstance(row, DataError) or len(row.input_ids) <= planned:
            return place, row
        reason = (
            f"{planned} were counted when packs were planned: did its image change?"
            if planned
            else "it was left out then."
        )
        return place, BadSample(
            row.file, row.row, f"has {len(row.input_ids)} tokens, and {reason} Empty the data cache (data.cache) and "
            "start a new run", row.id,
        )  # fmt: skip


class _RowChunks:
    """The places of this rank's rows in chunks that are encoded together. Also the sampler of the worker processes."""

    step = ROWS_PER_CALL

    def __init__(self, loader: PackLoader) -> None:
        self.loader, self.pack_position = loader, loader.pack_position

    def __iter__(self) -> Iterator[list[Place]]:
        for local_packs, _, _ in self.loader.steps(self.pack_position):
            for pack in local_packs:
                places = [self.loader.mixture.row(number) for number in pack.rows]
                yield from (places[first : first + ROWS_PER_CALL] for first in range(0, len(places), ROWS_PER_CALL))
