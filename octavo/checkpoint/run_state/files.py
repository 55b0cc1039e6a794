"""The checkpoints of a run as directories: which there are, which are whole, how one becomes visible, which go.

    checkpoints/step_200/            whole: it was renamed into place after everything in it had reached the disk
    checkpoints/.step_200.tmp/       being written, or what a killed save left
    checkpoints/.step_200.old/       the former step_200 while a new one takes its place
    checkpoints/.step_200.gone/      being deleted

Only names are decided here; what is inside is `state.py`'s matter, except state.json, the list of contents.

Folders hold what users put there too: copies (`step_003`, `step_4 (copy)`), links to another disk, files. A checkpoint
is a directory, no link, whose name is written as Octavo writes it and whose state.json says the same step, or is
damaged: then the name has to do. Everything else is left alone: no deletion follows a link, and what is in the way of a
save is renamed (:func:`publish`).
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
_NUMBER = "(0|[1-9][0-9]*)"  # as Octavo writes it: no zeros before it, no digits of other scripts
_WHOLE = re.compile(f"step_{_NUMBER}")
_ASIDE = re.compile(rf"\.step_{_NUMBER}\.(tmp|old|gone)")
OTHER = ".other"  # appended to the name of what was in the way of a save


def place(directory: Path, step: int) -> Path:
    return directory / f"step_{step}"


def aside(directory: Path, step: int, why: str) -> Path:
    return directory / f".step_{step}.{why}"


def steps(directory: str | os.PathLike[str]) -> list[int]:
    """The steps of the checkpoints that were renamed into place, ascending, by their names: contents are not looked at,
    and links are not followed."""
    directory = Path(directory)
    if not directory.is_dir():
        return []
    folders = (entry.name for entry in directory.iterdir() if entry.is_dir() and not entry.is_symlink())
    return sorted(int(match[1]) for match in map(_WHOLE.fullmatch, folders) if match)


def others(directory: str | os.PathLike[str]) -> list[str]:
    """What is called as checkpoints are and is none that was written here, each with the reason: of another spelling, a
    link, a file, or a copy of another step's checkpoint."""
    directory, named = Path(directory), []
    for entry in sorted(directory.iterdir()) if directory.is_dir() else ():
        if entry.name.startswith("step_") and (why := _why_other(entry)):
            named.append(f"{entry.name} ({why})")
    return named


def _why_other(entry: Path) -> str:
    if entry.is_symlink():
        return "a link"
    if not entry.is_dir():
        return "no folder"
    name = _WHOLE.fullmatch(entry.name)
    if name is None:
        return "no name that a run gives"
    if not (entry / STATE).is_file():
        return f"without {STATE}"
    try:
        step = read_state(entry)["step"]
    except CheckpointError:
        return ""  # of the run, and damaged: or encrypted, with another key
    return "" if step == int(name[1]) else f"of step {step}"


def copied(path: Path, document: Mapping[str, Any]) -> str | None:
    """Why a checkpoint is not the one that its name says, in a sentence; None: it is."""
    name = _WHOLE.fullmatch(path.name)
    if path.is_symlink() or name is None or document["step"] == int(name[1]):
        return None
    return f"{path} holds step {document['step']}: it was copied or renamed"


def recover(directory: Path) -> None:
    """Undo a replacement that was interrupted between its two renames: the former checkpoint returns."""
    for step in _left(directory, "old"):
        if not aside(directory, step, "old").is_symlink() and not os.path.lexists(place(directory, step)):
            atomic_write.restore(aside(directory, step, "old"), place(directory, step))


def sweep(directory: str | os.PathLike[str]) -> None:
    """Remove what killed saves and deletions left. For the one rank that writes: as its run begins, and before it
    writes. Not for readers (`latest`), who cannot tell a leftover from a save under way. Harmless without a directory.
    """
    directory = Path(directory)
    recover(directory)
    for why in ("tmp", "old", "gone"):
        for step in _left(directory, why):
            _remove(aside(directory, step, why))


def _remove(path: Path) -> None:
    """Remove a folder, or a link or file itself. What cannot be removed stays for the next sweep: a save that needs the
    name fails by itself, and any other goes on."""
    if path.is_symlink() or not path.is_dir():
        with contextlib.suppress(OSError):
            path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


def _left(directory: Path, why: str) -> list[int]:
    found = (_ASIDE.fullmatch(entry.name) for entry in directory.iterdir()) if directory.is_dir() else ()
    return [int(match[1]) for match in found if match and match[2] == why]


def publish(directory: Path, step: int) -> Path:
    """Make `.step_N.tmp` the checkpoint step_N. A kill at any point leaves the new one or the former one whole.

    What is there and is no checkpoint of this step that a run wrote (a file, a link, a copy of another one) is renamed
    to `step_N.other` and stays."""
    made, final, former = aside(directory, step, "tmp"), place(directory, step), aside(directory, step, "old")
    atomic_write.sync(made)
    if os.path.lexists(final) and _why_other(final):
        os.rename(final, _free(final.with_name(final.name + OTHER)))
    atomic_write.swap(made, final, former)
    if former.exists():
        _remove(former)
    return final


def _free(path: Path) -> Path:
    """A path that nothing has, by a number after it."""
    number = 1
    while os.path.lexists(free := path if number == 1 else path.with_name(f"{path.name}-{number}")):
        number += 1
    return free


def prune(directory: str | os.PathLike[str], newest: int, keep: int) -> list[str]:
    """Delete all but `newest` and the `keep` - 1 checkpoints before it; returns a sentence for each that could not be
    deleted, which is no reason to end a run.

    Later ones go too: they belong to a history that the run left when it went back to an earlier checkpoint, and
    `latest` would lead back into it. What the run did not write is neither counted nor touched.
    """
    directory = Path(directory)
    own = [step for step in steps(directory) if not _why_other(place(directory, step))]
    stays = [step for step in own if step <= newest][-max(keep, 1) :]
    problems = []
    for step in (step for step in own if step not in stays):
        path, gone = place(directory, step), aside(directory, step, "gone")
        try:
            # Renamed first: a deletion cut short must not leave half a checkpoint under a whole one's name.
            os.rename(path, gone)
            shutil.rmtree(gone)
        except OSError as error:
            problems.append(f"{path} could not be deleted (run.keep): {error.strerror} ({error.filename})")
    return problems


def fingerprint(path: Path) -> dict[str, int]:
    """{"size": bytes, "crc32": ...} of a file, of an encrypted one of what it holds; read in pieces."""
    checksum, size = 0, 0
    with safe_read.open_file(path, CheckpointError) as file:
        while piece := file.read(1 << 22):
            checksum, size = zlib.crc32(piece, checksum), size + len(piece)
    return {"size": size, "crc32": checksum}


def write_sealed(file: Path, document: Mapping[str, Any], encrypt: bool = False) -> None:
    """JSON with a checksum over its own contents, there whole or not at all, and forced to the disk."""
    raw = (json.dumps({"crc32": _checksum(document), **document}, indent=1) + "\n").encode()
    atomic_write.write_bytes(file, encryption.encrypted(raw) if encrypt else raw)


def read_sealed(file: Path, format: str, fix: str) -> dict[str, Any]:
    """What `write_sealed` wrote. Raises CheckpointError for anything else, naming the file and the fix."""
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
        raise CheckpointError(f"{file} is of format {document.get('format')!r}, this version reads {format!r}")
    return document


def write_state(path: Path, state: dict[str, Any], encrypt: bool = False) -> None:
    """Write state.json."""
    write_sealed(path / STATE, state, encrypt)


def read_state(path: Path) -> dict[str, Any]:
    """state.json of a checkpoint, each of its parts present and of its type.

    Raises CheckpointError, naming the file, where there is none, it is not what was written, or not of Octavo's making.
    """
    file = path / STATE
    if not path.is_dir():
        there = ", ".join(f"step_{step}" for step in steps(path.parent)) or "none"
        raise CheckpointError(f"there is no checkpoint {path}; {path.parent} holds {there}")
    state = read_sealed(file, FORMAT, "use an earlier checkpoint")
    for key, (fits, wanted) in _CONTENTS.items():
        if key not in state:
            raise CheckpointError(f"{file} lacks {key!r}; Octavo did not write it")
        if not fits(state[key]):
            raise CheckpointError(
                f"{file} says {key!r} is {str(state[key])[:80]!r} where {wanted} is needed; Octavo did not write it. "
                "Use an earlier checkpoint"
            )
    return state


def _count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _group(value: Any) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("settings"), dict):
        return False
    names = value.get("parameters")
    return isinstance(names, list) and all(isinstance(name, str) for name in names)


def _file(value: Any) -> bool:
    return isinstance(value, dict) and value.keys() == {"size", "crc32"} and all(map(_count, value.values()))


# What state.json holds beside its format: a checksum says that it was not damaged, not that it makes sense.
_CONTENTS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "step": (_count, "a number from 0"),
    "ranks": (lambda value: _count(value) and value > 0, "a number from 1"),
    "counters": (lambda value: isinstance(value, dict), "a table"),
    "groups": (
        lambda value: isinstance(value, list) and all(map(_group, value)),
        "a list of groups, each with parameters and settings,",
    ),
    "files": (
        lambda value: isinstance(value, dict) and all(map(_file, value.values())),
        "a table of files, each with size and crc32,",
    ),
}


def problem(path: Path, name: str, wanted: dict[str, int]) -> str | None:
    """What is wrong with one file of a checkpoint, or None."""
    file = path / name
    if name != os.path.basename(name):
        return f"{path / STATE} lists {name!r}, outside the checkpoint"
    if file.is_file() and encryption.is_encrypted(file) != encryption.is_encrypted(path / STATE):
        return f"of {file} and {STATE} beside it one is encrypted, and one is not: it was exchanged"
    try:
        size = file.stat().st_size
        if encryption.is_encrypted(file):
            with safe_read.open_file(file, CheckpointError) as opened:
                size = safe_read.size_of(opened)
        found = fingerprint(file) if size == wanted["size"] else {"size": size}
    except FileNotFoundError:
        return f"{file} is missing"
    except encryption.VaultError as error:
        return str(error)
    except OSError as error:
        return f"{file} cannot be read: {error.strerror}"
    except CheckpointError as error:
        return str(error)
    if found["size"] != wanted["size"]:
        return f"{file} has {found['size']} bytes instead of {wanted['size']}: it was cut short or written over"
    return None if found == wanted else f"{file} is corrupt: its checksum is not the one noted when it was written"


def _checksum(document: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(document, sort_keys=True).encode())
