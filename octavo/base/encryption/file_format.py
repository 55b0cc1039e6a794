"""The format of an encrypted file, byte by byte; docs/encryption.md explains it for other implementations.

    0   8   8f "OCTAES" 02      the last byte is the version
    8   4   C, bytes of a chunk, big-endian: a power of two from 2^12 to 2^24
    12  8   id of the key
    20  32  salt: random, different in each file
    52  2   L, bytes of the name, big-endian, at most 4096; 0 if the file was encrypted on its own
    54  16  if L > 0: id of the folder that was encrypted, random
    70  L   if L > 0: the path inside that folder, its parts joined by "/"
    H-16    tag of the bytes before it; H, bytes of the header, is 70, or 86 + L if L > 0
    H       chunks of C bytes, each followed by 16 bytes of tag; the last has 0 to C (0: the file is empty)

    file key = HKDF-SHA256(key, salt, info = bytes 0 to 19)
    nonce    = 00 00 00 | number of the chunk, 8 bytes, big-endian | 0; 1 for the last chunk, 2 for the header's tag

Version 1, of Octavo 0.4.0, has no L and no name: its header ends with the tag at byte 52, and no file is bound to its
path. It can still be read.

AES-256-GCM with the nonces of STREAM (Hoang, Reyhanitabar, Rogaway, Vizár, "Online Authenticated-Encryption and its
Nonce-Reuse Misuse-Resistance", 2015): decryption fails for a chunk that was changed, moved, repeated, left out or taken
from another file, and for a file that was cut or lengthened. A file key is used for one file, a nonce for one chunk.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from octavo.base.encryption.errors import Damaged, WrongKey
from octavo.base.encryption.key import Key

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

Bytes: TypeAlias = bytes | bytearray | memoryview

MAGIC = b"\x8fOCTAES\x02"
VERSION_1 = 1  # the version without names
TAG = 16
SALTED_BYTES = 52  # bytes of magic, chunk size, key id and salt
MAX_NAME_BYTES = 4096  # bytes of a path in a folder (PATH_MAX of Linux)
MAX_HEADER_BYTES = SALTED_BYTES + 2 + 16 + MAX_NAME_BYTES + TAG  # bytes of the longest header
CHUNK = 1 << 18  # bytes: small compared with a shard, large compared with the overhead of a call
MAX_CHUNKS = 1 << 26  # chunks of a file: 16 TiB in chunks of CHUNK bytes, which stays below 2^42 AES blocks for one key
_CHUNK_SIZES = [1 << n for n in range(12, 25)]


@dataclass(frozen=True)
class Place:
    """The path that a file is bound to: the id of the encrypted folder, and the path inside it as file system bytes,
    its parts joined by "/"."""

    folder: bytes
    name: bytes


@dataclass(frozen=True)
class Cipher:
    """AES-256-GCM with the key of one file.

    header  of the file
    chunk   plain bytes per chunk
    place   the path that the file is bound to, or None if it was encrypted on its own
    """

    header: bytes
    chunk: int
    aead: AESGCM
    place: Place | None = None

    @property
    def version(self) -> int:
        return self.header[7]

    def encrypt_chunk(self, number: int, plain: Bytes, last: bool) -> bytes:
        """Encrypt a chunk; its tag is appended."""
        return bytes(self.aead.encrypt(_nonce(number, last), plain, None))

    def decrypt_chunk(self, number: int, stored: bytes, last: bool) -> bytes:
        """Decrypt a chunk with its tag. Raises cryptography's InvalidTag if it was not written as this chunk."""
        return bytes(self.aead.decrypt(_nonce(number, last), stored, None))


def new_cipher(key: Key, chunk: int = CHUNK, place: Place | None = None) -> Cipher:
    """Return the cipher, with its header, of a new file."""
    assert chunk in _CHUNK_SIZES, chunk
    head = MAGIC + chunk.to_bytes(4, "big") + key.id
    salt = os.urandom(32)
    name_field = b"\0\0"
    if place is not None:
        assert len(place.folder) == 16 and 0 < len(place.name) <= MAX_NAME_BYTES, place
        name_field = len(place.name).to_bytes(2, "big") + place.folder + place.name
    aead = _aead(key.derive(head, salt))
    bound = head + salt + name_field
    return Cipher(bound + aead.encrypt(_nonce(0, 2), b"", bound), chunk, aead, place)


def read_cipher(key: Key, header: bytes, path: object) -> Cipher:
    """Return the cipher of a file that begins with these bytes: `MAX_HEADER_BYTES` of them, or all if the file is
    shorter.
    Raises WrongKey and Damaged, which name the `path`."""
    from cryptography.exceptions import InvalidTag

    if len(header) < SALTED_BYTES + TAG:
        raise Damaged(f"{path} is damaged: it ends within the header of an encrypted file. Restore it from a copy")
    if header[7] not in (VERSION_1, MAGIC[7]):
        raise Damaged(
            f"{path} is encrypted in version {header[7]} of the format, but this Octavo reads {VERSION_1} to {MAGIC[7]}"
        )
    if header[12:20] != key.id:
        raise WrongKey(
            f"{path} was encrypted with another key, {header[12:20].hex()}; the key in use is "
            f"{key.id.hex()}. Use the former"
        )
    end, place = SALTED_BYTES, None
    if header[7] != VERSION_1:
        length = int.from_bytes(header[SALTED_BYTES : SALTED_BYTES + 2], "big")
        begin = SALTED_BYTES + 2 + (16 if length else 0)
        end = begin + length
        if length:
            place = Place(header[SALTED_BYTES + 2 : begin], header[begin:end])
    chunk = int.from_bytes(header[8:12], "big")
    aead = _aead(key.derive(header[:20], header[20:52]))
    try:
        aead.decrypt(_nonce(0, 2), header[end : end + TAG], header[:end])
    except (InvalidTag, ValueError):  # ValueError: fewer bytes than a tag
        chunk = 0  # no valid header has it: both faults raise the same error
    if chunk not in _CHUNK_SIZES:
        raise Damaged(
            f"{path} is damaged: its header (bytes 0 to {min(end + TAG, len(header)) - 1}) was changed or truncated. "
            "Restore it from a copy"
        )
    return Cipher(header[: end + TAG], chunk, aead, place)


def header_tag(header: bytes) -> bytes:
    """Return the tag of an encrypted file's header, unverified: it needs no key. `header`: the first bytes of the
    file."""
    end = SALTED_BYTES
    if header[7:8] != bytes([VERSION_1]):
        length = int.from_bytes(header[SALTED_BYTES : SALTED_BYTES + 2], "big")
        end += 2 + (16 + length if length else 0)
    return header[end : end + TAG]


def looks_encrypted(head: bytes, key: Key) -> bool:
    """Return whether the first bytes of a file without the magic bytes look like a damaged encrypted file: most of the
    magic bytes, their beginning, or the id of the key."""
    if len(head) < len(MAGIC):
        return bool(head) and MAGIC.startswith(head[:7])
    matching = sum(actual == magic for actual, magic in zip(head, MAGIC[:7], strict=False))
    return matching >= 4 or head[12:20] == key.id


def _nonce(number: int, kind: int) -> bytes:
    return b"\0\0\0" + number.to_bytes(8, "big") + bytes([kind])


def _aead(key: bytes) -> AESGCM:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    return AESGCM(key)
