"""The key of a sealed run: 32 random bytes in a file, and the streams of numbers drawn from it.

    file      32 bytes as they are, or as 64 hexadecimal digits, or as base64; readable by its owner alone (mode 0600)
    stream    of a label: HMAC-SHA256(HMAC-SHA256(key, "octavo seal 1 " + label), counter), counter = 0, 1, ... as eight
              bytes, big-endian; read as 32-bit big-endian words. Equal on every machine
    print     the first 16 bytes of HMAC-SHA256(key, "octavo seal 1 fingerprint"), in hexadecimal: what a twin may say
              of its key, by which another key is told

An HMAC with a secret key cannot be told from random bits (it is HKDF's expansion, RFC 5869, without its chaining).
A key stands in no message, in no `repr` and in no file but its own.
"""

from __future__ import annotations

import base64
import hmac
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from struct import unpack

from octavo import reading
from octavo.sealing.errors import SealError

BYTES = 32
_LABEL = b"octavo seal 1 "


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
        return hmac.digest(self._secret, _LABEL + b"fingerprint", "sha256")[:16].hex()

    def words(self, label: str) -> Iterator[int]:
        """The endless stream of 32-bit numbers of a label."""
        own = hmac.digest(self._secret, _LABEL + label.encode(), "sha256")
        counter = 0
        while True:
            yield from unpack(">8I", hmac.digest(own, counter.to_bytes(8, "big"), "sha256"))
            counter += 1


def make_key(file: str | Path) -> Path:
    """Write a new key. Raises SealError where the file exists: a key that is lost unseals nothing."""
    path = Path(file)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0), 0o600)
    except FileExistsError:
        raise SealError(f"{path} exists, and a key is never overwritten. Name another file") from None
    with os.fdopen(handle, "wb") as out:
        out.write(secrets.token_bytes(BYTES))
        out.flush()
        os.fsync(out.fileno())
    return path


def read_key(file: str | Path) -> Key:
    """The key in a file. Raises SealError for one that is missing, of another size, or open to others than its
    owner."""
    path = Path(file)
    if not path.is_file():
        raise SealError(f"{path} is no file: a key is one of {BYTES} random bytes. `octavo seal key {path}` makes one")
    if os.name == "posix" and (mode := path.stat().st_mode & 0o077):
        raise SealError(f"{path} can be read or written by others (mode bits {mode:03o}). `chmod 600 {path}` first")
    raw = reading.read_bytes(path, SealError, limit=1 << 12)
    return Key(raw if len(raw) == BYTES else _decoded(raw.strip(), path))


def _decoded(text: bytes, path: Path) -> bytes:
    try:
        return bytes.fromhex(text.decode()) if len(text) == 2 * BYTES else base64.b64decode(text, validate=True)
    except ValueError:  # its words would quote the file
        raise SealError(f"{path} is neither {BYTES} bytes nor these in hexadecimal or base64: it is no key") from None
