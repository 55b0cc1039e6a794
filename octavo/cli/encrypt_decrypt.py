"""The shared part of `octavo encrypt` and `octavo decrypt`: convert a file or a folder into a new one, atomically."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, Protocol

from octavo.base import atomic_write, encryption, safe_read, target_folder
from octavo.base.safe_read import printable
from octavo.cli import arguments, terminal

PIECE = 1 << 22


class Refused(arguments.UsageError):
    """The conversion is not possible, or the disk is full."""


class Conversion(Protocol):
    """The operation on each file."""

    def begin(self, source: Path, files: list[Path], new_folder: Path | None) -> None:
        """Check all files before the first is written. `made`: the folder that is being written; None for a single
        file."""

    def named(self, file: Path) -> str | None:
        """The name of a file in the target; None: skip it."""

    def write(self, opened: BinaryIO, out: BinaryIO, file: Path, path: Path) -> Iterator[int]:
        """Convert a stored file into the one at `path`; yields the number of bytes of each piece that was read."""

    def finish(self) -> None:
        """Called when all files of a folder are written."""


def convert(source: Path, target: Path, conversion: Conversion, what: str) -> int:
    """Convert `source`, a file or a folder with everything in it, into `target`, which must not exist. Returns the
    number of files. Files and folders keep their modes. Raises Refused, and VaultError for files that cannot be
    read."""
    if not source.exists():
        raise Refused(f"{printable(source)} does not exist")
    if os.path.lexists(target) and not (target.is_dir() and source.is_dir() and target_folder.is_free(target)):
        raise Refused(f"{printable(target)} already exists, and nothing is overwritten; choose another name")
    # A target inside the source would be converted as a part of it.
    if target.resolve().is_relative_to(source.resolve()):
        raise Refused(f"{printable(target)} is inside {printable(source)}; choose a target outside of it")
    if not target.absolute().parent.is_dir():
        raise Refused(f"{printable(target.parent)} is not a folder; create it first, or choose another target")
    files = _files(source, conversion.named) if source.is_dir() else _regular([source])
    total, done = sum(file.stat().st_size for file in files), 0
    with terminal.progress(what) as progress:

        def one(file: Path, path: Path) -> None:
            nonlocal done
            with _stored(file) as opened, _private(path) as out:
                for size in conversion.write(opened, out, file, path):
                    done += size
                    progress(done, total)
                out.flush()
                os.fchmod(out.fileno(), stat.S_IMODE(os.fstat(opened.fileno()).st_mode) & 0o777)
                os.fsync(out.fileno())

        if source.is_dir():
            _write_folder(source, target, files, conversion, one)
        else:
            conversion.begin(source, files, None)
            _write_file(source, target, one)
    return len(files)


def _write_folder(
    source: Path, target: Path, files: list[Path], conversion: Conversion, one: Callable[[Path, Path], None]
) -> None:
    folders = [folder for folder in sorted(source.rglob("*")) if folder.is_dir()]
    modes = {folder.relative_to(source): stat.S_IMODE(folder.stat().st_mode) & 0o777 for folder in folders}
    fixed = target_folder.is_fixed(target)
    with atomic_write.new_folder(target, Refused, replace=False) as result:
        result.chmod(0o700)
        conversion.begin(source, files, result)
        for folder in modes:
            (result / folder).mkdir(mode=0o700)
        for file in files:
            name = conversion.named(file)
            assert name is not None, file
            one(file, result / file.relative_to(source).with_name(name))
        conversion.finish()
        for folder, mode in modes.items():
            (result / folder).chmod(mode | 0o700)  # else it could not be moved, nor removed
        atomic_write.sync_tree(result)
    if not fixed:  # a mounted volume keeps its mode
        modes[Path()] = stat.S_IMODE(source.stat().st_mode) & 0o777
    for folder in reversed(modes):
        (target / folder).chmod(modes[folder])


def _write_file(source: Path, target: Path, one: Callable[[Path, Path], None]) -> None:
    aside = target.with_name(f".{target.name}.part")
    try:
        aside.unlink(missing_ok=True)  # left by a command that was killed
        one(source, aside)
        atomic_write.swap(aside, target)
    except OSError as error:
        if (reason := atomic_write.why_no_space(target, error)) is None:
            raise
        raise Refused(f"{printable(target)} could not be written: {reason}") from error
    finally:
        aside.unlink(missing_ok=True)


def _private(path: Path) -> BinaryIO:
    """A new file that only this user can read until its final mode is set."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb")


def _files(source: Path, named: Callable[[Path], str | None]) -> list[Path]:
    """All files of a folder except locks. Raises Refused for entries that would be skipped or have the same target."""
    entries = sorted(file for file in source.rglob("*") if file.name != ".lock")
    if odd := next((file for file in entries if file.is_symlink() and (file.is_dir() or not file.exists())), None):
        what = "a folder, which is not followed" if odd.is_dir() else "nothing"
        raise Refused(f"{printable(odd)} is a link to {what}; replace it by its target, or remove it")
    stored = _regular([file for file in entries if not file.is_dir()])
    files, places = [file for file in stored if named(file) is not None], dict[Path, Path]()
    for file in files:
        name = str(named(file))
        if (other := places.setdefault(file.with_name(name), file)) is not file:
            raise Refused(f"{printable(other)} and {printable(file)} would both become {name}; convert them one by one")
    return files


def _regular(files: list[Path]) -> list[Path]:
    """The same files. Raises Refused for one that is not regular: opening a pipe would wait for a writer."""
    for file in files:
        if (kind := safe_read.describe_file_type(file)) is not None:
            raise Refused(f"{printable(file)} is {kind}, not a file; remove it from the folder")
    return files


def _stored(file: Path) -> BinaryIO:
    """Open a regular file as it is on the disk."""
    return _regular([file])[0].open("rb")


def lines(opened: BinaryIO, file: Path, key: encryption.Key | None = None) -> Iterator[tuple[int, bytes]]:
    """(bytes read, content) of each line of an encrypted list; `key` None: the process's key."""
    for number, line in enumerate(opened, 1):
        if line.endswith(b"\n"):  # a killed writer leaves half a line
            yield len(line), encryption.decrypt_line(line[:-1], f"{file}, line {number},", key)


def pieces(opened: BinaryIO) -> Iterator[bytes]:
    """The rest of a file, from its current position, in pieces."""
    return iter(lambda: opened.read(PIECE), b"")


def is_encrypted(opened: BinaryIO) -> bool:
    """Whether a file is encrypted, by its first bytes."""
    begins = encryption.has_magic(opened.read(8))
    opened.seek(0)
    return begins


def count_summary(counts: dict[str, int]) -> str:
    """ "3 encrypted, 1 copied as they are" of those that are not 0."""
    return ", ".join(f"{count} {how}" for how, count in counts.items() if count)
