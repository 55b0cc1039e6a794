"""Reads encrypted files: random access, one chunk in memory; no byte is returned before its tag is verified."""

from __future__ import annotations

import contextlib
import io
import os
import stat
from typing import NoReturn

from octavo.base.encryption import file_format
from octavo.base.encryption.errors import Damaged
from octavo.base.encryption.key import Key, find_key

_MAX_LISTED = 10_000
_version_1_files: dict[
    str, str
] = {}  # files of version 1 that this process opened: absolute path -> path as first given


def pop_version_1_files() -> list[str]:
    """Return the files of version 1, which are not bound to their paths, that this process read since the last call."""
    files = list(_version_1_files.values())
    _version_1_files.clear()
    return files


def is_encrypted(path: str | os.PathLike[str]) -> bool:
    """Return whether a file is encrypted, by its first bytes; False for a path that cannot be read as a file."""
    with contextlib.suppress(OSError, ValueError):
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
        try:
            return has_magic(os.pread(handle, 8, 0))
        finally:
            os.close(handle)
    return False


def has_magic(raw: bytes) -> bool:
    """Return whether these are the first bytes of an encrypted file of any version."""
    return raw[:7] == file_format.MAGIC[:7]


class Reader(io.RawIOBase):
    """The plain text of an encrypted file as a readable, seekable file object.

    `stored`: the bytes of the encrypted file, or its handle, which this object closes. `key` defaults to the key of the
    process. A handle is read with pread, so that forked processes share no position; `fileno` raises, because the
    caller would read encrypted bytes. Raises VaultError: NoKey, WrongKey, Damaged.
    """

    def __init__(self, stored: int | bytes, path: object, key: Key | None = None) -> None:
        self._stored, self._path, self._at = stored, path, 0
        self._kept: tuple[int, bytes] = (-1, b"")
        try:
            self._begin_reading(key or find_key())
        except BaseException:
            self.release()
            raise

    def _begin_reading(self, key: Key) -> None:
        stored, path = self._stored, self._path
        self._cipher = file_format.read_cipher(key, self._bytes(0, file_format.MAX_HEADER_BYTES), path)
        if self._cipher.version == file_format.VERSION_1 and len(_version_1_files) < _MAX_LISTED:
            _version_1_files.setdefault(os.path.abspath(str(path)), str(path))
        size = len(stored) if isinstance(stored, bytes) else os.fstat(stored).st_size
        self._begin = len(self._cipher.header)
        body, whole = size - self._begin, self._cipher.chunk + file_format.TAG
        self._chunks, rest = divmod(body, whole)
        self._chunks += bool(rest)
        if body < file_format.TAG or 0 < rest < file_format.TAG or self._chunks > file_format.MAX_CHUNKS:
            raise Damaged(f"{path} is damaged: it ends within a chunk, at byte {size}. Restore it from a copy")
        self.size = body - self._chunks * file_format.TAG
        self._chunk(self._chunks - 1)  # verifies that the file was not truncated or extended

    def release(self) -> None:
        """Leave the handle to the caller: neither `close` nor garbage collection of this object closes it."""
        self._stored = b""

    @classmethod
    def of(cls, path: str | os.PathLike[str], key: Key | None = None) -> Reader:
        """Return a reader of the file at a path. Raises VaultError, and OSError as open does."""
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
        try:
            if not stat.S_ISREG(os.fstat(handle).st_mode):  # else pread raises "Is a directory" without the path
                raise Damaged(f"{os.fspath(path)} is not a file. Restore it from a copy")
            return cls(handle, os.fspath(path), key)
        except BaseException:
            os.close(handle)
            raise

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        at = offset + (0, self._at, self.size)[whence]
        if at < 0:
            raise ValueError(f"negative seek position {at}")
        self._at = at
        return at

    # collections.abc.Buffer, the type of the base class, needs Python 3.12.
    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        view = memoryview(buffer).cast("B")
        done = 0
        while done < len(view) and self._at < self.size:
            number, begin = divmod(self._at, self._cipher.chunk)
            piece = memoryview(self._chunk(number))[begin : begin + len(view) - done]
            view[done : done + len(piece)] = piece
            done += len(piece)
            self._at += len(piece)
        return done

    def readall(self) -> bytes:
        out, left = [], self.size - self._at
        while left > 0:
            number, begin = divmod(self._at, self._cipher.chunk)
            out.append(self._chunk(number)[begin:])
            self._at += len(out[-1])
            left -= len(out[-1])
        return b"".join(out)

    @property
    def place(self) -> file_format.Place | None:
        """The path that the file is bound to, or None if it was encrypted on its own or in version 1."""
        return self._cipher.place

    @property
    def chunk(self) -> int:
        """Plain bytes of a chunk."""
        return self._cipher.chunk

    @property
    def version(self) -> int:
        """The version of the format; in version 1 files are not bound to their paths."""
        return self._cipher.version

    @property
    def tag(self) -> bytes:
        """The tag of the header, which identifies this file."""
        return self._cipher.header[-file_format.TAG :]

    def read_at(self, start: int, size: int) -> bytes:
        """Read up to `size` bytes of plain text from `start`, like os.pread."""
        self.seek(start)
        out = bytearray(max(0, min(size, self.size - start)))
        self.readinto(out)
        return bytes(out)

    def stat(self) -> os.stat_result:
        """Return os.fstat of the stored file, which must be a handle."""
        assert isinstance(self._stored, int)
        return os.fstat(self._stored)

    def fileno(self) -> NoReturn:
        raise io.UnsupportedOperation(f"{self._path} is encrypted, but a plain file is required: run octavo decrypt")

    def close(self) -> None:
        if not self.closed and isinstance(self._stored, int):
            os.close(self._stored)
        super().close()

    def _bytes(self, start: int, size: int) -> bytes:
        """Read bytes of the encrypted file."""
        if isinstance(self._stored, bytes):
            return self._stored[start : start + size]
        return os.pread(self._stored, size, start)

    def _chunk(self, number: int) -> bytes:
        """Return the plain text of a chunk; the last chunk that was read is cached."""
        from cryptography.exceptions import InvalidTag

        if self._kept[0] != number:
            whole, last = self._cipher.chunk + file_format.TAG, number == self._chunks - 1
            start = self._begin + number * whole
            stored = self._bytes(start, whole)
            try:
                self._kept = number, self._cipher.decrypt_chunk(number, stored, last)
            except InvalidTag:
                end = ", or the file was truncated or extended" if last else ""
                raise Damaged(
                    f"{self._path} is damaged: chunk {number} of {self._chunks} (bytes {start} to "
                    f"{start + len(stored) - 1}) differs from what was written there. It was changed, moved or comes "
                    f"from another file{end}. Restore the file from a copy"
                ) from None
        return self._kept[1]


def decrypt(stored: bytes, path: object, key: Key | None = None) -> bytes:
    """Return the plain text of the bytes of an encrypted file, wherever they are stored. Raises VaultError."""
    return Reader(stored, path, key).readall()
