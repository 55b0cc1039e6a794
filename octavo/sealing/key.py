"""The key of a sealed run: 32 random bytes in a file, and the streams of numbers drawn from it.

    file      as those of encrypted files are (octavo/base/encryption/key.py), and never one of those: who trains has
              the key of files, and this one stays at home
    stream    of a label: HMAC-SHA256(HMAC-SHA256(key, "octavo seal 1 " + label), counter), counter = 0, 1, ... as eight
              bytes, big-endian; read as 32-bit big-endian words. Equal on every machine
    print     what a twin says of its key (:mod:`octavo.base.seal_note`)

An HMAC with a secret key cannot be told from random bits (it is HKDF's expansion, RFC 5869, without its chaining).
A key stands in no message, in no `repr` and in no file but its own.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterator
from pathlib import Path
from struct import unpack

from octavo.base import encryption, seal_note
from octavo.base.encryption.key import secret_in
from octavo.sealing.errors import SealError

BYTES = 32


class Key:
    """A key that draws, and does not show itself."""

    __slots__ = ("_secret",)

    def __init__(self, secret: bytes) -> None:
        if len(secret) != BYTES:
            raise SealError(f"a key has {BYTES} bytes, and {len(secret)} were given. `octavo seal key FILE` makes one")
        self._secret = secret

    def __repr__(self) -> str:
        return f"Key({self.fingerprint})"

    def __reduce__(self) -> tuple[object, ...]:
        raise SealError("a key is not stored with anything else; pass the name of its file")

    @property
    def fingerprint(self) -> str:
        """32 hexadecimal digits that tell keys apart and do not give one away."""
        return seal_note.fingerprint(self._secret)

    def words(self, label: str) -> Iterator[int]:
        """The endless stream of 32-bit numbers of a label."""
        label_key = hmac.digest(self._secret, seal_note.LABEL + label.encode(), "sha256")
        counter = 0
        while True:
            yield from unpack(">8I", hmac.digest(label_key, counter.to_bytes(8, "big"), "sha256"))
            counter += 1


def read_key(file: str | Path) -> Key:
    """The key in a file. Raises NoKey for one that is missing, that everybody may read, or that holds no key."""
    return Key(secret_in(file))


def find_key() -> Key:
    """The key of this process, given as that of encrypted files is. Raises NoKey where there is none."""
    return Key(encryption.process_secret())
