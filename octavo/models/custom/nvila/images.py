"""Converts images to tiles with Pillow and numpy.

    tiles     the grid of tiles closest to the image's aspect ratio, row by row, then the full image as one more tile
              if the grid has several: InternVL's rule and order
    scales    (dynamic S2) the image at each scale as a square of tiles, except the largest, which is a grid as above of
              at least as many tiles as its square; one tile if the limit does not allow that many

All tiles are squares of `size`, resized with bicubic interpolation, scaled to 0 .. 1 and normalized as in SigLIP.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from transformers import BatchFeature
from transformers.image_utils import SizeDict
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import (
    GotOcr2ImageProcessorPil,
    get_optimal_tiled_canvas,
)

from octavo.models.custom.nvila.configuration import MAX_TILES, NvilaLiteConfig

_HALF = [0.5, 0.5, 0.5]


class NvilaImages(GotOcr2ImageProcessorPil):
    """Converts images to `pixel_values`, tiles [3, side, side] in fp32, and `grids`.

    A grid is (tiles, 1, 1), or with several scales (frames, rows, columns): the first frame is the largest scale, row
    by row; the second contains the smaller ones, the smallest first, and is padded with zeros. An image of one tile has
    (1, 1, 1). The product is the number of its tiles.

    `min_patches` and `max_patches` limit the tiles of the grid; with a `max_patches` of 1 each image is one tile.
    """

    image_mean, image_std = _HALF, _HALF
    size = {"height": 448, "width": 448}
    crop_to_patches = True
    max_patches = MAX_TILES  # before `configure` sets the model's limit
    scales: tuple[int, ...] = ()

    def __init__(self, **settings: Any) -> None:
        # published folders name SigLIP's processor, which has no tiles: their number comes from config.json
        super().__init__(**{**settings, "crop_to_patches": True})

    def configure(self, config: NvilaLiteConfig) -> None:
        """Set limits and scales from a model's configuration; narrower limits that were set before are kept."""
        self.max_patches = max(1, min(self.max_patches, config.max_tiles))
        self.min_patches = min(max(self.min_patches, config.min_tiles), self.max_patches)
        self.scales = config.s2_scales

    def grid(self, height: int, width: int) -> tuple[int, int, int]:
        """Return the grid of an image of this size."""
        if not self.scales:
            return int(self.get_number_of_image_patches(height, width)), 1, 1
        least = self._squares()[-1]
        if self.max_patches < least:
            return 1, 1, 1
        side = (self.size["height"], self.size["width"])
        columns, rows = get_optimal_tiled_canvas((height, width), side, max(least, self.min_patches), self.max_patches)
        return 1 + -(-sum(self._squares()[:-1]) // (rows * columns)), rows, columns

    def _squares(self) -> list[int]:
        """Return the number of tiles of each scale as a square."""
        return [(scale // self.size["height"]) ** 2 for scale in self.scales]

    # type ignored: the signatures of two transformers base classes differ, so no override fits both
    def _preprocess(self, images: list[np.ndarray], **options: Any) -> BatchFeature:  # type: ignore[override]
        if not self.scales:
            batch = super()._preprocess(images, **options)
            grids = [(tiles, 1, 1) for tiles in batch["num_patches"]]
            return BatchFeature({"pixel_values": batch["pixel_values"], "grids": grids})
        grids = [self.grid(*image.shape[-2:]) for image in images]
        tiles = [tile for image, grid in zip(images, grids, strict=True) for tile in self._scaled(image, grid, options)]
        return BatchFeature({"pixel_values": tiles, "grids": grids})

    def _scaled(self, image: np.ndarray, grid: tuple[int, int, int], options: dict[str, Any]) -> list[np.ndarray]:
        """Return the tiles of an image [3, height, width] at all scales, padded to the number in the grid."""
        frames, rows, columns = grid
        tiles = self._cut(image, rows, columns, options)
        if frames > 1:
            for scale in self.scales[:-1]:
                side = scale // self.size["height"]
                tiles += self._cut(image, side, side, options)
        return tiles + [np.zeros_like(tiles[0])] * (frames * rows * columns - len(tiles))

    def _cut(self, image: np.ndarray, rows: int, columns: int, options: dict[str, Any]) -> list[np.ndarray]:
        """Return an image resized to rows x columns tiles, row by row."""
        tall, wide = self.size["height"], self.size["width"]
        resized = self.resize(image, SizeDict(height=rows * tall, width=columns * wide), options["resample"])
        resized = self.normalize(
            self.rescale(resized, options["rescale_factor"]), options["image_mean"], options["image_std"]
        )
        tiles = resized.reshape(-1, rows, tall, columns, wide).transpose(1, 3, 0, 2, 4)
        return list(tiles.reshape(rows * columns, -1, tall, wide))
