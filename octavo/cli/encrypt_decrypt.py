"""What `octavo encrypt` and `octavo decrypt` share: one file or a whole folder, into a new one, whole or not at all."""

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
    """What is asked for cannot be, or the disk is full."""


class Conversion(Protocol):
    """What is done with each file."""

    def begin(self, source: Path, files: list[Path], made: Path | None) -> None:
        """Look at all of them before the first is written. `made`: the folder that is being written, None of a file."""

    def named(self, file: Path) -> str | None:
        """What a file is called in the target; None: it is left out."""

    def write(self, opened: BinaryIO, out: BinaryIO, file: Path, path: Path) -> Iterator[int]:
        """Write a stored file as another one, which is at `path`; yields the bytes read, piece by piece."""

    def finish(self) -> None:
        """All of a folder is written."""


def convert(source: Path, target: Path, conversion: Conversion, what: str) -> int:
    """Write `source`, a file or a folder with all that is in it, as `target`, which must not be there; gives the number
    of files. Files and folders keep their modes. Raises Refused, and VaultError for what cannot be read."""
    if not source.exists():
        raise Refused(f"{printable(source)} is not there")
    if os.path.lexists(target) and not (target.is_dir() and source.is_dir() and target_folder.is_free(target)):
        raise Refused(f"{printable(target)} is there already, and nothing is overwritten; name another")
    if target.resolve().is_relative_to(source.resolve()):
        raise Refused(f"{printable(target)} lies in {printable(source)}; name a place outside of it")
    if not target.absolute().parent.is_dir():
        raise Refused(f"{printable(target.parent)} is no folder; make it first, or name another place")
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
    with atomic_write.folder(target, Refused, replace=False) as made:
        made.chmod(0o700)
        conversion.begin(source, files, made)
        for folder in modes:
            (made / folder).mkdir(mode=0o700)
        for file in files:
            name = conversion.named(file)
            assert name is not None, file
            one(file, made / file.relative_to(source).with_name(name))
        conversion.finish()
        for folder, mode in modes.items():
            (made / folder).chmod(mode | 0o700)  # else it could not be moved, nor removed
        atomic_write.sync_tree(made)
    if not fixed:  # a volume keeps its own
        modes[Path()] = stat.S_IMODE(source.stat().st_mode) & 0o777
    for folder in reversed(modes):
        (target / folder).chmod(modes[folder])


def _write_file(source: Path, target: Path, one: Callable[[Path, Path], None]) -> None:
    aside = target.with_name(f".{target.name}.part")
    try:
        aside.unlink(missing_ok=True)  # of one that was killed
        one(source, aside)
        atomic_write.swap(aside, target)
    except OSError as error:
        if (reason := atomic_write.no_room(target, error)) is None:
            raise
        raise Refused(f"{printable(target)} could not be written: {reason}") from error
    finally:
        aside.unlink(missing_ok=True)


def _private(path: Path) -> BinaryIO:
    """A new file that only this user may read, until its own mode is set."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb")


def _files(source: Path, named: Callable[[Path], str | None]) -> list[Path]:
    """All that is in a folder, but for locks. Raises Refused for what would be left out, or lie where another does."""
    entries = sorted(file for file in source.rglob("*") if file.name != ".lock")
    if odd := next((file for file in entries if file.is_symlink() and (file.is_dir() or not file.exists())), None):
        what = "a folder, which is not followed" if odd.is_dir() else "nothing"
        raise Refused(f"{printable(odd)} is a link to {what}; put what is meant in its place, or remove the link")
    stored = _regular([file for file in entries if not file.is_dir()])
    files, places = [file for file in stored if named(file) is not None], dict[Path, Path]()
    for file in files:
        name = str(named(file))
        if (other := places.setdefault(file.with_name(name), file)) is not file:
            raise Refused(f"{printable(other)} and {printable(file)} would both be {name}; do them one by one")
    return files


def _regular(files: list[Path]) -> list[Path]:
    """The same. Raises Refused for what is no regular file: opening a pipe would wait for who writes to it."""
    for file in files:
        if (kind := safe_read.kind_of(file)) is not None:
            raise Refused(f"{printable(file)} is {kind}, not a file; remove it from the folder")
    return files


def _stored(file: Path) -> BinaryIO:
    """A regular file as it stands on the disk."""
    return _regular([file])[0].open("rb")


def lines(opened: BinaryIO, file: Path, key: encryption.Key | None = None) -> Iterator[tuple[int, bytes]]:
    """(bytes read, what it holds) of each line of an encrypted list; `key`: the process's, unless given."""
    for number, line in enumerate(opened, 1):
        if line.endswith(b"\n"):  # half a line is what a kill leaves
            yield len(line), encryption.decrypted_line(line[:-1], f"{file}, line {number},", key)


def pieces(opened: BinaryIO) -> Iterator[bytes]:
    """A file from where it stands to its end."""
    return iter(lambda: opened.read(PIECE), b"")


def is_encrypted(opened: BinaryIO) -> bool:
    """By the first bytes."""
    begins = encryption.has_magic(opened.read(8))
    opened.seek(0)
    return begins


def count_summary(counts: dict[str, int]) -> str:
    """ "3 encrypted, 1 copied as they are" of those that are not 0."""
    return ", ".join(f"{count} {how}" for how, count in counts.items() if count)
