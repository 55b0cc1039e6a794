"""Sequential writing of encrypted files; no plain text reaches a disk."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

from octavo.base.encryption import file_format
from octavo.base.encryption.errors import VaultError
from octavo.base.encryption.key import Key, find_key


class Writer(io.RawIOBase):
    """Encrypts written data into `out`, which stays open. `finish` writes the last chunk: without it the file cannot be
    read, so that an interrupted file is never mistaken for a complete one. Positions count plain text. `place`: the
    path that the file is bound to (:class:`octavo.base.encryption.Folder`)."""

    def __init__(
        self,
        out: BinaryIO,
        chunk: int = file_format.CHUNK,
        key: Key | None = None,
        place: file_format.Place | None = None,
    ) -> None:
        self.out, self._cipher = out, file_format.new_cipher(key or find_key(), chunk, place)
        self._number, self._written, self._rest, self._done = 0, 0, bytearray(), False
        out.write(self._cipher.header)

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._written

    @property
    def tag(self) -> bytes:
        """The tag of the header, which identifies this file."""
        return self._cipher.header[-file_format.TAG :]

    def fileno(self) -> int:
        """Return the handle of the stored file, which DCP syncs to the disk."""
        return self.out.fileno()

    # collections.abc.Buffer, the type of the base class, needs Python 3.12.
    def write(self, data: bytes | bytearray | memoryview) -> int:  # type: ignore[override]
        if self._done:
            raise ValueError("the last chunk of this file has been written")
        view = memoryview(data).cast("B")
        size, chunk = len(view), self._cipher.chunk
        self._written += size
        if len(self._rest) + size > chunk and self._rest:
            head = chunk - len(self._rest)
            self._rest += view[:head]
            self._write_chunk(self._rest, False)
            self._rest, view = bytearray(), view[head:]
        while len(view) > chunk:  # not >=: a full chunk may be the last, which has another nonce
            self._write_chunk(view[:chunk], False)
            view = view[chunk:]
        self._rest += view
        return size

    def finish(self) -> None:
        """Write the remaining data as the last chunk."""
        if not self._done:
            self._write_chunk(self._rest, True)
            self._done, self._rest = True, bytearray()

    def _write_chunk(self, plain: file_format.Bytes, last: bool) -> None:
        if self._number >= file_format.MAX_CHUNKS:
            raise VaultError(
                f"a file of more than {file_format.MAX_CHUNKS} chunks cannot be encrypted with one key; split it"
            )
        # The number counts up before the write: after a failed one (a full disk) its nonce must not be used again.
        number, self._number = self._number, self._number + 1
        self.out.write(self._cipher.encrypt_chunk(number, plain, last))


@contextmanager
def open_encrypted(path: str | os.PathLike[str], chunk: int = file_format.CHUNK) -> Iterator[Writer]:
    """Create an encrypted file, synced to the disk when the block ends; if the block raises, the file cannot be
    read."""
    with open(path, "wb") as out:
        writer = Writer(out, chunk)
        yield writer
        writer.finish()
        out.flush()
        os.fsync(out.fileno())


def encrypt(
    plain: bytes, chunk: int = file_format.CHUNK, key: Key | None = None, place: file_format.Place | None = None
) -> bytes:
    """Return the bytes of an encrypted file with this plain text."""
    out = io.BytesIO()
    writer = Writer(out, chunk, key, place)
    writer.write(plain)
    writer.finish()
    return out.getvalue()
