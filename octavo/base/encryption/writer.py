"""An encrypted file, written from its beginning to its end; nothing of it reaches a disk in plain."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

from octavo.base.encryption import file_format
from octavo.base.encryption.errors import VaultError
from octavo.base.encryption.key import Key, find


class Writer(io.RawIOBase):
    """Encrypts what is written to it into `out`, which stays open. `finish` writes the last chunk: without it the file
    is none, so that what was broken off is never taken for whole. Positions are those of the plain text. `place`: that
    the file is bound to (:class:`octavo.base.encryption.Folder`)."""

    def __init__(
        self,
        out: BinaryIO,
        chunk: int = file_format.CHUNK,
        key: Key | None = None,
        place: file_format.Place | None = None,
    ) -> None:
        self.out, self._cipher = out, file_format.new(key or find(), chunk, place)
        self._number, self._written, self._rest, self._done = 0, 0, bytearray(), False
        out.write(self._cipher.header)

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._written

    @property
    def tag(self) -> bytes:
        """That of the header, by which this very file is recognised."""
        return self._cipher.header[-file_format.TAG :]

    def fileno(self) -> int:
        """Of the stored file, which DCP forces to the disk."""
        return self.out.fileno()

    def write(self, data: Any) -> int:
        if self._done:
            raise ValueError("the last chunk of this file is written")
        view = memoryview(data).cast("B")
        size, chunk = len(view), self._cipher.chunk
        self._written += size
        if len(self._rest) + size > chunk and self._rest:
            head = chunk - len(self._rest)
            self._rest += view[:head]
            self._put(self._rest, False)
            self._rest, view = bytearray(), view[head:]
        while len(view) > chunk:  # not >=: which chunk is the last is known when there is no more
            self._put(view[:chunk], False)
            view = view[chunk:]
        self._rest += view
        return size

    def finish(self) -> None:
        """Write what is left as the last chunk."""
        if not self._done:
            self._put(self._rest, True)
            self._done, self._rest = True, bytearray()

    def _put(self, plain: Any, last: bool) -> None:
        if self._number >= file_format.MOST:
            raise VaultError(f"a file of more than {file_format.MOST} chunks is not encrypted under one key; split it")
        number, self._number = self._number, self._number + 1  # one that a full disk refused is never used again
        self.out.write(self._cipher.sealed(number, plain, last))


@contextmanager
def writing(path: str | os.PathLike[str], chunk: int = file_format.CHUNK) -> Iterator[Writer]:
    """A new encrypted file, forced to the disk when the block ends; one that raises leaves what cannot be read."""
    with open(path, "wb") as out:
        writer = Writer(out, chunk)
        yield writer
        writer.finish()
        out.flush()
        os.fsync(out.fileno())


def encrypted(
    plain: bytes, chunk: int = file_format.CHUNK, key: Key | None = None, place: file_format.Place | None = None
) -> bytes:
    """The bytes of an encrypted file that holds these."""
    out = io.BytesIO()
    writer = Writer(out, chunk, key, place)
    writer.write(plain)
    writer.finish()
    return out.getvalue()
