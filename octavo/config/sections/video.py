"""The section ``data.video``: which frames of a video are sampled, their size, and the limits of a file."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from octavo.config.sections.names import Section

MAX_FPS = 1000
FPS_RANGE = f"frames per second, a number above 0 and at most {MAX_FPS}"


def parse_fps(value: Any) -> float | None:
    """Parse a rate in frames per second from a number or its text; return None for any other value."""
    try:
        rate = float(value) if isinstance(value, int | float | str) and not isinstance(value, bool) else 0.0
    except (ValueError, OverflowError):
        return None
    return rate if 0 < rate <= MAX_FPS else None


class VideoSection(Section):
    """How videos become frames. Absent settings come from the model family: video_preprocessor_config.json of the
    folder, else the default of its authors' processor. The run's config.yaml records them."""

    fps: float | None = Field(
        default=None, gt=0, le=MAX_FPS, description="Frames sampled per second, evenly over the whole video."
    )
    min_frames: int | None = Field(
        default=None, ge=1, le=2**16, description="Minimum number of frames of a short video, if it has as many."
    )
    max_frames: int | None = Field(
        default=None, ge=1, le=2**16, description="Maximum number of frames of a long video."
    )
    min_pixels: int | None = Field(
        default=None,
        ge=1,
        le=10**10,
        description="Smaller videos are scaled up to this many pixels: over all frames (Qwen3-VL), or in each frame "
        "(Qwen2.5-VL).",
    )
    max_pixels: int | None = Field(
        default=None,
        ge=1,
        le=10**10,
        description="Larger videos are scaled down to this many pixels, counted as in min_pixels.",
    )
    cap_pixels_per_frame: bool | None = Field(
        default=None,
        description="Also bound each frame (Qwen3-VL), or all frames together (Qwen2.5-VL), as qwen-vl-utils does. "
        "Absent: the folder's setting, else false.",
    )
    folder_fps: float | None = Field(
        default=None,
        gt=0,
        le=MAX_FPS,
        description="Frames per second of folders of frames whose rows have no `fps`.",
    )
    max_seconds: float = Field(
        default=3600.0, gt=0, le=10**6, description="A longer video is a bad sample and is not decoded."
    )
    max_megabytes: float = Field(
        default=1000.0, gt=0, le=10**6, description="A larger video file is a bad sample (megabytes of 10^6 bytes)."
    )
