"""Lists that grow line by line, and may be broken off by a kill: each line is an encrypted file of its own, in base64.

`NAME.aes` holds such lines. A line that was changed is refused; that lines were left out or moved is not seen, as of a
list that anybody may append to.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable
from pathlib import Path

from octavo.base.encryption import file_format
from octavo.base.encryption.errors import Damaged
from octavo.base.encryption.key import Key
from octavo.base.encryption.reader import decrypted
from octavo.base.encryption.writer import encrypted

SUFFIX = ".aes"
_CHUNK = 1 << 12
_MARK = base64.b64encode(file_format.MAGIC[:6])  # how every line begins


def encrypted_line(plain: bytes, key: Key | None = None) -> bytes:
    """A line, its end included. `key`: the process's, unless it is given."""
    return base64.b64encode(encrypted(plain, _CHUNK, key)) + b"\n"


def decrypted_line(line: bytes, where: object, key: Key | None = None) -> bytes:
    """What a line holds, which had no end. Raises VaultError; `where` it stands is said."""
    try:
        stored = base64.b64decode(line, validate=True)
    except binascii.Error:
        stored = b""
    if not stored.startswith(file_format.MAGIC[:7]):
        raise Damaged(f"{where} is damaged: it is no encrypted line. Take the file from a copy, or remove the line")
    return decrypted(stored, where, key)


def append(file: Path, lines: Iterable[str]) -> None:
    """Append lines, each with its end, to a list of lines; encrypted where its name ends in `.aes`."""
    with file.open("ab") as out:
        for line in lines:
            raw = line.encode("utf-8", "backslashreplace")
            out.write(encrypted_line(raw) if file.suffix == SUFFIX else raw)


def is_list(path: Path) -> bool:
    """Whether a file holds encrypted lines."""
    with path.open("rb") as file:
        return file.read(len(_MARK)) == _MARK
