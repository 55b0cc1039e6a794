"""One training process a run directory: two would interleave their metrics and sweep each other's checkpoints."""

from __future__ import annotations

import errno
import os
import weakref
from pathlib import Path
from typing import IO

from octavo import reading
from octavo.train.errors import TrainError

try:
    import fcntl
except ImportError:  # Windows has none; there the directory is not guarded
    fcntl = None  # type: ignore[assignment]

LOCK = ".lock"
_WITHOUT = (errno.EACCES, errno.EPERM, errno.EROFS)  # a directory that nobody can write to needs no guard
_UNABLE = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)  # file systems without locks, some over networks


class RunLock:
    """A context that gives back what `take` took. The kernel does so too when the process dies, however it dies."""

    def __init__(self) -> None:
        self._file: IO[str] | None = None

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def take(self, directory: Path) -> None:
        """Lock `directory`, which is made if need be. The file in it stays: it names the last process that held it.

        Raises TrainError where another process, or another run of this one, holds it.
        """
        if fcntl is None or self._file is not None:
            return
        try:
            directory.mkdir(parents=True, exist_ok=True)
            if (directory / LOCK).exists():
                reading.open_file(directory / LOCK, TrainError).close()
            file = (directory / LOCK).open("a+", encoding="utf-8")
        except FileNotFoundError as error:
            raise TrainError(
                f"run directory {directory} cannot be made ({error.strerror}: {error.filename}). Name another run.dir"
            ) from error
        except OSError as error:
            if error.errno in _WITHOUT:
                return
            raise
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip()
            file.close()
            raise TrainError(
                f"run directory {directory} is in use by {f'process {holder}' if holder else 'another process'}; wait "
                "for it to end, stop it with SIGTERM (it saves), or name another run.dir"
            ) from None
        except OSError as error:
            file.close()
            if error.errno in _UNABLE:
                return
            raise
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        self._file = file
        _HELD.add(self)

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


# A forked data worker shares the lock and would hold it on after its trainer was killed.
_HELD: weakref.WeakSet[RunLock] = weakref.WeakSet()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: [lock._close() for lock in _HELD])
