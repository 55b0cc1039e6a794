"""The image processor of an image encoder for images of one size: which squares it makes, and the settings with which
it makes squares of another size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from octavo.models.errors import ModelError
from octavo.models.folder.folder import silence_transformers, wrap_errors
from octavo.models.processors.image import settings_file
from octavo.models.processors.llava import IMAGE_PROCESSORS

_DINOV3 = "DINOv3ViTImageProcessor"
"""It needs torchvision. SigLIP's resizes before it scales values to [0, 1], and is the same otherwise."""
_IMAGENET = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
_SIZES = ("height", "width", "shortest_edge")
_TRIAL = (48, 31)  # pixels of an image that is not square


@dataclass(frozen=True)
class ImageSettings:
    """The settings of an image processor, the file that has them, and the sizes that it names: one, if it makes
    squares."""

    file: Path
    settings: Mapping[str, object]
    sizes: frozenset[int]

    @property
    def size(self) -> int | None:
        """Pixels of the squares that the processor makes, or None if it does not name one size."""
        return next(iter(self.sizes)) if len(self.sizes) == 1 else None

    def of_size(self, size: int) -> dict[str, object]:
        """Return the settings for squares of `size` pixels. Raises ModelError if images would have another size or no
        finite values."""
        settings = dict(self.settings) if size == self.size else _with_size(self.settings, size)
        processor = IMAGE_PROCESSORS[str(settings["image_processor_type"])]
        image = Image.fromarray(np.full((*_TRIAL, 3), 128, dtype=np.uint8))
        with wrap_errors(f"{self.file} cannot process an image"), silence_transformers():
            pixels = np.asarray(processor.from_dict(settings)(images=[image], return_tensors="np")["pixel_values"])
        if pixels.shape != (1, 3, size, size):
            size_of_trial = " x ".join(map(str, pixels.shape[-2:]))
            raise ModelError(
                f"{self.file} makes {size_of_trial} pixels of an image of {_TRIAL[0]} x {_TRIAL[1]}, and an image "
                f"encoder takes squares of {size}; set size to height and width, and do_resize to true"
            )
        if not np.isfinite(pixels).all():
            raise ModelError(f"{self.file} makes NaN or infinity of an image; correct image_std and rescale_factor")
        return settings


def read_image_settings(folder: Path, settings: Mapping[str, object], usual: str) -> ImageSettings:
    """Return the settings of an image encoder's folder. `usual`: the class of its image processor, if they name none.
    Raises ModelError for an unknown class, and for sizes that are no whole numbers."""
    file = settings_file(folder)
    name = str(settings.get("image_processor_type") or usual).removesuffix("Pil").removesuffix("Fast")
    if name == _DINOV3:
        name, settings = "SiglipImageProcessor", {"resample": 2, **_IMAGENET, **settings}
    if name not in IMAGE_PROCESSORS:
        known = ", ".join(IMAGE_PROCESSORS)
        raise ModelError(f"{file}: image_processor_type is {name!r:.80}; expected one of {known}")
    sizes = set[int]()
    for edge in _edges(settings):
        if type(edge) is not int or edge < 1:
            raise ModelError(f"{file}: {edge!r:.80} is no size of an image; expected a number of pixels")
        sizes.add(edge)
    named = {**settings, "image_processor_type": name, "processor_class": "LlavaProcessor"}
    return ImageSettings(file, named, frozenset(sizes))


def _edges(settings: Mapping[str, object]) -> Iterator[object]:
    for key in ("crop_size", "size"):
        entry = settings.get(key)
        if entry is None or (key == "crop_size" and settings.get("do_center_crop") is False):
            continue
        values: Mapping[str, object] = entry if isinstance(entry, dict) else {"height": entry}
        yield from (values[name] for name in _SIZES if name in values)
        return


def _with_size(settings: Mapping[str, object], size: int) -> dict[str, object]:
    """Return the settings of an image processor for square images of another size."""
    square = {"height": size, "width": size}
    sizes: dict[str, object] = {"size": square}
    if "crop_size" in settings or settings["image_processor_type"] in ("CLIPImageProcessor", "BitImageProcessor"):
        shortest = {"shortest_edge": size}
        sizes = {"size": square if settings.get("do_center_crop") is False else shortest, "crop_size": square}
    return {**settings, **sizes}
