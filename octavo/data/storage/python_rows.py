"""Rows that a program passes to `octavo.run`: a list of rows, or a `datasets.Dataset`.

A configuration names them `python:train_data` and `python:eval_data`; :func:`hold` makes them available under these
names while a run lasts. They are read where they are: a row is copied when it is used, and never changed. Images of PIL
become image files in memory, so that all that follows, limits included, is the same as for rows of a file.
"""

from __future__ import annotations

import datetime
import decimal
import hashlib
import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import NamedTuple, TypeGuard

import numpy as np
from PIL import Image, ImageFile, ImageOps

from octavo.config.sections.text_types import absent_rows_text
from octavo.data.errors import BadSample, DataError, quote_value
from octavo.data.formats.arrow_rows import Rows, collect_keys
from octavo.data.storage.cache import Log, no_log
from octavo.data.storage.hub_datasets import DatasetRows

MANY_ROWS = 50_000  # whose digest takes several seconds
TYPES = "a list of rows, such as [{'messages': [...]}], or a datasets.Dataset"


class Digest(NamedTuple):
    """`size`: the bytes that the digest covers; `sha256`: of all rows in their order, with their images."""

    size: int
    sha256: str


class ListRows:
    """The rows of a list. `path` is `python:NAME`."""

    def __init__(self, path: str, rows: Sequence[object]) -> None:
        self.path, self._rows = path, rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: int) -> object:
        return self._read(row, _as_file)

    def with_pixels(self, row: int) -> object:
        """Return a row with the pixels of its images of PIL in place of files. Raises BadSample."""
        return self._read(row, _as_pixels)

    def _read(self, row: int, encode: Encode) -> object:
        try:
            return _plain(self._rows[row], encode)
        except _Unusable as cause:
            raise BadSample(self.path, row, str(cause)) from cause
        except RecursionError as cause:
            raise BadSample(self.path, row, "it is nested too deeply, or contains itself") from cause

    def keys(self) -> set[str]:
        return collect_keys(self)


def check_rows(rows: object, name: str) -> str | None:
    """Return why `rows` cannot be used as the argument `name`, and what to do; None if they can."""
    kind = type(rows)
    library = kind.__module__.partition(".")[0] == "datasets"
    if library and kind.__name__.endswith("DatasetDict"):
        splits = ", ".join(map(repr, rows))  # type: ignore[call-overload]
        return f"it has the splits {splits}; pass one of them, such as {name}[{next(iter(rows), '')!r}]"  # type: ignore[call-overload]
    if library and kind.__name__ == "IterableDataset":
        return "it is an IterableDataset, whose rows have no numbers; pass a Dataset, or list(...) of its rows"
    if library and kind.__name__ == "Dataset":
        if rows.format["type"] == "custom":  # type: ignore[attr-defined]
            return "it has a transform (set_transform), which would be ignored; apply it with .map(), or pass list(...)"
    elif not isinstance(rows, list | tuple):
        return f"expected {TYPES}, found {quote_value(rows)} ({kind.__name__})"
    if len(rows) == 0:  # type: ignore[arg-type]
        return f"it has no rows; expected {TYPES}"
    return None


def make_rows(rows: object, path: str) -> Rows:
    """Return rows that `check_rows` accepts, under the name `path` (`python:NAME`). Raises DataError for a damaged
    file of a `datasets.Dataset`."""
    return ListRows(path, rows) if isinstance(rows, list | tuple) else DatasetRows(path, rows)


_HELD: dict[str, Rows] = {}  # `python:NAME` -> the rows of the run in progress
_DIGESTS: dict[str, Digest] = {}


@contextmanager
def hold(rows: Sequence[Rows]) -> Iterator[None]:
    """Make rows available by their path in this block, in place of all others."""
    before = {**_HELD}, {**_DIGESTS}
    _replace({str(entry.path): entry for entry in rows}, {})
    try:
        yield
    finally:
        _replace(*before)


def _replace(rows: Mapping[str, Rows], digests: Mapping[str, Digest]) -> None:
    _HELD.clear()
    _DIGESTS.clear()
    _HELD.update(rows)
    _DIGESTS.update(digests)


def open_python_rows(path: str) -> Rows:
    """Return the rows with this path. Raises DataError if this process does not have them."""
    if path not in _HELD:
        raise DataError(absent_rows_text(path))
    return _HELD[path]


def digest_of(path: str, log: Log = no_log) -> Digest:
    """Return the digest of the rows with this path, computed once; `log` receives a message if it takes several
    seconds. Raises DataError if this process does not have the rows."""
    if path not in _DIGESTS:
        rows = open_python_rows(path)
        if len(rows) > MANY_ROWS:
            log(f"{path}: {len(rows):,} rows are read once to compute the SHA-256 that a resume compares")
        _DIGESTS[path] = _digest(rows)
    return _DIGESTS[path]


Encode = Callable[[Image.Image], object]


class _Unusable(ValueError):
    """A value that rows cannot have; the message becomes the reason of a `BadSample`."""


def _plain(value: object, encode: Encode, key: str = "") -> object:
    """Return a copy of a value as JSON would have it, with the bytes of media files; `encode` is called for images of
    PIL. Raises `_Unusable`."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {_text_key(name): _plain(entry, encode, str(name)) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry, encode, key) for entry in value]
    if isinstance(value, bytes | bytearray):
        # Bytes of a file; in the form {"bytes", "path"} they are there already.
        return bytes(value) if key == "bytes" else {"bytes": bytes(value)}
    if isinstance(value, Image.Image):
        try:
            return encode(value)
        except _Unusable:
            raise
        except Exception as cause:  # Pillow raises errors of many classes for a file that is broken or closed
            raise _Unusable(f"its image {key!r} cannot be read ({type(cause).__name__}: {cause})") from cause
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, datetime.date | datetime.time | datetime.timedelta | decimal.Decimal):
        return str(value)  # as in a table
    if isinstance(value, np.generic):
        return _plain(value.item(), encode, key)
    for kind in (bool, int, float, str):  # a subclass, such as a member of an IntEnum
        if isinstance(value, kind):
            return kind(value)
    where = f"its key {key!r}" if key else "it"
    fix = "use text, numbers, lists, mappings, bytes, paths or images of PIL"
    if hasattr(value, "tolist"):
        fix = "use .tolist(), or PIL.Image.fromarray(...) for an image"
    raise _Unusable(f"{where} is {quote_value(value)} ({type(value).__name__}); {fix}")


def _text_key(name: object) -> str:
    if not isinstance(name, str):
        raise _Unusable(f"it has the key {quote_value(name)} ({type(name).__name__}); keys must be text")
    return str(name)


def _is_undecoded(image: Image.Image) -> TypeGuard[ImageFile.ImageFile]:
    """Return True for an image that was opened and not read yet: it is still what its file contains."""
    return isinstance(image, ImageFile.ImageFile) and bool(image.tile) and image.tell() == 0


def _file_bytes(image: ImageFile.ImageFile) -> bytes:
    """Return the file of an image that was opened and not read yet. A file on a disk is opened again: workers share
    the position in an open one."""
    if image.filename and os.path.isfile(image.filename):
        return Path(os.fsdecode(image.filename)).read_bytes()
    file = image.fp
    assert file is not None  # it is open until the image is decoded
    position = file.tell()
    file.seek(0)
    try:
        return file.read()
    finally:
        file.seek(position)


def _as_file(image: Image.Image) -> dict[str, bytes]:
    """Return an image file with the pixels of an image, or the file that it was opened from."""
    if _is_undecoded(image):
        return {"bytes": _file_bytes(image)}
    out = BytesIO()
    image = _stored_mode(ImageOps.exif_transpose(image))
    if image.mode == "F":
        image.save(out, "TIFF")
    elif image.mode in ("L", "RGB") and "transparency" not in image.info:
        image.save(out, "PPM")  # a copy of the pixels: PNG would compress them at every use
    else:
        image.save(out, "PNG", compress_level=1)
    return {"bytes": out.getvalue()}


def _stored_mode(image: Image.Image) -> Image.Image:
    """Return an image in a mode that a file can store, with the same colors. Raises `_Unusable`."""
    if image.mode in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16", "F"):
        return image
    if image.mode == "I":
        low, high = image.getextrema()
        if not 0 <= float(low) <= float(high) <= 65535:  # type: ignore[arg-type]
            raise _Unusable(f"it has an image with the values {low} to {high}; scale them to 8 or 16 bits")
        return Image.fromarray(np.asarray(image).astype(np.uint16))
    return image.convert({"La": "LA", "RGBa": "RGBA", "PA": "RGBA"}.get(image.mode, "RGB"))


def _as_pixels(image: Image.Image) -> list[object]:
    """Return what an image shows, whether or not it was decoded before."""
    if _is_undecoded(image):  # a copy: decoding this one would keep its pixels in memory
        image = Image.open(BytesIO(_file_bytes(image)), formats=[image.format or ""])
    image = ImageOps.exif_transpose(image)
    palette = None if image.palette is None else bytes(image.palette.palette)
    return [image.mode, *image.size, image.tobytes(), palette, repr(image.info.get("transparency"))]


def _digest(rows: Rows) -> Digest:
    """Return the digest of rows as they are used, with images of PIL as pixels. A row that cannot be used counts by its
    reason."""
    total = _Hash()
    for number in range(len(rows)):
        try:
            total.add(rows.with_pixels(number) if isinstance(rows, ListRows) else rows[number])
        except BadSample as bad:
            total.add(["octavo: bad row", bad.reason])
    return Digest(total.size, total.sha256.hexdigest())


class _Hash:
    """SHA-256 of JSON values and bytes, in a form in which different values have different bytes."""

    def __init__(self) -> None:
        self.sha256, self.size = hashlib.sha256(), 0

    def add(self, value: object) -> None:
        if isinstance(value, dict):
            self._write(b"{", len(value))
            for key, entry in value.items():
                self.add(key)
                self.add(entry)
        elif isinstance(value, list):
            self._write(b"[", len(value))
            for entry in value:
                self.add(entry)
        elif isinstance(value, bytes):
            self._write(b"b", len(value), value)
        elif isinstance(value, str):
            raw = value.encode("utf-8", "surrogatepass")
            self._write(b"s", len(raw), raw)
        else:  # None, a boolean or a number
            raw = repr(value).encode()
            self._write(b"v", len(raw), raw)

    def _write(self, kind: bytes, length: int, raw: bytes = b"") -> None:
        self.sha256.update(kind + struct.pack("<Q", length) + raw)
        self.size += 9 + len(raw)
