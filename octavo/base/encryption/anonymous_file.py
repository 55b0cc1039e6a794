"""Files that exist only in memory and still have a path, for libraries that open paths (Linux's memfd_create).

The path is /proc/PID/fd/N: children of the process, forked or spawned, can open it too while the process lives. Such a
file is never on a disk, unless the system swaps; it is freed when the last process closes it.
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
    """Create an empty file in memory. Returns its handle, which the caller closes, and its path.

    what   the file that it replaces, for the error message

    Raises VaultError if this system has no such files.
    """
    if not hasattr(os, "memfd_create"):
        raise VaultError(
            f"{what} is encrypted and would have to be written to a disk in plain: this system has no in-memory files "
            "(memfd_create of Linux). Use Linux, or decrypt it first with octavo decrypt"
        )
    handle = os.memfd_create("octavo")
    return handle, Path(f"/proc/{os.getpid()}/fd/{handle}")


@contextmanager
def plain_path(path: Path) -> Iterator[Path]:
    """Provide a path under which a library may open a file: the path itself, or for an encrypted file the path of its
    plain text in memory, which is freed when the block ends. Raises VaultError."""
    if not is_encrypted(path):
        check_file(path, None)
        yield path
        return
    handle, memory_path = create_memory_file(str(path))
    try:
        with open_decrypted(os.open(path, os.O_RDONLY | os.O_CLOEXEC), path, 0) as plain:
            while piece := plain.read(1 << 22):
                view = memoryview(piece)
                while view:
                    view = view[os.write(handle, view) :]
        yield memory_path
    finally:
        os.close(handle)
