"""The form of an encrypted file, to the byte; docs/encryption.md spells it out for who implements it elsewhere.

    0   8   8f "OCTAES" 01      the last byte is the version
    8   4   C, bytes of a chunk, big-endian: a power of two from 2^12 to 2^24
    12  8   id of the key
    20  32  salt: random, and a file's own
    52  16  tag of what stands before
    68      chunks of C bytes, each with 16 bytes of tag behind it; the last has 0 to C (0: the file is empty)

    file key = HKDF-SHA256(key, salt, info = bytes 0 to 19)
    nonce    = 00 00 00 | number of the chunk, 8 bytes, big-endian | 0, of the last chunk 1, of the header's tag 2

AES-256-GCM with the nonces of STREAM (Hoang, Reyhanitabar, Rogaway, Vizár, "Online Authenticated-Encryption and its
Nonce-Reuse Misuse-Resistance", 2015): a chunk that is changed, moved, repeated, left out or of another file does not
open, nor does a file that ends early or goes on. A file key is used for one file, each nonce for one chunk of it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from octavo.vault.errors import Damaged, WrongKey
from octavo.vault.key import Key

MAGIC = b"\x8fOCTAES\x01"
HEADER, TAG = 68, 16
CHUNK = 1 << 18  # bytes: small beside a shard, large beside a call
MOST = 1 << 26  # chunks of a file: 16 TiB of the usual ones, below 2^42 blocks of AES for one key
_SIZES = [1 << n for n in range(12, 25)]


@dataclass(frozen=True)
class Cipher:
    """AES-256-GCM under a file's key, by the number of a chunk. `chunk`: bytes of one; `header`: the file's."""

    header: bytes
    chunk: int
    aead: Any

    def sealed(self, number: int, plain: Any, last: bool) -> bytes:
        """A chunk with its tag."""
        return bytes(self.aead.encrypt(_nonce(number, last), plain, None))

    def opened(self, number: int, stored: Any, last: bool) -> bytes:
        """What a chunk holds. Raises cryptography's InvalidTag where it is not the one that was written there."""
        return bytes(self.aead.decrypt(_nonce(number, last), stored, None))


def new(key: Key, chunk: int = CHUNK) -> Cipher:
    """Of a file that is about to be written."""
    assert chunk in _SIZES, chunk
    head = MAGIC + chunk.to_bytes(4, "big") + key.id
    salt = os.urandom(32)
    aead = _aead(key.derived(head, salt))
    return Cipher(head + salt + aead.encrypt(_nonce(0, 2), b"", head + salt), chunk, aead)


def of(key: Key, header: bytes, path: object) -> Cipher:
    """Of a file with this header. Raises WrongKey and Damaged, which name the `path`."""
    from cryptography.exceptions import InvalidTag

    if len(header) < HEADER:
        raise Damaged(f"{path} is damaged: it ends within the header of an encrypted file. Take it from a copy")
    if header[7] != MAGIC[7]:
        raise Damaged(f"{path} is encrypted in version {header[7]} of the form, and this Octavo reads {MAGIC[7]}")
    if header[12:20] != key.id:
        raise WrongKey(
            f"{path} was encrypted with another key ({header[12:20].hex()}) than the one that is given "
            f"({key.id.hex()}). Give that key"
        )
    chunk = int.from_bytes(header[8:12], "big")
    aead = _aead(key.derived(header[:20], header[20:52]))
    try:
        aead.decrypt(_nonce(0, 2), header[52:], header[:52])
    except InvalidTag:
        chunk = 0
    if chunk not in _SIZES:
        raise Damaged(f"{path} is damaged: its header (bytes 0 to {HEADER - 1}) was changed. Take it from a copy")
    return Cipher(header, chunk, aead)


def _nonce(number: int, kind: int) -> bytes:
    return b"\0\0\0" + number.to_bytes(8, "big") + bytes([kind])


def _aead(key: bytes) -> Any:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    return AESGCM(key)
