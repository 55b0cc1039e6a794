"""Images: where they may lie, and how they are opened without trusting them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from PIL import Image, ImageOps


class ImageProblem(ValueError):
    """An image that cannot be used; the message is the reason of a `BadSample`."""


def locate(root: Path, name: str) -> Path:
    """The file that an image name means: inside `root`, and nowhere else.

    `..`, absolute paths and symbolic links are followed first and the result is judged: what lies inside is
    accepted, however it was written; what lies outside is refused. Raises `ImageProblem`.
    """
    if name.startswith("file://"):
        name = name[len("file://") :]
    scheme = name.split(":", 1)[0].lower()
    if scheme in ("http", "https", "ftp", "s3", "gs", "hf", "data") and ":" in name:
        raise ImageProblem(
            f"image {name[:80]!r} is not a local file; Octavo fetches nothing: download it into the image folder"
        )
    if not name or "\0" in name:
        raise ImageProblem(f"image name {name!r} is not a file name")
    try:
        root = root.resolve()
        path = (root / name).resolve()
        there = path.is_file()
    except (OSError, RuntimeError) as cause:  # a name too long, a loop of links
        raise ImageProblem(f"image {name[:80]!r} cannot be looked up ({cause})") from cause
    if not path.is_relative_to(root):
        raise ImageProblem(
            f"image {name!r} lies outside the image folder {root} (at {path}); "
            f"name the folder that holds it in `images`, or copy it there"
        )
    if not there:
        raise ImageProblem(f"image {name!r} is missing: no file at {path}; check `images` in the configuration")
    return path


def load(path: str | Path, max_megapixels: float = 100.0) -> Image.Image:
    """Open an image as RGB, upright (EXIF orientation applied).

    The size is read from the header and checked before a pixel is decoded, so that a decompression bomb costs
    nothing. Raises `ImageProblem` for one, and for what is broken, truncated or no image.
    """
    with _own_bomb_limit():
        try:
            with Image.open(path) as image:
                width, height = image.size
                if width * height > max_megapixels * 1e6:
                    raise ImageProblem(
                        f"image {path} holds {width} x {height} = {width * height / 1e6:.0f} megapixels, over the "
                        f"limit of {max_megapixels:g} (a decompression bomb?); if it is meant, raise "
                        f"data.max_image_megapixels"
                    )
                image.load()
                return _rgb(ImageOps.exif_transpose(image))
        except ImageProblem:
            raise
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


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I;16") or image.mode == "I":
        # 16-bit greys would be clipped to white by convert().
        image = image.point(lambda value: value * (1 / 257)).convert("L")
    return image.convert("RGB")
