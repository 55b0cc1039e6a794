"""conversion.json: what a conversion noted beside the DCP checkpoint that it made."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from octavo import atomic
from octavo.checkpoint.convert import dcp
from octavo.checkpoint.convert import folder as folders
from octavo.checkpoint.errors import CheckpointError
from octavo.checkpoint.files import fingerprint
from octavo.models.headers import Header

MANIFEST, CARRIED, FORMAT = "conversion.json", "hf", "octavo-conversion-1"


def write_manifest(
    made: Path, command: str, options: Mapping[str, Any], shards: Iterable[Header], written: list[list[dcp.Written]]
) -> None:
    said = {
        "format": FORMAT,
        "command": command,
        "options": dict(options),
        "shards": [folders.to_json(shard) for shard in shards],
        "tensors": [[one.to_json() for one in part] for part in written],
        "carried": {file.name: fingerprint(file) for file in sorted((made / CARRIED).iterdir())},
    }
    atomic.write_text(made / MANIFEST, json.dumps({"crc32": _checksum(said), **said}))


def read_manifest(directory: Path) -> dict[str, Any] | None:
    """What `write_manifest` wrote beside a DCP checkpoint; None where nobody did."""
    file = directory.parent / MANIFEST
    if directory.name != dcp.RELEASE or not file.is_file():
        return None
    try:
        said = dict(json.loads(file.read_text(encoding="utf-8")))
        claimed = said.pop("crc32")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"{file} is damaged ({type(error).__name__}: {error}); convert the folder again"
        ) from error
    if said.get("format") != FORMAT:
        raise CheckpointError(f"{file} is of format {said.get('format')!r}, this version reads {FORMAT!r}")
    if claimed != _checksum(said):
        raise CheckpointError(f"{file} was changed after it was written; convert the folder again")
    return said


def _checksum(said: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(said, sort_keys=True).encode())
