"""Untrusted images, decoded to RGB."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import ClassVar

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError
from PIL.TiffImagePlugin import BITSPERSAMPLE, PHOTOMETRIC_INTERPRETATION, SAMPLEFORMAT

from octavo.base.encryption import check_plain, is_encrypted
from octavo.base.safe_read import read_bytes
from octavo.data.errors import DataError, MediaProblem
from octavo.data.rows.media import InlineFile

ORIENTATION = 0x0112  # EXIF tag; its values 5 to 8 swap width and height
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF")  # no decoder starts a program


class InlineImage(InlineFile):
    """An image file whose bytes are in the row."""

    what: ClassVar[str] = "image"


ImageFile = Path | InlineImage


@cache
def _supported_formats() -> list[str]:
    """Return the `FORMATS` that the installed Pillow supports."""
    Image.init()
    return [name for name in FORMATS if name in Image.OPEN]


def load(path: str | ImageFile, max_megapixels: float = 100.0) -> Image.Image:
    """Decode an image file, or an image in a row, as RGB with the EXIF orientation applied; of an animation or several
    pages the first.

    The format is recognized by content and must be one of `FORMATS`; no other decoder, some of which start a program
    (EPS), runs. The size is read from the header and checked before a pixel is decoded, so that a decompression bomb
    costs nothing. Colours are taken as sRGB, without color profiles; transparent pixels become white; grey values of
    more than 8 bits are scaled (`_scale_grey`). Raises `MediaProblem` for a bomb, for a file that is broken, truncated
    or not an image, and for pixels without a defined black and white.
    """
    with _open_image(path, max_megapixels) as image:
        facts = _PixelInfo(image)
        image.load()
        ImageOps.exif_transpose(image, in_place=True)
        return _to_rgb(image, facts)


def size(path: str | ImageFile, max_megapixels: float = 100.0) -> tuple[int, int]:
    """Return (width, height) from the header, with the EXIF orientation applied. Raises `MediaProblem` as `load`
    does."""
    with _open_image(path, max_megapixels) as image:
        exif = Image.Exif()
        exif.load(image.info.get("exif") or b"")  # getexif() would decode a PNG to read data after its pixels
        width, height = image.size
        return (height, width) if exif.get(ORIENTATION) in (5, 6, 7, 8) else (width, height)


def _source(path: str | ImageFile) -> str | Path | BytesIO:
    """What Pillow opens: a path, or bytes. Raises DataError for an encrypted file that is damaged or has no key, and
    for a plain file in place of an encrypted one."""
    if isinstance(path, InlineImage):
        return BytesIO(path.data)
    if is_encrypted(path):
        return BytesIO(read_bytes(path, DataError))
    check_plain(path, DataError)
    return path


@contextmanager
def _open_image(path: str | ImageFile, max_megapixels: float) -> Iterator[Image.Image]:
    known = _supported_formats()
    with _without_bomb_limit():
        try:
            with Image.open(_source(path), formats=known) as image:
                width, height = image.size
                if width * height > max_megapixels * 1e6:
                    raise MediaProblem(
                        f"has {width} x {height} = {width * height / 1e6:.0f} megapixels, over the "
                        f"limit of {max_megapixels:g} (a decompression bomb?); if it is intended, raise "
                        f"data.max_image_megapixels"
                    )
                yield image
        except MediaProblem as cause:
            raise MediaProblem(f"image {path} {cause}") from cause
        except DataError:
            raise
        except UnidentifiedImageError as cause:
            raise MediaProblem(f"image {path} cannot be decoded (UnidentifiedImageError: its header matches none of "
                               f"{', '.join(known)}); convert it to one of them") from cause  # fmt: skip
        # Decoders raise errors of many classes for a broken file (struct.error, SyntaxError, IndexError ...); all mean
        # the same here, and the cause is kept in the message and in the chain.
        except Exception as cause:
            raise MediaProblem(f"image {path} cannot be decoded ({type(cause).__name__}: {cause})") from cause


@contextmanager
def _without_bomb_limit() -> Iterator[None]:
    """Switch off Pillow's limit in the block, a global of 89 megapixels; `_open_image` checks the configured one."""
    before, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # e.g. corrupt EXIF, which does not matter for the pixels
            yield
    finally:
        Image.MAX_IMAGE_PIXELS = before


class _PixelInfo:
    """Properties of the stored pixels that Pillow drops when it decodes or rotates them.

    `black`, `white`: the limits of grey values of more than 8 bits. `key`: the transparent value, or None.
    """

    def __init__(self, image: Image.Image) -> None:
        tile = getattr(image, "tile", None)
        raw = tile[0][3] if tile else None  # the layout of samples in the file; in some formats not a string
        self.key = image.info.get("transparency")
        if image.format == "PNG" and self.key is not None:
            if raw == "RGB;16B":
                raise MediaProblem(
                    "has a 16-bit transparent color, of which 8 bits are read; save it with an alpha channel"
                )
            # Pillow scales samples of 2 and 4 bits to 8, but not the transparent key.
            self.key *= {"L;2": 85, "L;4": 17}.get(str(raw), 1)
        tags = getattr(image, "tag_v2", {})  # of a TIFF
        if 2 in tags.get(SAMPLEFORMAT, ()):
            raise MediaProblem("is a TIFF of signed integers, which defines no black and white; save it as unsigned")
        bits = tags.get(BITSPERSAMPLE, (16,))[0]  # PNG and JPEG 2000 have 16 here, and PGM is scaled to them
        self.black, self.white = 0, 1 if image.mode == "F" else 2**bits - 1
        if tags.get(PHOTOMETRIC_INTERPRETATION) == 0:  # the least value is white
            self.black, self.white = self.white, self.black


def _to_rgb(image: Image.Image, facts: _PixelInfo) -> Image.Image:
    if image.mode == "F" or image.mode.startswith("I"):
        return _scale_grey(image, facts)
    if facts.key is not None and image.mode in ("1", "L", "RGB"):
        image.info["transparency"] = facts.key
    if not image.has_transparency_data:
        return image if image.mode == "RGB" else image.convert("RGB")
    if image.mode == "La":  # the only conversion of this mode in Pillow
        image = image.convert("LA")
    return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA")).convert("RGB")


def _scale_grey(image: Image.Image, facts: _PixelInfo) -> Image.Image:
    """Grey values of more than 8 bits, scaled from black to white: unsigned, with as many bits as the file has. Floats
    must be 0 to 1, or whole numbers up to 255 (an 8-bit image stored as floats). Raises `MediaProblem` for others."""
    values = np.asarray(image)
    if image.mode == "I" and facts.white + facts.black == 2**32 - 1:
        values = values.view(np.uint32)  # Pillow has no unsigned mode and reads the bits as signed
    black, white = facts.black, facts.white
    low, high = values.min(), values.max()
    if image.mode == "F" and high > 1 and black < white and (values == np.rint(values)).all():
        white = 255
    if not (min(black, white) <= low and high <= max(black, white)):  # also true for NaN
        raise MediaProblem(f"has {image.mode} values from {low:g} to {high:g}, where {black} would be black and "
                           f"{white} white; save it with 8 or 16 bits")  # fmt: skip
    grey = np.rint((values.astype(np.float64) - black) * (255 / (white - black))).astype(np.uint8)
    if facts.key is not None:
        grey[values == facts.key] = 255
    return Image.fromarray(grey).convert("RGB")
