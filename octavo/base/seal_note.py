"""The note in a sealed folder of a model, data set or adapter: the fingerprint of the key that sealed it.

    sealed.json    {"octavo_sealed": 1, "of": "model", "data" or "adapter", "key": 32 hexadecimal digits, ...}

It holds no key, and no word or number from which the permutation could be computed. Training compares two notes;
:mod:`octavo.sealing` writes and reads the sealed folders.

    fingerprint    the first 16 bytes of HMAC-SHA256(key, "octavo seal 1 fingerprint"), in hexadecimal: it may be
                   published, and distinguishes keys
"""

from __future__ import annotations

import hmac
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from octavo.base import safe_read
from octavo.base.safe_read import ValueCheck

NOTE = "sealed.json"
FORMAT = 1
LABEL = b"octavo seal 1 "
_HEX_DIGITS = ValueCheck(
    lambda value: isinstance(value, str) and len(value) == 32 and set(value) <= set("0123456789abcdef"),
    "32 hexadecimal digits",
)
_SEALED_KIND = ValueCheck(lambda value: value in ("model", "data", "adapter"), "model, data or adapter")
ONE_KEY_ONE_PURPOSE = (
    "A key has one purpose: with the same key, a reader of the files could also undo the permutation. Make a separate "
    "key for files (octavo encrypt --new-key NEW); octavo encrypt SRC DST --old-key OLD --key-file NEW moves encrypted "
    "files to it"
)
"""The error text if one key would both seal and encrypt."""


@dataclass(frozen=True)
class Note:
    """``of``: "model", "data" or "adapter"; ``key``: the fingerprint; ``details``: the other entries of the note."""

    of: str
    key: str
    details: Mapping[str, object] = field(default_factory=dict)


def fingerprint(secret: bytes) -> str:
    """Return 32 hexadecimal digits that identify a key without revealing it."""
    return hmac.digest(secret, LABEL + b"fingerprint", "sha256")[:16].hex()


def read_note(folder: str | Path, error: type[Exception] = ValueError) -> Note | None:
    """Return the note of a folder, or None if it has none. Raises `error` for a note that cannot be read."""
    file = Path(folder) / NOTE
    if not os.path.lexists(file):
        return None
    raw = safe_read.read_json(file, error)
    if (version := raw.get("octavo_sealed")) != FORMAT:
        raise error(f"{file} has format {version!r:.20}, but this version reads {FORMAT}: seal it again")
    safe_read.check_schema(raw, {"of": _SEALED_KIND, "key": _HEX_DIGITS}, file, error)
    return Note(raw["of"], raw["key"], {k: v for k, v in raw.items() if k not in ("octavo_sealed", "of", "key")})


def check_adapter(adapter: str | Path, base: str | Path, error: type[Exception], key: str = "") -> None:
    """Check that an adapter and its base model are both plain, or both sealed with one key. Raises `error`; its message
    begins with `key`, the configuration key that names the adapter."""
    notes = read_note(adapter, error), read_note(base, error)
    if len({note and note.key for note in notes}) > 1:
        first, second = (f"sealed with the key {note.key}" if note else "not sealed" for note in notes)
        raise error(
            f"{key}{adapter} is {first}, and {base} is {second}: to each other they are noise. Convert the adapter "
            "with `octavo seal adapter` or `octavo unseal adapter`"
        )


def write_note(folder: Path, note: Note) -> None:
    """Write the note of a folder."""
    (folder / NOTE).write_bytes(note_bytes(note))


def note_bytes(note: Note) -> bytes:
    """Return the bytes of a note's file."""
    return (
        json.dumps({"octavo_sealed": FORMAT, "of": note.of, "key": note.key, **note.details}, indent=1) + "\n"
    ).encode()
