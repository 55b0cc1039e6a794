"""Videos in rows: where they name them, or hold them (:mod:`octavo.data.rows.media`), under `video` or `videos`.

A video is a file (mp4, mov, webm, mkv), by name or by its bytes, or a folder of frames as images, whose rate the row's
`fps` tells; beside files alone, which say their own, it is refused, since elsewhere (qwen-vl-utils) it means how many
frames are taken. What is in one is read elsewhere (:mod:`octavo.data.encoding.video`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from octavo.config.sections.video import FRAMES_A_SECOND, frames_a_second
from octavo.data.errors import RowProblem, shown
from octavo.data.formats import media_kinds
from octavo.data.rows.media import Inline, Medium, Ref

PLACEHOLDER = "<video>"
_OF_PART = ("fps", "nframes", "num_frames", "min_frames", "max_frames", "min_pixels", "max_pixels", "total_pixels",
            "video_start", "video_end", "resized_height", "resized_width")  # fmt: skip


class Clip(Inline):
    """A file of video whose bytes stand in the row itself."""

    what: ClassVar[str] = "video"


@dataclass(frozen=True)
class Frames:
    """A folder of frames; `fps` of them are a second, where its row says it."""

    path: Path
    fps: float | None = None

    def __str__(self) -> str:
        return str(self.path)


VideoFile = Path | Clip | Frames


@dataclass(frozen=True)
class VideoRef(Ref):
    """The place of a video."""


VIDEO = Medium(
    "video", PLACEHOLDER, media_kinds.VIDEO.keys, ("video", "video_url"), ("video", "path", "url", "video_url"),
    VideoRef, Clip, "a file of video or a folder of frames",
)  # fmt: skip


def check_video_part(part: dict[str, Any], number: int) -> None:
    """That a part of turn `number` has none of the keys by which others choose the frames of its video: they are
    refused and not passed over. Raises `RowProblem`."""
    if own := next((key for key in _OF_PART if part.get(key) is not None), None):
        raise RowProblem(
            f"turn {number} has a video part with {own!r}; frames are chosen as data.video of the configuration says "
            "(of a folder of frames, the row's `fps` tells the rate): remove it"
        )


def with_rate(files: Sequence[Path | Clip], raw: Any) -> tuple[VideoFile, ...]:
    """The videos of a row, of which folders of frames have the rate that it says. Raises `RowProblem`."""
    if not isinstance(raw, dict) or raw.get("fps") is None:
        return tuple(as_video(file) for file in files)
    fps = rate(raw["fps"])
    videos = tuple(as_video(file, fps) for file in files)
    if not any(isinstance(video, Frames) for video in videos):
        raise RowProblem(
            f"has the fps {shown(raw['fps'])}, and no folder of frames, whose rate it would tell: a file of video says "
            "its own. If it means how many frames are taken, set data.video.fps; else remove it, or give it another "
            "name by data.train's columns: {file_fps: fps}"
        )
    return videos


def as_video(path: Path | Clip, fps: float | None = None) -> VideoFile:
    """A file of video, or a folder of frames of which `fps` are a second (None: it is not said)."""
    return Frames(path, fps) if isinstance(path, Path) and path.is_dir() else path


def rate(value: Any) -> float:
    """Frames a second of a folder, a number or its text, which is all that CSV has. Raises `RowProblem`."""
    if (found := frames_a_second(value)) is None:
        raise RowProblem(f"has the fps {shown(value)}; expected {FRAMES_A_SECOND}")
    return found
