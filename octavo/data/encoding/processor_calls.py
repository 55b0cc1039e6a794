"""Calls the processor for several rows at a time, and splits its outputs: tensors by row, and tokens by text position.

A call of a stock processor takes hundreds of microseconds even for a small input. So the encoding of a row is a
generator that yields a request and is sent the outputs; :func:`run_together` runs many generators and processes their
requests in one call.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import numpy as np

from octavo.base.wording import count_noun
from octavo.data.encoding import video as video_files
from octavo.data.encoding.audio import Limits
from octavo.data.encoding.audio import load as load_sound
from octavo.data.encoding.sample import check_lengths, extra_inputs
from octavo.data.errors import DataError, MediaProblem, Mismatch
from octavo.data.rows.audio_refs import SoundFile
from octavo.data.rows.image_refs import ImageFile, load

Outputs = dict[str, Any]
T = TypeVar("T")
OPEN_PIXELS = 1 << 25  # pixels of decoded images in memory at a time: 100 MB
KNOWN_OUTPUTS = {
    "input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "offset_mapping",
    "pixel_values", "image_grid_thw", "num_patches", "text_replacement_offsets",
}  # fmt: skip
_ROW_OUTPUTS = ("input_ids", "offset_mapping", "mm_token_type_ids", "text_replacement_offsets")


class ProcessorRequest(NamedTuple):
    """A request to the processor: a rendered text to tokenize, with its images, sounds and videos."""

    text: str
    images: tuple[ImageFile, ...] = ()
    sounds: tuple[SoundFile, ...] = ()
    videos: tuple[video_files.FrameSelection, ...] = ()


Encoding = Generator[ProcessorRequest, Outputs, T]


def run_together(
    rows: Sequence[Encoding[T]], answer: Callable[[Sequence[ProcessorRequest]], Sequence[Outputs | Exception]]
) -> list[T | DataError]:
    """Run generators of rows and return the value of each, or the `DataError` that it raises; other errors propagate.
    The requests of all rows are passed to `answer` at once; an exception among its results is raised in that row's
    generator."""
    results: list[Any] = [None] * len(rows)
    waiting: list[tuple[int, ProcessorRequest]] = []

    def advance(number: int, answered: Outputs | Exception | None) -> None:
        row = rows[number]
        try:
            request = row.throw(answered) if isinstance(answered, Exception) else row.send(answered)  # type: ignore[arg-type]
        except StopIteration as done:
            results[number] = done.value
        except DataError as bad:
            results[number] = bad
        else:
            waiting.append((number, request))

    for number in range(len(rows)):
        advance(number, None)
    while waiting:
        requests, waiting = waiting, []
        for (number, _), answered in zip(requests, answer([request for _, request in requests]), strict=True):
            advance(number, answered)
    return results


class ProcessorCalls:
    """Calls a processor (`.tokenizer`, `(text=, images=)`, or `(text=, audio=)`) for several rows at a time.

    A processor without `.image_processor` takes no images, without `.sound_limits` no sounds, without `.videos` no
    videos. `file_limits` are the limits of video files.
    """

    def __init__(
        self, processor: Any, max_image_megapixels: float, file_limits: video_files.FileLimits | None = None
    ) -> None:
        self.videos: Any = getattr(processor, "videos", None)
        self.file_limits = file_limits or video_files.FileLimits(megapixels=max_image_megapixels)
        self.processor, self.tokenizer = processor, processor.tokenizer
        self.max_image_megapixels = max_image_megapixels
        self.takes_images = getattr(processor, "image_processor", None) is not None
        limits = getattr(processor, "sound_limits", None)
        self.sound_limits = None if limits is None else Limits(*limits)
        self.multimodal = self.takes_images or self.sound_limits is not None
        self.image_token: str | None = None  # or the token of a sound: no supported family takes both
        if self.multimodal:
            self.image_token = processor.image_token if self.takes_images else processor.audio_token

    def tokens(self, texts: list[str]) -> Outputs:
        """Tokenize texts that contain all their special tokens."""
        return dict(self.tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True))

    def __call__(self, requests: Sequence[ProcessorRequest]) -> list[Outputs | Exception]:
        """Return the outputs for each request, or the error of the processor or of a media file. Rows of one kind share
        a call, up to `OPEN_PIXELS`; images are opened here, so that they stay decoded only during a call."""
        results: list[Outputs | Exception] = [Mismatch("")] * len(requests)
        groups: dict[tuple[bool, bool], list[_Row]] = {}
        for number, (text, paths, sounds, videos) in enumerate(requests):
            try:
                self._check(text, len(paths), len(sounds), len(videos))
                images = [load(path, self.max_image_megapixels) for path in paths]
                decoded_sounds = [load_sound(path, self.sound_limits) for path in sounds] if self.sound_limits else []
                row = _Row(
                    number,
                    text,
                    images,
                    decoded_sounds,
                    [video_files.load(video, self.file_limits) for video in videos],
                )
            except (MediaProblem, Mismatch, DataError) as problem:
                results[number] = problem
                continue
            group = groups.setdefault((bool(paths or sounds or videos), self.starts_with_bos(text)), [])
            group.append(row)
            # Decoded images are large: process the group before it fills memory.
            if sum(row.pixels for row in group) > OPEN_PIXELS:
                self._process_group(group, results)
                group.clear()
        for group in groups.values():
            self._process_group(group, results)
        return results

    def _check(self, text: str, images: int, sounds: int = 0, videos: int = 0) -> None:
        """Check that each image, sound or video of a row has a placeholder: in a call for several rows, the sums could
        agree although an image is assigned to the wrong row. Raises `Mismatch`."""
        if videos and (written := text.count(self.processor.video_token)) != videos:
            raise Mismatch(
                f"the chat template writes {count_noun(written, 'placeholder')} ({self.processor.video_token}) for "
                f"{count_noun(videos, 'video')}; use a version of the template that supports videos"
            )
        places = text.count(self.image_token) if self.image_token is not None else 0
        if places != images + sounds:
            media = count_noun(sounds, "sound") if sounds else count_noun(images, "image")
            raise Mismatch(f"the chat template writes {count_noun(places, 'placeholder')} for {media}")

    def starts_with_bos(self, text: str) -> bool:
        """Return True if the template wrote the BOS token, so that the tokenizer must not add another."""
        bos = self.tokenizer.bos_token
        return bos is not None and text.startswith(bos)

    def _process_group(self, rows: Sequence[_Row], results: list[Outputs | Exception]) -> None:
        """Process rows in one call and store their outputs in `results`. If the call fails, process them one by one, so
        that only the bad row gets the error."""
        if not rows:
            return
        try:
            with single_thread():
                outputs = self._call(rows)
        except BaseException as cause:  # third-party code, as the template is, may raise anything for a bad row
            # A panic of the tokenizers library, which is written in Rust, is a BaseException.
            if not isinstance(cause, Exception) and type(cause).__name__ != "PanicException":
                raise
            if len(rows) == 1:
                results[rows[0].number] = processor_error(cause)
            else:
                for row in rows:
                    self._process_group([row], results)
            return
        names = extra_inputs(self.processor)
        if unknown := sorted(set(outputs) - KNOWN_OUTPUTS - set(names)):
            for row in rows:
                results[row.number] = DataError(
                    f"{type(self.processor).__name__} returns {', '.join(unknown)}, which Octavo does not pass to the "
                    "model; this version of transformers is not supported for this family"
                )
            return
        place = getattr(self.processor, "image_token_id", None)
        try:
            by_row = split_outputs(outputs, [self.image_count(row) for row in rows], place, names)
            add_video_inputs(by_row, outputs, [len(row.videos) for row in rows], names)
            _add_sound_inputs(by_row, outputs, [len(row.sounds) for row in rows], names)
        except DataError as wrong:
            for row in rows:
                results[row.number] = wrong
            return
        for row, row_outputs in zip(rows, by_row, strict=True):
            results[row.number] = self._trim(row_outputs)

    def image_count(self, row: _Row) -> int:
        """Return the number of images of a row, including frames of videos if the model takes them as images."""
        frames = getattr(self.processor, "frames_are_images", False)
        return len(row.images) + (sum(len(shot.indices) for shot in row.videos) if frames else 0)

    def _trim(self, outputs: Outputs) -> Outputs:
        """Remove the padding of a row's images to the size of the images of other rows."""
        trim = getattr(self.processor, "trimmed", None)
        if trim is None or "pixel_values" not in outputs:
            return outputs
        return {**outputs, **trim(outputs)}

    def _call(self, rows: Sequence[_Row]) -> Outputs:
        texts = [row.text for row in rows]
        if not self.multimodal:
            return self.tokens(texts)
        by_row = [row.images for row in rows]
        grouped = getattr(self.processor, "images_by_row", False)
        images = by_row if grouped and any(by_row) else [image for images in by_row for image in images]
        options = {"add_special_tokens": False} if self.starts_with_bos(texts[0]) else {}
        if not self.takes_images:
            sounds = [sound for row in rows for sound in row.sounds]
            return dict(self.processor(text=texts, audio=sounds or None, return_offsets_mapping=True, **options))
        shots = [shot for row in rows for shot in row.videos]
        if shots:
            options |= self.processor.video_inputs(shots)
        if shots or getattr(self.processor, "tells_places", False):
            options["return_text_replacement_offsets"] = True
        return dict(self.processor(text=texts, images=images or None, return_offsets_mapping=True, **options))


@contextmanager
def single_thread() -> Iterator[None]:
    """Disable the threads of tokenizers in the block, unless `TOKENIZERS_PARALLELISM` is set: starting threads takes
    longer than tokenizing a few rows, and makes every later fork print a warning."""
    if "TOKENIZERS_PARALLELISM" in os.environ:
        yield
        return
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        yield
    finally:
        del os.environ["TOKENIZERS_PARALLELISM"]


class _Row(NamedTuple):
    number: int
    text: str
    images: list[Any]
    sounds: list[np.ndarray] = []
    videos: list[video_files.DecodedVideo] = []

    @property
    def pixels(self) -> int:
        seen = sum(image.width * image.height for image in self.images) + sum(shot.frames.size for shot in self.videos)
        return seen + sum(map(len, self.sounds))


def _add_sound_inputs(
    rows: Sequence[Outputs], outputs: Outputs, sounds: Sequence[int], names: Mapping[str, str]
) -> None:
    """Add to row k the tensors of its `sounds[k]` sounds. Raises `DataError` as `split_outputs` does."""
    present = {name for name, per in names.items() if per == "sound" and outputs.get(name) is not None}
    check_lengths(outputs, dict.fromkeys(present, "sound"), {"sound": sum(sounds)})
    ends = np.cumsum([0, *sounds])
    for row, start, end in zip(rows, ends, ends[1:], strict=False):
        row |= {name: np.stack(outputs[name][start:end]) for name in present if end > start}


def add_video_inputs(
    rows: Sequence[Outputs], outputs: Outputs, videos: Sequence[int], names: Mapping[str, str]
) -> None:
    """Add to row k the tensors of its `videos[k]` videos: one entry per video of a per-video tensor, and the patches of
    their grids from a tensor of patches. Raises `DataError` as `split_outputs` does."""
    if (grid := outputs.get("video_grid_thw")) is None:
        return
    grid, ends = np.asarray(grid), np.cumsum([0, *videos])
    counts = {"video": int(ends[-1]), "patch": int(grid.prod(axis=1).sum())}
    counted = {name: per for name, per in names.items() if per in counts}
    check_lengths(outputs, counted, counts)
    for row, start, end in zip(rows, ends, ends[1:], strict=False):
        if end > start:
            patches = slice(*(int(grid[:n].prod(axis=1).sum()) for n in (start, end)))
            part = {"video": slice(start, end), "patch": patches}
            for name, per in counted.items():
                row[name] = np.asarray(outputs[name])[part[per]].copy()


def processor_error(cause: BaseException) -> Mismatch:
    return Mismatch(f"the processor rejects it: {type(cause).__name__}: {cause}")


def split_outputs(
    outputs: Outputs, images: Sequence[int], place: int | None, names: Mapping[str, str] | None = None
) -> list[Outputs]:
    """Split the outputs of a processor for several rows by row; row k has `images[k]` images. `names` are the
    additional tensors, as `octavo.data.encoding.sample.extra_inputs` returns them.

    An image has one row of `pixel_values` if there are as many rows as images, else as many rows as its grid has
    patches; without a grid, every row of pixels has the same number of `place` tokens. Raises `DataError` for a tensor
    of the wrong length.
    """
    names = names or {}
    count = len(outputs["input_ids"])
    by_token = [*_ROW_OUTPUTS, *(name for name, per in names.items() if per == "token")]
    rows = [{key: outputs[key][number] for key in by_token if outputs.get(key) is not None} for number in range(count)]
    if outputs.get("pixel_values") is None:
        return rows
    pixels, ends = np.asarray(outputs["pixel_values"]), np.cumsum([0, *images])
    grid = None if outputs.get("image_grid_thw") is None else np.asarray(outputs["image_grid_thw"])
    check_lengths(outputs, names, {"image": int(ends[-1]), "pixels": len(pixels), "row": count})
    if len(pixels) == ends[-1]:
        shares = list(images)
    elif grid is not None:
        shares = [grid[a:b].prod(axis=1).sum() for a, b in zip(ends, ends[1:], strict=False)]
    else:
        tokens = np.array([np.count_nonzero(np.asarray(row["input_ids"]) == place) for row in rows])
        shares = tokens * len(pixels) // tokens.sum()
    stops = np.cumsum([0, *shares])
    counted = {"pixel_values": "pixels", "image_grid_thw": "image"} | {
        k: v for k, v in names.items() if v in ("image", "pixels", "row")
    }
    present = {name: np.asarray(outputs[name]) for name in counted if outputs.get(name) is not None}
    for number, row in enumerate(rows):
        if images[number]:
            slices = {
                "image": slice(ends[number], ends[number + 1]),
                "pixels": slice(stops[number], stops[number + 1]),
                "row": slice(number, number + 1),
            }
            for name, values in present.items():
                part = values[slices[counted[name]]]
                row[name] = part if count == 1 else part.copy()  # a view would keep the pixels of all rows in memory
    return rows


# Places -------------------------------------------------------------------------------------------------------------


class Expansion:
    """Maps characters of the rendered text to tokens of the processed text, in which placeholders are expanded.

    Token offsets (`starts`, `stops`) are positions in the expanded text. `growth` has an entry for each placeholder or
    run of placeholders: its end in the rendered text, and the number of characters it grew by. The text between them is
    unchanged, so each growth shifts all text after it.
    """

    def __init__(self, growth: list[tuple[int, int]], starts: np.ndarray, stops: np.ndarray) -> None:
        self.growth, self.starts, self.stops = growth, starts, stops

    @classmethod
    def of_outputs(cls, outputs: Outputs, text: str, token: str | None, mask: np.ndarray) -> Expansion:
        """Make an expansion from the outputs for a rendered text: from its replacement offsets, else by matching runs
        of the placeholder `token` with runs of the tokens that they expanded to (`mask`). Raises `Mismatch`."""
        starts, stops = token_offsets(outputs)
        if (replacements := outputs.get("text_replacement_offsets")) is None:
            return cls.of_runs(text, token, starts, stops, true_runs(mask))
        return cls([place.growth for place in read_replacements(replacements)], starts, stops)

    @classmethod
    def of_runs(
        cls, text: str, token: str | None, starts: np.ndarray, stops: np.ndarray, grown: list[tuple[int, int]]
    ) -> Expansion:
        """Make an expansion for placeholders that expand to image tokens only: runs of image tokens (`grown`: first
        token and end) and runs of placeholders in the rendered text are in the same order. Raises `Mismatch`."""
        before = [m.span() for m in re.finditer(f"(?:{re.escape(token)})+", text)] if token else []
        if len(before) != len(grown):
            raise Mismatch(f"the processor returned {len(grown)} runs of image tokens for {len(before)} placeholders")
        growth = [
            (end, int(stops[stop - 1] - starts[start]) - (end - begin))
            for (begin, end), (start, stop) in zip(before, grown, strict=True)
        ]
        return cls(growth, starts, stops)

    def tokens(self, start: int, end: int) -> tuple[int, int]:
        """Return (first token, end) of the tokens that cover the characters [start, end) of the rendered text."""
        first, last = self._shift(start), self._shift(end)
        return covering_tokens(self.starts, self.stops, first, last)

    def _shift(self, position: int) -> int:
        return position + sum(by for end, by in self.growth if end <= position)


def covering_tokens(starts: np.ndarray, stops: np.ndarray, first: int, last: int) -> tuple[int, int]:
    """Return (first token, end) of the tokens that cover the characters [first, last), or (0, 0) if there are none."""
    inside = np.flatnonzero((starts < last) & (stops > first) & (stops > starts))
    return (int(inside[0]), int(inside[-1]) + 1) if len(inside) else (0, 0)


class Replacement(NamedTuple):
    """The replacement for an image or a video (`kind`), as the processor reports it: the characters of its placeholder
    in the rendered text (`span`), and of its expansion in the processed one (`new_span`)."""

    span: tuple[int, int]
    new_span: tuple[int, int]
    kind: str = "image"

    @property
    def growth(self) -> tuple[int, int]:
        """(end of the placeholder, number of characters it grew by), for `Expansion`."""
        (start, end), (begin, stop) = self.span, self.new_span
        return end, (stop - begin) - (end - start)


def read_replacements(entries: Sequence[Mapping[str, Any]]) -> list[Replacement]:
    """Parse `text_replacement_offsets` of one row."""
    return [
        Replacement(tuple(entry["span"]), tuple(entry["new_span"]), str(entry.get("type", "image")))
        for entry in entries
    ]


def true_runs(mask: np.ndarray, boundaries: np.ndarray | None = None) -> list[tuple[int, int]]:
    """Return (start, stop) of each run of True in `mask`; a new run begins at each position in `boundaries`."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(np.int8), [0]])))
    runs = list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))
    if boundaries is None or not len(boundaries):
        return runs
    split_runs = []
    for start, stop in runs:
        cuts = [start, *(int(boundary) for boundary in boundaries if start < boundary < stop), stop]
        split_runs += list(zip(cuts, cuts[1:], strict=False))
    return split_runs


def token_offsets(outputs: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Return the starts and the ends of the tokens, in characters of the processed text."""
    starts, stops = as_array(outputs["offset_mapping"], np.int64).reshape(-1, 2).T
    return starts, stops


def media_spans(outputs: dict[str, Any], kind: str | None = None) -> tuple[tuple[int, int], ...]:
    """Return (first token, end) of each image or video of a `kind`, or of both kinds if None; () if the processor
    reports no offsets."""
    if not (replacements := outputs.get("text_replacement_offsets")):
        return ()
    starts, stops = token_offsets(outputs)
    return tuple(
        covering_tokens(starts, stops, *place.new_span)
        for place in read_replacements(replacements)
        if kind in (None, place.kind)
    )


def as_array(values: Any, dtype: Any) -> np.ndarray:
    if isinstance(values, list) and values and hasattr(values[0], "shape"):
        values = np.stack([np.asarray(value) for value in values])
    return np.ascontiguousarray(values, dtype=dtype)
