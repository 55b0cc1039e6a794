"""Shapes of image inputs of a family, computed from the configuration: patches, whole images, or tiles.

patches   rows of patches of whole images, and `image_grid_thw` (Qwen, GLM-4V, Ernie)
whole     whole images, padded to the largest, and `image_sizes` (Pixtral)
tiles     tiles of one size (InternVL, LLaVA, LLaVA-OneVision, SmolVLM, Gemma 3, NVILA)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from octavo.base.model_families import RECORDS, leading_tokens
from octavo.models.errors import ModelError
from octavo.models.structure import anyres


@dataclass(frozen=True)
class Vision:
    """The shapes of a family's image inputs.

    kind     "patches", "whole" or "tiles"
    patch    (height, width) of a patch in pixels
    channels channels of a pixel times frames of a patch
    merge    patches per feature, in each direction (patches, whole)
    tile     (height, width) of a tile; `least`: of the smallest tile that the tower takes
    prefix   patches that the tower prepends to the patches of a tile
    length   features of a tile; `ends`: placeholders for line breaks after them in the text, or their maximum
    scales   tiles of each of several scales as a square: the tower receives an image at all scales, or at one scale if
             it has fewer tiles than the last scale (NVILA)
    most     maximum number of tiles of an image, if the configuration limits it
    axes     dimensions of `pixel_values`; five: SmolVLM's [tiles, 1, ...], or [images, tiles, ...] of LLaVA-OneVision,
             which also takes the sizes of images and the number of images in each row (`sized`)
    """

    kind: Literal["patches", "whole", "tiles"]
    patch: tuple[int, int]
    channels: int
    merge: int = 1
    tile: tuple[int, int] = (0, 0)
    least: tuple[int, int] = (0, 0)
    prefix: int = 0
    length: int = 0
    ends: int = 0
    scales: tuple[int, ...] = ()
    most: int = 1 << 16
    axes: int = 4
    sized: bool = False

    @property
    def cells(self) -> int:
        """Patches of a tile."""
        return (self.tile[0] // self.patch[0]) * (self.tile[1] // self.patch[1])

    def patches(self, batch: Mapping[str, Tensor]) -> list[int]:
        """Return the number of tower patches of each image of a batch, or of each tile if there are tiles."""
        if self.kind == "patches":
            return batch["image_grid_thw"].prod(-1).tolist()
        if self.scales:
            tiles = [(frames > 1, rows * columns) for frames, rows, columns in batch["image_grid_thw"].tolist()]
            return [self.cells * (count + self.smaller * several) for several, count in tiles]
        if self.kind == "whole":
            sizes = batch["image_sizes"]
            return ((sizes[:, 0] // self.patch[0]) * (sizes[:, 1] // self.patch[1])).tolist()
        pixels = batch["pixel_values"]
        if self.axes == 5:  # images are padded with zeros to the largest number of tiles; no real tile is all zeros
            pixels = pixels.flatten(0, 1)
            pixels = pixels[pixels.flatten(1).any(1)]
        cells = (pixels.shape[-2] // self.patch[0]) * (pixels.shape[-1] // self.patch[1])
        return [cells + self.prefix] * len(pixels)

    @property
    def smaller(self) -> int:
        """Number of tiles of an image at all scales except the largest."""
        return sum(self.scales[:-1])

    def seen(self, tiles: int) -> tuple[int, int]:
        """Return (tower patches, features) of an image of at most `tiles` tiles."""
        if not self.scales:
            return tiles * (self.cells + self.prefix), tiles * self.length
        if tiles < self.scales[-1]:
            return self.cells, self.length
        return self.cells * (tiles + self.smaller), tiles * self.length

    def features(self, patches: int) -> int:
        """Return the number of features that the projector returns for `patches` patches of an image or tile."""
        if self.scales:
            tiles = patches // self.cells
            return self.length * (tiles - self.smaller if tiles > self.smaller else tiles)
        return patches // self.merge**2 if self.kind != "tiles" else (patches - self.prefix) * self.length // self.cells

    def smallest(self, device: torch.device | None = None, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
        """Return the smallest black image, as arguments of `get_image_features`."""
        like: dict[str, Any] = {"dtype": dtype, "device": device}
        (tall, wide), merge = self.patch, self.merge
        # One branch for each form of `pixel_values`: patches, whole images, tiles at scales, tiles, sized tiles.
        if self.kind == "patches":
            pixels = torch.zeros(merge * merge, self.channels * tall * wide, **like)
            return {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, merge, merge]], device=device)}
        if self.kind == "whole":
            size = (merge * tall, 2 * merge * wide)  # two features: with one, Mistral 3 squeezes the wrong dimension
            return {"pixel_values": torch.zeros(1, self.channels, *size, **like),
                    "image_sizes": torch.tensor([size], device=device)}  # fmt: skip
        if self.scales:
            black = torch.zeros(1, self.channels, *self.least, **like)
            return {"pixel_values": black, "image_grid_thw": torch.ones(1, 3, dtype=torch.int64, device=device)}
        if not self.sized:
            lead = (1,) * (self.axes - 3)
            return {"pixel_values": torch.zeros(*lead, self.channels, *self.least, **like)}
        sizes = torch.tensor([self.tile] * 2, device=device)  # two images in a row are not cut into tiles
        return {"pixel_values": torch.zeros(2, 1, self.channels, *self.tile, **like), "image_sizes": sizes,
                "batch_num_images": torch.tensor([2], device=device)}  # fmt: skip


def vision_of(config: PreTrainedConfig) -> Vision:
    """Return the image shapes of a configuration, by the `image_cut` of its family's record. Raises ModelError for a
    family that Octavo does not know."""
    if getattr(config, "vision_config", None) is None:
        raise ModelError(f"model_type {config.model_type!r} does not take images")
    record = RECORDS.get(config.model_type)
    cut = record.image_cut if record is not None else ""
    if not cut:  # towers whose configuration identifies the form
        vision = config.vision_config
        cut = "patches" if hasattr(vision, "spatial_merge_size") else "whole" if vision.model_type == "pixtral" else ""
    if not cut:
        raise ModelError(f"Octavo does not know the image inputs of model_type {config.model_type!r}")
    return _CUTS[cut](config, _pair(config.vision_config.patch_size), _channels(config.vision_config))


def _channels(vision: PreTrainedConfig) -> int:
    if getattr(vision, "in_channels", None):
        return vision.in_channels
    return getattr(vision, "num_channels", 3)


def _patches(config: PreTrainedConfig, patch: tuple[int, int], channels: int) -> Vision:
    vision = config.vision_config
    return Vision("patches", patch, channels * getattr(vision, "temporal_patch_size", 1), vision.spatial_merge_size)


def _whole(config: PreTrainedConfig, patch: tuple[int, int], channels: int) -> Vision:
    return Vision("whole", patch, channels, config.spatial_merge_size)


def _tile(config: PreTrainedConfig, patch: tuple[int, int]) -> tuple[tuple[int, int], int]:
    """Return the size of a tile, and its patches."""
    tile = _pair(config.vision_config.image_size)
    return tile, (tile[0] // patch[0]) * (tile[1] // patch[1])


def _shuffled_tiles(config: PreTrainedConfig, patch: tuple[int, int], channels: int) -> Vision:
    tile, cells = _tile(config, patch)
    small = round(1 / config.downsample_ratio)
    least = (small * patch[0], small * patch[1])
    return Vision("tiles", patch, channels, 1, tile, least, 1, int(cells * config.downsample_ratio**2))


def _stacked_tiles(config: PreTrainedConfig, patch: tuple[int, int], channels: int) -> Vision:
    tile, cells = _tile(config, patch)
    return Vision("tiles", patch, channels, 1, tile, tile, 0, cells // config.scale_factor**2, axes=5)


def _anyres_tiles(config: PreTrainedConfig, patch: tuple[int, int], channels: int) -> Vision:
    tile, cells = _tile(config, patch)
    most = max(anyres.count_tiles(config, size, True) for size in config.image_grid_pinpoints)
    breaks = tile[0] // patch[0]  # for a tile in a grid of one column; in wider grids tiles share line breaks
    return Vision("tiles", patch, channels, 1, tile, tile, 0, cells, breaks, most=most, axes=5, sized=True)


def _one_tile(config: PreTrainedConfig, patch: tuple[int, int], channels: int) -> Vision:
    tile, cells = _tile(config, patch)
    if (pooled := getattr(config, "mm_tokens_per_image", None)) is not None:
        return Vision("tiles", patch, channels, 1, tile, tile, 0, pooled, most=1)
    prefix = leading_tokens(config.vision_config)
    if (tokens := getattr(config, "image_tokens", None)) is not None:
        return Vision("tiles", patch, channels, 1, tile, tile, prefix, tokens, most=1)
    dropped = 0 if config.vision_feature_select_strategy == "full" else 1
    return Vision("tiles", patch, channels, 1, tile, tile, prefix, cells + prefix - dropped, most=1)


def _scaled_tiles(config: PreTrainedConfig, patch: tuple[int, int], channels: int) -> Vision:
    tile, _ = _tile(config, patch)
    rows, columns = tile[0] // patch[0], tile[1] // patch[1]
    least = (config.merge * patch[0], config.merge * patch[1])
    length, side = config.tile_tokens(rows, columns), config.vision_config.image_size
    squares = tuple((scale // side) ** 2 for scale in config.s2_scales)
    most = config.max_tiles + (not squares and config.max_tiles > 1)  # the thumbnail is one more tile
    return Vision("tiles", patch, channels, 1, tile, least, 0, length, ends=config.newlines, scales=squares, most=most)


_CUTS: Mapping[str, Callable[[PreTrainedConfig, tuple[int, int], int], Vision]] = {
    "patches": _patches,
    "paired_patches": _patches,
    "whole": _whole,
    "shuffled_tiles": _shuffled_tiles,
    "stacked_tiles": _stacked_tiles,
    "anyres_tiles": _anyres_tiles,
    "one_tile": _one_tile,
    "scaled_tiles": _scaled_tiles,
}
"""The `image_cut` of a record -> the function that computes :class:`Vision` from a configuration."""


def _pair(size: int | Sequence[int]) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))
