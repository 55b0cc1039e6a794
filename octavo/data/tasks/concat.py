"""Joined documents: one stream of tokens with an end token after each document, cut into samples of equal length.

Sample i is the tokens [i T, (i + 1) T) of the documents in shuffled order (evaluation data: in file order). So any
sample is located directly, and an order over samples (`Mixture`) resumes with one number. A document may begin in one
sample and end in the next; there is no padding, no token is lost, and the last sample may be shorter. Attention is
causal over the whole sample: a document attends to earlier documents in its sample, as in most pretraining.

Documents are tokenized once, into a cache file that all ranks and workers map into memory:

    token ids of all documents (uint16 or uint32) · int64 [documents + 1], the start of each and the end of the last ·
    JSON: dtype, records of rows left out · the lengths of the two previous parts, uint64 each
"""

from __future__ import annotations

import json
import struct
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from octavo.data.encoding.sample import IGNORE, Sample
from octavo.data.errors import BadSample, DataError, QuotingError
from octavo.data.order import permutation
from octavo.data.storage import cache
from octavo.data.tasks.documents import Document, DocumentEncoder
from octavo.data.tasks.sources import DETECTION_ROWS, Source

FORMAT_VERSION = 1  # version of the file; incremented when the file of the same documents changes
CHARS_PER_CALL = 1 << 20  # characters passed to the tokenizer in one call
_TRAILER = struct.Struct("<QQ")


class JoinedDocuments:
    """The documents of a data set as samples of up to `length` tokens: `len(joined)`, `joined[i]` (a `Sample`),
    `joined.records` (of rows that are left out or noted)."""

    def __init__(self, name: str, file: Path, length: int, seed: int | None, vocabulary: int) -> None:
        self.name, self.file, self.length, self.vocabulary = name, file, length, vocabulary
        self._map()
        sizes = np.diff(self._edges)
        self._order = np.arange(len(sizes)) if seed is None else permutation(len(sizes), seed, 3)
        self._starts = np.concatenate([[0], np.cumsum(sizes[self._order])])  # of documents, in that order

    def __len__(self) -> int:
        return int(self._starts[-1] + self.length - 2) // self.length  # a last sample of one token has no prediction

    def __getitem__(self, number: int) -> Sample:
        if not 0 <= number < len(self):
            raise IndexError(f"{self.name} has {len(self)} samples of {self.length} tokens; {number} was requested")
        at, stop = number * self.length, min((number + 1) * self.length, int(self._starts[-1]))
        nth = int(np.searchsorted(self._starts, at, "right")) - 1
        pieces = []
        while at < stop:
            end = min(stop, int(self._starts[nth + 1]))
            begin = int(self._edges[self._order[nth]]) - int(self._starts[nth])
            pieces.append(self._ids[begin + at : begin + end])
            at, nth = end, nth + 1
        ids = np.concatenate(pieces).astype(np.int64)
        if (top := int(ids.max())) >= self.vocabulary:
            raise self._damaged(f"sample {number} has the token {top}, and the tokenizer has {self.vocabulary}")
        labels = ids.copy()
        labels[0] = IGNORE  # nothing predicts the first token
        return Sample(ids, labels, length=len(ids), file=self.name, row=number)

    def _map(self) -> None:
        try:
            with open(self.file, "rb") as file:
                size = file.seek(-_TRAILER.size, 2) + _TRAILER.size
                edges, trailer_size = _TRAILER.unpack(file.read())
                at = file.seek(size - _TRAILER.size - trailer_size - 8 * edges)
                self._edges: np.ndarray = np.memmap(self.file, np.int64, "r", at, (edges,))
                file.seek(8 * edges, 1)
                trailer = json.loads(file.read(trailer_size))
            self.records: list[dict[str, Any]] = trailer["records"]
            self._ids = np.memmap(self.file, np.dtype(trailer["dtype"]), "r", 0, (int(self._edges[-1]),))
            if at - self._ids.nbytes not in range(8):
                raise ValueError(f"{self._ids.nbytes} bytes of tokens were written, but it has {at}")
        except (OSError, ValueError, KeyError, struct.error) as cause:
            raise self._damaged(cause) from cause

    def _damaged(self, cause: object) -> DataError:
        return DataError(f"{self.file}, a file of the data cache, is damaged ({cause}); remove it")

    def __getstate__(self) -> dict[str, object]:
        return {key: value for key, value in self.__dict__.items() if key not in ("_ids", "_edges")}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._map()


def is_plain_text(source: Source) -> bool:
    """Return True if the first rows of a data set are plain text without images."""
    if source.format != "text":
        return False
    for row in range(min(len(source), DETECTION_ROWS)):
        try:
            if source[row].images:
                return False
        except BadSample:  # reported when the row is used
            continue
    return True


def join(
    source: Source, encoder: DocumentEncoder, on_bad: str, seed: int | None, folder: Path | None = None,
    log: cache.Log = cache.no_log, depends_on: str = "",
) -> JoinedDocuments:  # fmt: skip
    """Join the documents of a source; their tokens come from the cache or are computed now.

    `seed` shuffles the documents; None keeps the file order. `depends_on` contains all other settings of the data set
    that determine its rows. Raises `DataError`: a `BadSample` for a bad row with on_bad="error", or if all rows are
    bad.
    """
    if encoder.seq_length < 2:
        raise DataError(
            f"train.seq_length is {encoder.seq_length}, but joined documents need 2 or more: a token predicts the next"
        )

    def write(file: Path, progress: Callable[[float], None]) -> None:
        _write_file(source, encoder, on_bad, file, progress)

    key = json.dumps([FORMAT_VERSION, source.format, len(source), depends_on, _tokenizer_fingerprint(encoder)])
    file = cache.cached_file(folder, source.rows.path, write, log, key, "tokens")
    vocabulary = max(encoder.tokenizer.get_vocab().values()) + 1  # ids may have gaps, so not the number of tokens
    joined = JoinedDocuments(source.name, file, encoder.seq_length, seed, vocabulary)
    bad = [record for record in joined.records if record["action"] == BadSample.action]
    if bad and on_bad == "error":
        raise BadSample(*(bad[0][key] for key in ("file", "row", "reason", "id")))
    return joined


def _tokenizer_fingerprint(encoder: DocumentEncoder) -> str:
    """Return a text of all settings of a tokenizer that determine the tokens of a text."""
    tokenizer = encoder.tokenizer
    options = [getattr(tokenizer, "split_special_tokens", False), encoder.end_id, sorted(encoder.marks)]
    return json.dumps([tokenizers.__version__, tokenizer.backend_tokenizer.to_str(), options])


def _write_file(
    source: Source, encoder: DocumentEncoder, on_bad: str, file: Path, progress: Callable[[float], None]
) -> None:
    dtype = np.dtype("<u2" if len(encoder.tokenizer) <= 1 << 16 else "<u4")
    edges = array("q", [0])
    records: list[dict[str, Any]] = []
    with open(file, "wb") as out:
        for row, texts in _text_batches(source, encoder, on_bad, records):
            for ids in encoder.tokenize(texts):
                out.write(np.array(ids, dtype).tobytes())
                edges.append(edges[-1] + len(ids))
            progress(row / len(source))
        if len(edges) == 1:
            last = records[-1]
            raise QuotingError(
                f"{source.name}: all {len(source)} rows were left out; the last one (row {last['row']}) "
                f"because it {last['reason']}"
            )
        out.write(b"\0" * (-out.tell() % 8))
        trailer = json.dumps({"dtype": dtype.str, "records": records}).encode()
        out.write(edges.tobytes() + trailer + _TRAILER.pack(len(edges), len(trailer)))


def _text_batches(
    source: Source, encoder: DocumentEncoder, on_bad: str, records: list[dict[str, Any]]
) -> Iterator[tuple[int, list[str]]]:
    """Yield (rows read so far, texts of about `CHARS_PER_CALL` characters); rows left out or noted are appended to
    `records`."""
    texts: list[str] = []
    size = 0
    for row in range(len(source)):
        try:
            document: Document = source[row]
            records += [{"file": source.name, "row": row, "id": document.id, "action": action, "reason": reason}
                        for action, reason in encoder.collect_notes(document)]  # fmt: skip
        except BadSample as bad:
            if on_bad == "error":
                raise
            records.append(bad.record())
            continue
        texts.append(document.text)
        size += len(document.text)
        if size >= CHARS_PER_CALL:
            yield row + 1, texts
            texts, size = [], 0
    if texts:
        yield len(source), texts
