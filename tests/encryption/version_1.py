"""Files as Octavo 0.4.0 encrypted them, which later versions read: by the page, not by Octavo's code."""

from __future__ import annotations

import hashlib
import hmac
import os
from pathlib import Path

from cryptography.hazmat.primitives.ciphers.aead import AESGCM


def encrypted(plain: bytes, key: bytes, chunk: int = 1 << 18) -> bytes:
    """A file in version 1 of the form."""

    def hkdf(salt: bytes, info: bytes) -> bytes:
        return hmac.digest(hmac.digest(salt or bytes(32), key, hashlib.sha256), info + b"\x01", hashlib.sha256)

    head = b"\x8fOCTAES\x01" + chunk.to_bytes(4, "big") + hkdf(b"", b"octavo key id")[:8]
    salt = os.urandom(32)
    aead = AESGCM(hkdf(salt, head))
    pieces = [plain[at : at + chunk] for at in range(0, len(plain), chunk)] or [b""]
    chunks = [
        aead.encrypt(bytes(3) + n.to_bytes(8, "big") + bytes([n == len(pieces) - 1]), piece, None)
        for n, piece in enumerate(pieces)
    ]
    return head + salt + aead.encrypt(bytes(11) + b"\x02", b"", head + salt) + b"".join(chunks)


def encrypt_tree(source: Path, target: Path, key: bytes) -> Path:
    """A folder as `octavo encrypt` of 0.4.0 wrote it: each file by itself, and no list."""
    for file in source.rglob("*"):
        if file.is_file():
            (target / file.relative_to(source)).parent.mkdir(parents=True, exist_ok=True)
            (target / file.relative_to(source)).write_bytes(encrypted(file.read_bytes(), key))
    return target
