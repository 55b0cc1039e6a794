"""Videos to frames, decoded without trusting them: mp4, mov, webm and mkv by PyAV, and folders of images.

What a header says is not believed. A first pass reads the packets of a file, decoding none: how many frames there are,
when each is shown, and which are key frames. A video then is its frames on a clock of its mean rate: number n is what
is shown n / rate seconds after the first, so that one of variable rate keeps its time and one of constant rate its
numbers. Of the frames that a family takes, those behind a key frame are reached by a seek; each is resized as it comes.
PyAV comes with the extra `video`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
import torch
import torch.nn.functional as F

from octavo.base.encryption import VaultError, check_plain, is_encrypted
from octavo.base.safe_read import open_file
from octavo.data.errors import DataError, ImageProblem, Mismatch
from octavo.data.rows.image_refs import load as load_image
from octavo.data.rows.video_refs import Clip, Frames, VideoFile

IMAGES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
MOST_FRAMES = 1 << 20  # of a file: ten hours at 29 a second
RATES = (0.01, 1000.0)  # frames a second; beyond them a header is broken
_CONTAINERS = ((4, b"ftyp", "mov"), (0, b"\x1aE\xdf\xa3", "matroska"))  # where their first mark stands; no other opens
_NEAR = 0.25  # of a frame: how far a time stamp may be rounded
_TURNED = 0.02  # of 1, by which a quarter turn may be rounded: the sine of about a degree
_LOST = 0.1  # of the length that a header claims: as much may be missing
DIGITS = re.compile(r"(\d+)")


class Takes(Protocol):
    """How a family takes videos (`octavo.models.processors.video.Videos`)."""

    def indices(self, total: int, fps: float) -> list[int]: ...

    def size(self, frames: int, height: int, width: int) -> tuple[int, int]: ...

    def tokens(self, frames: int, height: int, width: int) -> int: ...


@dataclass(frozen=True)
class FileLimits:
    """What a video may be: seconds, bytes, megapixels of a frame. `folder_fps`: of folders that have no rate."""

    seconds: float = 3600.0
    megabytes: float = 1000.0
    megapixels: float = 100.0
    folder_fps: float | None = None


@dataclass(frozen=True)
class Film:
    """A video, and what is taken of it: `indices` of its `total` frames at `fps` a second, each resized to `size`
    (height, width), which will be `tokens`; `when`: the time stamps of a file's frames, `keys` those of key frames;
    `shape` (height, width) of its first frame, and so of all."""

    file: VideoFile
    total: int
    fps: float
    indices: tuple[int, ...]
    size: tuple[int, int]
    tokens: int
    when: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64), repr=False, compare=False)
    keys: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64), repr=False, compare=False)
    tick: float = 0.0
    megapixels: float = 100.0
    shape: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class Shot:
    """A `Film` with its `frames`, uint8 [indices, height, width, 3]."""

    total: int
    fps: float
    indices: tuple[int, ...]
    size: tuple[int, int]
    frames: np.ndarray = field(repr=False, compare=False)


def select_frames(file: VideoFile, takes: Takes, limits: FileLimits = FileLimits()) -> Film:
    """What is taken of a video, for the price of one frame. Raises `Mismatch` for one that is broken, truncated, no
    video, or over the limits; `DataError` where PyAV is not installed."""
    if isinstance(file, Frames):
        names = _frames_of(file, limits)
        fps = file.fps or limits.folder_fps
        if fps is None:
            raise Mismatch(
                f"video {file} is a folder of frames, whose rate nobody says; give the row `fps`, or set "
                "data.video.folder_fps"
            )
        height, width = _image(names[0], limits.megapixels).shape[:2]
        return _select(file, takes, limits, len(names), fps, height, width)
    with _open_video(file, limits) as (container, stream):
        when, keys = _packets(file, container, stream)
        tick = float(stream.time_base)
        fps = _rate(file, stream, when, tick)
        claimed = float(stream.duration or 0) * tick or (container.duration or 0) / 1e6
        if "matroska" in container.format.name:  # counts from 0, where frames need not begin
            claimed -= max(0.0, when[0] * tick)
        length = (when[-1] - when[0]) * tick + 1 / fps
        if claimed > limits.seconds or length > limits.seconds:
            raise Mismatch(f"video {file} is {max(claimed, length):.0f} s long, and {limits.seconds:g} are the most "
                           "(data.video.max_seconds)")  # fmt: skip
        if length < claimed * (1 - _LOST) - 2 / fps or len(when) < stream.frames * (1 - _LOST) - 2:
            raise Mismatch(f"video {file} is truncated: {len(when)} frames of {length:.2f} s are there, and its header "
                           f"says {stream.frames or 'no number'} of {claimed:.2f} s")  # fmt: skip
        first = _upright_pixels(next(_frames_from(container, stream, int(when[0])), None), file)
    made = {"when": when, "keys": keys, "tick": tick, "megapixels": limits.megapixels}
    return _select(file, takes, limits, len(when), fps, *first.shape[:2], **made)


def _select(
    file: VideoFile, takes: Takes, limits: FileLimits, total: int, fps: float, height: int, width: int, **more: Any
) -> Film:
    if total / fps > limits.seconds:
        raise Mismatch(f"video {file} is {total / fps:.0f} s long, and {limits.seconds:g} are the most "
                       "(data.video.max_seconds)")  # fmt: skip
    try:
        indices = takes.indices(total, fps)
        size, tokens = takes.size(len(indices), height, width), takes.tokens(len(indices), height, width)
    except ValueError as cause:
        raise Mismatch(f"video {file} {cause}") from cause
    return Film(file, total, fps, tuple(indices), size, tokens, shape=(height, width), **more)


def load(film: Film, limits: FileLimits = FileLimits()) -> Shot:
    """The frames of a video that are taken. Raises as `look` does."""
    if isinstance(film.file, Frames):
        names = _frames_of(film.file, limits)
        found = {
            number: _resize(_check_shape(_image(names[number], limits.megapixels), film, names[number].name), film.size)
            for number in film.indices
        }
    else:
        with _open_video(film.file, limits) as (container, stream):
            found = _decode_frames(film, container, stream)
    return Shot(film.total, film.fps, film.indices, film.size, np.stack([found[number] for number in film.indices]))


def _decode_frames(film: Film, container: Any, stream: Any) -> dict[int, np.ndarray]:
    """Frame number -> its pixels: frames in order, with a seek wherever a key frame lies between them. Key frames may
    be such in name alone (streams of intra refresh): where one gives no picture, all are decoded from the first on."""
    since = (film.when - film.when[0]) * film.tick
    shown = np.searchsorted(since, np.array(film.indices) / film.fps + _NEAR / film.fps, side="right") - 1
    of_stamp: dict[int, list[int]] = {}
    for number, place in zip(film.indices, shown.tolist(), strict=True):
        of_stamp.setdefault(int(film.when[max(place, 0)]), []).append(number)
    found: dict[int, np.ndarray] = {}
    frames: Iterator[Any] = iter(())
    first, at, keys = int(film.when[0]), None, film.keys
    for stamp, numbers in sorted(of_stamp.items()):
        before = keys[keys <= stamp]
        key = int(before[-1]) if len(before) else first
        if at is None or key > at:
            frames = _frames_from(container, stream, key)
        frame = _frame_at(frames, stamp)
        if (frame is None or frame.is_corrupt) and len(keys):
            keys = keys[:0]  # once: from here on without seeks
            frames = _frames_from(container, stream, first)
            frame = _frame_at(frames, stamp)
        if frame is None:
            raise Mismatch(f"video {film.file} is broken: its frame {numbers[0]} cannot be decoded")
        at = frame.pts
        if frame.width * frame.height > film.megapixels * 1e6:
            raise _too_large(film.file, frame.width, frame.height, film.megapixels)
        pixels = _check_shape(_upright_pixels(frame, film.file), film, f"frame {numbers[0]}")
        pixels = _resize(pixels, film.size)
        found |= dict.fromkeys(numbers, pixels)
    return found


def _frames_from(container: Any, stream: Any, stamp: int) -> Iterator[Any]:
    """Frames from the key frame at a time stamp on."""
    container.seek(stamp, stream=stream, backward=True)
    return container.decode(stream)  # type: ignore[no-any-return]


def _frame_at(frames: Iterator[Any], stamp: int) -> Any:
    """The next frame that is shown at a time stamp; None where there is none."""
    frame = next((frame for frame in frames if frame.pts is not None and frame.pts >= stamp), None)
    return frame if frame is not None and frame.pts == stamp else None


def _upright_pixels(frame: Any, file: VideoFile) -> np.ndarray:
    """The pixels [H, W, 3] of a frame as it is to be shown: phones write how they were held, and whether it is a
    mirror's image."""
    if frame is None:
        raise Mismatch(f"video {file} holds no frame that can be decoded")
    if getattr(frame, "is_corrupt", False):
        raise Mismatch(f"video {file} is broken: a frame of it is damaged")
    try:
        return _rotate(frame.to_ndarray(format="rgb24"), _matrix_of(frame))
    except ValueError as cause:
        raise Mismatch(f"video {file} {cause}") from cause


def _check_shape(pixels: np.ndarray, film: Film, name: str) -> np.ndarray:
    """The pixels of a frame that is as large as the first one: to fit another into its place would stretch it."""
    height, width = pixels.shape[:2]
    if (height, width) != film.shape:
        raise Mismatch(
            f"video {film.file} has frames of two sizes: the first has {film.shape[1]} x {film.shape[0]} pixels, and "
            f"{name} {width} x {height}; write all in one size"
        )
    return pixels


def _resize(pixels: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """As stock video processors resize on a CPU: bicubic, in whole numbers, by torch. Pillow's differs by up to 2."""
    if pixels.shape[:2] == size:
        return np.ascontiguousarray(pixels)
    image = torch.from_numpy(np.ascontiguousarray(pixels)).permute(2, 0, 1)[None]
    made = F.interpolate(image, size, mode="bicubic", antialias=True, align_corners=False)
    return np.ascontiguousarray(made[0].permute(1, 2, 0).numpy())


def _packets(file: VideoFile, container: Any, stream: Any) -> tuple[np.ndarray, np.ndarray]:
    """(when each frame is shown, in order; when the key frames are), in ticks."""
    when, keys = [], []
    for packet in container.demux(stream):
        if not packet.size or packet.is_discard:
            continue
        if packet.pts is None:
            raise Mismatch(f"video {file} does not say when its frames are shown; write it again, as mp4 or webm")
        when.append(packet.pts)
        if packet.is_keyframe:
            keys.append(packet.pts)
        if len(when) > MOST_FRAMES:
            raise Mismatch(f"video {file} has over {MOST_FRAMES} frames; cut it")
    if not when or not keys:
        raise Mismatch(f"video {file} holds no frame")
    stamps = np.unique(np.array(when, np.int64))
    if len(stamps) < len(when):
        raise Mismatch(f"video {file} shows two frames at one time; write it again")
    return stamps, np.sort(np.array(keys, np.int64))


def _rate(file: VideoFile, stream: Any, when: np.ndarray, tick: float) -> float:
    """Frames a second: what the header says where the time stamps agree, else by these."""
    stated = float(stream.average_rate or 0)
    measured = (len(when) - 1) / ((when[-1] - when[0]) * tick) if len(when) > 1 else stated
    since = (when - when[0]) * tick
    if stated > 0 and (np.abs(since - np.arange(len(when)) / stated) <= _NEAR / stated).all():
        measured = stated
    if not RATES[0] <= measured <= RATES[1]:
        raise Mismatch(f"video {file} has {measured:g} frames a second, and {RATES[0]:g} to {RATES[1]:g} are read; its "
                       "header is broken; write it again")  # fmt: skip
    return measured


@contextmanager
def _open_video(file: VideoFile, limits: FileLimits) -> Iterator[tuple[Any, Any]]:
    """(container, its stream of video). It is opened as what its first bytes say and as nothing else, from bytes and
    not by a name: playlists and addresses, which open further files, are never followed."""
    try:
        import av
    except ImportError as cause:
        raise DataError(
            f"rows hold videos, which PyAV reads, and it cannot be imported ({cause}); pip install 'octavo[video]'"
        ) from cause
    assert not isinstance(file, Frames)
    if isinstance(file, Path) and not file.is_file():  # a pipe would be waited for
        raise Mismatch(f"video {file} is no file")
    try:
        with BytesIO(file.data) if isinstance(file, Clip) else _bytes_of(file) as raw:
            size = raw.seek(0, 2)
            if size > limits.megabytes * 1e6:
                raise Mismatch(f"video {file} has {size / 1e6:.0f} MB, and {limits.megabytes:g} are the most "
                               "(data.video.max_megabytes)")  # fmt: skip
            raw.seek(0)
            head = raw.read(12)
            kind = next((kind for at, mark, kind in _CONTAINERS if head[at : at + len(mark)] == mark), None)
            if kind is None:
                raise Mismatch(
                    f"video {file} is {'empty' if not size else 'none of mp4, mov, webm and mkv'}; convert it"
                )
            raw.seek(0)
            with av.open(raw, format=kind, metadata_errors="ignore") as container:
                cover = av.stream.Disposition.attached_pic
                shown = [one for one in container.streams.video if not one.disposition & cover]
                if not shown:
                    there = "sound alone" if container.streams.audio else "no stream of video"
                    raise Mismatch(f"video {file} holds {there}")
                stream = shown[0]
                context = stream.codec_context
                if context is None:
                    raise Mismatch(f"video {file} is coded in a way that PyAV does not decode; convert it")
                if context.width * context.height > limits.megapixels * 1e6:
                    raise _too_large(file, context.width, context.height, limits.megapixels)
                context.options = {"max_pixels": str(int(limits.megapixels * 1e6))}
                context.thread_count = 1  # workers are processes
                yield container, stream
    except (Mismatch, DataError):
        raise
    except VaultError as cause:
        raise DataError(str(cause)) from cause
    except Exception as cause:  # FFmpeg's, and the operating system's
        raise Mismatch(f"video {file} cannot be decoded ({type(cause).__name__}: {cause})") from cause


def _bytes_of(file: Path) -> BinaryIO:
    """A file as it is, an encrypted one as what it holds, a chunk at a time. Raises DataError for one whose key is not
    given."""
    if is_encrypted(file):
        return open_file(file, DataError)
    check_plain(file, DataError)
    return file.open("rb")


def _too_large(file: VideoFile, width: int, height: int, most: float) -> Mismatch:
    return Mismatch(f"video {file} has frames of {width} x {height} pixels, over the limit of {most:g} megapixels; if "
                    "it is meant, raise data.max_image_megapixels")  # fmt: skip


def _frames_of(file: Frames, limits: FileLimits) -> list[Path]:
    """The images of a folder, in the order of the numbers in their names."""
    try:
        names = [path for path in file.path.iterdir() if path.suffix.lower() in IMAGES and not path.is_dir()]
        away = [path for path in names if path.is_symlink() and path.resolve().parent != file.path.resolve()]
        gone = [path for path in names if path not in away and not path.is_file()]
    except (OSError, RuntimeError) as cause:  # a loop of links
        raise Mismatch(f"video {file} cannot be read ({cause})") from cause
    if away:
        raise Mismatch(f"video {file} is a folder whose {away[0].name} lies elsewhere; copy it there")
    if gone:
        raise Mismatch(f"video {file} is a folder whose {gone[0].name} is no file; restore or remove it")
    if not names:
        raise Mismatch(f"video {file} is a folder without a frame ({', '.join(IMAGES)})")
    if len(names) > MOST_FRAMES:
        raise Mismatch(f"video {file} has over {MOST_FRAMES} frames; cut it")
    of_stem = {path.stem: path for path in names}
    if twice := next((path for path in names if of_stem[path.stem] != path), None):
        raise Mismatch(f"video {file} has {twice.name} and {of_stem[twice.stem].name}, two frames of one name; remove "
                       "one")  # fmt: skip
    return sorted(names, key=lambda path: [(part.isdecimal(), int(part) if part.isdecimal() else 0, part)
                                           for part in DIGITS.split(path.name)])  # fmt: skip


def _image(path: Path, megapixels: float) -> np.ndarray:
    try:
        return np.array(load_image(path, megapixels))  # a copy: torch warns of one that it may not write
    except ImageProblem as cause:
        raise Mismatch(f"a frame of a video: {cause}") from cause


# How a frame is to be shown: the display matrix that cameras write, turns and mirrors alike. PyAV's `frame.rotation` is
# the angle of its first row alone: of a mirror it says 180 degrees, or none.
#
#     x' = a x + c y        [ a b u ]
#     y' = b x + d y        [ c d v ]   int32 in the machine's order, a to d with 16 bits behind the point


def _matrix_of(frame: Any) -> np.ndarray | None:
    """[[a, b], [c, d]] of a frame, at most 1; None where it has none, or one of zeros, which says nothing."""
    for data in frame.side_data:
        if data.type.name == "DISPLAYMATRIX":
            values = np.frombuffer(bytes(data), np.int32).astype(np.float64)[[0, 1, 3, 4]].reshape(2, 2)
            largest = np.abs(values).max()
            return values / largest if largest else None
    return None


def _rotate(pixels: np.ndarray, matrix: np.ndarray | None) -> np.ndarray:
    """Pixels [H, W, 3] as the matrix shows them. Raises ValueError for one that is no quarter turn, mirrored or not."""
    if matrix is None:
        return pixels
    signs = np.rint(matrix)
    across, down = signs  # where x and y go: each to one axis, and no two to one
    lone = all((np.abs(signs).sum(axis) == 1).all() for axis in (0, 1))
    if np.abs(matrix - signs).max() > _TURNED or not lone:
        rows = "; ".join(" ".join(f"{value:g}" for value in row) for row in matrix.round(3))
        raise ValueError(f"is to be shown by the matrix ({rows}), which is no quarter turn; write it again upright")
    if across[0]:
        right, below = across[0], down[1]
    else:
        pixels = pixels.transpose(1, 0, 2)
        right, below = down[0], across[1]
    return pixels[:: int(below), :: int(right)]
