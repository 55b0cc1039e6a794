"""What can be wrong with an encrypted file or with its key."""

from __future__ import annotations

import errno


class VaultError(OSError):
    """An encrypted file that cannot be read or written, or a key that cannot be had; the message says what to do.

    It is an OSError, because libraries that are handed an open file (Arrow, Pillow, tarfile) pass such on, and because
    who reads files expects one.
    """

    def __init__(self, message: str) -> None:
        super().__init__(errno.EBADMSG, message)

    def __str__(self) -> str:
        return str(self.strerror)

    def __reduce__(self) -> tuple[type, tuple[str]]:  # an OSError pickles by its number too
        return type(self), (str(self),)


class NoKey(VaultError):
    """No key was given, or what was given is none."""


class WrongKey(VaultError):
    """The file was encrypted with another key."""


class Damaged(VaultError):
    """The file is not what was written: changed, cut short, or put together from others."""


class Exchanged(Damaged):
    """The file is whole, and not the one that was encrypted at its place; or a folder lacks one, or has one more."""
