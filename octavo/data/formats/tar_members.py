"""What files a tar holds, and where: `tarfile` reads headers, contents are passed over."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from octavo.base.safe_read import first_line, open_file, size_of
from octavo.data.errors import DataError

MOST = 256 << 20  # bytes of a file in a tar
_PACKED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}


class Entry(NamedTuple):
    """A file: its first byte, how many it has; why it cannot be read. A name of none: the tar itself is broken."""

    name: str
    start: int
    size: int
    problem: str | None = None


class _Header(NamedTuple):
    """What a header says; `end`: where the next one stands. `plain`: whether it is of a file and no link."""

    name: str
    start: int
    size: int
    end: int
    plain: bool
    folder: bool = False


def entries(path: Path) -> Iterator[Entry]:
    """The files of a tar in their order, up to where it is broken. Raises `DataError` where it is none."""
    at, last = 0, "its beginning"
    with open_file(path, DataError) as file, open_file(path, DataError) as read, _opened(path, read) as archive:
        total = size_of(file)
        while True:
            try:
                header = _next(archive)
                if header is not None and header.end <= at:
                    raise tarfile.TarError(f"a size of {header.size}")
            except Exception as cause:  # whatever the parsing of numbers and names runs into
                yield Entry("", at, 0, _broken(path, last, at, total, first_line(cause)))
                return
            if header is None:
                break
            if not header.folder:
                last = header.name
                yield Entry(last, header.start, header.size, _problem(path, header, total))
                if header.plain and header.start + header.size > total:
                    return
            at = header.end
        if (why := _why_not_the_end(file, at)) is not None:
            yield Entry("", at, 0, _broken(path, last, at, total, why))


def _why_not_the_end(file: BinaryIO, at: int) -> str | None:
    """A tar ends with empty blocks, and nothing else."""
    file.seek(at)
    first = file.read(tarfile.BLOCKSIZE)
    if any(first):
        return "what follows is no file's header"
    if len(first) < tarfile.BLOCKSIZE:
        return "the empty blocks that end a tar are missing: it was not copied whole"
    if any(any(piece) for piece in iter(lambda: file.read(1 << 20), b"")):
        return "there is more behind its end, as of tars that were joined; unpack them and make one"
    return None


def _next(archive: tarfile.TarFile) -> _Header | None:
    """The next header; None at the end, and at one that `tarfile` cannot read."""
    found = archive.next()
    archive.members.clear()  # type: ignore[attr-defined]  # it would keep them all
    if found is None:
        return None
    name = found.name.encode("utf-8", "surrogateescape").decode("utf-8", "replace").removeprefix("./")
    plain = found.isreg() and not found.issparse()
    return _Header(name, found.offset_data, found.size, archive.offset, plain, found.isdir())


def _problem(path: Path, header: _Header, total: int) -> str | None:
    name, size, left = header.name, header.size, max(0, total - header.start)
    if not header.plain:
        return f"its {name} is a link or no plain file; put the file itself into the tar"
    if size > left:
        return f"its {name} has {size} bytes, and {path.name} ends after {left} of them: it was not copied whole"
    return f"its {name} has {size} bytes, and {MOST} are the most" if size > MOST else None


def _broken(path: Path, last: str, at: int, total: int, why: str) -> str:
    return f"{path.name} is broken behind {last}, byte {at} of {total} ({why})"


def _opened(path: Path, file: BinaryIO) -> tarfile.TarFile:
    head = file.read(8)
    file.seek(0)
    if packed := next((name for mark, name in _PACKED.items() if head.startswith(mark)), None):
        raise DataError(f"{path} is compressed ({packed}), and rows of a tar are read by their places; unpack it once, "
                        "images are compressed as they are")  # fmt: skip
    try:
        return tarfile.open(fileobj=file, mode="r:")
    except Exception as cause:
        raise DataError(f"{path} is no tar file that can be read ({cause})") from cause
