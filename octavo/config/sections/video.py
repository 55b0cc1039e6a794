"""The section of videos: which frames of one are taken, how large they are made, and what a file may be."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from octavo.config.sections.names import Section

MOST_FPS = 1000
FRAMES_A_SECOND = f"frames a second, a number above 0, at most {MOST_FPS}"


def frames_a_second(value: Any) -> float | None:
    """A rate, from a number or its text; None for what is none."""
    try:
        found = float(value) if isinstance(value, int | float | str) and not isinstance(value, bool) else 0.0
    except (ValueError, OverflowError):
        return None
    return found if 0 < found <= MOST_FPS else None


class VideoSection(Section):
    """How videos become frames. What is absent is the model family's own: what video_preprocessor_config.json of the
    folder says, else what its authors' processor does; the run's config.yaml says it."""

    fps: float | None = Field(
        default=None, gt=0, le=MOST_FPS, description="Frames of a second that are taken, evenly over the whole video."
    )
    min_frames: int | None = Field(default=None, ge=1, le=2**16, description="Frames of a short video, if it has them.")
    max_frames: int | None = Field(default=None, ge=1, le=2**16, description="Most frames of a long video.")
    min_pixels: int | None = Field(
        default=None,
        ge=1,
        le=10**10,
        description="Smaller videos are scaled up to this many pixels: of all frames together (Qwen3-VL), or of each "
        "(Qwen2.5-VL).",
    )
    max_pixels: int | None = Field(
        default=None, ge=1, le=10**10, description="Larger videos are scaled down to this many, counted likewise."
    )
    cap_pixels_per_frame: bool | None = Field(
        default=None,
        description="Bound each frame (Qwen3-VL), or all frames together (Qwen2.5-VL), too, as qwen-vl-utils does. "
        "Absent: as the folder says, else false.",
    )
    folder_fps: float | None = Field(
        default=None,
        gt=0,
        le=MOST_FPS,
        description="Frames a second in folders of frames whose rows have no `fps`.",
    )
    max_seconds: float = Field(
        default=3600.0, gt=0, le=10**6, description="A longer video is a bad sample; nothing of it is decoded."
    )
    max_megabytes: float = Field(
        default=1000.0, gt=0, le=10**6, description="A larger file of video (10^6 bytes) is a bad sample."
    )
