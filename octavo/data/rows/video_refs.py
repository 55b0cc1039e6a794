"""Videos in rows, by name or as bytes (:mod:`octavo.data.rows.media`), under `video` or `videos`.

A video is a file (mp4, mov, webm, mkv), by name or as bytes, or a folder of frames as images, whose rate is the key
`fps` of the row. If a row has only video files, which contain their rate, `fps` is refused, because in other software
(qwen-vl-utils) it means the sampling rate. :mod:`octavo.data.encoding.video` decodes the files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from octavo.config.sections.video import FPS_RANGE, parse_fps
from octavo.data.errors import RowProblem, quote_value
from octavo.data.formats import media_kinds
from octavo.data.rows.media import InlineFile, MediaRef, MediaType

PLACEHOLDER = "<video>"
_SAMPLING_KEYS = (
    "fps", "nframes", "num_frames", "min_frames", "max_frames", "min_pixels", "max_pixels", "total_pixels",
    "video_start", "video_end", "resized_height", "resized_width",
)  # fmt: skip


class InlineVideo(InlineFile):
    """A video file whose bytes are in the row."""

    what: ClassVar[str] = "video"


@dataclass(frozen=True)
class FrameFolder:
    """A folder of frames. `fps` is its frames per second, if the row has it."""

    path: Path
    fps: float | None = None

    def __str__(self) -> str:
        return str(self.path)


VideoFile = Path | InlineVideo | FrameFolder


@dataclass(frozen=True)
class VideoRef(MediaRef):
    """The place of a video."""


VIDEO = MediaType(
    "video", PLACEHOLDER, media_kinds.VIDEO.keys, ("video", "video_url"), ("video", "path", "url", "video_url"),
    VideoRef, InlineVideo, "a file of video or a folder of frames",
)  # fmt: skip


def check_video_part(part: dict[str, Any], number: int) -> None:
    """Check that a part of turn `number` has none of the keys by which other frameworks choose frames: ignoring them
    would change the training data. Raises `RowProblem`."""
    if option := next((key for key in _SAMPLING_KEYS if part.get(key) is not None), None):
        raise RowProblem(
            f"turn {number} has a video part with {option!r}; frames are chosen by data.video of the configuration "
            "(the rate of a folder of frames is the row's `fps`): remove it"
        )


def videos_with_rate(files: Sequence[Path | InlineVideo], raw: object) -> tuple[VideoFile, ...]:
    """Return the videos of a row; folders of frames get the rate of the row. Raises `RowProblem`."""
    if not isinstance(raw, dict) or raw.get("fps") is None:
        return tuple(as_video(file) for file in files)
    fps = parse_rate(raw["fps"])
    videos = tuple(as_video(file, fps) for file in files)
    if not any(isinstance(video, FrameFolder) for video in videos):
        raise RowProblem(
            f"has the fps {quote_value(raw['fps'])}, and no folder of frames, whose rate it would be: a video file has "
            "its rate in the header. If it means how many frames are taken, set data.video.fps; else remove it, or "
            "give it another name by data.train's columns: {file_fps: fps}"
        )
    return videos


def as_video(path: Path | InlineVideo, fps: float | None = None) -> VideoFile:
    """Return a video file, or a folder of frames with the rate `fps`, which is None if unknown."""
    return FrameFolder(path, fps) if isinstance(path, Path) and path.is_dir() else path


def parse_rate(value: object) -> float:
    """Parse the frames per second of a folder from a number or its text, as in CSV. Raises `RowProblem`."""
    if (fps := parse_fps(value)) is None:
        raise RowProblem(f"has the fps {quote_value(value)}; expected {FPS_RANGE}")
    return fps
