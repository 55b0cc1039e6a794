"""Tiles and tokens of an image in LLaVA-OneVision (2024), computed from the configuration and the image size.

The only image of a row becomes one tile of the full image and the tiles of a grid, the best of `image_grid_pinpoints`.
Padding is removed from the grid's features. They are downsampled if there are more than `vision_aspect_ratio` allows
(anyres_max_9: the features of nine tiles), and get a line break after each row. Several images in a row are not cut:
each is one tile and one line break.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from transformers import PreTrainedConfig
from transformers.image_processing_utils import select_best_resolution


def only_images(counts: Iterable[int]) -> list[bool]:
    """Return whether each image is the only one of its row; `counts`: number of images per row."""
    return [count == 1 for count in map(int, counts) for _ in range(count)]


def count_tiles(config: PreTrainedConfig, size: Sequence[int], only_image: bool) -> int:
    """Return the number of tiles of an image of (height, width), including the tile of the full image. `only_image`:
    whether it is the only image of its row."""
    if not only_image:
        return 1
    rows, columns = _grid(config, size)
    return 1 + rows * columns


def count_tokens(config: PreTrainedConfig, size: Sequence[int], only_image: bool) -> int:
    """Return the number of placeholders of an image, computed like transformers' unpadding and downsampling of its
    features."""
    side = config.vision_config.image_size // config.vision_config.patch_size
    if not only_image:
        return side * side + 1
    rows, columns = _grid(config, size)
    (height, width), tall, wide = map(int, size), rows * side, columns * side
    if width / height > wide / tall:
        tall -= (tall - int(round(height * (wide / width), 7))) // 2 * 2  # equal parts above and below
    else:
        wide -= (wide - int(round(width * (tall / height), 7))) // 2 * 2
    most = int(config.vision_aspect_ratio.removeprefix("anyres_max_"))
    ratio = math.sqrt(tall * wide / (most * side * side))
    if ratio > 1.1:  # the threshold of transformers' pack_image_features, below which nothing is resized
        tall, wide = int(tall // ratio), int(wide // ratio)
    return side * side + tall * (wide + 1)


def closest_grid(config: PreTrainedConfig, wanted: int) -> tuple[int, int]:
    """Return the (height, width) of the grid whose number of tiles is closest to `wanted`; among several, the most
    square one."""

    def distance(size: Sequence[int]) -> tuple[int, float]:
        return abs(count_tiles(config, size, True) - wanted), abs(math.log(size[0] / size[1]))

    height, width = min(config.image_grid_pinpoints, key=distance)
    return int(height), int(width)


def _grid(config: PreTrainedConfig, size: Sequence[int]) -> tuple[int, int]:
    """Return (rows, columns) of an image's tiles."""
    tall, wide = select_best_resolution(tuple(map(int, size)), config.image_grid_pinpoints)
    side = config.vision_config.image_size
    return tall // side, wide // side
