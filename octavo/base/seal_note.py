"""The note in a sealed folder, a model's or a data set's: of which key it is, by that key's fingerprint.

    sealed.json    {"octavo_sealed": 1, "of": "model", "data" or "adapter", "key": 32 hexadecimal digits, ...}

It holds no key, no word and no number from which an order could be found. Whoever trains compares two of them:
:mod:`octavo.sealing` makes and reads what they stand in.

    print          the first 16 bytes of HMAC-SHA256(key, "octavo seal 1 fingerprint"), in hexadecimal: what a twin may
                   say of its key, by which another key is told
"""

from __future__ import annotations

import hmac
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from octavo.base import safe_read
from octavo.base.safe_read import Is

NOTE = "sealed.json"
FORMAT = 1
LABEL = b"octavo seal 1 "
_DIGITS = Is(lambda value: isinstance(value, str) and len(value) == 32 and set(value) <= set("0123456789abcdef"),
             "32 hexadecimal digits")  # fmt: skip
_OF = Is(lambda value: value in ("model", "data", "adapter"), "model, data or adapter")
ONE_PURPOSE = (
    "A key has one purpose: who gets this one to read files undoes the permutation, too. Make one for files (octavo "
    "encrypt --new-key NEW); octavo encrypt SRC DST --old-key OLD --key-file NEW takes to it what is encrypted already"
)
"""What is said where one key would seal and encrypt."""


@dataclass(frozen=True)
class Note:
    """``of``: "model", "data" or "adapter"; ``key``: the fingerprint; ``more``: what else the note says."""

    of: str
    key: str
    more: dict[str, Any] = field(default_factory=dict)


def fingerprint(secret: bytes) -> str:
    """32 hexadecimal digits that tell keys apart and do not give one away."""
    return hmac.digest(secret, LABEL + b"fingerprint", "sha256")[:16].hex()


def read_note(folder: str | Path, error: type[Exception] = ValueError) -> Note | None:
    """The note of a folder, None where it has none. Raises `error` for one that cannot be read."""
    file = Path(folder) / NOTE
    if not os.path.lexists(file):
        return None
    raw = safe_read.read_json(file, error)
    if raw.get("octavo_sealed") != FORMAT:
        found = raw.get("octavo_sealed")
        raise error(f"{file} is of format {found!r:.20}, and this version reads {FORMAT}: seal it again")
    safe_read.check_form(raw, {"of": _OF, "key": _DIGITS}, file, error)
    return Note(raw["of"], raw["key"], {k: v for k, v in raw.items() if k not in ("octavo_sealed", "of", "key")})


def check_adapter(adapter: str | Path, base: str | Path, error: type[Exception], key: str = "") -> None:
    """That an adapter and the model that it is to stand beside are of one world: both plain, or both sealed with one
    key. Raises `error`, after the `key` of the configuration that names the adapter."""
    own, there = (read_note(folder, error) for folder in (adapter, base))
    if (own and own.key) != (there and there.key):
        first, second = (f"sealed with the key {note.key}" if note else "not sealed" for note in (own, there))
        raise error(f"{key}{adapter} is {first}, and {base} is {second}: to each other they are noise. `octavo seal "
                    "adapter` and `octavo unseal adapter` lead from one to the other")  # fmt: skip


def write_note(folder: Path, note: Note) -> None:
    """Write the note of a folder that is being made."""
    (folder / NOTE).write_bytes(note_bytes(note))


def note_bytes(note: Note) -> bytes:
    """What the file of a note holds."""
    return (
        json.dumps({"octavo_sealed": FORMAT, "of": note.of, "key": note.key, **note.more}, indent=1) + "\n"
    ).encode()
