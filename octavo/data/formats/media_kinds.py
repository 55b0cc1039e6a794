"""The kinds of media in rows: their keys, and the suffixes of their files in a tar."""

from __future__ import annotations

from typing import NamedTuple


class MediaKind(NamedTuple):
    """One kind. `keys`: of a row, for one file and for several. `endings`: suffixes in a tar, in lower case."""

    keys: tuple[str, str]
    endings: tuple[str, ...]


IMAGE = MediaKind(
    ("image", "images"),
    ("jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff", "ppm", "pgm", "pbm", "jp2", "avif"),
)
SOUND = MediaKind(("audio", "audios"), ("wav", "flac"))
VIDEO = MediaKind(("video", "videos"), ("mp4", "m4v", "mov", "mkv", "webm"))
KEYS = (*IMAGE.keys, *SOUND.keys, *VIDEO.keys)
