"""Held-out data: every row once, in file order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from octavo.data.batching.collate import collate
from octavo.data.loaders.loader import CACHE_BYTES, BadRowPolicy, EncodedRows, RowEncoder
from octavo.data.skip_report import SkipReport
from octavo.data.tasks.concat import JoinedDocuments
from octavo.data.tasks.sealed import SealedRows
from octavo.data.tasks.sources import Source
from octavo.data.tasks.splitting import SplitRows


class EvalSet:
    """Batches over all rows of the sources, in file order; every iteration yields the same batches.

    Batch k has the rows [k*B, (k+1)*B), B = `micro_batch`; rank r takes the batches r, r + world, ... Every rank
    yields `len(evalset)` batches; a rank without a last batch yields an empty one (fully masked, no rows in its meta).
    Together the ranks use each row once. Encoded rows stay in memory between evaluations. `max_rows` limits the rows to
    the first ones; None uses all.
    """

    def __init__(
        self,
        sources: Sequence[Source | SplitRows | JoinedDocuments | SealedRows],
        encoder: RowEncoder,
        micro_batch: int,
        rank: int = 0,
        world: int = 1,
        on_bad: str = "error",
        report_path: str | Path | None = None,
        cache_bytes: int = CACHE_BYTES,
        collate: Callable[..., Any] = collate,
        max_rows: int | None = None,
    ) -> None:
        self.sources, self.encoder, self.micro_batch, self.rank, self.world = (
            tuple(sources), encoder, micro_batch, rank, world)  # fmt: skip
        self.collate, self.max_rows = collate, max_rows
        self.policy = BadRowPolicy(self.sources, on_bad, report_path)
        self.encoded = EncodedRows(self.sources, encoder, cache_bytes)

    @property
    def report(self) -> SkipReport:
        return self.policy.report

    @property
    def rows(self) -> int:
        """The number of rows of all sources, over all ranks."""
        total = sum(len(source) for source in self.sources)
        return total if self.max_rows is None else min(total, self.max_rows)

    def origin(self, file: str, row: int, answer: int | None) -> str:
        """Return a key by which dependent answers are grouped: the value of `source` in the row (one name, or a list
        with one per answer), else the names of its images, sounds and videos, else file and row number."""
        sources = (source.source if isinstance(source, SplitRows) else source for source in self.sources)
        rows = next(source for source in sources if source.name == file and row < len(source))
        if isinstance(rows, JoinedDocuments | SealedRows):  # samples of several documents, or without any names
            return f"{file}:{row}"
        raw = rows.rows[row]
        source_name = raw.get("source") if isinstance(raw, dict) else None
        if isinstance(source_name, list) and answer is not None and answer < len(source_name):
            source_name = source_name[answer]
        if isinstance(source_name, str | int):
            return str(source_name)
        media_files = [file for kind in ("images", "sounds", "videos") for file in getattr(rows[row], kind, ())]
        return "|".join(map(str, media_files)) if media_files else f"{file}:{row}"

    def __len__(self) -> int:
        return -(-self.rows // (self.micro_batch * self.world))

    def __iter__(self) -> Iterator[Any]:
        places = [(source, row) for source, rows in enumerate(self.sources) for row in range(len(rows))][: self.rows]
        for step in range(len(self)):
            first = (step * self.world + self.rank) * self.micro_batch
            batch = places[first : first + self.micro_batch]
            admitted = list(map(self.policy.admit, batch, self.encoded[batch]))
            yield self.collate([sample for sample in admitted if sample is not None], self.encoder.pad_id)
