"""One training process per run directory: two would interleave their metrics and delete each other's checkpoints.

Two signs show that a process holds a directory. The kernel's lock (flock) ends with its process, but between hosts it
is only as reliable as the file system: some forget it, some keep it after its host has died. So the file also names its
holder and has a number that increases every few seconds while the process lives. On one host the lock decides
immediately. If the file names another host, the number decides: if it does not change, the holder is dead.
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
except ImportError:  # Windows has no fcntl; directories are not locked there
    fcntl = None  # type: ignore[assignment]

LOCK = ".lock"
BEAT = 5.0  # seconds between two heartbeats
DEAD = 6  # heartbeats after which an unchanged number means that the holder is dead
_WITHOUT = (errno.EACCES, errno.EPERM, errno.EROFS)  # a directory without write access needs no lock
_UNABLE = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)  # file systems without locks, e.g. some network ones


class Holder(NamedTuple):
    """The holder of a lock, as its file names it. ``boot`` identifies a machine and its boot (containers of one machine
    share it, and its locks)."""

    pid: str
    host: str = ""
    boot: str = ""

    @property
    def words(self) -> str:
        return f"process {self.pid}{f' on {self.host}' if self.elsewhere else ''}" if self.pid else "another process"

    @property
    def elsewhere(self) -> bool:
        """Whether it runs or ran on another machine, or on this one before a reboot."""
        return bool(self.boot) and self.boot != _boot()


class RunLock:
    """A context that releases the lock of `take`. If the process dies, the kernel releases it."""

    def __init__(self) -> None:
        self._file: IO[str] | None = None
        self._ended = threading.Event()

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._file is not None and _read(Path(self._file.name))[0] == _me():
            self._file.truncate(0)  # so that no other host waits to see whether this process is alive
        self._close()

    def take(self, directory: Path, log: Callable[[str], None] = lambda text: None) -> None:
        """Lock `directory`, which is created if necessary. The lock file stays and names its last holder. `log`
        receives a line if it takes time to see whether a holder on another host is alive.

        Raises TrainError if another process, or another run of this process, holds it.
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
        if (holder.elsewhere and _beats(path, log)) or not (free or holder.elsewhere):
            file.close()
            raise _in_use(directory, holder)
        if not free:  # held by a dead host: a new file has no lock
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
        os.pwrite(self._file.fileno(), text, 0)  # one write, so that readers never see half of it
        os.ftruncate(self._file.fileno(), len(text))

    def _beat(self, path: Path) -> None:
        number = 0
        while not self._ended.wait(BEAT):
            number += 1
            try:
                holder = _read(path)[0]  # no pid: the file cannot be read now, or was removed
                if holder.pid and holder != _me():
                    break
                self._write(number)
            except (OSError, TrainError, ValueError):  # file system temporarily gone; ValueError: just closed
                continue
        else:
            return
        if not self._ended.is_set():
            print(
                f"{path.parent} was taken over by {_read(path)[0].words}, which saw no sign of this process for "
                f"{BEAT * DEAD:g} s (it was stopped, or its file system did not answer). This process ends now, since "
                "two would overwrite each other's files", file=sys.stderr, flush=True,
            )  # fmt: skip
            os._exit(1)

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _open(directory: Path) -> IO[str] | None:
    """The lock file, created if necessary; None in a directory without write access."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if (directory / LOCK).exists():
            safe_read.open_file(directory / LOCK, TrainError).close()
        opener = lambda name, flags: os.open(name, flags | os.O_CREAT, 0o666)  # noqa: E731  (r+, and no O_APPEND)
        return open(directory / LOCK, "r+", encoding="utf-8", opener=opener)
    except FileNotFoundError as error:
        raise TrainError(
            f"run directory {directory} cannot be created ({error.strerror}: {error.filename}). Name another run.dir"
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
    """The holder of a lock, and its number. Reopens the file each time: network file systems show changes on open."""
    try:
        words = safe_read.read_bytes(path, TrainError).decode("utf-8", "replace").split()
    except TrainError:
        return Holder(""), ""
    return Holder(*words[:3]) if words else Holder(""), words[3] if len(words) > 3 else ""


def _beats(path: Path, log: Callable[[str], None]) -> bool:
    """Whether the number of a holder on another host increases."""
    holder, number = first = _read(path)
    log(f"{path.parent} was last held by {holder.words}: waiting up to {BEAT * DEAD:g} s to see whether it is alive")
    until = time.monotonic() + BEAT * DEAD
    while time.monotonic() < until:
        time.sleep(BEAT / 5)
        if (now := _read(path)) != first and now[0].pid:
            return True
    return False


def _boot() -> str:
    """Identifies this machine and its boot."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def _me() -> Holder:
    return Holder(str(os.getpid()), socket.gethostname(), _boot())


# A forked data worker shares the lock, and would keep holding it after its trainer was killed.
_HELD: weakref.WeakSet[RunLock] = weakref.WeakSet()


def _close_inherited() -> None:
    for lock in _HELD:
        lock._close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_inherited)
