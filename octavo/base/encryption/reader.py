"""An encrypted file, read: any byte of it, a chunk at a time in memory, none of it before its tag was found right."""

from __future__ import annotations

import contextlib
import io
import os
import stat
from typing import Any, NoReturn

from octavo.base.encryption import file_format
from octavo.base.encryption.errors import Damaged
from octavo.base.encryption.key import Key, find

_COUNTED = 10_000
_of_version_1: dict[str, str] = {}  # what this process opened in it: absolute path -> as it was named first


def read_in_version_1() -> list[str]:
    """The files of version 1, whose names are bound to nothing, that this process read since it was last asked."""
    files = list(_of_version_1.values())
    _of_version_1.clear()
    return files


def is_encrypted(path: str | os.PathLike[str]) -> bool:
    """Whether a file is an encrypted one, by its first bytes; False for what is no file that can be read."""
    with contextlib.suppress(OSError, ValueError):
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
        try:
            return begins(os.pread(handle, 8, 0))
        finally:
            os.close(handle)
    return False


def begins(raw: bytes) -> bool:
    """Whether these are the first bytes of an encrypted file, of whatever version."""
    return raw[:7] == file_format.MAGIC[:7]


class Reader(io.RawIOBase):
    """The plain text of an encrypted file as a file that can be read and sought.

    `stored` is the stored file's bytes or its handle, which is closed with this; `key` the process's, unless it is
    given. A handle is read by place (pread), so that a fork shares no position; and `fileno` is refused, for who asks
    for it would read what is stored. Raises VaultError: NoKey, WrongKey, Damaged.
    """

    def __init__(self, stored: int | bytes, path: object, key: Key | None = None) -> None:
        self._stored, self._path, self._at = stored, path, 0
        self._kept: tuple[int, bytes] = (-1, b"")
        try:
            self._begin_reading(key or find())
        except BaseException:
            self.release()
            raise

    def _begin_reading(self, key: Key) -> None:
        stored, path = self._stored, self._path
        self._cipher = file_format.of(key, self._bytes(0, file_format.HEADER), path)
        if self._cipher.version == file_format.FIRST and len(_of_version_1) < _COUNTED:
            _of_version_1.setdefault(os.path.abspath(str(path)), str(path))
        size = len(stored) if isinstance(stored, bytes) else os.fstat(stored).st_size
        self._begin = len(self._cipher.header)
        body, whole = size - self._begin, self._cipher.chunk + file_format.TAG
        self._chunks, rest = divmod(body, whole)
        self._chunks += bool(rest)
        if body < file_format.TAG or 0 < rest < file_format.TAG or self._chunks > file_format.MOST:
            raise Damaged(f"{path} is damaged: it ends within a chunk, at byte {size}. Take it from a copy")
        self.size = body - self._chunks * file_format.TAG
        self._chunk(self._chunks - 1)  # that the file ends where it was ended

    def release(self) -> None:
        """Leave the handle to the caller: neither `close` nor the collection of this object closes it from now on."""
        self._stored = b""

    @classmethod
    def of(cls, path: str | os.PathLike[str], key: Key | None = None) -> Reader:
        """Of the file at a path. Raises VaultError, and OSError as open does."""
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
        try:
            if not stat.S_ISREG(os.fstat(handle).st_mode):  # else pread says "Is a directory", and not of what
                raise Damaged(f"{os.fspath(path)} is no file: something else is in its place. Take it from a copy")
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

    def readinto(self, buffer: Any) -> int:
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
        """What the file is bound to; None of one that was encrypted by itself, or in version 1."""
        return self._cipher.place

    @property
    def chunk(self) -> int:
        """Plain bytes of a chunk."""
        return self._cipher.chunk

    @property
    def version(self) -> int:
        """Of the form; 1 binds no names."""
        return self._cipher.version

    @property
    def tag(self) -> bytes:
        """That of the header, by which this very file is recognised."""
        return self._cipher.header[-file_format.TAG :]

    def read_at(self, start: int, size: int) -> bytes:
        """Bytes by where they lie, as os.pread has it."""
        self.seek(start)
        out = bytearray(max(0, min(size, self.size - start)))
        self.readinto(out)
        return bytes(out)

    def stat(self) -> os.stat_result:
        """Of the stored file."""
        assert isinstance(self._stored, int)
        return os.fstat(self._stored)

    def fileno(self) -> NoReturn:
        raise io.UnsupportedOperation(f"{self._path} is encrypted, and is needed as a plain file: octavo decrypt it")

    def close(self) -> None:
        if not self.closed and isinstance(self._stored, int):
            os.close(self._stored)
        super().close()

    def _bytes(self, start: int, size: int) -> bytes:
        """Of what is stored."""
        if isinstance(self._stored, bytes):
            return self._stored[start : start + size]
        return os.pread(self._stored, size, start)

    def _chunk(self, number: int) -> bytes:
        """What a chunk holds; the last one that was asked for stays."""
        from cryptography.exceptions import InvalidTag

        if self._kept[0] != number:
            whole, last = self._cipher.chunk + file_format.TAG, number == self._chunks - 1
            start = self._begin + number * whole
            stored = self._bytes(start, whole)
            try:
                self._kept = number, self._cipher.opened(number, stored, last)
            except InvalidTag:
                end = " or the file was cut or lengthened" if last else ""
                raise Damaged(
                    f"{self._path} is damaged: chunk {number} of {self._chunks} (bytes {start} to "
                    f"{start + len(stored) - 1}) is not what was written there. It was changed, moved or comes from "
                    f"another file{end}. Take the file from a copy"
                ) from None
        return self._kept[1]


def decrypted(stored: bytes, path: object, key: Key | None = None) -> bytes:
    """The plain text of an encrypted file's bytes, wherever they stood. Raises VaultError."""
    return Reader(stored, path, key).readall()
