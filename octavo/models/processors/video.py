"""Videos to the tensors of a family, without torchvision: which frames, how large, in which order their patches lie.

What the stock video processors of transformers do (`Qwen3VLVideoProcessor`, `Qwen2VLVideoProcessor`,
`InternVLVideoProcessor`), by the same formulas on numpy arrays, which a test holds against them. Frames come resized
already, each as it was decoded, so that no video lies in memory in its own size. A :class:`Videos` stands where a
stock processor looks for its video processor; what stands in the text for a video is the stock processor's own.

Values that neither the configuration nor the folder's video_preprocessor_config.json gives are those of the family's
record (`VideoRecord`), not of the installed transformers: another version changes no run.
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
from octavo.models.folder.folder import at, read_json

VIDEO_SETTINGS = ("fps", "min_frames", "max_frames", "min_pixels", "max_pixels", "cap_pixels_per_frame")
"""What the section `data.video` may say of them."""
_LONGEST = 200  # times the shorter side


@dataclass(frozen=True)
class Videos:
    """How a family takes videos.

    kind      its `model_type`, whose record says what limits of pixels bound (`VideoRecord.budget`)
    patch, merge, depth   pixels of a patch and patches of a token, in each direction, and frames of a patch
    tile      (height, width) of a frame that is an image of one tile (InternVL)
    fps       frames of a second that are taken, as many as `min_frames` to `max_frames`
    pixels    `min_pixels` to `max_pixels`: of all frames together (Qwen3-VL), of each (Qwen2.5-VL)
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

    model_input_names = ("pixel_values_videos", "video_grid_thw")  # as a stock video processor says

    @property
    def together(self) -> bool:
        """Whether limits of pixels bound all frames of a video together."""
        return RECORDS[self.kind].video.budget == "video"  # type: ignore[union-attr]

    @property
    def merge_size(self) -> int:
        return self.merge

    @property
    def temporal_patch_size(self) -> int:
        return self.depth

    @property
    def settings(self) -> dict[str, Any]:
        """The values of :data:`VIDEO_SETTINGS` that hold."""
        return {name: getattr(self, name) for name in VIDEO_SETTINGS if getattr(self, name) is not None}

    def indices(self, total: int, fps: float) -> list[int]:
        """Which frames are taken of a video of `total` frames at `fps` a second. Raises ValueError for one of too few
        frames."""
        if total < self.depth:
            raise ValueError(f"has {total} frame(s), and the model takes {self.depth} at least")
        asked = total / fps * self.fps
        if self.together:
            count = min(max(int(asked), self.min_frames), self.max_frames, total)
            return np.linspace(0, total - 1, count).round().astype(int).tolist()  # type: ignore[no-any-return]
        if self.tile is None:
            most = min(self.max_frames, total) // self.depth * self.depth
            count = math.floor(min(max(asked, self.min_frames), most, total) / self.depth) * self.depth
            return torch.arange(0, total, total / max(count, self.depth)).int().tolist()  # type: ignore[no-any-return]
        count = min(max(int(asked), self.min_frames), self.max_frames, total)
        return torch.arange(total / count / 2, total, total / count).int().tolist()  # type: ignore[no-any-return]

    def size(self, frames: int, height: int, width: int) -> tuple[int, int]:
        """(height, width) that frames are resized to. Raises ValueError for a strip, and for too few frames."""
        if self.tile is not None:
            return self.tile
        assert self.min_pixels is not None and self.max_pixels is not None
        unit, least, most = self.patch * self.merge, self.min_pixels, self.max_pixels
        if not self.together:  # each frame by itself
            if self.cap_pixels_per_frame:
                share = int(self.max_video_tokens * unit * unit * 0.9) * self.depth // frames
                most = max(min(most, share), int(least * 1.05))
            return _fitted(1, 1, height, width, unit, least, most)
        if frames < self.depth:
            raise ValueError(f"has {frames} frame(s) to take, and the model takes {self.depth} at least")
        if self.cap_pixels_per_frame:
            share = max(min(self.max_video_tokens * unit * unit, most // frames), int(least * 1.05))
            most = share * frames
        if min(height, width) < unit:
            scale = max(unit / height, unit / width)
            height, width = int(height * scale), int(width * scale)
        return _fitted(round(frames / self.depth) * self.depth, frames, height, width, unit, least, most)

    def tokens(self, frames: int, height: int, width: int) -> int:
        """Tokens of so many frames of a video of this size, without the words between them."""
        if self.tile is not None:
            return frames * self.tile_tokens
        tall, wide = self.size(frames, height, width)
        return -(-frames // self.depth) * (tall // (self.patch * self.merge)) * (wide // (self.patch * self.merge))

    def grid(self, frames: int, height: int, width: int) -> list[int]:
        """(t, h, w) in patches of so many frames that have their size already."""
        return [-(-frames // self.depth), height // self.patch, width // self.patch]

    def __call__(
        self, videos: Sequence[np.ndarray], video_metadata: Sequence[VideoMetadata] | None = None, **_: Any
    ) -> BatchFeature:
        """What a stock video processor gives of videos, uint8 [frames, height, width, 3], whose frames are chosen and
        resized: `pixel_values_videos` and `video_grid_thw`; of tiles a list of [frames, 3, height, width]."""
        scaled = [self._normalized(np.asarray(video)) for video in videos]
        found: dict[str, Any] = {"video_metadata": list(video_metadata or ())}
        if self.tile is not None:
            return BatchFeature({**found, "pixel_values_videos": scaled})
        grids = [self.grid(len(video), *video.shape[2:]) for video in scaled]
        found["pixel_values_videos"] = torch.from_numpy(np.concatenate([self._patches(video) for video in scaled]))
        return BatchFeature({**found, "video_grid_thw": torch.tensor(grids)})

    def _normalized(self, video: np.ndarray) -> np.ndarray:
        """[T, H, W, 3] uint8 -> [T, 3, H, W] fp32: (x - 255 mean) / (255 std), as transformers fuses it."""
        mean, std = (np.float32(255) * np.array(values, np.float32) for values in (self.mean, self.std))
        return np.ascontiguousarray(((video.astype(np.float32) - mean) / std).transpose(0, 3, 1, 2))

    def _patches(self, video: np.ndarray) -> np.ndarray:
        """[T, 3, H, W] -> [t h w, 3 depth patch patch], ordered (t, h-block, w-block, h, w in it); the last frame is
        repeated to whole pairs."""
        video = np.concatenate([video, *[video[-1:]] * (-len(video) % self.depth)])
        (time, tall, wide), merge, patch = self.grid(len(video), *video.shape[2:]), self.merge, self.patch
        cut = video.reshape(time, self.depth, 3, tall // merge, merge, patch, wide // merge, merge, patch)
        return cut.transpose(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(time * tall * wide, -1)


def metadata(total: int, fps: float, indices: Sequence[int]) -> VideoMetadata:
    """What stock processors are told of a video whose frames `indices` were taken of `total` at `fps`."""
    return VideoMetadata(total_num_frames=total, fps=fps, frames_indices=list(indices))


def _fitted(counted: int, frames: int, height: int, width: int, unit: int, least: int, most: int) -> tuple[int, int]:
    """A size in whole units whose area times `counted` frames lies within the limits; beyond them that of `frames` is
    scaled to the limit. Raises ValueError for a strip."""
    if max(height, width) / min(height, width) > _LONGEST:
        raise ValueError(f"is a strip of {width} x {height} pixels; the longer side may be {_LONGEST} times the other")
    tall, wide = round(height / unit) * unit, round(width / unit) * unit
    if counted * tall * wide > most:
        beta = math.sqrt(frames * height * width / most)
        return max(unit, math.floor(height / beta / unit) * unit), max(unit, math.floor(width / beta / unit) * unit)
    if counted * tall * wide < least:
        beta = math.sqrt(least / (frames * height * width))
        return math.ceil(height * beta / unit) * unit, math.ceil(width * beta / unit) * unit
    return tall, wide


def videos_of(
    folder: Path, record: FamilyRecord, image_processor: Any, asked: Mapping[str, Any], tile_tokens: int = 0
) -> Videos:
    """How the model of a folder takes videos: as `asked` (of :data:`VIDEO_SETTINGS`, None: not asked), else as its
    video_preprocessor_config.json says, else as the family's record does, which has `video`.

    Raises ModelError for values that cannot be, and for limits of pixels where frames have one size.
    """
    file = at(folder, "video_preprocessor_config.json")
    own = read_json(file) if file.exists() else {}
    assert record.video is not None
    stated = {name: own[name] for name in (*VIDEO_SETTINGS, "max_video_tokens") if own.get(name) is not None}
    stated |= {ours: own[theirs] for ours, theirs in (("mean", "image_mean"), ("std", "image_std")) if own.get(theirs)}
    size = own.get("size") if isinstance(own.get("size"), Mapping) else {}
    tile, more = None, {}
    if record.video.budget == "tile":
        wrong = [name for name in ("min_pixels", "max_pixels", "cap_pixels_per_frame") if asked.get(name) is not None]
        if wrong:
            raise ModelError(f"data.video.{wrong[0]}: {folder} makes every frame one tile of a fixed size. Remove it.")
        side = image_processor.size
        tile = (int(side["height"]), int(side["width"]))
        if "height" in size and (size["height"], size["width"]) != tile:
            raise ModelError(f"{file} makes frames of {dict(size)}, and the tower takes tiles of {tile}. Mend it.")
        stated = {name: value for name, value in stated.items() if value is not None and "pixels" not in name}
        more = {"tile": tile, "tile_tokens": tile_tokens}
    else:
        limits = {"min_pixels": size.get("shortest_edge"), "max_pixels": size.get("longest_edge")}
        stated |= {name: value for name, value in limits.items() if value is not None}
        ours = image_processor
        more = {"patch": ours.patch_size, "merge": ours.merge_size, "depth": ours.temporal_patch_size}
    values = {**record.video.settings, **stated, **{name: value for name, value in asked.items() if value is not None}}
    for name in ("mean", "std"):
        given = values[name]
        if not isinstance(given, list | tuple) or not all(type(n) in (int, float) and math.isfinite(n) for n in given):
            shown = safe_read.printable(repr(given))[:80]
            raise ModelError(f"{file if own else folder} gives image_{name} {shown}: it is three numbers.")
        values[name] = tuple(given)
    found = Videos(record.model_type, **values, **more)
    _check(found, file if own else folder, asked)
    return found


def _check(videos: Videos, file: Path, asked: Mapping[str, Any]) -> None:
    for name in ("fps", "min_frames", "max_frames", "max_video_tokens", "min_pixels", "max_pixels"):
        value = getattr(videos, name)
        whole = type(value) is int or (name == "fps" and type(value) is float and math.isfinite(value))
        if value is not None and not (whole and 0 < value <= 1 << 40):
            raise ModelError(f"{file} gives {name} {safe_read.printable(repr(value))[:80]}: it is a number above 0.")
    for name in ("frames", "pixels"):
        low, high = getattr(videos, f"min_{name}"), getattr(videos, f"max_{name}")
        if low is not None and high is not None and low > high:
            raise ModelError(f"data.video.min_{name} is {low}, above max_{name}, {high}. Swap them or remove one.")
    if len(videos.mean) != 3 or len(videos.std) != 3 or 0 in videos.std:
        raise ModelError(f"{file} gives image_mean {videos.mean} and image_std {videos.std}: they are three numbers.")
    if videos.max_frames < videos.depth:
        raise ModelError(f"data.video.max_frames is {videos.max_frames}, and the model takes {videos.depth} at least.")
    cell = (videos.patch * videos.merge) ** 2
    if videos.max_pixels is not None and videos.max_pixels < cell:
        raise ModelError(f"data.video.max_pixels {videos.max_pixels} is less than one token. Give at least {cell}.")


def videos_described(videos: Videos) -> dict[str, Any]:
    """All that decides what becomes of a video, for a run's record and for what is cached."""
    return asdict(replace(videos))
