"""The note that an export leaves in its folder: what it wrote, with the SHA-256 of every file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octavo.base import safe_read
from octavo.checkpoint import compat
from octavo.checkpoint.errors import CheckpointError

#: what was written, and the permission to replace it by another export
MARKER = "octavo_export.json"
#: the note's own key for the SHA-256 of all its other fields
OWN = "sha256_of_note"


def sha256(file: Path) -> str:
    """Of a file's bytes, in hex. Raises CheckpointError."""
    digest = hashlib.sha256()
    with safe_read.open_file(file, CheckpointError) as opened:
        while piece := opened.read(1 << 22):
            digest.update(piece)
    return digest.hexdigest()


def note_digest(note: Mapping[str, Any]) -> str:
    """SHA-256 of a note's fields but this one, in hex, whatever their order and spaces."""
    fields = {key: value for key, value in note.items() if key != OWN}
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def is_changed(note: Mapping[str, Any]) -> bool:
    """Whether a note is not what an export wrote: its own digest is another, or files that it names have no sum. A
    note without a digest is not compared with one."""
    sums = compat.export_sums(note)
    own = note.get(OWN)
    return (own is not None and own != note_digest(note)) or bool(sums and not {*note["files"]} <= sums.keys())


def read_note(folder: Path) -> dict[str, Any]:
    """The note of an export, its `sha256` a table of this folder's file names (empty where it noted none).

    Raises CheckpointError for one that cannot be read or that Octavo did not write.
    """
    note = safe_read.read_json(folder / MARKER, CheckpointError)
    sums, files = compat.export_sums(note), note.get("files")
    good = isinstance(sums, dict) and all(Path(n).name == n and isinstance(s, str) for n, s in sums.items())
    if not good or not isinstance(files, list) or not all(isinstance(name, str) for name in files):
        raise CheckpointError(f"{folder / MARKER} does not say what an export wrote. Export the folder anew.")
    return {**note, "sha256": sums}
