"""The files in a tar and their positions: `tarfile` reads the headers, contents are skipped."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from octavo.base.safe_read import first_line, open_file, size_of
from octavo.data.errors import DataError

MAX_FILE_BYTES = 256 << 20  # largest file in a tar, in bytes
_COMPRESSIONS = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}


class Entry(NamedTuple):
    """A file: its first byte and size; `problem`: why it cannot be read. An empty name: the tar itself is broken."""

    name: str
    start: int
    size: int
    problem: str | None = None


class _Header(NamedTuple):
    """A header; `end`: the position of the next one; `plain`: whether it is a regular file, not a link."""

    name: str
    start: int
    size: int
    end: int
    plain: bool
    folder: bool = False


def read_entries(path: Path) -> Iterator[Entry]:
    """Yield the files of a tar in order, up to the place where it is broken. Raises `DataError` if it is not a tar."""
    at, last = 0, "its beginning"
    with open_file(path, DataError) as file, open_file(path, DataError) as read, _open_tar(path, read) as archive:
        total = size_of(file)
        while True:
            try:
                header = _next_header(archive)
                if header is not None and header.end <= at:
                    raise tarfile.TarError(f"a size of {header.size}")
            except Exception as cause:  # tarfile raises errors of many classes for broken numbers and names
                yield Entry("", at, 0, _describe_damage(path, last, at, total, first_line(cause)))
                return
            if header is None:
                break
            if not header.folder:
                last = header.name
                yield Entry(last, header.start, header.size, _find_problem(path, header, total))
                if header.plain and header.start + header.size > total:
                    return
            at = header.end
        if (why := _find_end_problem(file, at)) is not None:
            yield Entry("", at, 0, _describe_damage(path, last, at, total, why))


def _find_end_problem(file: BinaryIO, at: int) -> str | None:
    """Why a tar does not end at this position; None: it ends there, with empty blocks only."""
    file.seek(at)
    first = file.read(tarfile.BLOCKSIZE)
    if any(first):
        return "the next block is not a file header"
    if len(first) < tarfile.BLOCKSIZE:
        return "the empty blocks that end a tar are missing: it was not copied whole"
    if any(any(piece) for piece in iter(lambda: file.read(1 << 20), b"")):
        return "data follows its end, as in concatenated tars; unpack them and make one"
    return None


def _next_header(archive: tarfile.TarFile) -> _Header | None:
    """Read the next header; return None at the end, and at a header that `tarfile` cannot read."""
    info = archive.next()
    archive.members.clear()  # type: ignore[attr-defined]  # tarfile would keep all headers in memory
    if info is None:
        return None
    name = info.name.encode("utf-8", "surrogateescape").decode("utf-8", "replace").removeprefix("./")
    plain = info.isreg() and not info.issparse()
    return _Header(name, info.offset_data, info.size, archive.offset, plain, info.isdir())


def _find_problem(path: Path, header: _Header, total: int) -> str | None:
    name, size, left = header.name, header.size, max(0, total - header.start)
    if not header.plain:
        return f"its {name} is a link or not a regular file; add the file itself to the tar"
    if size > left:
        return f"its {name} has {size} bytes, and {path.name} ends after {left} of them: it was not copied whole"
    return f"its {name} has {size} bytes, over the limit of {MAX_FILE_BYTES}" if size > MAX_FILE_BYTES else None


def _describe_damage(path: Path, last: str, at: int, total: int, why: str) -> str:
    return f"{path.name} is broken after {last}, byte {at} of {total} ({why})"


def _open_tar(path: Path, file: BinaryIO) -> tarfile.TarFile:
    head = file.read(8)
    file.seek(0)
    if compression := next((name for mark, name in _COMPRESSIONS.items() if head.startswith(mark)), None):
        raise DataError(
            f"{path} is compressed ({compression}), but rows of a tar are read by position; decompress it (images are "
            "compressed already)"
        )
    try:
        return tarfile.open(fileobj=file, mode="r:")
    except Exception as cause:
        raise DataError(f"{path} is not a readable tar file ({cause})") from cause
