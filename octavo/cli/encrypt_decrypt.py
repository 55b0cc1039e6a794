"""Shared by `octavo encrypt` and `octavo decrypt`: converts a file or a folder into a new one, atomically."""

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
        """Check all files before the first is written. `new_folder`: the folder that is being written, or None for a
        single file."""

    def named(self, file: Path) -> str | None:
        """Return the name of a file in the target, or None to skip it."""

    def write(self, opened: BinaryIO, out: BinaryIO, file: Path, path: Path) -> Iterator[int]:
        """Convert a stored file into the one at `path`; yields the number of bytes of each piece that was read."""

    def finish(self) -> None:
        """Finish a folder; called after all its files are written."""


def convert(source: Path, target: Path, conversion: Conversion, what: str) -> int:
    """Convert `source`, a file or a folder with all its content, into `target`, which must not exist. Returns the
    number of files. Files and folders keep their modes. Raises Refused, and VaultError for files that cannot be
    read."""
    if not source.exists():
        raise Refused(f"{printable(source)} does not exist")
    if os.path.lexists(target) and not (target.is_dir() and source.is_dir() and target_folder.is_free(target)):
        raise Refused(f"{printable(target)} already exists, and nothing is overwritten; choose another name")
    # A target inside the source would itself be converted.
    if target.resolve().is_relative_to(source.resolve()):
        raise Refused(f"{printable(target)} is inside {printable(source)}; choose a target outside of it")
    if not target.absolute().parent.is_dir():
        raise Refused(f"{printable(target.parent)} is not a folder; create it first, or choose another target")
    files = _files(source, conversion.named) if source.is_dir() else _regular([source])
    total, done = sum(file.stat().st_size for file in files), 0
    with terminal.progress(what) as progress:

        def convert_file(file: Path, path: Path) -> None:
            nonlocal done
            with _stored(file) as opened, _private(path) as out:
                for size in conversion.write(opened, out, file, path):
                    done += size
                    progress(done, total)
                out.flush()
                os.fchmod(out.fileno(), stat.S_IMODE(os.fstat(opened.fileno()).st_mode) & 0o777)
                os.fsync(out.fileno())

        if source.is_dir():
            _write_folder(source, target, files, conversion, convert_file)
        else:
            conversion.begin(source, files, None)
            _write_file(source, target, convert_file)
    return len(files)


def _write_folder(
    source: Path, target: Path, files: list[Path], conversion: Conversion, convert_file: Callable[[Path, Path], None]
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
            convert_file(file, result / file.relative_to(source).with_name(name))
        conversion.finish()
        for folder, mode in modes.items():
            (result / folder).chmod(mode | 0o700)  # required to move or remove it
        atomic_write.sync_tree(result)
    if not fixed:  # a mounted volume keeps its mode
        modes[Path()] = stat.S_IMODE(source.stat().st_mode) & 0o777
    for folder in reversed(modes):
        (target / folder).chmod(modes[folder])


def _write_file(source: Path, target: Path, convert_file: Callable[[Path, Path], None]) -> None:
    part = target.with_name(f".{target.name}.part")
    try:
        part.unlink(missing_ok=True)  # of a killed command
        convert_file(source, part)
        atomic_write.swap(part, target)
    except OSError as error:
        if (reason := atomic_write.why_no_space(target, error)) is None:
            raise
        raise Refused(f"{printable(target)} could not be written: {reason}") from error
    finally:
        part.unlink(missing_ok=True)


def _private(path: Path) -> BinaryIO:
    """Create a file that only this user can read until its final mode is set."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb")


def _files(source: Path, named: Callable[[Path], str | None]) -> list[Path]:
    """Return all files of a folder except locks. Raises Refused for entries that would be skipped or have the same
    target."""
    entries = sorted(file for file in source.rglob("*") if file.name != ".lock")
    if bad_link := next((file for file in entries if file.is_symlink() and (file.is_dir() or not file.exists())), None):
        destination = "a folder, which is not followed" if bad_link.is_dir() else "nothing"
        raise Refused(f"{printable(bad_link)} is a link to {destination}; replace it by its target, or remove it")
    stored = _regular([file for file in entries if not file.is_dir()])
    files, places = [file for file in stored if named(file) is not None], dict[Path, Path]()
    for file in files:
        name = str(named(file))
        if (other := places.setdefault(file.with_name(name), file)) is not file:
            raise Refused(f"{printable(other)} and {printable(file)} would both become {name}; convert them one by one")
    return files


def _regular(files: list[Path]) -> list[Path]:
    """Return the files. Raises Refused for one that is not regular: opening a pipe would wait for a writer."""
    for file in files:
        if (kind := safe_read.describe_file_type(file)) is not None:
            raise Refused(f"{printable(file)} is {kind}, not a file; remove it from the folder")
    return files


def _stored(file: Path) -> BinaryIO:
    """Open a regular file as it is stored."""
    return _regular([file])[0].open("rb")


def lines(opened: BinaryIO, file: Path, key: encryption.Key | None = None) -> Iterator[tuple[int, bytes]]:
    """Yield (bytes read, content) of each line of an encrypted list; `key` None: the key of the process."""
    for number, line in enumerate(opened, 1):
        if line.endswith(b"\n"):  # a killed writer leaves half a line
            yield len(line), encryption.decrypt_line(line[:-1], f"{file}, line {number},", key)


def pieces(opened: BinaryIO) -> Iterator[bytes]:
    """Yield the rest of a file, from its current position, in pieces."""
    return iter(lambda: opened.read(PIECE), b"")


def is_encrypted(opened: BinaryIO) -> bool:
    """Return whether a file is encrypted, by its first bytes."""
    begins = encryption.has_magic(opened.read(8))
    opened.seek(0)
    return begins


def count_summary(counts: dict[str, int]) -> str:
    """Format counts that are not 0, e.g. "3 encrypted, 1 copied as they are"."""
    return ", ".join(f"{count} {how}" for how, count in counts.items() if count)
