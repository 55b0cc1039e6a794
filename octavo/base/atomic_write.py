"""Atomic writes of files and folders: after a kill or a full disk a target is either complete or unchanged.

Everything is written to a temporary name on the same disk and then renamed into place. The next write to the same
target removes what a killed process left, except temporary files of targets that several processes may write, because
those have unique names.
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
    """Write a file so that it also survives a power failure. `shared`: several processes may write it at once; the last
    one wins."""
    write_bytes(file, text.encode(), shared)


def write_bytes(file: Path, content: bytes, shared: bool = False) -> None:
    """Write bytes as `write_text` writes text."""
    temporary = file.with_name(f".{file.name}.{uuid4().hex}.tmp" if shared else f".{file.name}.tmp")
    try:
        with open(temporary, "wb") as out:
            out.write(content)
            out.flush()
            os.fsync(out.fileno())
        os.replace(temporary, file)
    except BaseException:  # a signal too
        temporary.unlink(missing_ok=True)
        raise


@contextmanager
def new_folder(target: Path, refused: type[Exception], replace: bool = True) -> Iterator[Path]:
    """Create a directory to write into, which becomes `target` when the block ends and is removed if the block raises.

    It is `.NAME.part/new` in the target's parent folder, or `TARGET/.octavo.part/new` where the target is a directory
    that cannot be renamed (:mod:`octavo.base.target_folder`). A directory at `target` is replaced: the caller decides
    whether it may be; without `replace` it must be empty. A link is followed. The block syncs its files to the disk
    (`sync_tree`). Raises `refused` for a name that cannot be used, if the disk, the quota or the file size limit is
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
            staged = scratch / "new"
            with _space_errors(target, refused):
                staged.mkdir()
                yield staged
            if not replace and not target_folder.is_free(target):
                names = ", ".join(target_folder.contents(target)[:3])
                raise refused(
                    f"{target} was empty and now contains {names}; nothing is overwritten. Choose another path"
                )
            _publish(staged, target, scratch / "old", fixed, refused)
        finally:
            _remove_leftovers(scratch, target)
            shutil.rmtree(scratch, ignore_errors=True)
            shutil.rmtree(target / target_folder.STAGE, ignore_errors=True)


def _publish(new_folder: Path, target: Path, previous: Path, fixed: bool, refused: type[Exception]) -> None:
    """Put a finished directory in place of `target`."""
    if not fixed:
        try:
            swap(new_folder, target, previous)
            return
        except OSError as error:  # EBUSY: an undetected mount point; the finished work is moved instead
            if error.errno != errno.EBUSY or not target.is_dir():
                raise
    with _space_errors(target, refused):  # move_in may copy
        target_folder.move_in(new_folder, target)
    sync(target)


@contextmanager
def _space_errors(target: Path, refused: type[Exception]) -> Iterator[None]:
    """Raise `refused` for writes in the block that fail for lack of space."""
    try:
        yield
    except Exception as error:
        if (reason := why_no_space(target, error)) is None:
            raise
        raise refused(
            f"{target} could not be written: {reason}. Nothing was left half-written; free some space or choose "
            "another disk."
        ) from error


def swap(new_folder: Path, target: Path, previous: Path | None = None) -> None:
    """Rename an existing `target` to `previous` (without it the target must not exist), then `new_folder` to `target`.
    `restore` undoes a swap that a kill interrupted."""
    if previous is not None and target.exists():
        os.rename(target, previous)
    os.rename(new_folder, target)
    sync(target.parent)


def restore(previous: Path, target: Path) -> None:
    """Undo a `swap` that a kill interrupted: rename `previous` back if `target` does not exist."""
    if previous.is_dir() and not target.exists():
        os.rename(previous, target)


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
    """Return why a write to `path` failed for lack of space, or None if it failed for another reason.

    safetensors gives the errno only in its text. Torch's archive writer reports a short write as its own inconsistency;
    the errno is at most in the exception before it, and is lost if that exception crossed ranks. Then the free space
    of the disk decides.
    """
    cause: BaseException | None = error
    while cause is not None:
        number = cause.errno if isinstance(cause, OSError) else None
        if isinstance(cause, OSError) and number not in _NO_SPACE:
            return None
        full = next((n for n in _NO_SPACE if n == number or f"(os error {n})" in str(cause)), None)
        if full is not None:
            return f"{_NO_SPACE[full]} ({os.strerror(full)})"
        cause = cause.__cause__ or cause.__context__
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
        handle = os.open(scratch, os.O_RDONLY)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise refused(
                    f"{target} is being written by another process; wait for it or choose another directory."
                ) from error
            except OSError:
                pass  # a file system without locks: continue as if no other process wrote here
            # The previous holder may have removed the directory between open and lock: then this name is another
            # directory.
            if scratch.is_dir() and os.path.samestat(os.fstat(handle), scratch.stat()):
                yield
                return
        finally:
            os.close(handle)


def _remove_leftovers(scratch: Path, target: Path) -> None:
    target_folder.recover(target)
    restore(scratch / "old", target)
    for name in ("old", "new"):
        shutil.rmtree(scratch / name, ignore_errors=True)
