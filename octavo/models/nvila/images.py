"""Images to tiles, with Pillow and numpy.

    tiles    the grid of tiles closest to the image's aspect ratio, row by row, then the whole image as one tile more
             if the grid has several: InternVL's rule and order

All tiles are squares of `size`, resized with bicubic, scaled to 0 .. 1 and normalised as SigLIP's.
"""

from __future__ import annotations

from typing import Any

from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

_HALF = [0.5, 0.5, 0.5]


class NvilaLiteImages(GotOcr2ImageProcessorPil):
    """Images to `pixel_values`, tiles [3, side, side] in fp32, and `num_patches`, how many each image has.

    `min_patches` and `max_patches` are limits of the grid; a `max_patches` of 1 makes each image one tile.
    """

    image_mean, image_std = _HALF, _HALF
    size = {"height": 448, "width": 448}
    crop_to_patches = True

    def tiles(self, height: int, width: int) -> int:
        """How many tiles an image of this size becomes."""
        return int(self.get_number_of_image_patches(height, width))

    def __init__(self, **settings: Any) -> None:
        # what a published folder names is SigLIP's processor, which has no tiles: their number comes from config.json
        super().__init__(**{**settings, "crop_to_patches": True})
