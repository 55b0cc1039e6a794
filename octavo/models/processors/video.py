"""Converts videos to the tensors of a family without torchvision: choice of frames, frame size, order of patches.

The formulas are the same as in transformers' video processors (`Qwen3VLVideoProcessor`, `Qwen2VLVideoProcessor`,
`InternVLVideoProcessor`), on numpy arrays; a test compares both. Frames are resized one by one as they are decoded, so
that no video is in memory at its original size. A :class:`VideoProcessor` takes the place of a stock processor's video
processor; the text for a video is written by the stock processor.

Values that are neither in the configuration nor in the folder's video_preprocessor_config.json come from the family's
record (`VideoRecord`), not from the installed transformers, so that upgrading transformers does not change results.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import BatchFeature
from transformers.video_utils import VideoMetadata

from octavo.base import safe_read
from octavo.base.model_families import RECORDS, FamilyRecord
from octavo.models.errors import ModelError
from octavo.models.folder.folder import find_file, read_json

VIDEO_SETTINGS = ("fps", "min_frames", "max_frames", "min_pixels", "max_pixels", "cap_pixels_per_frame")
"""The keys of the section `data.video`."""
_MAX_ASPECT_RATIO = 200  # the largest aspect ratio, as in transformers


@dataclass(frozen=True)
class VideoProcessor:
    """Converts the videos of a family to tensors; has the interface of a stock video processor.

    kind      its `model_type`; `VideoRecord.budget` of its record defines what the limits of pixels apply to
    patch, merge, depth   pixels of a patch and patches of a token, in each direction, and frames of a patch
    tile      (height, width) of a frame that is an image of one tile (InternVL)
    fps       frames sampled per second; `min_frames` and `max_frames` limit their number
    pixels    `min_pixels` to `max_pixels`: of all frames together (Qwen3-VL) or of each frame (Qwen2.5-VL)
    """

    kind: str
    fps: float
    min_frames: int
    max_frames: int
    min_pixels: int | None
    max_pixels: int | None
    cap_pixels_per_frame: bool | None
    max_video_tokens: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    patch: int = 0
    merge: int = 1
    depth: int = 1
    tile: tuple[int, int] | None = None
    tile_tokens: int = 0

    model_input_names = ("pixel_values_videos", "video_grid_thw")  # as of a stock video processor

    @property
    def together(self) -> bool:
        """Whether limits of pixels apply to all frames of a video together."""
        record = RECORDS[self.kind].video
        assert record is not None
        return record.budget == "video"

    @property
    def merge_size(self) -> int:
        return self.merge

    @property
    def temporal_patch_size(self) -> int:
        return self.depth

    @property
    def settings(self) -> dict[str, Any]:
        """The values of :data:`VIDEO_SETTINGS` that are set."""
        return {name: getattr(self, name) for name in VIDEO_SETTINGS if getattr(self, name) is not None}

    def indices(self, total: int, fps: float) -> list[int]:
        """Return the indices of the sampled frames of a video of `total` frames at `fps` frames per second. Raises
        ValueError for a video with too few frames."""
        if total < self.depth:
            raise ValueError(f"has {total} frame(s), but the model needs at least {self.depth}")
        sampled = total / fps * self.fps
        # Each branch rounds like the video processor of its family: Qwen3-VL, Qwen2.5-VL, InternVL.
        if self.together:
            count = min(max(int(sampled), self.min_frames), self.max_frames, total)
            return np.linspace(0, total - 1, count).round().astype(int).tolist()
        if self.tile is None:
            most = min(self.max_frames, total) // self.depth * self.depth
            count = math.floor(min(max(sampled, self.min_frames), most, total) / self.depth) * self.depth
            return torch.arange(0, total, total / max(count, self.depth)).int().tolist()
        count = min(max(int(sampled), self.min_frames), self.max_frames, total)
        return torch.arange(total / count / 2, total, total / count).int().tolist()

    def size(self, frames: int, height: int, width: int) -> tuple[int, int]:
        """Return the (height, width) to which frames are resized. Raises ValueError for an extreme aspect ratio, and
        for too few frames."""
        if self.tile is not None:
            return self.tile
        assert self.min_pixels is not None and self.max_pixels is not None
        unit, least, most = self.patch * self.merge, self.min_pixels, self.max_pixels
        if not self.together:  # each frame by itself
            if self.cap_pixels_per_frame:
                share = int(self.max_video_tokens * unit * unit * 0.9) * self.depth // frames
                most = max(min(most, share), int(least * 1.05))
            return _fit_size(1, 1, height, width, unit, least, most)
        if frames < self.depth:
            raise ValueError(f"has {frames} sampled frame(s), but the model needs at least {self.depth}")
        if self.cap_pixels_per_frame:
            share = max(min(self.max_video_tokens * unit * unit, most // frames), int(least * 1.05))
            most = share * frames
        if min(height, width) < unit:
            scale = max(unit / height, unit / width)
            height, width = int(height * scale), int(width * scale)
        return _fit_size(round(frames / self.depth) * self.depth, frames, height, width, unit, least, most)

    def tokens(self, frames: int, height: int, width: int) -> int:
        """Return the number of tokens of `frames` frames of a video of this size, without the text between them."""
        if self.tile is not None:
            return frames * self.tile_tokens
        tall, wide = self.size(frames, height, width)
        return -(-frames // self.depth) * (tall // (self.patch * self.merge)) * (wide // (self.patch * self.merge))

    def grid(self, frames: int, height: int, width: int) -> list[int]:
        """Return (t, h, w) in patches for `frames` frames that are already resized."""
        return [-(-frames // self.depth), height // self.patch, width // self.patch]

    def __call__(
        self, videos: Sequence[np.ndarray], video_metadata: Sequence[VideoMetadata] | None = None, **_: object
    ) -> BatchFeature:
        """Return the output of a stock video processor for videos, uint8 [frames, height, width, 3], with chosen and
        resized frames: `pixel_values_videos` and `video_grid_thw`; for tiles a list of [frames, 3, height, width]."""
        scaled = [self._normalize(np.asarray(video)) for video in videos]
        batch: dict[str, Any] = {"video_metadata": list(video_metadata or ())}
        if self.tile is not None:
            return BatchFeature({**batch, "pixel_values_videos": scaled})
        grids = [self.grid(len(video), *video.shape[2:]) for video in scaled]
        batch["pixel_values_videos"] = torch.from_numpy(np.concatenate([self._patches(video) for video in scaled]))
        return BatchFeature({**batch, "video_grid_thw": torch.tensor(grids)})

    def _normalize(self, video: np.ndarray) -> np.ndarray:
        """[T, H, W, 3] uint8 -> [T, 3, H, W] fp32: (x - 255 mean) / (255 std), as transformers fuses it."""
        mean, std = (np.float32(255) * np.array(values, np.float32) for values in (self.mean, self.std))
        return np.ascontiguousarray(((video.astype(np.float32) - mean) / std).transpose(0, 3, 1, 2))

    def _patches(self, video: np.ndarray) -> np.ndarray:
        """[T, 3, H, W] -> [t h w, 3 depth patch patch], in the order (t, h-block, w-block, h and w in the block); the
        last frame is repeated to a multiple of `depth`."""
        video = np.concatenate([video, *[video[-1:]] * (-len(video) % self.depth)])
        (time, tall, wide), merge, patch = self.grid(len(video), *video.shape[2:]), self.merge, self.patch
        cut = video.reshape(time, self.depth, 3, tall // merge, merge, patch, wide // merge, merge, patch)
        return cut.transpose(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(time * tall * wide, -1)


def metadata(total: int, fps: float, indices: Sequence[int]) -> VideoMetadata:
    """Return the metadata that stock processors expect for a video of `total` frames at `fps` with the sampled frames
    `indices`."""
    return VideoMetadata(total_num_frames=total, fps=fps, frames_indices=list(indices))


def _fit_size(counted: int, frames: int, height: int, width: int, unit: int, least: int, most: int) -> tuple[int, int]:
    """Return a size in whole units whose area times `counted` frames is within the limits; beyond a limit, the area
    times `frames` is scaled to it. Raises ValueError for an extreme aspect ratio."""
    if max(height, width) / min(height, width) > _MAX_ASPECT_RATIO:
        raise ValueError(f"is a strip of {width} x {height} pixels; the aspect ratio is limited to {_MAX_ASPECT_RATIO}")
    tall, wide = round(height / unit) * unit, round(width / unit) * unit
    if counted * tall * wide > most:
        beta = math.sqrt(frames * height * width / most)
        return max(unit, math.floor(height / beta / unit) * unit), max(unit, math.floor(width / beta / unit) * unit)
    if counted * tall * wide < least:
        beta = math.sqrt(least / (frames * height * width))
        return math.ceil(height * beta / unit) * unit, math.ceil(width * beta / unit) * unit
    return tall, wide


def load_video_processor(
    folder: Path, record: FamilyRecord, image_processor: Any, settings: Mapping[str, Any], tile_tokens: int = 0
) -> VideoProcessor:
    """Create the video processor of a model folder from `settings` (the keys :data:`VIDEO_SETTINGS`, None if not set),
    else its video_preprocessor_config.json, else the family's record, which must have `video`.

    Raises ModelError for invalid values, and for limits of pixels if frames have a fixed size.
    """
    file = find_file(folder, "video_preprocessor_config.json")
    entries = read_json(file) if file.exists() else {}
    assert record.video is not None
    # Later sources take precedence: the record, then `stated` from the file, then `settings`.
    stated = {name: entries[name] for name in (*VIDEO_SETTINGS, "max_video_tokens") if entries.get(name) is not None}
    names = (("mean", "image_mean"), ("std", "image_std"))
    stated |= {ours: entries[theirs] for ours, theirs in names if entries.get(theirs)}
    stored_size = entries.get("size")
    size: Mapping[str, Any] = stored_size if isinstance(stored_size, Mapping) else {}
    layout: dict[str, Any]
    if record.video.budget == "tile":
        limits = [n for n in ("min_pixels", "max_pixels", "cap_pixels_per_frame") if settings.get(n) is not None]
        if limits:
            raise ModelError(
                f"data.video.{limits[0]}: {folder} uses one tile of fixed size for every frame. Remove it."
            )
        side = image_processor.size
        tile = (int(side["height"]), int(side["width"]))
        if "height" in size and (size["height"], size["width"]) != tile:
            raise ModelError(
                f"{file} has frames of size {dict(size)}, but the tower takes tiles of {tile}. Correct it."
            )
        stated = {name: value for name, value in stated.items() if value is not None and "pixels" not in name}
        layout = {"tile": tile, "tile_tokens": tile_tokens}
    else:
        edges = {"min_pixels": size.get("shortest_edge"), "max_pixels": size.get("longest_edge")}
        stated |= {name: value for name, value in edges.items() if value is not None}
        images = image_processor
        layout = {"patch": images.patch_size, "merge": images.merge_size, "depth": images.temporal_patch_size}
    user_settings = {name: value for name, value in settings.items() if value is not None}
    values: dict[str, Any] = {**record.video.settings, **stated, **user_settings}
    for name in ("mean", "std"):
        value = values[name]
        if not isinstance(value, list | tuple) or not all(type(n) in (int, float) and math.isfinite(n) for n in value):
            shown = safe_read.printable(repr(value))[:80]
            raise ModelError(f"{file if entries else folder} has image_{name} {shown}; it must be three numbers.")
        values[name] = tuple(value)
    videos = VideoProcessor(record.model_type, **values, **layout)
    _check(videos, file if entries else folder)
    return videos


def _check(videos: VideoProcessor, file: Path) -> None:
    for name in ("fps", "min_frames", "max_frames", "max_video_tokens", "min_pixels", "max_pixels"):
        value = getattr(videos, name)
        whole = type(value) is int or (name == "fps" and type(value) is float and math.isfinite(value))
        if value is not None and not (whole and 0 < value <= 1 << 40):
            raise ModelError(
                f"{file} gives {name} {safe_read.printable(repr(value))[:80]}; it must be a number above 0."
            )
    for name in ("frames", "pixels"):
        low, high = getattr(videos, f"min_{name}"), getattr(videos, f"max_{name}")
        if low is not None and high is not None and low > high:
            raise ModelError(f"data.video.min_{name} is {low}, larger than max_{name} {high}. Swap them or remove one.")
    if len(videos.mean) != 3 or len(videos.std) != 3 or 0 in videos.std:
        raise ModelError(
            f"{file} gives image_mean {videos.mean} and image_std {videos.std}; each must be three numbers, and no std "
            "may be 0."
        )
    if videos.max_frames < videos.depth:
        raise ModelError(f"data.video.max_frames is {videos.max_frames}, but the model needs at least {videos.depth}.")
    cell = (videos.patch * videos.merge) ** 2
    if videos.max_pixels is not None and videos.max_pixels < cell:
        raise ModelError(f"data.video.max_pixels {videos.max_pixels} is smaller than one token. Use at least {cell}.")


def describe_videos(videos: VideoProcessor) -> dict[str, Any]:
    """Return all values that affect the encoding of a video, for a run's record and for cache keys."""
    return asdict(replace(videos))
