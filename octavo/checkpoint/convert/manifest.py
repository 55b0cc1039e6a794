"""conversion.json: the record of a conversion about the DCP checkpoint that it wrote."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from octavo.checkpoint.convert import dcp
from octavo.checkpoint.convert import folder as folders
from octavo.checkpoint.run_state.files import fingerprint, read_checksummed_json, write_checksummed_json
from octavo.models.folder.headers import Header

MANIFEST, CARRIED, FORMAT = "conversion.json", "hf", "octavo-conversion-1"


def write_manifest(
    directory: Path,
    command: str,
    options: Mapping[str, Any],
    shards: Iterable[Header],
    written: list[list[dcp.WrittenTensor]],
) -> None:
    document = {
        "format": FORMAT,
        "command": command,
        "options": dict(options),
        "shards": [folders.to_json(shard) for shard in shards],
        "tensors": [[tensor.to_json() for tensor in part] for part in written],
        "carried": {file.name: fingerprint(file) for file in sorted((directory / CARRIED).iterdir())},
    }
    write_checksummed_json(directory / MANIFEST, document)


def read_manifest(directory: Path) -> dict[str, Any] | None:
    """Read the manifest of a DCP checkpoint, or return None if there is none."""
    file = directory.parent / MANIFEST
    if directory.name != dcp.RELEASE or not file.is_file():
        return None
    return read_checksummed_json(file, FORMAT, "convert the folder again")
