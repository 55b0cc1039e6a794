"""The key of a sealed run: 32 random bytes in a file, and the streams of numbers drawn from it.

    file      in the format of encryption keys (octavo/base/encryption/key.py), but never the same key: the trainer has
              the encryption key, while this one stays with the owner
    stream    for a label: HMAC-SHA256(HMAC-SHA256(key, "octavo seal 1 " + label), counter), counter = 0, 1, ... as
              eight bytes, big-endian; read as 32-bit big-endian words. Equal on every machine
    print     the key's fingerprint in a twin (:mod:`octavo.base.seal_note`)

An HMAC with a secret key is indistinguishable from random bits (it is HKDF's expansion, RFC 5869, without chaining).
The key appears in no message, no `repr` and no other file.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterator
from pathlib import Path
from struct import unpack

from octavo.base import encryption, seal_note
from octavo.base.encryption.key import read_secret
from octavo.sealing.errors import SealError

BYTES = 32


class Key:
    """A key that draws permutations and does not reveal itself."""

    __slots__ = ("_secret",)

    def __init__(self, secret: bytes) -> None:
        if len(secret) != BYTES:
            raise SealError(
                f"a key has {BYTES} bytes, but this one has {len(secret)}. `octavo seal key FILE` creates one"
            )
        self._secret = secret

    def __repr__(self) -> str:
        return f"Key({self.fingerprint})"

    def __reduce__(self) -> tuple[object, ...]:
        raise SealError("a key cannot be pickled; pass the name of its file")

    @property
    def fingerprint(self) -> str:
        """32 hexadecimal digits that identify the key without revealing it."""
        return seal_note.fingerprint(self._secret)

    def words(self, label: str) -> Iterator[int]:
        """Yield the endless stream of 32-bit numbers for a label."""
        label_key = hmac.digest(self._secret, seal_note.LABEL + label.encode(), "sha256")
        counter = 0
        while True:
            yield from unpack(">8I", hmac.digest(label_key, counter.to_bytes(8, "big"), "sha256"))
            counter += 1


def read_key(file: str | Path) -> Key:
    """Return the key in a file. Raises NoKey for a file that is missing, readable by others, or not a key."""
    return Key(read_secret(file))


def find_key() -> Key:
    """Return the key of this process, from the same options as an encryption key. Raises NoKey if there is none."""
    return Key(encryption.process_secret())
