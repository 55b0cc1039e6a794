"""Encrypted files to which lines are appended: each line is a separate encrypted file, in base64.

`NAME.aes` contains such lines. A changed line is rejected; removed or moved lines are not detected, because any process
may append to the file.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable
from pathlib import Path

from octavo.base.encryption import file_format
from octavo.base.encryption.errors import Damaged
from octavo.base.encryption.key import Key
from octavo.base.encryption.reader import decrypt
from octavo.base.encryption.writer import encrypt

SUFFIX = ".aes"
_CHUNK = 1 << 12
_MARK = base64.b64encode(file_format.MAGIC[:6])  # how every line begins


def encrypt_line(plain: bytes, key: Key | None = None) -> bytes:
    """Encrypt a line; the result ends in a line break. `key` defaults to the key of the process."""
    return base64.b64encode(encrypt(plain, _CHUNK, key)) + b"\n"


def decrypt_line(line: bytes, where: object, key: Key | None = None) -> bytes:
    """Decrypt a line without its line break. Raises VaultError, which names `where` the line is."""
    try:
        stored = base64.b64decode(line, validate=True)
    except binascii.Error:
        stored = b""
    if not stored.startswith(file_format.MAGIC[:7]):
        raise Damaged(
            f"{where} is damaged: it is not an encrypted line. Restore the file from a copy, or remove the line"
        )
    return decrypt(stored, where, key)


def append_lines(file: Path, lines: Iterable[str]) -> None:
    """Append lines, each with its line break, to a file; encrypted if its name ends in `.aes`."""
    with file.open("ab") as out:
        for line in lines:
            raw = line.encode("utf-8", "backslashreplace")
            out.write(encrypt_line(raw) if file.suffix == SUFFIX else raw)


def is_encrypted_lines(path: Path) -> bool:
    """Return whether a file holds encrypted lines."""
    with path.open("rb") as file:
        return file.read(len(_MARK)) == _MARK
