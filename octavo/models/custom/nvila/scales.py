"""Dynamic S2: the features of an image at several scales, concatenated, in blocks for the projector.

    1  the tiles of a scale are joined to one feature map
    2  each map is resized to the largest scale, by area, in fp32, and channels are concatenated, smallest scale first
    3  the map is cut into rows x columns blocks of a tile's size; each is projected, and their tokens are joined to a
       map, which is read row by row

An image of one tile has the same features at every scale. Tiles are cut by `octavo.models.custom.nvila.images`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Cut(NamedTuple):
    """The tiles of an image: rows and columns of the largest scale, the sides in tiles of the smaller scales, and the
    number of all tiles including padding."""

    rows: int
    columns: int
    smaller: tuple[int, ...]
    tiles: int

    @property
    def num_used(self) -> int:
        """Number of tiles without the padding, which comes last."""
        return self.rows * self.columns + sum(side * side for side in self.smaller)


def make_cut(grid: Sequence[int], squares: Sequence[int]) -> Cut:
    """Create the cut of an image with a grid (frames, rows, columns); `squares`: tiles of each smaller scale."""
    frames, rows, columns = grid
    smaller = tuple(round(square**0.5) for square in squares) if frames > 1 else ()
    return Cut(rows, columns, smaller, frames * rows * columns)


def used_tiles(cuts: Sequence[Cut]) -> list[int]:
    """Return the indices of the tiles of all images that go through the tower."""
    starts = accumulate((one.tiles for one in cuts), initial=0)
    return [start + number for start, one in zip(starts, cuts, strict=False) for number in range(one.num_used)]


def make_blocks(features: Tensor, cuts: Sequence[Cut], scales: int) -> list[Tensor]:
    """Split features [tiles, h, w, C] of images into the blocks of each image, [rows * columns, h, w, scales * C]."""
    parts = features.split([cut.num_used for cut in cuts])
    return [_blocks(part, cut, scales) for part, cut in zip(parts, cuts, strict=True)]


def _blocks(features: Tensor, of: Cut, scales: int) -> Tensor:
    largest, *smaller = features.split([of.rows * of.columns, *(side * side for side in of.smaller)])
    whole = _merge_tiles(largest, of.rows, of.columns)
    maps = [_resize(_merge_tiles(one, side, side), whole) for one, side in zip(smaller, of.smaller, strict=True)]
    joined = torch.cat([*maps, whole] if maps else [whole] * scales, -1)
    _, tall, wide, _ = features.shape
    cut = joined.reshape(of.rows, tall, of.columns, wide, -1).transpose(1, 2)
    return cut.reshape(of.rows * of.columns, tall, wide, -1)


def _merge_tiles(tiles: Tensor, rows: int, columns: int) -> Tensor:
    """Return tiles [rows * columns, h, w, C], row by row -> one map [rows * h, columns * w, C]."""
    _, tall, wide, channels = tiles.shape
    parted = tiles.reshape(rows, columns, tall, wide, channels).transpose(1, 2)
    return parted.reshape(rows * tall, columns * wide, channels)


def _resize(small: Tensor, to: Tensor) -> Tensor:
    resized = F.interpolate(small.permute(2, 0, 1)[None].float(), size=to.shape[:2], mode="area")
    return resized[0].permute(1, 2, 0).to(to.dtype)


def stitch(tokens: Tensor, rows: int, columns: int) -> Tensor:
    """Return tokens of blocks [rows * columns, n, H], each a square row by row -> tokens of the image, row by row."""
    side = round(tokens.shape[1] ** 0.5)
    return _merge_tiles(tokens.unflatten(1, (side, side)), rows, columns).flatten(0, 1)
