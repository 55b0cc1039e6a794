"""Decodes untrusted videos to frames: mp4, mov, webm and mkv with PyAV, and folders of images.

Headers are not trusted. A first pass reads the packets of a file without decoding them: the number of frames, the time
stamp of each, and which are key frames. Frames are then numbered by the mean frame rate: frame n is the one shown n /
rate seconds after the first, so that a video of variable rate keeps its timing and one of constant rate its frame
numbers. The selected frames are reached by seeking to key frames; each is resized after decoding. PyAV comes with the
extra `video`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Protocol, cast

import numpy as np
import torch
import torch.nn.functional as F

from octavo.base.byte_size import format_bytes
from octavo.base.encryption import VaultError, check_plain, is_encrypted
from octavo.base.safe_read import open_file
from octavo.data.errors import DataError, MediaProblem, Mismatch
from octavo.data.rows.image_refs import load as load_image
from octavo.data.rows.video_refs import FrameFolder, InlineVideo, VideoFile

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.sidedata.sidedata import SideData
    from av.video.frame import VideoFrame
    from av.video.stream import VideoStream

IMAGES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
MAX_FRAMES = 1 << 20  # limit per file: ten hours at 29 frames per second
RATES = (0.01, 1000.0)  # accepted frames per second; a rate outside this range means a broken header
_CONTAINERS = ((4, b"ftyp", "mov"), (0, b"\x1aE\xdf\xa3", "matroska"))  # (offset, magic bytes, format); no other opens
_TIME_TOLERANCE = 0.25  # largest rounding of a time stamp, in frames
_MATRIX_TOLERANCE = 0.02  # largest rounding of an entry of a display matrix: the sine of about a degree
_MISSING_SHARE = 0.1  # share of the length in the header that may be missing
DIGITS = re.compile(r"(\d+)")


class FrameSampler(Protocol):
    """Samples and resizes videos for a family (`octavo.models.processors.video.VideoProcessor`)."""

    def indices(self, total: int, fps: float) -> list[int]: ...

    def size(self, frames: int, height: int, width: int) -> tuple[int, int]: ...

    def tokens(self, frames: int, height: int, width: int) -> int: ...


@dataclass(frozen=True)
class FileLimits:
    """Limits of a video: length, file size, megapixels of a frame. `folder_fps` is the rate of folders whose row has
    none."""

    seconds: float = 3600.0
    megabytes: float = 1000.0
    megapixels: float = 100.0
    folder_fps: float | None = None


@dataclass(frozen=True)
class FrameSelection:
    """A video with its selected frames: `indices` of its `total` frames at `fps` frames per second, each resized to
    `size` (height, width), which give `tokens` tokens. `when` are the time stamps of all frames of a file in units of
    `tick` seconds, `keys` the time stamps of its key frames. `shape` is the (height, width) of its first frame, which
    all frames must have."""

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
class DecodedVideo:
    """A `FrameSelection` with its `frames`, uint8 [indices, height, width, 3]."""

    total: int
    fps: float
    indices: tuple[int, ...]
    size: tuple[int, int]
    frames: np.ndarray = field(repr=False, compare=False)


def select_frames(file: VideoFile, sampler: FrameSampler, limits: FileLimits = FileLimits()) -> FrameSelection:
    """Choose the frames of a video; decodes only the first frame. Raises `Mismatch` for a file that is broken,
    truncated, not a video, or over the limits; `DataError` if PyAV is not installed."""
    if isinstance(file, FrameFolder):
        names = _list_frames(file, limits)
        fps = file.fps or limits.folder_fps
        if fps is None:
            raise Mismatch(
                f"video {file} is a folder of frames without a rate; give the row `fps`, or set data.video.folder_fps"
            )
        height, width = _load_frame(names[0], limits.megapixels).shape[:2]
        return _select(file, sampler, limits, len(names), fps, height, width)
    with _open_video(file, limits) as (container, stream):
        when, keys = _read_time_stamps(file, container, stream)
        if stream.time_base is None:
            raise Mismatch(f"video {file} has no time base in its header; write it again")
        tick = float(stream.time_base)
        fps = _frame_rate(file, stream, when, tick)
        claimed = float(stream.duration or 0) * tick or (container.duration or 0) / 1e6
        if "matroska" in container.format.name:  # its duration counts from 0, which may be before the first frame
            claimed -= max(0.0, when[0] * tick)
        length = (when[-1] - when[0]) * tick + 1 / fps
        if claimed > limits.seconds or length > limits.seconds:
            raise Mismatch(f"video {file} is {max(claimed, length):.0f} s long, over the limit of {limits.seconds:g} s "
                           "(data.video.max_seconds)")  # fmt: skip
        if length < claimed * (1 - _MISSING_SHARE) - 2 / fps or len(when) < stream.frames * (1 - _MISSING_SHARE) - 2:
            raise Mismatch(f"video {file} is truncated: {len(when)} frames of {length:.2f} s are there, and its header "
                           f"says {stream.frames or 'no number'} of {claimed:.2f} s")  # fmt: skip
        first = _upright_pixels(next(_frames_from(container, stream, int(when[0])), None), file)
    selection = _select(file, sampler, limits, len(when), fps, *first.shape[:2])
    return replace(selection, when=when, keys=keys, tick=tick, megapixels=limits.megapixels)


def _select(
    file: VideoFile, sampler: FrameSampler, limits: FileLimits, total: int, fps: float, height: int, width: int
) -> FrameSelection:
    if total / fps > limits.seconds:
        raise Mismatch(f"video {file} is {total / fps:.0f} s long, over the limit of {limits.seconds:g} s "
                       "(data.video.max_seconds)")  # fmt: skip
    try:
        indices = sampler.indices(total, fps)
        size, tokens = sampler.size(len(indices), height, width), sampler.tokens(len(indices), height, width)
    except ValueError as cause:
        raise Mismatch(f"video {file} {cause}") from cause
    return FrameSelection(file, total, fps, tuple(indices), size, tokens, shape=(height, width))


def load(selection: FrameSelection, limits: FileLimits = FileLimits()) -> DecodedVideo:
    """Decode the chosen frames of a video. Raises as `select_frames` does."""
    if isinstance(selection.file, FrameFolder):
        names = _list_frames(selection.file, limits)
        pixels = {
            number: _resize(
                _check_shape(_load_frame(names[number], limits.megapixels), selection, names[number].name),
                selection.size,
            )
            for number in selection.indices
        }
    else:
        with _open_video(selection.file, limits) as (container, stream):
            pixels = _decode_frames(selection, container, stream)
    return DecodedVideo(
        selection.total,
        selection.fps,
        selection.indices,
        selection.size,
        np.stack([pixels[number] for number in selection.indices]),
    )


def _decode_frames(selection: FrameSelection, container: InputContainer, stream: VideoStream) -> dict[int, np.ndarray]:
    """Decode the selected frames; returns frame number -> pixels. Frames are decoded in order, with a seek wherever
    there is a key frame between two of them. Key frames of streams with intra refresh may give no picture; then all
    frames are decoded from the first on."""
    since = (selection.when - selection.when[0]) * selection.tick
    frame_indices = (
        np.searchsorted(
            since, np.array(selection.indices) / selection.fps + _TIME_TOLERANCE / selection.fps, side="right"
        )
        - 1
    )
    numbers_by_stamp: dict[int, list[int]] = {}
    for number, place in zip(selection.indices, frame_indices.tolist(), strict=True):
        numbers_by_stamp.setdefault(int(selection.when[max(place, 0)]), []).append(number)
    decoded: dict[int, np.ndarray] = {}
    frames: Iterator[VideoFrame] = iter(())
    first, at, keys = int(selection.when[0]), None, selection.keys
    for stamp, numbers in sorted(numbers_by_stamp.items()):
        before = keys[keys <= stamp]
        key = int(before[-1]) if len(before) else first
        if at is None or key > at:
            frames = _frames_from(container, stream, key)
        frame = _frame_at(frames, stamp)
        if (frame is None or frame.is_corrupt) and len(keys):
            keys = keys[:0]  # no seeks from here on
            frames = _frames_from(container, stream, first)
            frame = _frame_at(frames, stamp)
        if frame is None:
            raise Mismatch(f"video {selection.file} is broken: its frame {numbers[0]} cannot be decoded")
        at = frame.pts
        if frame.width * frame.height > selection.megapixels * 1e6:
            raise _size_error(selection.file, frame.width, frame.height, selection.megapixels)
        pixels = _check_shape(_upright_pixels(frame, selection.file), selection, f"frame {numbers[0]}")
        pixels = _resize(pixels, selection.size)
        decoded |= dict.fromkeys(numbers, pixels)
    return decoded


def _frames_from(container: InputContainer, stream: VideoStream, stamp: int) -> Iterator[VideoFrame]:
    """Decode frames, starting from the key frame at a time stamp."""
    container.seek(stamp, stream=stream, backward=True)
    return container.decode(stream)


def _frame_at(frames: Iterator[VideoFrame], stamp: int) -> VideoFrame | None:
    """Return the next frame with this time stamp, or None if there is none."""
    frame = next((frame for frame in frames if frame.pts is not None and frame.pts >= stamp), None)
    return frame if frame is not None and frame.pts == stamp else None


def _upright_pixels(frame: VideoFrame | None, file: VideoFile) -> np.ndarray:
    """Return the pixels [H, W, 3] of a frame after its display matrix: phones store how they were held, and
    mirroring."""
    if frame is None:
        raise Mismatch(f"video {file} has no frame that can be decoded")
    if getattr(frame, "is_corrupt", False):
        raise Mismatch(f"video {file} is broken: one of its frames is damaged")
    try:
        return _rotate(frame.to_ndarray(format="rgb24"), _display_matrix(frame))
    except ValueError as cause:
        raise Mismatch(f"video {file} {cause}") from cause


def _check_shape(pixels: np.ndarray, selection: FrameSelection, name: str) -> np.ndarray:
    """Return the pixels of a frame if it is as large as the first; resizing another size would stretch it. Raises
    `Mismatch`."""
    height, width = pixels.shape[:2]
    if (height, width) != selection.shape:
        raise Mismatch(
            f"video {selection.file} has frames of two sizes: the first has {selection.shape[1]} x "
            f"{selection.shape[0]} pixels, and {name} {width} x {height}; write all in one size"
        )
    return pixels


def _resize(pixels: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Resize as stock video processors do on a CPU: bicubic, uint8, by torch. Pillow's result differs by up to 2."""
    if pixels.shape[:2] == size:
        return np.ascontiguousarray(pixels)
    image = torch.from_numpy(np.ascontiguousarray(pixels)).permute(2, 0, 1)[None]
    resized = F.interpolate(image, size, mode="bicubic", antialias=True, align_corners=False)
    return np.ascontiguousarray(resized[0].permute(1, 2, 0).numpy())


def _read_time_stamps(file: VideoFile, container: InputContainer, stream: VideoStream) -> tuple[np.ndarray, np.ndarray]:
    """(sorted time stamps of all frames, of the key frames), in ticks."""
    when, keys = [], []
    for packet in container.demux(stream):
        if not packet.size or packet.is_discard:
            continue
        if packet.pts is None:
            raise Mismatch(f"video {file} has frames without time stamps; write it again, as mp4 or webm")
        when.append(packet.pts)
        if packet.is_keyframe:
            keys.append(packet.pts)
        if len(when) > MAX_FRAMES:
            raise Mismatch(f"video {file} has over {MAX_FRAMES} frames; cut it")
    if not when or not keys:
        raise Mismatch(f"video {file} has no frame")
    stamps = np.unique(np.array(when, np.int64))
    if len(stamps) < len(when):
        raise Mismatch(f"video {file} has two frames with one time stamp; write it again")
    return stamps, np.sort(np.array(keys, np.int64))


def _frame_rate(file: VideoFile, stream: VideoStream, when: np.ndarray, tick: float) -> float:
    """Return the frames per second: the rate in the header if the time stamps agree with it, else the rate by time
    stamps."""
    stated = float(stream.average_rate or 0)
    measured = (len(when) - 1) / ((when[-1] - when[0]) * tick) if len(when) > 1 else stated
    since = (when - when[0]) * tick
    if stated > 0 and (np.abs(since - np.arange(len(when)) / stated) <= _TIME_TOLERANCE / stated).all():
        measured = stated
    if not RATES[0] <= measured <= RATES[1]:
        raise Mismatch(
            f"video {file} has {measured:g} frames per second, outside the range of {RATES[0]:g} to {RATES[1]:g}: its "
            "header is broken; write it again"
        )
    return measured


@contextmanager
def _open_video(file: VideoFile, limits: FileLimits) -> Iterator[tuple[InputContainer, VideoStream]]:
    """(container, video stream). The format is decided by the first bytes only, and the file is opened as bytes and not
    by name: playlists and addresses, which would open further files, are never followed."""
    try:
        import av
    except ImportError as cause:
        raise DataError(
            f"PyAV, which decodes the videos of rows, cannot be imported ({cause}); pip install 'octavo[video]'"
        ) from cause
    assert not isinstance(file, FrameFolder)
    if isinstance(file, Path) and not file.is_file():  # reading a pipe would block
        raise Mismatch(f"video {file} is not a file")
    try:
        with BytesIO(file.data) if isinstance(file, InlineVideo) else _open_bytes(file) as raw:
            size = raw.seek(0, 2)
            if size > limits.megabytes * 1e6:
                raise Mismatch(f"video {file} has {format_bytes(size)}, over the limit of {limits.megabytes:g} MB "
                               "(data.video.max_megabytes)")  # fmt: skip
            raw.seek(0)
            head = raw.read(12)
            kind = next((kind for at, mark, kind in _CONTAINERS if head[at : at + len(mark)] == mark), None)
            if kind is None:
                raise Mismatch(f"video {file} is {'empty' if not size else 'not mp4, mov, webm or mkv'}; convert it")
            raw.seek(0)
            with av.open(raw, mode="r", format=kind, metadata_errors="ignore") as container:
                cover = av.stream.Disposition.attached_pic
                streams = [candidate for candidate in container.streams.video if not candidate.disposition & cover]
                if not streams:
                    content = "only audio" if container.streams.audio else "no video stream"
                    raise Mismatch(f"video {file} has {content}")
                stream = streams[0]
                context = stream.codec_context
                if context is None:
                    raise Mismatch(f"video {file} has a codec that PyAV does not decode; convert it")
                if context.width * context.height > limits.megapixels * 1e6:
                    raise _size_error(file, context.width, context.height, limits.megapixels)
                context.options = {"max_pixels": str(int(limits.megapixels * 1e6))}
                context.thread_count = 1  # data workers are processes already
                yield container, stream
    except (Mismatch, DataError):
        raise
    except VaultError as cause:
        raise DataError(str(cause)) from cause
    except Exception as cause:  # errors of FFmpeg and the operating system
        raise Mismatch(f"video {file} cannot be decoded ({type(cause).__name__}: {cause})") from cause


def _open_bytes(file: Path) -> BinaryIO:
    """Open a file; an encrypted one is decrypted chunk by chunk. Raises DataError if its key is missing."""
    if is_encrypted(file):
        return open_file(file, DataError)
    check_plain(file, DataError)
    return file.open("rb")


def _size_error(file: VideoFile, width: int, height: int, most: float) -> Mismatch:
    return Mismatch(f"video {file} has frames of {width} x {height} pixels, over the limit of {most:g} megapixels; if "
                    "it is intended, raise data.max_image_megapixels")  # fmt: skip


def _list_frames(file: FrameFolder, limits: FileLimits) -> list[Path]:
    """Return the images of a folder, ordered by the numbers in their names. Raises `Mismatch`."""
    try:
        names = [path for path in file.path.iterdir() if path.suffix.lower() in IMAGES and not path.is_dir()]
        outside_links = [path for path in names if path.is_symlink() and path.resolve().parent != file.path.resolve()]
        missing = [path for path in names if path not in outside_links and not path.is_file()]
    except (OSError, RuntimeError) as cause:  # a loop of links
        raise Mismatch(f"video {file} cannot be read ({cause})") from cause
    if outside_links:
        raise Mismatch(
            f"video {file} is a folder whose {outside_links[0].name} is a link to a file outside it; copy the file "
            "there"
        )
    if missing:
        raise Mismatch(f"video {file} is a folder whose {missing[0].name} is not a file; restore or remove it")
    if not names:
        raise Mismatch(f"video {file} is a folder without a frame ({', '.join(IMAGES)})")
    if len(names) > MAX_FRAMES:
        raise Mismatch(f"video {file} has over {MAX_FRAMES} frames; cut it")
    by_stem = {path.stem: path for path in names}
    if duplicate := next((path for path in names if by_stem[path.stem] != path), None):
        other = by_stem[duplicate.stem].name
        raise Mismatch(f"video {file} has two frames with one name, {duplicate.name} and {other}; remove one")
    return sorted(names, key=lambda path: [(part.isdecimal(), int(part) if part.isdecimal() else 0, part)
                                           for part in DIGITS.split(path.name)])  # fmt: skip


def _load_frame(path: Path, megapixels: float) -> np.ndarray:
    try:
        return np.array(load_image(path, megapixels))  # a copy: torch warns about read-only arrays
    except MediaProblem as cause:
        raise Mismatch(f"a frame of a video: {cause}") from cause


# The display matrix that cameras write holds rotation and mirroring. PyAV's `frame.rotation` is only the angle of its
# first row: for a mirrored frame it is 180 degrees, or none.
#
#     x' = a x + c y        [ a b u ]
#     y' = b x + d y        [ c d v ]   int32 in native byte order, a to d with 16 fractional bits


def _display_matrix(frame: VideoFrame) -> np.ndarray | None:
    """Return [[a, b], [c, d]] of a frame, scaled to at most 1, or None if the frame has no matrix or only zeros."""
    for data in cast("Iterable[SideData]", frame.side_data):  # PyAV's stub has a dict of str here
        if data.type.name == "DISPLAYMATRIX":
            values = np.frombuffer(bytes(data), np.int32).astype(np.float64)[[0, 1, 3, 4]].reshape(2, 2)
            largest = np.abs(values).max()
            return values / largest if largest else None
    return None


def _rotate(pixels: np.ndarray, matrix: np.ndarray | None) -> np.ndarray:
    """Pixels [H, W, 3] transformed by a display matrix. Raises ValueError unless it is a multiple of a quarter turn,
    mirrored or not."""
    if matrix is None:
        return pixels
    signs = np.rint(matrix)
    across, down = signs  # the images of x and y: each must be one axis, and not the same one
    is_permutation = all((np.abs(signs).sum(axis) == 1).all() for axis in (0, 1))
    if np.abs(matrix - signs).max() > _MATRIX_TOLERANCE or not is_permutation:
        rows = "; ".join(" ".join(f"{value:g}" for value in row) for row in matrix.round(3))
        raise ValueError(
            f"has the display matrix ({rows}), which is not a multiple of a quarter turn; write it again upright"
        )
    if across[0]:
        right, below = across[0], down[1]
    else:
        pixels = pixels.transpose(1, 0, 2)
        right, below = down[0], across[1]
    return pixels[:: int(below), :: int(right)]
