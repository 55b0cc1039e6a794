"""What `octavo encrypt` and `octavo decrypt` share: one file or a whole folder, into a new one, whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from octavo import atomic, reading, targets, vault
from octavo.cli import arguments, terminal
from octavo.reading import printable

Write = Callable[[BinaryIO, BinaryIO, Path], Iterator[int]]
"""Writes one stored file as another, by what the first bytes say that it is; yields the bytes read, piece by piece."""
PIECE = 1 << 22


class Refused(arguments.UsageError):
    """What is asked for cannot be, or the disk is full."""


def convert(source: Path, target: Path, write: Write, named: Callable[[Path], str], what: str) -> int:
    """Write `source`, a file or a folder with all that is in it, as `target`, which must not be there; gives the number
    of files. `named`: what a file is called there. Raises Refused, and VaultError for what cannot be read."""
    if not source.exists():
        raise Refused(f"{printable(source)} is not there")
    if os.path.lexists(target) and not (target.is_dir() and source.is_dir() and targets.is_free(target)):
        raise Refused(f"{printable(target)} is there already, and nothing is overwritten; name another")
    if target.resolve().is_relative_to(source.resolve()):
        raise Refused(f"{printable(target)} lies in {printable(source)}; name a place outside of it")
    if not target.absolute().parent.is_dir():
        raise Refused(f"{printable(target.parent)} is no folder; make it first, or name another place")
    files = _files(source, named) if source.is_dir() else [source]
    total, done = sum(file.stat().st_size for file in files), 0
    with terminal.progress(what) as progress:

        def one(file: Path, made: Path) -> None:
            nonlocal done
            with _stored(file) as opened, made.open("wb") as out:
                for size in write(opened, out, file):
                    done += size
                    progress(done, total)
                out.flush()
                os.fsync(out.fileno())

        if source.is_dir():
            with atomic.folder(target, Refused, replace=False) as made:
                for file in files:
                    place = made / file.relative_to(source)
                    place.parent.mkdir(parents=True, exist_ok=True)
                    one(file, place.with_name(named(file)))
                atomic.sync_tree(made)
        else:
            aside = target.with_name(f".{target.name}.part")
            try:
                one(source, aside)
                atomic.swap(aside, target)
            except OSError as error:
                if (reason := atomic.no_room(target, error)) is None:
                    raise
                raise Refused(f"{printable(target)} could not be written: {reason}") from error
            finally:
                aside.unlink(missing_ok=True)
    return len(files)


def _files(source: Path, named: Callable[[Path], str]) -> list[Path]:
    """All that is in a folder, but for locks. Raises Refused for what would be left out, or lie where another does."""
    found = sorted(file for file in source.rglob("*") if file.name != ".lock")
    if odd := next((file for file in found if file.is_symlink() and (file.is_dir() or not file.exists())), None):
        what = "a folder, which is not followed" if odd.is_dir() else "nothing"
        raise Refused(f"{printable(odd)} is a link to {what}; put what is meant in its place, or remove the link")
    files, places = [file for file in found if not file.is_dir()], dict[Path, Path]()
    for file in files:
        if (other := places.setdefault(file.with_name(named(file)), file)) is not file:
            raise Refused(f"{printable(other)} and {printable(file)} would both be {named(file)}; do them one by one")
    return files


def _stored(file: Path) -> BinaryIO:
    """A regular file as it stands on the disk."""
    if (kind := reading.kind_of(file)) is not None:
        raise Refused(f"{printable(file)} is {kind}, not a file; remove it from the folder")
    return file.open("rb")


def lines(opened: BinaryIO, file: Path, key: vault.Key | None = None) -> Iterator[tuple[int, bytes]]:
    """(bytes read, what it holds) of each line of an encrypted list; `key`: the process's, unless given."""
    for number, line in enumerate(opened, 1):
        if line.endswith(b"\n"):  # half a line is what a kill leaves
            yield len(line), vault.decrypted_line(line[:-1], f"{file}, line {number},", key)


def pieces(opened: BinaryIO) -> Iterator[bytes]:
    """A file from where it stands to its end."""
    return iter(lambda: opened.read(PIECE), b"")


def is_encrypted(opened: BinaryIO) -> bool:
    """By the first bytes."""
    found = vault.begins(opened.read(8))
    opened.seek(0)
    return found
