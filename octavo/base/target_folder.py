"""The folder that a command writes: whether its name can be used, whether it is free, and one that cannot be renamed.

A target is usually written aside and renamed into place (:mod:`octavo.base.atomic_write`). The root of a mounted file
system (a container's volume at /out) cannot be renamed: rename(2) fails with EBUSY. Then the files are written in
`TARGET/.octavo.part` and moved up, each by a rename of its own, files of JSON last: a folder without config.json or
octavo_export.json is none that a reader takes for a model or an export.
"""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

from octavo.base.safe_read import printable

STAGE = ".octavo.part"
#: what an empty file system has: a folder that ext4 makes, and what a killed command left
_NOT_COUNTED = (STAGE, "lost+found")
_MOUNTS = Path("/proc/self/mountinfo")


def check_target(target: str | os.PathLike[str], refused: type[Exception]) -> None:
    """Refuse what cannot become a file or a folder, before any work is done.

    Raises `refused` for a name that is not UTF-8 or holds control characters (reports, indices and tables would have to
    write it), for links that lead in a circle, and for a path below a file.
    """
    path, shown = Path(target), printable(os.fspath(target))
    if not os.fspath(path).isprintable():
        raise refused(
            f"{shown} cannot be written: its name holds control characters or is not UTF-8. Name another place"
        )
    for place in (path, *path.parents):
        try:
            os.stat(place)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise refused(f"{shown} cannot be written: its links lead in a circle. Name another place") from error
            continue
        if place != path and not os.path.isdir(place):
            raise refused(f"{shown} cannot be written: {printable(place)} is a file. Name another place")
        return


def contents(target: Path) -> list[str]:
    """The names in a folder, without what an empty file system and a killed command leave; of no folder none."""
    return sorted(name for name in os.listdir(target) if name not in _NOT_COUNTED) if target.is_dir() else []


def is_free(target: Path) -> bool:
    """Whether nothing is there, or an empty folder."""
    return not target.exists() or (target.is_dir() and not contents(target))


def is_fixed(target: Path) -> bool:
    """Whether a folder is there that no rename can replace: a mount point, or one in a folder that is not ours."""
    if not target.is_dir():
        return False
    return os.path.ismount(target) or str(target) in _mounts() or not os.access(target.parent, os.W_OK)


def move_in(made: Path, target: Path) -> None:
    """Put the entries of `made` in place of those of the folder `target`.

    What is there goes to `.octavo.part/leaving`, which is called `old` as soon as all of it is in there: so `recover`
    knows how far a killed process came. A rename that fails undoes those before it.
    """
    stage = target / STAGE
    new, leaving, old = stage / "new", stage / "leaving", stage / "old"
    if made != new:  # the rename beside the target failed, where nothing announced a mount point
        stage.mkdir(exist_ok=True)
        shutil.move(made, new)  # copies, where a rename cannot cross the border of a mount
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
    """End what a kill cut short in `move_in`: back where not all had left, on where it had; then nothing is aside."""
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


def _json_last(made: Path) -> list[str]:
    return sorted(os.listdir(made), key=lambda name: (name.endswith(".json"), name))


def _mounts() -> set[str]:
    """Mount points of this process (Linux). A bind mount of the same file system is one too, which `ismount` denies."""
    try:
        lines = _MOUNTS.read_bytes().splitlines()
    except OSError:
        return set()
    # the fifth field, in which blanks and backslashes are written in octal
    names = [line.split()[4] for line in lines if len(line.split()) > 4]
    return {os.fsdecode(name.decode("unicode_escape").encode("latin-1")) for name in names}
