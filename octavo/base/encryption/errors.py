"""Errors of encrypted files and keys."""

from __future__ import annotations

import errno


class VaultError(OSError):
    """An encrypted file that cannot be read or written, or a missing key; the message says what to do.

    It is an OSError, because libraries that read from an open file (Arrow, Pillow, tarfile) propagate OSError, and
    callers that read files expect one.
    """

    def __init__(self, message: str) -> None:
        super().__init__(errno.EBADMSG, message)

    def __str__(self) -> str:
        return str(self.strerror)

    def __reduce__(self) -> tuple[type, tuple[str]]:  # an OSError pickles by its number too
        return type(self), (str(self),)


class NoKey(VaultError):
    """No key was given, or the given value is not a key."""


class WrongKey(VaultError):
    """The file was encrypted with another key."""


class Damaged(VaultError):
    """The file differs from what was written: it was changed, cut short, or assembled from several files."""


class Replaced(Damaged):
    """The file is intact but was not encrypted at this path, or a file of a folder is missing or was added."""
