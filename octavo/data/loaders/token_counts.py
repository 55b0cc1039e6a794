"""How many tokens rows have, before an image is opened: text by the tokenizer, images by the sizes in their headers.

What is counted once is kept in a file of the cache, 4 bytes a row of a data set: a number, or 0 where nobody counted
yet. Ranks of a machine, later epochs and later runs share it. Whoever finds a 0 counts the row; so nobody waits for
anybody, and a file that cannot be written costs time alone. A row that cannot be used is noted too, and stays left out.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, count
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import transformers

from octavo.data.batching.collate import Place
from octavo.data.encoding.encode import Encoder, Written
from octavo.data.encoding.loss_mask import TemplateProblem
from octavo.data.encoding.processor_calls import single_thread
from octavo.data.encoding.sample import Sample
from octavo.data.errors import DataError, ImageProblem, Mismatch
from octavo.data.loaders.loader import run_workers
from octavo.data.order import Mixture
from octavo.data.storage import cache
from octavo.data.tasks.concat import Joined
from octavo.data.tasks.sealed import Sealed
from octavo.data.tasks.sources import Source
from octavo.data.tasks.splitting import Split

FORM = 2  # of the file; rises when the same rows give other numbers
LEFT = -1  # tokens of a row that is left out: it stays so, or the packs of a run that goes on would be others
PIECE = 50  # rows that are counted in one call


def count_tokens(encoder: Encoder, rows: Sequence[Any]) -> list[int]:
    """The tokens of each row as `encode` makes it, at most `encoder.seq_length`: 0 for one that it refuses or leaves
    out, as far as that is known without pixels. One that is cut inside an image has fewer than are counted."""
    found = [len(row.input_ids) if isinstance(row, Sample) else 0 for row in rows]
    texts: dict[bool, list[tuple[int, Written, int]]] = {}
    for number, row in enumerate(rows):
        if isinstance(row, Sample | DataError):
            continue
        try:
            written = encoder.written(row)
            alone = len(written.images) == 1
            grown = sum(encoder.image_tokens(image, alone) - 1 for image in written.images)
        except (DataError, ImageProblem, Mismatch, TemplateProblem):
            continue
        texts.setdefault(written.special, []).append((number, written, grown))
    for special, asked in texts.items():
        for (number, written, grown), ids in zip(asked, _ids(encoder, special, asked), strict=True):
            if ids is not None:
                ends = written.ended and ids[-1:] != [encoder.tokenizer.eos_token_id]
                found[number] = len(ids) + grown + ends
    most = encoder.seq_length if encoder.on_long == "cut" else 0
    return [length if length <= encoder.seq_length else most for length in found]


def _ids(encoder: Encoder, special: bool, asked: Sequence[tuple[int, Written, int]]) -> list[list[int] | None]:
    """The tokens of texts, None for one that the tokenizer refuses."""
    try:
        with single_thread():
            texts = [written.text for _, written, _ in asked]
            return list(encoder.tokenizer(texts, add_special_tokens=special, verbose=False)["input_ids"])
    except Exception:  # a stranger's program; whatever it meets is one row's
        return [None] if len(asked) == 1 else [ids for one in asked for ids in _ids(encoder, special, [one])]


class Counts:
    """What is known of the rows of a data set: token counts up to `most`, `LEFT` of one that is left out, 0 where
    nobody counted. `file`: where all who count write (None: in memory alone, for joined documents, whose rows are known
    by their number). Raises DataError for a file of another size."""

    def __init__(self, rows: int, most: int, file: Path | None = None) -> None:
        self._own, self._most, self._file = np.zeros(rows, np.int32), most, file
        self._map()

    def _map(self) -> None:
        self._shared = None
        if self._file is None:
            return
        if (size := self._file.stat().st_size) != self._own.nbytes:
            raise DataError(f"{self._file}, a file of the data cache, is damaged ({size} bytes, {self._own.nbytes} "
                            "were written); remove it")  # fmt: skip
        self._shared = np.memmap(self._file, "<i4", "r")

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_shared"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._map()

    def __getitem__(self, row: int) -> int:
        if not self._own[row] and self._shared is not None:
            found = self._shared[row]
            self._own[row] = found if found == LEFT or 0 < found <= self._most else 0
        return int(self._own[row])

    def add(self, found: Iterable[tuple[int, int]]) -> None:
        """(row, tokens or `LEFT`) of rows that were counted."""
        found = [(row, tokens) for row, tokens in found if self[row] != tokens]
        for row, tokens in found:
            self._own[row] = tokens
        if self._file is None or not found:
            return
        try:
            out = os.open(self._file, os.O_WRONLY | getattr(os, "O_CLOEXEC", 0))
            try:
                for row, tokens in found:  # not through the map: a full disk would end the process
                    os.pwrite(out, np.array(tokens, "<i4").tobytes(), 4 * row)
            finally:
                os.close(out)
        except OSError:  # others, and later runs, count these rows again
            pass


def open_counts(source: Source | Split | Joined | Sealed, encoder: Encoder, folder: Path | None, more: str) -> Counts:
    """What the cache knows of a data set; `more`: what else than its file and the encoder decides what its rows are.
    Raises DataError where the cache cannot be used."""
    if isinstance(source, Joined | Sealed):
        return Counts(len(source), encoder.seq_length)
    of, asked = (source.source, len(source)) if isinstance(source, Split) else (source, None)
    length = len(of.rows) if asked is None else asked

    def write(file: Path, progress: Any) -> None:
        np.zeros(length, "<i4").tofile(file)

    what = [of.kind, of.format, str(of.images), *([] if asked is None else ["split", len(of)])]
    key = json.dumps([FORM, length, *what, more, _print_of(encoder)])
    return Counts(length, encoder.seq_length, cache.cached_file(folder, of.rows.path, write, more=key, form="counts"))


def _print_of(encoder: Encoder) -> str:
    """All of an encoder that decides how many tokens a row has."""
    processor, tokenizer = encoder.processor, encoder.tokenizer
    templates = [getattr(one, "chat_template", None) for one in (processor, tokenizer)]
    pixels = getattr(processor, "image_processor", None)
    own = [type(encoder).__name__, encoder.seq_length, encoder.on_long, encoder.system, encoder.max_image_megapixels]
    own += [dict(getattr(processor, "template_args", {}))]
    videos = getattr(processor, "videos", None)
    own += [] if videos is None else [repr(videos), repr(encoder.calls.file_limits)]
    of_image = None if pixels is None else [type(processor).__name__, pixels.to_dict()]
    versions = [transformers.__version__, tokenizers.__version__]
    return json.dumps([*own, templates, tokenizer.backend_tokenizer.to_str(), of_image, *versions], default=str)


class _TokenCounter:
    """Places to token counts, in the process that counts: what anybody has counted is taken, the rest noted."""

    def __init__(self, sources: Sequence[Any], encoder: Encoder, known: Sequence[Counts]) -> None:
        self.sources, self.encoder, self.known = sources, encoder, known

    def __getitem__(self, places: Sequence[Place]) -> list[int]:
        new = [place for place in dict.fromkeys(places) if not self.known[place[0]][place[1]]]
        counted = count_tokens(self.encoder, [self._row(*place) for place in new])
        found = {place: count or LEFT for place, count in zip(new, counted, strict=True)}
        record_counts(self.known, found.items())
        return [found.get(place) or self.known[place[0]][place[1]] for place in places]

    def _row(self, source: int, row: int) -> Any:
        try:
            return self.sources[source][row]
        except DataError as bad:
            return bad


def record_counts(known: Sequence[Counts], counted: Iterable[tuple[Place, int]]) -> None:
    """Put what was counted where it is known from then on."""
    counted = list(counted)
    for number, of in enumerate(known):
        of.add((row, count) for (source, row), count in counted if source == number)


class Lengths:
    """Token counts of the rows of a mixture, by windows of `size` rows, one after the other from `first` on. The last
    window of a round has what is left of it, so that none has rows of two.

    `workers`: processes of their own that count ahead, each a window. They begin where none of the other `world` ranks
    does, and pass over what those have counted meanwhile.
    """

    def __init__(
        self, mixture: Mixture, encoder: Encoder, size: int, known: Sequence[Counts], first: int = 0, rank: int = 0,
        world: int = 1, workers: int = 0, timeout: float = float("inf"),
    ) -> None:  # fmt: skip
        self.mixture, self.size, self.next = mixture, size, first
        self.rank, self.world, self.workers, self._timeout = rank, world, workers, timeout
        self._counting = _TokenCounter(mixture.sources, encoder, known)
        self._made: Any = None

    def rows(self, window: int) -> range:
        """The numbers of a window's rows in the stream of the mixture."""
        turn, nth = divmod(window, -(-self.mixture.round // self.size))
        first = turn * self.mixture.round + nth * self.size
        return range(first, min(first + self.size, (turn + 1) * self.mixture.round))

    def places(self, window: int) -> list[Place]:
        return [self.mixture.row(number) for number in self.rows(window)]

    def of(self, window: int) -> list[int]:
        """Tokens of each row of a window; 0 for those that are left out."""
        places = self.places(window)
        if window != self.next:  # one that has passed, of which all is known
            return [max(0, tokens) for tokens in self._counting[places]]
        self._made = self._made or self._count_windows()
        counted = dict(chain.from_iterable(next(self._made) for _ in range(0, len(places), PIECE)))
        self.next += 1
        if self.workers:  # another process noted it where a file can be written to
            record_counts(self._counting.known, counted.items())
        return [max(0, counted[place]) for place in places]

    def _count_windows(self) -> Any:
        chunks = _Pieces(self, self.next)
        if self.workers:
            return run_workers(self._counting, chunks, self.workers, self._timeout, -(-self.size // PIECE) + 1)
        return (list(zip(chunk, self._counting[chunk], strict=True)) for chunk in chunks)

    def close(self) -> None:
        """Stop the processes that count."""
        if self._made is not None:
            self._made.close()
            self._made = None


class _Pieces:
    """The places of each window in pieces, from this rank's part on: the sampler of the processes that count."""

    step = PIECE

    def __init__(self, lengths: Lengths, first: int) -> None:
        self.lengths, self.first = lengths, first

    def __iter__(self) -> Iterator[list[Place]]:
        for window in count(self.first):
            places = self.lengths.places(window)
            starts = range(0, len(places), PIECE)
            begin = self.lengths.rank * len(starts) // self.lengths.world
            for start in [*starts[begin:], *starts[:begin]]:
                yield places[start : start + PIECE]
