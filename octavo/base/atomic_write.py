"""Files and folders that are there whole or as they were before, whatever stops the writing: a kill, a full disk.

Everything is written aside, on the same disk, and then renamed into place. What a kill leaves aside is removed by the
next one who writes there, but for files that several processes may write: each has a name of its own aside.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

from octavo.base import target_folder

_NO_ROOM = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "your quota of this disk is used up",
    errno.EFBIG: "a file would be larger than this disk, or the limit of this shell (ulimit -f), allows",
}
# Bytes free below which a failed write is put down to a full disk; a block may be left that no file could use.
_LITTLE = 1 << 20


def write_text(file: Path, text: str, shared: bool = False) -> None:
    """Write a file, also safe from a power cut. `shared`: processes may write it at once, and the last one wins."""
    write_bytes(file, text.encode(), shared)


def write_bytes(file: Path, content: bytes, shared: bool = False) -> None:
    """The same of bytes."""
    aside = file.with_name(f".{file.name}.{uuid4().hex}.tmp" if shared else f".{file.name}.tmp")
    try:
        with open(aside, "wb") as out:
            out.write(content)
            out.flush()
            os.fsync(out.fileno())
        os.replace(aside, file)
    except BaseException:  # a signal too
        aside.unlink(missing_ok=True)
        raise


@contextmanager
def folder(target: Path, refused: type[Exception], replace: bool = True) -> Iterator[Path]:
    """A new directory to write into, which becomes `target` when the block ends, and vanishes when it raises.

    It is `.NAME.part/new` in the target's own folder, or `TARGET/.octavo.part/new` where the target is a directory that
    cannot be renamed (:mod:`octavo.base.target_folder`). A directory at `target` is replaced: whether it may be is for
    the caller to ask first; with `replace` off it must be empty. A link is followed. The block forces its files to the
    disk (`sync_tree`). Raises `refused` for a name that cannot be used, where the disk, the quota or the file size
    limit is reached, and where another process is writing the same directory: two would mix their files.
    """
    target_folder.check_target(target, refused)
    target = target.resolve() if target.is_symlink() else target.absolute()
    target.parent.mkdir(parents=True, exist_ok=True)
    fixed = target_folder.is_fixed(target)
    scratch = target / target_folder.STAGE if fixed else target.parent / f".{target.name}.part"
    with _locked(scratch, target, refused):
        _clear(scratch, target)
        try:
            made = scratch / "new"
            with _room(target, refused):
                made.mkdir()
                yield made
            if not replace and not target_folder.is_free(target):
                now = ", ".join(target_folder.contents(target)[:3])
                raise refused(f"{target} was empty, and now holds {now}; nothing is overwritten. Name another place")
            _publish(made, target, scratch / "old", fixed, refused)
        finally:
            _clear(scratch, target)
            shutil.rmtree(scratch, ignore_errors=True)
            shutil.rmtree(target / target_folder.STAGE, ignore_errors=True)


def _publish(made: Path, target: Path, former: Path, fixed: bool, refused: type[Exception]) -> None:
    """Put a finished directory in place of `target`."""
    if not fixed:
        try:
            swap(made, target, former)
            return
        except OSError as error:  # EBUSY: a mount point that nothing announced; hours of work are not thrown away
            if error.errno != errno.EBUSY or not target.is_dir():
                raise
    with _room(target, refused):  # which may copy
        target_folder.move_in(made, target)
    sync(target)


@contextmanager
def _room(target: Path, refused: type[Exception]) -> Iterator[None]:
    """Inside, what fails for want of room raises `refused`; nothing of it stays."""
    try:
        yield
    except Exception as error:
        if (reason := no_room(target, error)) is None:
            raise
        raise refused(
            f"{target} could not be written: {reason}. Nothing was left half-written; free some space, or name another "
            "disk."
        ) from error


def swap(made: Path, target: Path, former: Path | None = None) -> None:
    """Rename `made` to `target`, what is there to `former` before (none: refused); `restore` mends a kill between."""
    if former is not None and target.exists():
        os.rename(target, former)
    os.rename(made, target)
    sync(target.parent)


def restore(former: Path, target: Path) -> None:
    """Undo a `swap` that was cut short: `former` returns where nothing took its place."""
    if former.is_dir() and not target.exists():
        os.rename(former, target)


def sync(path: Path) -> None:
    """Force a file, or a directory's list of names, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(directory: Path) -> None:
    """Force everything in a directory to the disk."""
    for place, _, names in os.walk(directory):
        for name in names:
            sync(Path(place) / name)
        sync(Path(place))


def no_room(path: Path, error: BaseException) -> str | None:
    """How a write to `path` failed for want of room, or None where it failed otherwise.

    safetensors has the machine's number in its text alone. Torch's archive writer reports a short write as an
    inconsistency of its own; the machine's word is at most in the exception that came before it, and lost where that
    crossed ranks. Then the disk itself is asked.
    """
    before: BaseException | None = error
    while before is not None:
        number = before.errno if isinstance(before, OSError) else None
        if isinstance(before, OSError) and number not in _NO_ROOM:
            return None
        found = next((n for n in _NO_ROOM if n == number or f"(os error {n})" in str(before)), None)
        if found is not None:
            return f"{_NO_ROOM[found]} ({os.strerror(found)})"
        before = before.__cause__ or before.__context__
    if isinstance(error, RuntimeError) and "inline_container" in str(error):
        there = next((place for place in (path, *path.parents) if place.exists()), None)
        free = shutil.disk_usage(there).free if there is not None else _LITTLE
        if free < _LITTLE:
            return f"{_NO_ROOM[errno.ENOSPC]} ({free >> 10} KiB are free)"
    return None


@contextmanager
def _locked(scratch: Path, target: Path, refused: type[Exception]) -> Iterator[None]:
    """Hold the scratch directory, made if need be. The lock is the kernel's: it ends with the process."""
    while True:
        scratch.mkdir(exist_ok=True)
        held = os.open(scratch, os.O_RDONLY)
        try:
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise refused(
                    f"{target} is being written by another process; wait for it, or name another directory."
                ) from error
            except OSError:
                pass  # a file system without locks: go on as one who is alone
            # whoever held it before may have removed the directory since: then it is no longer the one of this name
            if scratch.is_dir() and os.path.samestat(os.fstat(held), scratch.stat()):
                yield
                return
        finally:
            os.close(held)


def _clear(scratch: Path, target: Path) -> None:
    target_folder.recover(target)
    restore(scratch / "old", target)
    for aside in ("old", "new"):
        shutil.rmtree(scratch / aside, ignore_errors=True)
