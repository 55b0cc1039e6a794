"""How LLaVA-OneVision (2024) cuts an image, by the configuration and the image's size alone.

The only image of a row becomes a whole tile and the tiles of a grid, the best of `image_grid_pinpoints`. The grid's
features lose what is padding, shrink where they are more than `vision_aspect_ratio` (anyres_max_9: nine tiles') allows,
and get a line break behind each line. Of several images none is cut: each is a tile and one line break.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from transformers.image_processing_utils import select_best_resolution


def alone(counts: Iterable[int]) -> list[bool]:
    """Whether each image is the only one of its row, by how many the rows have, in order."""
    return [count == 1 for count in map(int, counts) for _ in range(count)]


def tiles(config: Any, size: Sequence[int], alone: bool) -> int:
    """Tiles of an image of (height, width), the whole of it among them; ``alone``: the only one of its row."""
    if not alone:
        return 1
    rows, columns = _grid(config, size)
    return 1 + rows * columns


def tokens(config: Any, size: Sequence[int], alone: bool) -> int:
    """Placeholders of the same image, which its features replace."""
    side = config.vision_config.image_size // config.vision_config.patch_size
    if not alone:
        return side * side + 1
    rows, columns = _grid(config, size)
    (height, width), tall, wide = map(int, size), rows * side, columns * side
    if width / height > wide / tall:
        tall -= (tall - int(round(height * (wide / width), 7))) // 2 * 2  # as much above as below
    else:
        wide -= (wide - int(round(width * (tall / height), 7))) // 2 * 2
    most = int(config.vision_aspect_ratio.removeprefix("anyres_max_"))
    ratio = math.sqrt(tall * wide / (most * side * side))
    if ratio > 1.1:
        tall, wide = int(tall // ratio), int(wide // ratio)
    return side * side + tall * (wide + 1)


def nearest(config: Any, wanted: int) -> tuple[int, int]:
    """The (height, width) of the grid whose tiles come nearest to so many; of equals the squarest."""

    def far(size: Sequence[int]) -> tuple[int, float]:
        return abs(tiles(config, size, True) - wanted), abs(math.log(size[0] / size[1]))

    height, width = min(config.image_grid_pinpoints, key=far)
    return int(height), int(width)


def _grid(config: Any, size: Sequence[int]) -> tuple[int, int]:
    """(rows, columns) of an image's tiles."""
    tall, wide = select_best_resolution(list(map(int, size)), config.image_grid_pinpoints)
    side = config.vision_config.image_size
    return tall // side, wide // side
