"""octavo_export.json: the note of an export, with the SHA-256 of every file that it wrote."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octavo.base import safe_read
from octavo.checkpoint import compat
from octavo.checkpoint.errors import CheckpointError

#: the note's file name; a folder that has it may be replaced by another export
MARKER = "octavo_export.json"
#: the key of the SHA-256 of all other fields of this file
NOTE_DIGEST = "sha256_of_note"


def sha256(file: Path) -> str:
    """Return the SHA-256 of a file's bytes, in hex. Raises CheckpointError for a file that cannot be read."""
    digest = hashlib.sha256()
    with safe_read.open_file(file, CheckpointError) as opened:
        while piece := opened.read(1 << 22):
            digest.update(piece)
    return digest.hexdigest()


def note_digest(note: Mapping[str, Any]) -> str:
    """Return the SHA-256 of all fields except the digest itself, in hex, independent of their order and of spaces."""
    fields = {key: value for key, value in note.items() if key != NOTE_DIGEST}
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def is_changed(note: Mapping[str, Any]) -> bool:
    """Return whether a note was changed after the export: its digest does not match, or files that it names have no
    checksum.

    A note without a digest (Octavo 0.4.0) is checked only by its checksums.
    """
    sums = compat.export_checksums(note)
    noted = note.get(NOTE_DIGEST)
    return (noted is not None and noted != note_digest(note)) or bool(sums and not {*note["files"]} <= sums.keys())


def read_note(folder: Path) -> dict[str, Any]:
    """Return the note of an export; its `sha256` maps file names of this folder to digests (empty where it has none).

    Raises CheckpointError for a note that cannot be read or that Octavo did not write.
    """
    note = safe_read.read_json(folder / MARKER, CheckpointError)
    sums, files = compat.export_checksums(note), note.get("files")
    good = isinstance(sums, dict) and all(Path(n).name == n and isinstance(s, str) for n, s in sums.items())
    if not good or not isinstance(files, list) or not all(isinstance(name, str) for name in files):
        raise CheckpointError(f"{folder / MARKER} is not the note of an export. Export the folder again.")
    return {**note, "sha256": sums}
