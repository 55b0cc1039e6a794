"""Files that lie in memory alone and have a path all the same, for libraries that open paths (Linux's memfd_create).

The path is /proc/PID/fd/N: children of the process, forked or spawned, open it too for as long as it lives. Nothing of
such a file is on a disk, unless the system swaps; it goes with the last process that has it open.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from octavo.base.encryption.errors import VaultError
from octavo.base.encryption.folders import check_file, opened
from octavo.base.encryption.reader import is_encrypted


def anonymous(what: str) -> tuple[int, Path]:
    """A new empty file in memory: its handle, to be closed by the caller, and its path. `what` it is for is said where
    this system has none. Raises VaultError."""
    if not hasattr(os, "memfd_create"):
        raise VaultError(
            f"{what} is encrypted and would have to be written to a disk in plain here: this system has no files in "
            "memory (memfd_create of Linux). Use Linux, or decrypt it yourself: octavo decrypt"
        )
    handle = os.memfd_create("octavo")
    return handle, Path(f"/proc/{os.getpid()}/fd/{handle}")


@contextmanager
def plain_path(path: Path) -> Iterator[Path]:
    """A path under which a library may open a file: its own, or of an encrypted one that of its plain text in memory,
    which is gone when the block ends. Raises VaultError."""
    if not is_encrypted(path):
        check_file(path, None)
        yield path
        return
    handle, place = anonymous(str(path))
    try:
        with opened(os.open(path, os.O_RDONLY | os.O_CLOEXEC), path, 0) as plain:
            while piece := plain.read(1 << 22):
                view = memoryview(piece)
                while view:
                    view = view[os.write(handle, view) :]
        yield place
    finally:
        os.close(handle)
