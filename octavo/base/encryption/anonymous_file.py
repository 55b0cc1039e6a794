"""Files that exist only in memory and still have a path, for libraries that open paths (Linux's memfd_create).

The path is /proc/PID/fd/N: children of the process, forked or spawned, can open it too while the process lives. Nothing
of such a file is on a disk, unless the system swaps; it is freed when the last process closes it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from octavo.base.encryption.errors import VaultError
from octavo.base.encryption.folders import check_file, open_decrypted
from octavo.base.encryption.reader import is_encrypted


def create_memory_file(what: str) -> tuple[int, Path]:
    """A new empty file in memory: its handle, which the caller closes, and its path. Raises VaultError, which names
    `what` the file is for, where this system has none."""
    if not hasattr(os, "memfd_create"):
        raise VaultError(
            f"{what} is encrypted and would have to be written to a disk in plain here: this system has no files in "
            "memory (memfd_create of Linux). Use Linux, or decrypt it yourself: octavo decrypt"
        )
    handle = os.memfd_create("octavo")
    return handle, Path(f"/proc/{os.getpid()}/fd/{handle}")


@contextmanager
def plain_path(path: Path) -> Iterator[Path]:
    """A path under which a library may open a file: the path itself, or for an encrypted file the path of its plain
    text in memory, which is freed when the block ends. Raises VaultError."""
    if not is_encrypted(path):
        check_file(path, None)
        yield path
        return
    handle, place = create_memory_file(str(path))
    try:
        with open_decrypted(os.open(path, os.O_RDONLY | os.O_CLOEXEC), path, 0) as plain:
            while piece := plain.read(1 << 22):
                view = memoryview(piece)
                while view:
                    view = view[os.write(handle, view) :]
        yield place
    finally:
        os.close(handle)
