"""How LLaVA-OneVision (2024) cuts an image, computed from the configuration and the image's size.

The only image of a row becomes one tile of the whole image and the tiles of a grid, the best of `image_grid_pinpoints`.
Padding is removed from the grid's features. They are downsampled if there are more than `vision_aspect_ratio` allows
(anyres_max_9: as many as nine tiles have), and get a line break after each line. Several images in a row are not cut:
each is one tile and one line break.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from transformers import PreTrainedConfig
from transformers.image_processing_utils import select_best_resolution


def only_images(counts: Iterable[int]) -> list[bool]:
    """Return whether each image is the only one of its row; `counts`: images of each row, in order."""
    return [count == 1 for count in map(int, counts) for _ in range(count)]


def count_tiles(config: PreTrainedConfig, size: Sequence[int], only_image: bool) -> int:
    """Return tiles of an image of (height, width), including the tile of the whole image; the last argument is whether
    it is the only image of its row."""
    if not only_image:
        return 1
    rows, columns = _grid(config, size)
    return 1 + rows * columns


def count_tokens(config: PreTrainedConfig, size: Sequence[int], only_image: bool) -> int:
    """Return placeholders of the same image, which its features replace, as transformers' model unpads and shrinks
    them."""
    side = config.vision_config.image_size // config.vision_config.patch_size
    if not only_image:
        return side * side + 1
    rows, columns = _grid(config, size)
    (height, width), tall, wide = map(int, size), rows * side, columns * side
    if width / height > wide / tall:
        tall -= (tall - int(round(height * (wide / width), 7))) // 2 * 2  # as much above as below
    else:
        wide -= (wide - int(round(width * (tall / height), 7))) // 2 * 2
    most = int(config.vision_aspect_ratio.removeprefix("anyres_max_"))
    ratio = math.sqrt(tall * wide / (most * side * side))
    if ratio > 1.1:  # the threshold of transformers' pack_image_features, below which nothing is resized
        tall, wide = int(tall // ratio), int(wide // ratio)
    return side * side + tall * (wide + 1)


def closest_grid(config: PreTrainedConfig, wanted: int) -> tuple[int, int]:
    """Return the (height, width) of the grid whose number of tiles is closest to `wanted`; of several, the most square
    one."""

    def distance(size: Sequence[int]) -> tuple[int, float]:
        return abs(count_tiles(config, size, True) - wanted), abs(math.log(size[0] / size[1]))

    height, width = min(config.image_grid_pinpoints, key=distance)
    return int(height), int(width)


def _grid(config: PreTrainedConfig, size: Sequence[int]) -> tuple[int, int]:
    """Return (rows, columns) of an image's tiles."""
    tall, wide = select_best_resolution(tuple(map(int, size)), config.image_grid_pinpoints)
    side = config.vision_config.image_size
    return tall // side, wide // side
