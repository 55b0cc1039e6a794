"""Calls of the processor, and what its outputs say: which tensors are a row's, and where characters of its text are.

A call of a stock processor costs hundreds of microseconds, however little it is given. So making a row numbers is a
generator, which says what it wants processed and is sent what became of it; :func:`together` runs many of them, and
what they want is answered for all in one call.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import numpy as np

from octavo.data.encoding import video as video_files
from octavo.data.encoding.audio import Limits
from octavo.data.encoding.audio import load as load_sound
from octavo.data.encoding.sample import check_lengths, extra_inputs
from octavo.data.errors import DataError, ImageProblem, Mismatch
from octavo.data.rows.audio_refs import SoundFile
from octavo.data.rows.image_refs import ImageFile, load

Outputs = dict[str, Any]
T = TypeVar("T")
OPEN_PIXELS = 1 << 25  # of images that are decoded at once: 100 MB
KNOWN_OUTPUTS = {
    "input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "offset_mapping",
    "pixel_values", "image_grid_thw", "num_patches", "text_replacement_offsets",
}  # fmt: skip
_BY_ROW = ("input_ids", "offset_mapping", "mm_token_type_ids", "text_replacement_offsets")


class Wanted(NamedTuple):
    """A rendered text that is to become tokens, its images and videos pixels, its sounds what the tower of sound
    takes."""

    text: str
    images: tuple[ImageFile, ...] = ()
    sounds: tuple[SoundFile, ...] = ()
    videos: tuple[video_files.Film, ...] = ()


Encoding = Generator[Wanted, Outputs, T]


def run_together(
    rows: Sequence[Encoding[T]], answer: Callable[[Sequence[Wanted]], Sequence[Outputs | Exception]]
) -> list[T | DataError]:
    """What each row returns, or the `DataError` that it raises; others go through. What rows want is given to `answer`
    all at once; an exception among what it gives is raised where that row waits."""
    found: list[Any] = [None] * len(rows)
    waiting: list[tuple[int, Wanted]] = []

    def go_on(number: int, answered: Outputs | Exception | None) -> None:
        row = rows[number]
        try:
            wanted = row.throw(answered) if isinstance(answered, Exception) else row.send(answered)  # type: ignore[arg-type]
        except StopIteration as done:
            found[number] = done.value
        except DataError as bad:
            found[number] = bad
        else:
            waiting.append((number, wanted))

    for number in range(len(rows)):
        go_on(number, None)
    while waiting:
        asked, waiting = waiting, []
        for (number, _), answered in zip(asked, answer([wanted for _, wanted in asked]), strict=True):
            go_on(number, answered)
    return found


class Calls:
    """Calls of a processor (`.tokenizer`, `(text=, images=)`, or `(text=, audio=)`) for several rows at a time. One
    without `.image_processor` sees nothing, one without `.sound_limits` hears nothing, one without `.videos` takes no
    videos. `file_limits`: of files of video."""

    def __init__(
        self, processor: Any, max_image_megapixels: float, file_limits: video_files.FileLimits | None = None
    ) -> None:
        self.videos: Any = getattr(processor, "videos", None)
        self.file_limits = file_limits or video_files.FileLimits(megapixels=max_image_megapixels)
        self.processor, self.tokenizer = processor, processor.tokenizer
        self.max_image_megapixels = max_image_megapixels
        self.sees = getattr(processor, "image_processor", None) is not None
        limits = getattr(processor, "sound_limits", None)
        self.sound_limits = None if limits is None else Limits(*limits)
        self.multimodal = self.sees or self.sound_limits is not None
        self.image_token: str | None = None  # or that of a sound: no family that trains takes both
        if self.multimodal:
            self.image_token = processor.image_token if self.sees else processor.audio_token

    def tokens(self, texts: list[str]) -> Outputs:
        """What the tokenizer alone makes of texts that hold all their special tokens."""
        return dict(self.tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True))

    def __call__(self, wanted: Sequence[Wanted]) -> list[Outputs | Exception]:
        """What becomes of each, or what the processor or an image says against it. Rows of one kind go into one call,
        unless their images are too many to be open at once; they are opened here, so that they are no longer."""
        found: list[Outputs | Exception] = [Mismatch("")] * len(wanted)
        groups: dict[tuple[bool, bool], list[_Row]] = {}
        for number, (text, paths, sounds, videos) in enumerate(wanted):
            try:
                self._check(text, len(paths), len(sounds), len(videos))
                images = [load(path, self.max_image_megapixels) for path in paths]
                heard = [load_sound(path, self.sound_limits) for path in sounds] if self.sound_limits else []
                row = _Row(number, text, images, heard, [video_files.load(video, self.file_limits) for video in videos])
            except (ImageProblem, Mismatch, DataError) as problem:
                found[number] = problem
                continue
            group = groups.setdefault((bool(paths or sounds or videos), self.bare(text)), [])
            group.append(row)
            if sum(row.pixels for row in group) > OPEN_PIXELS:
                self._answer(group, found)
                group.clear()
        for group in groups.values():
            self._answer(group, found)
        return found

    def _check(self, text: str, images: int, sounds: int = 0, videos: int = 0) -> None:
        """That each image, sound or video has its place: of several rows the sums might agree, and an image go to
        another row."""
        if videos and (written := text.count(self.processor.video_token)) != videos:
            raise Mismatch(
                f"the chat template writes {written} places ({self.processor.video_token}) for its {videos} video(s); "
                "take the template of a version that knows videos"
            )
        places = text.count(self.image_token) if self.image_token is not None else 0
        if places != images + sounds:
            there = f"{sounds} sound(s)" if sounds else f"{images} image(s)"
            raise Mismatch(f"the chat template writes {places} places for its {there}")

    def bare(self, text: str) -> bool:
        """Whether a template wrote the BOS itself, which then gets no second one."""
        bos = self.tokenizer.bos_token
        return bos is not None and text.startswith(bos)

    def _answer(self, rows: Sequence[_Row], found: list[Outputs | Exception]) -> None:
        """Put into `found` what one call makes of rows; where it refuses them, what it makes of each by itself."""
        if not rows:
            return
        try:
            with single_thread():
                outputs = self._call(rows)
        except BaseException as cause:  # a stranger's program, as the template is; whatever it meets is this row's
            # A panic of the tokenizers library, which is written in Rust, is no Exception.
            if not isinstance(cause, Exception) and type(cause).__name__ != "PanicException":
                raise
            if len(rows) == 1:
                found[rows[0].number] = refusal(cause)
            else:
                for row in rows:
                    self._answer([row], found)
            return
        names = extra_inputs(self.processor)
        if unknown := sorted(set(outputs) - KNOWN_OUTPUTS - set(names)):
            for row in rows:
                found[row.number] = DataError(
                    f"{type(self.processor).__name__} returns {', '.join(unknown)}, which Octavo does not pass on to "
                    "the model; this family is not available in this version"
                )
            return
        place = getattr(self.processor, "image_token_id", None)
        try:
            own = split_outputs(outputs, [self.image_count(row) for row in rows], place, names)
            give_videos(own, outputs, [len(row.videos) for row in rows], names)
            _give_sounds(own, outputs, [len(row.sounds) for row in rows], names)
        except DataError as wrong:
            own = [wrong] * len(rows)
        for row, made in zip(rows, own, strict=True):
            found[row.number] = self._trim(made)

    def image_count(self, row: _Row) -> int:
        """The images of a row, and the frames of its videos where these are images to the model."""
        frames = getattr(self.processor, "frames_are_images", False)
        return len(row.images) + (sum(len(shot.indices) for shot in row.videos) if frames else 0)

    def _trim(self, made: Outputs | Exception) -> Outputs | Exception:
        """Without what a row's images are padded by to the size of its neighbours', where the processor pads."""
        trim = getattr(self.processor, "trimmed", None)
        if trim is None or isinstance(made, Exception) or "pixel_values" not in made:
            return made
        return {**made, **trim(made)}

    def _call(self, rows: Sequence[_Row]) -> Outputs:
        texts = [row.text for row in rows]
        if not self.multimodal:
            return self.tokens(texts)
        by_row = [row.images for row in rows]
        apart = getattr(self.processor, "images_by_row", False)
        images = by_row if apart and any(by_row) else [image for images in by_row for image in images]
        options = {"add_special_tokens": False} if self.bare(texts[0]) else {}
        if not self.sees:
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
    """A tokenizer's own threads take more time to wake than a few rows take, and make every later fork warn. Whoever
    has set `TOKENIZERS_PARALLELISM` is not overruled."""
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
    videos: list[video_files.Shot] = []

    @property
    def pixels(self) -> int:
        seen = sum(image.width * image.height for image in self.images) + sum(shot.frames.size for shot in self.videos)
        return seen + sum(map(len, self.sounds))


def _give_sounds(rows: Sequence[Outputs], outputs: Outputs, sounds: Sequence[int], names: Mapping[str, str]) -> None:
    """Give each row what a processor made of its `sounds[k]` sounds. Raises `DataError` as `parted`."""
    given = {name for name, per in names.items() if per == "sound" and outputs.get(name) is not None}
    check_lengths(outputs, dict.fromkeys(given, "sound"), {"sound": sum(sounds)})
    ends = np.cumsum([0, *sounds])
    for row, start, end in zip(rows, ends, ends[1:], strict=False):
        row |= {name: np.stack(outputs[name][start:end]) for name in given if end > start}


def give_videos(rows: Sequence[Outputs], outputs: Outputs, videos: Sequence[int], names: Mapping[str, str]) -> None:
    """Give each row what a processor made of its `videos[k]` videos: a row of each tensor that counts these, and of
    that of patches as many rows as their grids say. Raises `DataError` as `parted`."""
    if (grid := outputs.get("video_grid_thw")) is None:
        return
    grid, ends = np.asarray(grid), np.cumsum([0, *videos])
    counts = {"video": int(ends[-1]), "patch": int(grid.prod(axis=1).sum())}
    own = {name: per for name, per in names.items() if per in counts}
    check_lengths(outputs, own, counts)
    for row, start, end in zip(rows, ends, ends[1:], strict=False):
        if end > start:
            patches = slice(*(int(grid[:n].prod(axis=1).sum()) for n in (start, end)))
            part = {"video": slice(start, end), "patch": patches}
            for name, per in own.items():
                row[name] = np.asarray(outputs[name])[part[per]].copy()


def refusal(cause: BaseException) -> Mismatch:
    return Mismatch(f"the processor refuses it: {type(cause).__name__}: {cause}")


def split_outputs(
    outputs: Outputs, images: Sequence[int], place: int | None, names: Mapping[str, str] | None = None
) -> list[Outputs]:
    """What a processor made of several rows, row by row; row k has `images[k]` images. `names`: its further tensors, as
    `octavo.data.encoding.sample.extra_inputs` has them.

    An image has one row of `pixel_values` where there are as many as images, else as many as its grid says; where no
    grid does, each row of pixels has as many tokens `place` as any other. Raises `DataError` where a tensor does not
    count what it should.
    """
    names = names or {}
    count = len(outputs["input_ids"])
    by_token = [*_BY_ROW, *(name for name, per in names.items() if per == "token")]
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
    given = {name: np.asarray(outputs[name]) for name in counted if outputs.get(name) is not None}
    for number, row in enumerate(rows):
        if images[number]:
            own = {
                "image": slice(ends[number], ends[number + 1]),
                "pixels": slice(stops[number], stops[number + 1]),
                "row": slice(number, number + 1),
            }
            for name, values in given.items():
                part = values[own[counted[name]]]
                row[name] = part if count == 1 else part.copy()  # or a row that is kept would keep its neighbours'
    return rows


# Places -------------------------------------------------------------------------------------------------------------


class Expansion:
    """Characters of the rendered text to tokens of the processed one, in which each placeholder has grown.

    Token offsets (`starts`, `stops`) count in the grown text. `growth`: (where a placeholder or a run of them ends in
    the rendered text, by how many characters it has grown); between them the texts are equal, so each moves what
    follows.
    """

    def __init__(self, growth: list[tuple[int, int]], starts: np.ndarray, stops: np.ndarray) -> None:
        self.growth, self.starts, self.stops = growth, starts, stops

    @classmethod
    def of_outputs(cls, outputs: Outputs, text: str, token: str | None, mask: np.ndarray) -> Expansion:
        """Of what a processor made of a rendered text: as it tells, else by runs of its placeholder `token` and of the
        tokens that these grew into (`mask`). Raises `Mismatch`."""
        starts, stops = token_offsets(outputs)
        if (told := outputs.get("text_replacement_offsets")) is None:
            return cls.of_runs(text, token, starts, stops, true_runs(mask))
        return cls([place.growth for place in read_replacements(told)], starts, stops)

    @classmethod
    def of_runs(
        cls, text: str, token: str | None, starts: np.ndarray, stops: np.ndarray, grown: list[tuple[int, int]]
    ) -> Expansion:
        """Where placeholders grow into image tokens alone: runs of these (`grown`: their first and last token), and
        runs of placeholders in the rendered text, come in the same order. Raises `Mismatch`."""
        before = [m.span() for m in re.finditer(f"(?:{re.escape(token)})+", text)] if token else []
        if len(before) != len(grown):
            raise Mismatch(f"the processor made {len(grown)} groups of image tokens of {len(before)} placeholders")
        growth = [
            (end, int(stops[stop - 1] - starts[start]) - (end - begin))
            for (begin, end), (start, stop) in zip(before, grown, strict=True)
        ]
        return cls(growth, starts, stops)

    def tokens(self, start: int, end: int) -> tuple[int, int]:
        """The tokens that hold any of the characters start to end of the rendered text."""
        first, last = self._shifted(start), self._shifted(end)
        return covering_tokens(self.starts, self.stops, first, last)

    def _shifted(self, position: int) -> int:
        return position + sum(more for end, more in self.growth if end <= position)


def covering_tokens(starts: np.ndarray, stops: np.ndarray, first: int, last: int) -> tuple[int, int]:
    """The tokens that hold any of the characters first to last; (0, 0) for none."""
    inside = np.flatnonzero((starts < last) & (stops > first) & (stops > starts))
    return (int(inside[0]), int(inside[-1]) + 1) if len(inside) else (0, 0)


class Replaced(NamedTuple):
    """What stands in for an image or a video (`kind`), as its processor tells: characters of its placeholder in the
    rendered text, and of what that grew into in the grown one."""

    span: tuple[int, int]
    new_span: tuple[int, int]
    kind: str = "image"

    @property
    def growth(self) -> tuple[int, int]:
        """As `Expansion` takes it."""
        (start, end), (begin, stop) = self.span, self.new_span
        return end, (stop - begin) - (end - start)


def read_replacements(told: Sequence[Mapping[str, Any]]) -> list[Replaced]:
    """`text_replacement_offsets` of one row."""
    return [Replaced(tuple(one["span"]), tuple(one["new_span"]), str(one.get("type", "image"))) for one in told]


def true_runs(mask: np.ndarray, opens: np.ndarray | None = None) -> list[tuple[int, int]]:
    """(start, stop) of each unbroken stretch of True; a new one begins at each position of `opens`."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(np.int8), [0]])))
    found = list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))
    if opens is None or not len(opens):
        return found
    parted = []
    for start, stop in found:
        cuts = [start, *(int(o) for o in opens if start < o < stop), stop]
        parted += list(zip(cuts, cuts[1:], strict=False))
    return parted


def token_offsets(outputs: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Where each token starts and ends, in characters of the text that was processed."""
    starts, stops = as_array(outputs["offset_mapping"], np.int64).reshape(-1, 2).T
    return starts, stops


def media_spans(outputs: dict[str, Any], kind: str | None = None) -> tuple[tuple[int, int], ...]:
    """Where the tokens of each image or video stand (of one `kind`; None: both), where the processor tells which
    characters are its."""
    if not (told := outputs.get("text_replacement_offsets")):
        return ()
    starts, stops = token_offsets(outputs)
    return tuple(
        covering_tokens(starts, stops, *place.new_span)
        for place in read_replacements(told)
        if kind in (None, place.kind)
    )


def as_array(values: Any, dtype: Any) -> np.ndarray:
    if isinstance(values, list) and values and hasattr(values[0], "shape"):
        values = np.stack([np.asarray(value) for value in values])
    return np.ascontiguousarray(values, dtype=dtype)
