"""Atomic writes of files and folders: after a kill or a full disk a target is either complete or unchanged.

Everything is written to a temporary name on the same disk, and then renamed into place. The next write to the same
target removes what a kill left, except temporary files of targets that several processes may write: those have unique
names.
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

_NO_SPACE = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "your quota of this disk is used up",
    errno.EFBIG: "a file would be larger than this disk, or the limit of this shell (ulimit -f), allows",
}
# With fewer free bytes, a failed write is attributed to a full disk: a few blocks may stay free that no file can use.
_NEARLY_FULL = 1 << 20


def write_text(file: Path, text: str, shared: bool = False) -> None:
    """Write a file, safe also from a power cut. `shared`: several processes may write it at once; the last one wins."""
    write_bytes(file, text.encode(), shared)


def write_bytes(file: Path, content: bytes, shared: bool = False) -> None:
    """Write bytes as `write_text` writes text."""
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
def new_folder(target: Path, refused: type[Exception], replace: bool = True) -> Iterator[Path]:
    """A new directory to write into, which becomes `target` when the block ends, and is removed when it raises.

    It is `.NAME.part/new` in the target's parent folder, or `TARGET/.octavo.part/new` where the target is a directory
    that cannot be renamed (:mod:`octavo.base.target_folder`). A directory at `target` is replaced: the caller decides
    whether it may be; with `replace` off it must be empty. A link is followed. The block syncs its files to the disk
    (`sync_tree`). Raises `refused` for a name that cannot be used, where the disk, the quota or the file size limit is
    reached, and while another process writes the same directory, because the two would mix their files.
    """
    target_folder.check_target(target, refused)
    target = target.resolve() if target.is_symlink() else target.absolute()
    target.parent.mkdir(parents=True, exist_ok=True)
    fixed = target_folder.is_fixed(target)
    scratch = target / target_folder.STAGE if fixed else target.parent / f".{target.name}.part"
    with _hold_lock(scratch, target, refused):
        _remove_leftovers(scratch, target)
        try:
            new_folder = scratch / "new"
            with _space_errors(target, refused):
                new_folder.mkdir()
                yield new_folder
            if not replace and not target_folder.is_free(target):
                now = ", ".join(target_folder.contents(target)[:3])
                raise refused(f"{target} was empty, and now holds {now}; nothing is overwritten. Name another place")
            _publish(new_folder, target, scratch / "old", fixed, refused)
        finally:
            _remove_leftovers(scratch, target)
            shutil.rmtree(scratch, ignore_errors=True)
            shutil.rmtree(target / target_folder.STAGE, ignore_errors=True)


def _publish(new_folder: Path, target: Path, former: Path, fixed: bool, refused: type[Exception]) -> None:
    """Put a finished directory in place of `target`."""
    if not fixed:
        try:
            swap(new_folder, target, former)
            return
        except OSError as error:  # EBUSY: a mount point that nothing announced; hours of work are not thrown away
            if error.errno != errno.EBUSY or not target.is_dir():
                raise
    with _space_errors(target, refused):  # which may copy
        target_folder.move_in(new_folder, target)
    sync(target)


@contextmanager
def _space_errors(target: Path, refused: type[Exception]) -> Iterator[None]:
    """Raise `refused` for writes in the block that fail for lack of space; nothing half-written is left."""
    try:
        yield
    except Exception as error:
        if (reason := why_no_space(target, error)) is None:
            raise
        raise refused(
            f"{target} could not be written: {reason}. Nothing was left half-written; free some space, or name another "
            "disk."
        ) from error


def swap(new_folder: Path, target: Path, former: Path | None = None) -> None:
    """Rename `new_folder` to `target`, after an existing target to `former` (None: it must not exist). `restore` undoes
    a swap that a kill cut short."""
    if former is not None and target.exists():
        os.rename(target, former)
    os.rename(new_folder, target)
    sync(target.parent)


def restore(former: Path, target: Path) -> None:
    """Undo a `swap` that a kill cut short: rename `former` back if `target` does not exist."""
    if former.is_dir() and not target.exists():
        os.rename(former, target)


def sync(path: Path) -> None:
    """Sync a file, or a directory's list of names, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(directory: Path) -> None:
    """Sync everything in a directory to the disk."""
    for place, _, names in os.walk(directory):
        for name in names:
            sync(Path(place) / name)
        sync(Path(place))


def why_no_space(path: Path, error: BaseException) -> str | None:
    """Why a write to `path` failed for lack of space, or None where it failed for another reason.

    safetensors gives the errno only in its text. Torch's archive writer reports a short write as its own inconsistency;
    the errno is at most in the exception before it, and lost where that crossed ranks. Then the free space of the disk
    decides.
    """
    before: BaseException | None = error
    while before is not None:
        number = before.errno if isinstance(before, OSError) else None
        if isinstance(before, OSError) and number not in _NO_SPACE:
            return None
        full = next((n for n in _NO_SPACE if n == number or f"(os error {n})" in str(before)), None)
        if full is not None:
            return f"{_NO_SPACE[full]} ({os.strerror(full)})"
        before = before.__cause__ or before.__context__
    if isinstance(error, RuntimeError) and "inline_container" in str(error):
        existing = next((place for place in (path, *path.parents) if place.exists()), None)
        free = shutil.disk_usage(existing).free if existing is not None else _NEARLY_FULL
        if free < _NEARLY_FULL:
            return f"{_NO_SPACE[errno.ENOSPC]} ({free >> 10} KiB are free)"
    return None


@contextmanager
def _hold_lock(scratch: Path, target: Path, refused: type[Exception]) -> Iterator[None]:
    """Lock the scratch directory, creating it if needed. The kernel releases the lock when the process ends."""
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
                pass  # a file system without locks: continue as if no other process wrote here
            # The previous holder may have removed the directory between open and lock: then this name is another one.
            if scratch.is_dir() and os.path.samestat(os.fstat(held), scratch.stat()):
                yield
                return
        finally:
            os.close(held)


def _remove_leftovers(scratch: Path, target: Path) -> None:
    target_folder.recover(target)
    restore(scratch / "old", target)
    for aside in ("old", "new"):
        shutil.rmtree(scratch / aside, ignore_errors=True)
