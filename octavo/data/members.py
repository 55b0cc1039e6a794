"""What files a tar holds, and where: headers are read, contents are passed over.

A header of the usual kind (POSIX ustar, a plain file) is read here, which takes a fourth of the time; all others, such
as long names and numbers, links and sparse files, are left to `tarfile`.
"""

from __future__ import annotations

import mmap
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from octavo.data.errors import DataError
from octavo.reading import first_line

MOST = 256 << 20  # bytes of a file in a tar
_PACKED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
_BLOCK = 512  # bytes that a tar is made of
_USTAR, _GNU = b"ustar\x0000", b"ustar  \0"


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
    total, at, last = path.stat().st_size, 0, "its beginning"
    with _opened(path) as archive, path.open("rb") as file, _mapped(file, total) as data:
        while True:
            try:
                header = _plain(data, at) or _other(archive, at)
                if header is not None and header.end <= at:
                    raise tarfile.InvalidHeaderError(f"a size of {header.size}")
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
        if any(data[at : at + _BLOCK]):
            yield Entry("", at, 0, _broken(path, last, at, total, "what follows is no file's header"))


def _plain(data: mmap.mmap | bytes, at: int) -> _Header | None:
    """The header at a byte, if it is of the usual kind; None for any other, or none."""
    block = data[at : at + _BLOCK]
    if block[156:157] not in (b"0", b"\0") or block[257:265] not in (_USTAR, _GNU) or block[124] & 128:
        return None
    if sum(block) - sum(block[148:156]) + 8 * ord(" ") != int(block[148:156].rstrip(b" \0"), 8):
        return None
    name, prefix = block[:100].partition(b"\0")[0], block[345:500].partition(b"\0")[0]
    if name.endswith(b"/") or (prefix and block[257:265] != _USTAR):
        return None
    size, start = int(block[124:136].rstrip(b" \0") or b"0", 8), at + _BLOCK
    end = start + -(-size // _BLOCK) * _BLOCK
    return _Header(_text(prefix + b"/" + name if prefix else name), start, size, end, plain=True)


def _other(archive: tarfile.TarFile, at: int) -> _Header | None:
    """The header at a byte as `tarfile` reads it; None at the end."""
    archive.firstmember, archive.offset = None, at  # type: ignore[attr-defined]
    archive.fileobj.seek(at)  # type: ignore[union-attr]
    found = archive.next()
    archive.members.clear()  # type: ignore[attr-defined]
    if found is None:
        return None
    name = _text(found.name.encode("utf-8", "surrogateescape"))
    plain = found.isreg() and not found.issparse()
    return _Header(name, found.offset_data, found.size, archive.offset, plain, found.isdir())  # type: ignore[attr-defined]


def _text(name: bytes) -> str:
    return name.decode("utf-8", "replace").removeprefix("./")


def _problem(path: Path, header: _Header, total: int) -> str | None:
    name, size, left = header.name, header.size, max(0, total - header.start)
    if not header.plain:
        return f"its {name} is a link or no plain file; put the file itself into the tar"
    if size > left:
        return f"its {name} has {size} bytes, and {path.name} ends after {left} of them: it was not copied whole"
    return f"its {name} has {size} bytes, and {MOST} are the most" if size > MOST else None


def _broken(path: Path, last: str, at: int, total: int, why: str) -> str:
    return f"{path.name} is broken behind {last}, byte {at} of {total} ({why})"


def _mapped(file: object, total: int) -> mmap.mmap:
    return mmap.mmap(file.fileno(), total, access=mmap.ACCESS_READ)  # type: ignore[attr-defined]


def _opened(path: Path) -> tarfile.TarFile:
    with path.open("rb") as file:
        head = file.read(8)
    if packed := next((name for mark, name in _PACKED.items() if head.startswith(mark)), None):
        raise DataError(f"{path} is compressed ({packed}), and rows of a tar are read by their places; unpack it once, "
                        "images are compressed as they are")  # fmt: skip
    try:
        return tarfile.open(path, "r:")
    except Exception as cause:
        raise DataError(f"{path} is no tar file that can be read ({cause})") from cause
