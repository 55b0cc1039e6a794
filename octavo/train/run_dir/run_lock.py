"""One training process a run directory: two would interleave their metrics and sweep each other's checkpoints.

Two things say that somebody is there. The kernel's lock (flock) ends with its process, but between hosts it is only as
good as the file system: some forget it, some keep it after its host has died. So the file also says who holds it, and a
number in it goes up every few seconds for as long as the process lives. On one host the lock decides, at once. Where
the file names another host, the number does: one that stands still is of a holder that is dead.
"""

from __future__ import annotations

import errno
import os
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import IO, NamedTuple

from octavo.base import safe_read
from octavo.train.errors import TrainError

try:
    import fcntl
except ImportError:  # Windows has none; there the directory is not guarded
    fcntl = None  # type: ignore[assignment]

LOCK = ".lock"
BEAT = 5.0  # seconds between two numbers
DEAD = 6  # beats after which a number that stands still is a dead holder's
_WITHOUT = (errno.EACCES, errno.EPERM, errno.EROFS)  # a directory that nobody can write to needs no guard
_UNABLE = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)  # file systems without locks, some over networks


class Holder(NamedTuple):
    """Who holds a lock: what its file says but for the number. ``boot``: of which start of which machine (containers
    of one machine share it, and its locks)."""

    pid: str
    host: str = ""
    boot: str = ""

    @property
    def words(self) -> str:
        return f"process {self.pid}{f' on {self.host}' if self.elsewhere else ''}" if self.pid else "another process"

    @property
    def elsewhere(self) -> bool:
        """Whether it is, or was, of another machine, or of this one before it was started again."""
        return bool(self.boot) and self.boot != _boot()


class RunLock:
    """A context that gives back what `take` took. The kernel does so too when the process dies, however it dies."""

    def __init__(self) -> None:
        self._file: IO[str] | None = None
        self._ended = threading.Event()

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._file is not None and _read(Path(self._file.name))[0] == _me():
            self._file.truncate(0)  # nobody has to wait whether this one is alive
        self._close()

    def take(self, directory: Path, say: Callable[[str], None] = lambda text: None) -> None:
        """Lock `directory`, which is made if need be. The file in it stays: it names the last process that held it.
        `say` gets a line where it takes time to see whether a holder on another host is alive.

        Raises TrainError where another process, or another run of this one, holds it.
        """
        if fcntl is None or self._file is not None:
            return
        file = _open(directory)
        if file is None:
            return
        try:
            free = _locked(file)
        except OSError as error:
            file.close()
            if error.errno in _UNABLE:
                return
            raise
        path = directory / LOCK
        holder = _read(path)[0]
        if (holder.elsewhere and _beats(path, say)) or not (free or holder.elsewhere):
            file.close()
            raise _in_use(directory, holder)
        if not free:  # of a host that is gone; its lock goes with its file
            file.close()
            path.unlink(missing_ok=True)
            file = _open(directory)
            if file is None or not _locked(file):
                raise _in_use(directory, _read(path)[0])
        self._file = file
        self._write(0)
        _HELD.add(self)
        threading.Thread(target=self._beat, args=(path,), name="lock", daemon=True).start()

    def _write(self, number: int) -> None:
        assert self._file is not None
        text = f"{' '.join(_me())} {number:012d}\n".encode()
        os.pwrite(self._file.fileno(), text, 0)  # at once, so that a reader never meets half of it
        os.ftruncate(self._file.fileno(), len(text))

    def _beat(self, path: Path) -> None:
        number = 0
        while not self._ended.wait(BEAT):
            number += 1
            try:
                holder = _read(path)[0]  # that of nobody: the file cannot be read now, or somebody removed it
                if holder.pid and holder != _me():
                    break
                self._write(number)
            except (OSError, TrainError, ValueError):  # no file system for a moment; ValueError: closed just now
                continue
        else:
            return
        if not self._ended.is_set():
            print(
                f"{path.parent} was taken over by {_read(path)[0].words}, which saw no sign of this process for "
                f"{BEAT * DEAD:g} s (it was stopped, or its file system did not answer). This process ends now, since "
                "two would write over each other", file=sys.stderr, flush=True,
            )  # fmt: skip
            os._exit(1)

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _open(directory: Path) -> IO[str] | None:
    """The file, made if need be; None in a directory that nobody can write to."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if (directory / LOCK).exists():
            safe_read.open_file(directory / LOCK, TrainError).close()
        opener = lambda name, flags: os.open(name, flags | os.O_CREAT, 0o666)  # noqa: E731  (r+, and no O_APPEND)
        return open(directory / LOCK, "r+", encoding="utf-8", opener=opener)
    except FileNotFoundError as error:
        raise TrainError(
            f"run directory {directory} cannot be made ({error.strerror}: {error.filename}). Name another run.dir"
        ) from error
    except OSError as error:
        if error.errno in _WITHOUT:
            return None
        raise


def _locked(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _in_use(directory: Path, holder: Holder) -> TrainError:
    return TrainError(
        f"run directory {directory} is in use by {holder.words}; wait for it to end, stop it with SIGTERM (it saves), "
        "or name another run.dir"
    )


def _read(path: Path) -> tuple[Holder, str]:
    """Who holds a lock, and the number. Opened anew each time: over a network that is when a change is seen."""
    try:
        words = safe_read.read_bytes(path, TrainError).decode("utf-8", "replace").split()
    except TrainError:
        return Holder(""), ""
    return Holder(*words[:3]) if words else Holder(""), words[3] if len(words) > 3 else ""


def _beats(path: Path, say: Callable[[str], None]) -> bool:
    """Whether the number of a holder elsewhere goes up."""
    holder, number = first = _read(path)
    say(f"{path.parent} was last held by {holder.words}: waiting up to {BEAT * DEAD:g} s to see whether it is alive")
    until = time.monotonic() + BEAT * DEAD
    while time.monotonic() < until:
        time.sleep(BEAT / 5)
        if (now := _read(path)) != first and now[0].pid:
            return True
    return False


def _boot() -> str:
    """Which start of which machine this is."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def _me() -> Holder:
    return Holder(str(os.getpid()), socket.gethostname(), _boot())


# A forked data worker shares the lock and would hold it on after its trainer was killed.
_HELD: weakref.WeakSet[RunLock] = weakref.WeakSet()


def _close_inherited() -> None:
    for lock in _HELD:
        lock._close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_inherited)
