"""One training process per run directory: two would interleave their metrics and delete each other's checkpoints.

Two signs show that a process holds a directory. The kernel's lock (flock) ends with its process, but between hosts it
it is only as reliable as the file system: some lose it, some keep it after the host has died. So the file also names
its holder and contains a number that increases every few seconds while the process lives. On one host the lock decides
immediately. If the file names a different host, the number decides: if it does not change, the holder is dead.
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
HEARTBEAT_S = 5.0  # seconds between two heartbeats
DEAD_AFTER = 6  # heartbeat intervals without a change after which the holder is dead
_NO_WRITE_ACCESS = (errno.EACCES, errno.EPERM, errno.EROFS)  # a directory without write access needs no lock
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)  # file systems without locks, e.g. some network ones


class Holder(NamedTuple):
    """The process that holds a lock, as named in the lock file. ``boot`` identifies a machine and its boot; containers
    on one machine share the boot and the locks."""

    pid: str
    host: str = ""
    boot: str = ""

    @property
    def description(self) -> str:
        if not self.pid:
            return "another process"
        return f"process {self.pid} on {self.host}" if self.on_other_host else f"process {self.pid}"

    @property
    def on_other_host(self) -> bool:
        """True if the process is on a different machine, or was on this one before a reboot."""
        return bool(self.boot) and self.boot != _boot_id()


class RunLock:
    """A context that releases on exit the lock that `take` acquired. If the process dies, the kernel releases it."""

    def __init__(self) -> None:
        self._file: IO[str] | None = None
        self._ended = threading.Event()

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._file is not None and _read(Path(self._file.name))[0] == _this_process():
            self._file.truncate(0)  # so that other hosts need not wait for a heartbeat
        self._close()

    def take(self, directory: Path, log: Callable[[str], None] = lambda text: None) -> None:
        """Lock `directory`, which is created if necessary. The lock file is kept and names its last holder. Logs a line
        before waiting for the heartbeat of a holder on a different host.

        Raises TrainError if another process, or another run in this process, holds the lock.
        """
        if fcntl is None or self._file is not None:
            return
        file = _open(directory)
        if file is None:
            return
        try:
            free = _try_lock(file)
        except OSError as error:
            file.close()
            if error.errno in _NO_LOCKS:
                return
            raise
        path = directory / LOCK
        holder = _read(path)[0]
        if (holder.on_other_host and _is_alive(path, log)) or not (free or holder.on_other_host):
            file.close()
            raise _in_use_error(directory, holder)
        if not free:  # held by a dead host: a new file has no lock
            file.close()
            path.unlink(missing_ok=True)
            file = _open(directory)
            if file is None or not _try_lock(file):
                raise _in_use_error(directory, _read(path)[0])
        self._file = file
        self._write(0)
        _HELD_LOCKS.add(self)
        threading.Thread(target=self._beat, args=(path,), name="lock", daemon=True).start()

    def _write(self, number: int) -> None:
        assert self._file is not None
        text = f"{' '.join(_this_process())} {number:012d}\n".encode()
        os.pwrite(self._file.fileno(), text, 0)  # a single write, so that readers never see a part of it
        os.ftruncate(self._file.fileno(), len(text))

    def _beat(self, path: Path) -> None:
        number = 0
        while not self._ended.wait(HEARTBEAT_S):
            number += 1
            try:
                holder = _read(path)[0]  # without a pid the file was removed or cannot be read now
                if holder.pid and holder != _this_process():
                    break
                self._write(number)
            except (
                OSError,
                TrainError,
                ValueError,
            ):  # file system unavailable; ValueError: file just closed
                continue
        else:
            return
        if not self._ended.is_set():
            print(
                f"{path.parent} was taken over by {_read(path)[0].description}, which saw no heartbeat of this process "
                f"for {HEARTBEAT_S * DEAD_AFTER:g} s (it was stopped, or its file system did not answer). This process "
                "ends now, since two would overwrite each other's files", file=sys.stderr, flush=True,
            )  # fmt: skip
            os._exit(1)

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _open(directory: Path) -> IO[str] | None:
    """Open the lock file, which is created if necessary. Returns None for a directory without write access."""
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
        if error.errno in _NO_WRITE_ACCESS:
            return None
        raise


def _try_lock(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _in_use_error(directory: Path, holder: Holder) -> TrainError:
    return TrainError(
        f"run directory {directory} is in use by {holder.description}; wait for it to end, stop it with SIGTERM (it "
        "saves), or name another run.dir"
    )


def _read(path: Path) -> tuple[Holder, str]:
    """Read the holder of a lock, and its number. The file is reopened each time, because network file systems show
    changes on open."""
    try:
        words = safe_read.read_bytes(path, TrainError).decode("utf-8", "replace").split()
    except TrainError:
        return Holder(""), ""
    return Holder(*words[:3]) if words else Holder(""), words[3] if len(words) > 3 else ""


def _is_alive(path: Path, log: Callable[[str], None]) -> bool:
    """Return True if the number of a holder on a different host increases."""
    holder, number = first = _read(path)
    timeout_s = HEARTBEAT_S * DEAD_AFTER
    log(f"{path.parent} was last held by {holder.description}: waiting up to {timeout_s:g} s for a sign of life")
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        time.sleep(HEARTBEAT_S / 5)
        if (now := _read(path)) != first and now[0].pid:
            return True
    return False


def _boot_id() -> str:
    """Return an identifier of this machine and its boot."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def _this_process() -> Holder:
    return Holder(str(os.getpid()), socket.gethostname(), _boot_id())


# A forked data worker inherits the lock, and would keep it after its trainer was killed.
_HELD_LOCKS: weakref.WeakSet[RunLock] = weakref.WeakSet()


def _close_inherited() -> None:
    for lock in _HELD_LOCKS:
        lock._close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_inherited)
