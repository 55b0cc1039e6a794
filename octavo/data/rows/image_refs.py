"""Images, opened without trusting them."""

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
from octavo.data.errors import DataError, ImageProblem
from octavo.data.rows.media import Inline

ORIENTATION = 0x0112  # in EXIF: from 5 on width is height
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF")  # none of them starts a program


class Picture(Inline):
    """An image file whose bytes stand in the row itself."""

    what: ClassVar[str] = "image"


ImageFile = Path | Picture


@cache
def _known() -> list[str]:
    """Of `FORMATS` those that this Pillow has."""
    Image.init()
    return [name for name in FORMATS if name in Image.OPEN]


def load(path: str | ImageFile, max_megapixels: float = 100.0) -> Image.Image:
    """Open an image file, or one in a row, as RGB, upright (EXIF orientation applied): of an animation or a file of
    pages the first.

    The format is one of `FORMATS`, whatever the file is called: of all others, those that start a program (EPS) among
    them, no byte is looked at. The size is read from the header and checked before a pixel is decoded, so that a
    decompression bomb costs nothing. Colours are sRGB as stored, profiles are not applied; what is transparent shows
    white; greys of more than 8 bits are scaled (`_grey`). Raises `ImageProblem` for a bomb, for what is broken,
    truncated or no image, and for pixels that do not say what they mean.
    """
    with _opened(path, max_megapixels) as image:
        facts = _Facts(image)
        image.load()
        ImageOps.exif_transpose(image, in_place=True)
        return _rgb(image, facts)


def size(path: str | ImageFile, max_megapixels: float = 100.0) -> tuple[int, int]:
    """(width, height) by the header alone, upright. Raises `ImageProblem` as `load` does."""
    with _opened(path, max_megapixels) as image:
        exif = Image.Exif()
        exif.load(image.info.get("exif") or b"")  # getexif() would decode a PNG to read data after its pixels
        width, height = image.size
        return (height, width) if exif.get(ORIENTATION) in (5, 6, 7, 8) else (width, height)


def _file(path: str | ImageFile) -> str | Path | BytesIO:
    """What Pillow opens. Raises DataError for an encrypted file that is damaged or whose key is not given, and for a
    plain one in its place."""
    if isinstance(path, Picture):
        return BytesIO(path.data)
    if is_encrypted(path):
        return BytesIO(read_bytes(path, DataError))
    check_plain(path, DataError)
    return path


@contextmanager
def _opened(path: str | ImageFile, max_megapixels: float) -> Iterator[Image.Image]:
    known = _known()
    with _own_bomb_limit():
        try:
            with Image.open(_file(path), formats=known) as image:
                width, height = image.size
                if width * height > max_megapixels * 1e6:
                    raise ImageProblem(
                        f"holds {width} x {height} = {width * height / 1e6:.0f} megapixels, over the "
                        f"limit of {max_megapixels:g} (a decompression bomb?); if it is meant, raise "
                        f"data.max_image_megapixels"
                    )
                yield image
        except ImageProblem as cause:
            raise ImageProblem(f"image {path} {cause}") from cause
        except DataError:
            raise
        except UnidentifiedImageError as cause:
            raise ImageProblem(f"image {path} cannot be decoded (UnidentifiedImageError: its header is that of none of "
                               f"{', '.join(known)}); convert it to one of them") from cause  # fmt: skip
        # Decoders raise whatever their parsing runs into (struct.error, SyntaxError, IndexError ...); each of
        # these means the same here, and the cause stays in the message and in the chain.
        except Exception as cause:
            raise ImageProblem(f"image {path} cannot be decoded ({type(cause).__name__}: {cause})") from cause


@contextmanager
def _own_bomb_limit() -> Iterator[None]:
    """Pillow's own limit is a global of 89 megapixels; ours is configured and checked above."""
    before, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # e.g. corrupt EXIF: the pixels decide
            yield
    finally:
        Image.MAX_IMAGE_PIXELS = before


class _Facts:
    """What only the file knows of its pixels: Pillow drops it when it decodes or turns them.

    `black`, `white`: the values of a grey of more than 8 bits. `key`: the value that is transparent, or None.
    """

    def __init__(self, image: Image.Image) -> None:
        tile = getattr(image, "tile", None)
        raw = tile[0][3] if tile else None  # the layout of samples in the file; in some formats not a string
        self.key = image.info.get("transparency")
        if image.format == "PNG" and self.key is not None:
            if raw == "RGB;16B":
                raise ImageProblem("names a transparent colour in 16 bits, of which 8 are read; save it with alpha")
            # Pillow scales samples of 2 and 4 bits to 8, but not the transparent key.
            self.key *= {"L;2": 85, "L;4": 17}.get(str(raw), 1)
        tags = getattr(image, "tag_v2", {})  # of a TIFF
        if 2 in tags.get(SAMPLEFORMAT, ()):
            raise ImageProblem("is a TIFF of signed integers, which names no black and no white; save it unsigned")
        bits = tags.get(BITSPERSAMPLE, (16,))[0]  # PNG and JPEG 2000 have 16 here, and PGM is scaled to them
        self.black, self.white = 0, 1 if image.mode == "F" else 2**bits - 1
        if tags.get(PHOTOMETRIC_INTERPRETATION) == 0:  # the least value is white
            self.black, self.white = self.white, self.black


def _rgb(image: Image.Image, facts: _Facts) -> Image.Image:
    if image.mode == "F" or image.mode.startswith("I"):
        return _grey(image, facts)
    if facts.key is not None and image.mode in ("1", "L", "RGB"):
        image.info["transparency"] = facts.key
    if not image.has_transparency_data:
        return image if image.mode == "RGB" else image.convert("RGB")
    if image.mode == "La":  # Pillow knows this way alone
        image = image.convert("LA")
    return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA")).convert("RGB")


def _grey(image: Image.Image, facts: _Facts) -> Image.Image:
    """Greys of more than 8 bits, from black to white: as many bits as the file says, unsigned. Floats are 0 to 1, or
    whole numbers up to 255 (an image of 8 bits, turned into floats); others mean what nobody wrote down."""
    values = np.asarray(image)
    if image.mode == "I" and facts.white + facts.black == 2**32 - 1:
        values = values.view(np.uint32)  # Pillow has no such mode, and calls the bits signed
    black, white = facts.black, facts.white
    low, high = values.min(), values.max()
    if image.mode == "F" and high > 1 and black < white and (values == np.rint(values)).all():
        white = 255
    if not (min(black, white) <= low and high <= max(black, white)):  # nor where one is NaN
        raise ImageProblem(f"holds {image.mode} values from {low:g} to {high:g}, where {black} would be black and "
                           f"{white} white; save it with 8 or 16 bits")  # fmt: skip
    grey = np.rint((values.astype(np.float64) - black) * (255 / (white - black))).astype(np.uint8)
    if facts.key is not None:
        grey[values == facts.key] = 255
    return Image.fromarray(grey).convert("RGB")
