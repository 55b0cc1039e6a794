"""Counts the tokens of rows without decoding images: text with the tokenizer, images by the sizes in their headers.

Counts are stored in a cache file with 4 bytes per row of a data set: the count, or 0 for a row not counted yet.
Ranks of a machine, later epochs and later runs share it. A process that reads a 0 counts the row, so no process waits
for another, and a file that cannot be written only costs time. Rows that cannot be used are recorded too, and stay left
out.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, count
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import transformers

from octavo.data.batching.collate import Place
from octavo.data.encoding.encode import Encoder, TokenizerInput
from octavo.data.encoding.loss_mask import TemplateProblem
from octavo.data.encoding.processor_calls import single_thread
from octavo.data.encoding.sample import Sample
from octavo.data.errors import DataError, MediaProblem, Mismatch
from octavo.data.loaders.loader import run_workers
from octavo.data.order import Mixture
from octavo.data.storage import cache
from octavo.data.tasks.concat import JoinedDocuments
from octavo.data.tasks.sealed import SealedRows
from octavo.data.tasks.sources import Source
from octavo.data.tasks.splitting import SplitRows

FORMAT_VERSION = 2  # version of the file; incremented when the counts of the same rows change
LEFT_OUT = -1  # count of a row that is left out; it stays left out, so that the packs of a resumed run do not change
ROWS_PER_CALL = 50  # rows counted in one call


def count_tokens(encoder: Encoder, rows: Sequence[Any]) -> list[int]:
    """Return the number of tokens of each row after `encode`, at most `encoder.seq_length`, and 0 for a row that is
    rejected or left out, as far as that is known without pixels. A row that is cut inside an image has fewer tokens
    than its count."""
    lengths = [len(row.input_ids) if isinstance(row, Sample) else 0 for row in rows]
    # Rows are grouped by whether the tokenizer adds special tokens, which is an option of the whole call.
    texts: dict[bool, list[tuple[int, TokenizerInput, int]]] = {}
    for number, row in enumerate(rows):
        if isinstance(row, Sample | DataError):
            continue
        try:
            tokenizer_input = encoder.tokenizer_input(row)
            is_only_image = len(tokenizer_input.images) == 1
            added = sum(encoder.image_tokens(image, is_only_image) - 1 for image in tokenizer_input.images)
        except (DataError, MediaProblem, Mismatch, TemplateProblem):
            continue
        texts.setdefault(tokenizer_input.special, []).append((number, tokenizer_input, added))
    for special, group in texts.items():
        for (number, tokenizer_input, added), ids in zip(group, _tokenize(encoder, special, group), strict=True):
            if ids is not None:
                end_token = tokenizer_input.ended and ids[-1:] != [encoder.tokenizer.eos_token_id]
                lengths[number] = len(ids) + added + end_token
    max_tokens = encoder.seq_length if encoder.on_long == "cut" else 0
    return [length if length <= encoder.seq_length else max_tokens for length in lengths]


def _tokenize(
    encoder: Encoder, special: bool, group: Sequence[tuple[int, TokenizerInput, int]]
) -> list[list[int] | None]:
    """Return the tokens of each text, or None for a text that the tokenizer rejects."""
    try:
        with single_thread():
            texts = [tokenizer_input.text for _, tokenizer_input, _ in group]
            return list(encoder.tokenizer(texts, add_special_tokens=special, verbose=False)["input_ids"])
    except Exception:  # tokenizers may raise anything for a bad row; the others are then tokenized one by one
        return [None] if len(group) == 1 else [ids for entry in group for ids in _tokenize(encoder, special, [entry])]


class TokenCounts:
    """The known token counts of a data set: up to `max_tokens`, `LEFT_OUT` for a row that is left out, 0 for an
    uncounted row.

    `file` is shared by all processes that count; None keeps the counts in memory, for samples that need no counting.
    Raises DataError if the file has the wrong size.
    """

    def __init__(self, rows: int, max_tokens: int, file: Path | None = None) -> None:
        self._read, self._max_tokens, self._file = np.zeros(rows, np.int32), max_tokens, file
        self._map()

    def _map(self) -> None:
        self._shared: np.ndarray | None = None
        if self._file is None:
            return
        if (size := self._file.stat().st_size) != self._read.nbytes:
            raise DataError(f"{self._file}, a file of the data cache, is damaged ({size} bytes, {self._read.nbytes} "
                            "were written); remove it")  # fmt: skip
        self._shared = np.memmap(self._file, "<i4", "r")

    def __getstate__(self) -> dict[str, object]:
        return {key: value for key, value in self.__dict__.items() if key != "_shared"}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._map()

    def __getitem__(self, row: int) -> int:
        if not self._read[row] and self._shared is not None:
            count = self._shared[row]
            self._read[row] = count if count == LEFT_OUT or 0 < count <= self._max_tokens else 0
        return int(self._read[row])

    def add(self, counts: Iterable[tuple[int, int]]) -> None:
        """Store (row, tokens or `LEFT_OUT`) of counted rows."""
        new = [(row, tokens) for row, tokens in counts if self[row] != tokens]
        for row, tokens in new:
            self._read[row] = tokens
        if self._file is None or not new:
            return
        try:
            out = os.open(self._file, os.O_WRONLY | getattr(os, "O_CLOEXEC", 0))
            try:
                for row, tokens in new:  # not through the map: on a full disk that would end the process
                    os.pwrite(out, np.array(tokens, "<i4").tobytes(), 4 * row)
            finally:
                os.close(out)
        except OSError:  # other processes and later runs count these rows again
            pass


def open_counts(
    source: Source | SplitRows | JoinedDocuments | SealedRows, encoder: Encoder, folder: Path | None, depends_on: str
) -> TokenCounts:
    """Open the token counts of a data set in the cache. `depends_on` contains all that determines its rows, except its
    file and the encoder. Raises DataError if the cache cannot be used."""
    if isinstance(source, JoinedDocuments | SealedRows):
        return TokenCounts(len(source), encoder.seq_length)
    base, questions = (source.source, len(source)) if isinstance(source, SplitRows) else (source, None)
    length = len(base.rows) if questions is None else questions

    def write(file: Path, progress: Callable[[float], None]) -> None:
        np.zeros(length, "<i4").tofile(file)

    what = [base.kind, base.format, str(base.images), *([] if questions is None else ["split", len(base)])]
    key = json.dumps([FORMAT_VERSION, length, *what, depends_on, _encoder_fingerprint(encoder)])
    return TokenCounts(
        length, encoder.seq_length, cache.cached_file(folder, base.rows.path, write, depends_on=key, form="counts")
    )


def _encoder_fingerprint(encoder: Encoder) -> str:
    """Return a text of all settings of an encoder that determine the number of tokens of a row."""
    processor, tokenizer = encoder.processor, encoder.tokenizer
    templates = [getattr(part, "chat_template", None) for part in (processor, tokenizer)]
    pixels = getattr(processor, "image_processor", None)
    settings = [
        type(encoder).__name__,
        encoder.seq_length,
        encoder.on_long,
        encoder.system,
        encoder.max_image_megapixels,
    ]
    settings += [dict(getattr(processor, "template_args", {}))]
    videos = getattr(processor, "videos", None)
    settings += [] if videos is None else [repr(videos), repr(encoder.calls.file_limits)]
    image_settings = None if pixels is None else [type(processor).__name__, pixels.to_dict()]
    versions = [transformers.__version__, tokenizers.__version__]
    return json.dumps(
        [*settings, templates, tokenizer.backend_tokenizer.to_str(), image_settings, *versions], default=str
    )


class _TokenCounter:
    """Maps places to token counts. Uses the counts that other processes have stored, and stores new ones."""

    def __init__(self, sources: Sequence[Any], encoder: Encoder, known: Sequence[TokenCounts]) -> None:
        self.sources, self.encoder, self.known = sources, encoder, known

    def __getitem__(self, places: Sequence[Place]) -> list[int]:
        new = [place for place in dict.fromkeys(places) if not self.known[place[0]][place[1]]]
        lengths = count_tokens(self.encoder, [self._row(*place) for place in new])
        counted = {place: count or LEFT_OUT for place, count in zip(new, lengths, strict=True)}
        store_counts(self.known, counted.items())
        return [counted.get(place) or self.known[place[0]][place[1]] for place in places]

    def _row(self, source: int, row: int) -> Any:
        try:
            return self.sources[source][row]
        except DataError as bad:
            return bad


def store_counts(known: Sequence[TokenCounts], counted: Iterable[tuple[Place, int]]) -> None:
    """Store new counts in the files of their data sets."""
    counted = list(counted)
    for number, counts in enumerate(known):
        counts.add((row, count) for (source, row), count in counted if source == number)


class WindowLengths:
    """The token counts of the rows of a mixture in windows of `size` rows, in order from the window `first` on. The
    last window of a round may be shorter, so that no window has rows of two rounds.

    `workers` is the number of processes that count in advance, one window each. Each of the `world` ranks starts at a
    different place of a window, and skips rows that other ranks have counted meanwhile.
    """

    def __init__(
        self, mixture: Mixture, encoder: Encoder, size: int, known: Sequence[TokenCounts], first: int = 0,
        rank: int = 0, world: int = 1, workers: int = 0, timeout: float = float("inf"),
    ) -> None:  # fmt: skip
        self.mixture, self.size, self.next = mixture, size, first
        self.rank, self.world, self.workers, self._timeout = rank, world, workers, timeout
        self._counter = _TokenCounter(mixture.sources, encoder, known)
        self._stream: Any = None

    def rows(self, window: int) -> range:
        """Return the numbers of a window's rows in the stream of the mixture."""
        turn, nth = divmod(window, -(-self.mixture.round // self.size))
        first = turn * self.mixture.round + nth * self.size
        return range(first, min(first + self.size, (turn + 1) * self.mixture.round))

    def places(self, window: int) -> list[Place]:
        return [self.mixture.row(number) for number in self.rows(window)]

    def lengths(self, window: int) -> list[int]:
        """Return the number of tokens of each row of a window, 0 for rows that are left out."""
        places = self.places(window)
        if window != self.next:  # an earlier window, whose rows have been counted
            return [max(0, tokens) for tokens in self._counter[places]]
        self._stream = self._stream or self._count_windows()
        counted = dict(chain.from_iterable(next(self._stream) for _ in range(0, len(places), ROWS_PER_CALL)))
        self.next += 1
        if self.workers:  # the worker stored them only in the file, if that can be written
            store_counts(self._counter.known, counted.items())
        return [max(0, counted[place]) for place in places]

    def _count_windows(self) -> Any:
        chunks = _WindowChunks(self, self.next)
        if self.workers:
            return run_workers(self._counter, chunks, self.workers, self._timeout, -(-self.size // ROWS_PER_CALL) + 1)
        return (list(zip(chunk, self._counter[chunk], strict=True)) for chunk in chunks)

    def close(self) -> None:
        """Stop the counting processes."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None


class _WindowChunks:
    """The places of each window in chunks, starting with this rank's part. The sampler of the counting processes."""

    step = ROWS_PER_CALL

    def __init__(self, lengths: WindowLengths, first: int) -> None:
        self.lengths, self.first = lengths, first

    def __iter__(self) -> Iterator[list[Place]]:
        for window in count(self.first):
            places = self.lengths.places(window)
            starts = range(0, len(places), ROWS_PER_CALL)
            begin = self.lengths.rank * len(starts) // self.lengths.world
            for start in [*starts[begin:], *starts[:begin]]:
                yield places[start : start + ROWS_PER_CALL]
