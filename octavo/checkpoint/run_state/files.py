"""The checkpoints of a run as directories: list them, publish a new one, delete old ones, read and write state.json.

    checkpoints/step_200/            complete: renamed into place after everything in it had reached the disk
    checkpoints/.step_200.tmp/       being written, or left by a killed save
    checkpoints/.step_200.old/       the previous step_200 while a new one replaces it
    checkpoints/.step_200.gone/      being deleted

The tensors inside are handled by `state.py` and `writing.py`.

Users put other entries into this folder: copies (`step_003`, `step_4 (copy)`), links to another disk, files. A
checkpoint is a directory, not a link, whose name is spelled as Octavo spells it and whose state.json has the same step.
If state.json is damaged, the name decides. Other entries are never touched: no deletion follows a link, and an entry in
the way of a save is renamed (:func:`publish`).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from octavo.base import atomic_write, encryption, safe_read
from octavo.checkpoint.errors import CheckpointError

STATE = "state.json"
FORMAT = "octavo-run-state-1"
_NUMBER = "(0|[1-9][0-9]*)"  # as Octavo writes it: no leading zeros, and no digits of other scripts, which \d matches
_STEP_NAME = re.compile(f"step_{_NUMBER}")
_TEMPORARY_NAME = re.compile(rf"\.step_{_NUMBER}\.(tmp|old|gone)")
MOVED_SUFFIX = ".other"  # appended to the name of an entry that was in the way of a save


def step_path(directory: Path, step: int) -> Path:
    return directory / f"step_{step}"


def temporary_path(directory: Path, step: int, why: str) -> Path:
    return directory / f".step_{step}.{why}"


def steps(directory: str | os.PathLike[str]) -> list[int]:
    """Return the steps of the published checkpoints, ascending. Only names are read, and links are not followed."""
    directory = Path(directory)
    if not directory.is_dir():
        return []
    folders = (entry.name for entry in directory.iterdir() if entry.is_dir() and not entry.is_symlink())
    return sorted(int(match[1]) for match in map(_STEP_NAME.fullmatch, folders) if match)


def has_saves(directory: str | os.PathLike[str]) -> bool:
    """Return whether the directory has a checkpoint, even a damaged one, or one that a killed save was replacing.
    Unfinished saves and deletions, and entries that a run did not write, do not count."""
    directory = Path(directory)
    replaced = (temporary_path(directory, step, "old") for step in _leftovers(directory, "old"))
    return bool(steps(directory)) or any(path.is_dir() and not path.is_symlink() for path in replaced)


def foreign_entries(directory: str | os.PathLike[str]) -> list[str]:
    """Return the entries with names like checkpoints that are not checkpoints of this run, each with the reason:
    another spelling, a link, a file, or a copy of the checkpoint of another step."""
    directory, foreign = Path(directory), []
    for entry in sorted(directory.iterdir()) if directory.is_dir() else ():
        if entry.name.startswith("step_") and (why := _why_foreign(entry)):
            foreign.append(f"{entry.name} ({why})")
    return foreign


def _why_foreign(entry: Path) -> str:
    if entry.is_symlink():
        return "a link"
    if not entry.is_dir():
        return "not a folder"
    name = _STEP_NAME.fullmatch(entry.name)
    if name is None:
        return "not a name that Octavo writes"
    if not (entry / STATE).is_file():
        return f"without {STATE}"
    try:
        step = read_state(entry)["step"]
    except CheckpointError:
        return ""  # a checkpoint of the run that is damaged, or encrypted with another key
    return "" if step == int(name[1]) else f"of step {step}"


def why_misplaced(path: Path, document: Mapping[str, Any]) -> str | None:
    """Return why a checkpoint does not belong to the step in its name, as a sentence, or None if it does.

    document   its state.json
    """
    name = _STEP_NAME.fullmatch(path.name)
    if path.is_symlink() or name is None or document["step"] == int(name[1]):
        return None
    return f"{path} contains step {document['step']}: it was copied or renamed"


def restore_previous(directory: Path) -> None:
    """Undo a replacement that was interrupted between its two renames: restore the previous checkpoint."""
    for step in _leftovers(directory, "old"):
        if not temporary_path(directory, step, "old").is_symlink() and not os.path.lexists(step_path(directory, step)):
            atomic_write.restore(temporary_path(directory, step, "old"), step_path(directory, step))


def remove_leftovers(directory: str | os.PathLike[str]) -> None:
    """Remove the leftovers of killed saves and deletions.

    Called on the one rank that writes, when its run begins and before each save. Not for readers (`latest`), which
    cannot distinguish leftovers from a save that is under way. Does nothing if the directory does not exist.
    """
    directory = Path(directory)
    restore_previous(directory)
    for why in ("tmp", "old", "gone"):
        for step in _leftovers(directory, why):
            _remove(temporary_path(directory, step, why))


def _remove(path: Path) -> None:
    """Remove a folder, a file, or a link without following it.

    Errors are ignored, and the next call tries again. Only a save of the same step needs the name, and then it fails
    with its own error.
    """
    if path.is_symlink() or not path.is_dir():
        with contextlib.suppress(OSError):
            path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


def _leftovers(directory: Path, why: str) -> list[int]:
    matches = (_TEMPORARY_NAME.fullmatch(entry.name) for entry in directory.iterdir()) if directory.is_dir() else ()
    return [int(match[1]) for match in matches if match and match[2] == why]


def publish(directory: Path, step: int) -> Path:
    """Rename `.step_N.tmp` to step_N. A kill at any point leaves the new or the previous checkpoint complete.

    An existing entry of that name that is not the checkpoint of this step (a file, a link, a copy of another
    checkpoint) is renamed to `step_N.other` and kept.
    """
    new, final, previous = (
        temporary_path(directory, step, "tmp"),
        step_path(directory, step),
        temporary_path(directory, step, "old"),
    )
    atomic_write.sync(new)
    if os.path.lexists(final) and _why_foreign(final):
        os.rename(final, _free_path(final.with_name(final.name + MOVED_SUFFIX)))
    atomic_write.swap(new, final, previous)
    if previous.exists():
        _remove(previous)
    return final


def _free_path(path: Path) -> Path:
    """Return an unused path: `path`, or `path` with the first free number appended."""
    number = 1
    while os.path.lexists(free := path if number == 1 else path.with_name(f"{path.name}-{number}")):
        number += 1
    return free


def prune(directory: str | os.PathLike[str], newest: int, keep: int) -> list[str]:
    """Delete all checkpoints except `newest` and the `keep` - 1 before it. Returns a sentence for each one that could
    not be deleted, which does not end the run.

    Later checkpoints are deleted, too: the run abandoned them when it resumed from an earlier one, and `latest` would
    return them. Entries that the run did not write are neither counted nor touched.
    """
    directory = Path(directory)
    written = [step for step in steps(directory) if not _why_foreign(step_path(directory, step))]
    kept = [step for step in written if step <= newest][-max(keep, 1) :]
    problems = []
    for step in (step for step in written if step not in kept):
        path, gone = step_path(directory, step), temporary_path(directory, step, "gone")
        try:
            # Renamed first: an interrupted deletion must not leave half a checkpoint under the name of a complete one.
            os.rename(path, gone)
            shutil.rmtree(gone)
        except OSError as error:
            problems.append(f"{path} could not be deleted (run.keep): {error.strerror} ({error.filename})")
    return problems


def fingerprint(path: Path) -> dict[str, int]:
    """Return {"size": bytes, "crc32": checksum} of a file, after decryption if it is encrypted. Read in pieces."""
    checksum, size = 0, 0
    with safe_read.open_file(path, CheckpointError) as file:
        while piece := file.read(1 << 22):
            checksum, size = zlib.crc32(piece, checksum), size + len(piece)
    return {"size": size, "crc32": checksum}


def write_checksummed_json(file: Path, document: Mapping[str, Any], encrypt: bool = False) -> None:
    """Write JSON with a checksum over its contents, atomically and forced to the disk."""
    raw = (json.dumps({"crc32": _checksum(document), **document}, indent=1) + "\n").encode()
    atomic_write.write_bytes(file, encryption.encrypt(raw) if encrypt else raw)


def read_checksummed_json(file: Path, format: str, fix: str) -> dict[str, Any]:
    """Read a file that `write_checksummed_json` wrote. Raises CheckpointError for any other file, with its name and the
    fix."""
    if not os.path.lexists(file):
        raise CheckpointError(f"{file} is missing: {file.parent} is not a checkpoint that Octavo finished")
    try:
        document = safe_read.read_json(file)
    except safe_read.Unreadable as error:
        if isinstance(error.__cause__, (encryption.NoKey, encryption.WrongKey)):
            raise CheckpointError(str(error)) from error
        raise CheckpointError(f"{file} is damaged; {fix} ({error})") from error
    claimed = document.pop("crc32", None)
    if claimed != _checksum(document):
        raise CheckpointError(f"{file} was changed after it was written; {fix}")
    if document.get("format") != format:
        raise CheckpointError(f"{file} has format {document.get('format')!r}, but this version reads {format!r}")
    return document


def write_state(path: Path, state: dict[str, Any], encrypt: bool = False) -> None:
    """Write state.json."""
    write_checksummed_json(path / STATE, state, encrypt)


def read_state(path: Path) -> dict[str, Any]:
    """Return state.json of a checkpoint, with every required key present and of the right type.

    Raises CheckpointError, naming the file, if it is missing, was changed, or was not written by Octavo.
    """
    file = path / STATE
    if not path.is_dir():
        present = ", ".join(f"step_{step}" for step in steps(path.parent)) or "none"
        raise CheckpointError(f"there is no checkpoint {path}; {path.parent} contains {present}")
    state = read_checksummed_json(file, FORMAT, "use an earlier checkpoint")
    for key, (fits, wanted) in _SCHEMA.items():
        if key not in state:
            raise CheckpointError(f"{file} has no key {key!r}; Octavo did not write it")
        if not fits(state[key]):
            raise CheckpointError(
                f"{file}: {key!r} is {str(state[key])[:80]!r}, not {wanted}; Octavo did not write it. "
                "Use an earlier checkpoint"
            )
    return state


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_group(value: Any) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("settings"), dict):
        return False
    names = value.get("parameters")
    return isinstance(names, list) and all(isinstance(name, str) for name in names)


def _is_fingerprint(value: Any) -> bool:
    return isinstance(value, dict) and value.keys() == {"size", "crc32"} and all(map(_is_count, value.values()))


# The keys of state.json except its format -> their check and its description. The checksum proves that the file was
# not damaged, not that its values make sense.
_SCHEMA: dict[str, tuple[Callable[[Any], bool], str]] = {
    "step": (_is_count, "a number from 0"),
    "ranks": (lambda value: _is_count(value) and value > 0, "a number from 1"),
    "counters": (lambda value: isinstance(value, dict), "a table"),
    "groups": (
        lambda value: isinstance(value, list) and all(map(_is_group, value)),
        "a list of groups, each with parameters and settings",
    ),
    "files": (
        lambda value: isinstance(value, dict) and all(map(_is_fingerprint, value.values())),
        "a table of files, each with size and crc32",
    ),
}


def file_problem(path: Path, name: str, wanted: dict[str, int]) -> str | None:
    """Return what is wrong with a file of a checkpoint, as a sentence, or None if size and CRC-32 are as `wanted`."""
    file = path / name
    if name != os.path.basename(name):
        return f"{path / STATE} lists {name!r}, outside the checkpoint"
    if file.is_file() and encryption.is_encrypted(file) != encryption.is_encrypted(path / STATE):
        return f"{file} and {STATE} must both be encrypted or both be plain; {file} was replaced"
    try:
        size = file.stat().st_size
        if encryption.is_encrypted(file):
            with safe_read.open_file(file, CheckpointError) as opened:
                size = safe_read.size_of(opened)
        actual = fingerprint(file) if size == wanted["size"] else {"size": size}
    except FileNotFoundError:
        return f"{file} is missing"
    except encryption.VaultError as error:
        return str(error)
    except OSError as error:
        return f"{file} cannot be read: {error.strerror}"
    except CheckpointError as error:
        return str(error)
    if actual["size"] != wanted["size"]:
        return f"{file} has {actual['size']} bytes instead of {wanted['size']}: it was truncated or overwritten"
    return None if actual == wanted else f"{file} is corrupt: its checksum is not the one noted when it was written"


def _checksum(document: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(document, sort_keys=True).encode())
