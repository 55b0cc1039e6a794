"""Checks of the folder that a command writes, and the replacement of a folder that cannot be renamed.

A target is usually written under a temporary name and renamed into place (:mod:`octavo.base.atomic_write`). The root of
a mounted file system (a container's volume at /out) cannot be renamed: rename(2) fails with EBUSY. Then the files are
written in `TARGET/.octavo.part` and moved up one by one, JSON files last: without config.json or octavo_export.json no
reader mistakes the folder for a model or an export.
"""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

from octavo.base.safe_read import printable

STAGE = ".octavo.part"
#: entries that do not count as content: a folder that ext4 creates, and the leftover of a killed command
_IGNORED_ENTRIES = (STAGE, "lost+found")
_MOUNTS = Path("/proc/self/mountinfo")


def check_target(target: str | os.PathLike[str], refused: type[Exception]) -> None:
    """Raise `refused` for a path that cannot become a file or a folder, before any work is done.

    Such names are not UTF-8 or have control characters (they would be written into reports, indices and tables), are
    symbolic links that form a loop, or are below a file.
    """
    path, shown = Path(target), printable(os.fspath(target))
    if not os.fspath(path).isprintable():
        raise refused(
            f"{shown} cannot be written: its name contains control characters or is not UTF-8. Choose another path"
        )
    for ancestor in (path, *path.parents):
        try:
            os.stat(ancestor)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise refused(
                    f"{shown} cannot be written: its symbolic links form a loop. Choose another path"
                ) from error
            continue
        if ancestor != path and not os.path.isdir(ancestor):
            raise refused(f"{shown} cannot be written: {printable(ancestor)} is a file. Choose another path")
        return


def contents(target: Path) -> list[str]:
    """Return the names in a folder, except leftovers of a file system or a killed command; [] if not a folder."""
    return sorted(name for name in os.listdir(target) if name not in _IGNORED_ENTRIES) if target.is_dir() else []


def is_free(target: Path) -> bool:
    """Return whether the path does not exist, or is an empty folder."""
    return not target.exists() or (target.is_dir() and not contents(target))


def is_fixed(target: Path) -> bool:
    """Return whether a rename cannot replace the folder: a mount point, or a folder whose parent is not writable."""
    if not target.is_dir():
        return False
    return os.path.ismount(target) or str(target) in _mount_points() or not os.access(target.parent, os.W_OK)


def move_in(new_folder: Path, target: Path) -> None:
    """Replace the entries of the folder `target` by the entries of `new_folder`.

    The present entries are moved to `.octavo.part/leaving`, which is renamed to `old` when all of them are in it: this
    tells `recover` how far a killed process came. A rename that fails undoes the earlier ones.
    """
    stage = target / STAGE
    new, leaving, old = stage / "new", stage / "leaving", stage / "old"
    if new_folder != new:  # it was written next to the target, and renaming failed at an undetected mount point
        stage.mkdir(exist_ok=True)
        shutil.move(new_folder, new)  # copies if a rename would cross file systems
    entered: list[str] = []
    try:
        leaving.mkdir()
        for name in contents(target):
            os.rename(target / name, leaving / name)
        os.rename(leaving, old)
        for name in _json_last(new):
            os.rename(new / name, target / name)
            entered.append(name)
    except BaseException:
        for name in reversed(entered):
            os.rename(target / name, new / name)
        if old.exists():
            os.rename(old, leaving)
        _move_back(leaving, target)
        raise


def recover(target: Path) -> None:
    """Finish a `move_in` that a kill interrupted: undo it if not all old entries had been moved out, else complete
    it."""
    stage = target / STAGE
    if not target.is_dir() or not stage.is_dir():
        return
    _move_back(stage / "leaving", target)
    if (stage / "old").is_dir() and (stage / "new").is_dir():
        for name in _json_last(stage / "new"):
            os.rename(stage / "new" / name, target / name)


def _move_back(leaving: Path, target: Path) -> None:
    if leaving.is_dir():
        for name in os.listdir(leaving):
            os.rename(leaving / name, target / name)
        leaving.rmdir()


def _json_last(folder: Path) -> list[str]:
    return sorted(os.listdir(folder), key=lambda name: (name.endswith(".json"), name))


def _mount_points() -> set[str]:
    """Return the mount points of this process (Linux), including bind mounts, which `ismount` misses."""
    try:
        lines = _MOUNTS.read_bytes().splitlines()
    except OSError:
        return set()
    # The mount point is the fifth field, in which blanks and backslashes are escaped in octal.
    names = [line.split()[4] for line in lines if len(line.split()) > 4]
    return {os.fsdecode(name.decode("unicode_escape").encode("latin-1")) for name in names}
