"""Encrypted folders: every file is bound to its path inside, and a list names all files.

    files.octavo     in the root of the folder: an encrypted file that holds "octavo files 1\\0", and for each file
                     KIND " " PATH "\\0"
    KIND  =          an encrypted file that its header binds to this folder and path
          32 hex     an encrypted file that was copied unchanged: the tag of its header
          *          a file of encrypted lines, to which lines may be added

The id of the folder is random and is in the header of every file, the list included: files from another encryption of
the same folder, with the same key, are rejected. Neither the folder's name nor its location is bound: it
can be renamed and moved as a whole. A folder inside it may have a separate list (`hf/` in the directory of a run).
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO, cast

from octavo.base.encryption import file_format
from octavo.base.encryption.errors import NoKey, Replaced, VaultError
from octavo.base.encryption.key import Key, find_key
from octavo.base.encryption.reader import Reader
from octavo.base.encryption.writer import encrypt

LIST = "files.octavo"
BOUND, LINES = "=", "*"
_LIST_HEADER = b"octavo files 1\0"
_FIX = "Restore the whole folder from a copy, including its files.octavo"
#: names of files that need not be listed: the lock of a process that works in the folder
_UNLISTED = (".lock",)


class Folder:
    """An encrypted folder that is being written. `identity`: its id, if several ranks write it; random by default."""

    def __init__(self, root: Path, identity: bytes | None = None, key: Key | None = None) -> None:
        self.root, self.identity, self._key = root, identity or os.urandom(16), key

    def place(self, path: Path) -> file_format.Place:
        """Return the place that a file at this path is bound to. Raises VaultError for a path that is too long."""
        name = os.fsencode(path.relative_to(self.root))
        if len(name) > file_format.MAX_NAME_BYTES:
            raise VaultError(
                f"{path} has a path of {len(name)} bytes inside its folder; the limit is {file_format.MAX_NAME_BYTES}"
            )
        return file_format.Place(self.identity, name)

    def put(self, path: Path, plain: bytes) -> None:
        """Encrypt and write a whole file; not synced to the disk."""
        path.write_bytes(encrypt(plain, key=self._key, place=self.place(path)))

    def write_list(self, kinds: Mapping[Path, str] | None = None) -> None:
        """Write the list of the folder's files, after all of them. `kinds`: the kind of each file; by default every
        file in the folder is bound to it."""
        if kinds is None:
            kinds = {path: BOUND for path in self.root.rglob("*") if path.is_file() and path != self.root / LIST}
        entries = [f"{kind} ".encode() + self.place(path).name + b"\0" for path, kind in sorted(kinds.items())]
        self.put(self.root / LIST, _LIST_HEADER + b"".join(entries))


def write_file(path: Path, plain: bytes, folder: Folder | None) -> None:
    """Write a whole file, encrypted if it belongs to an encrypted `folder`; not synced to the disk."""
    if folder is None:
        path.write_bytes(plain)
    else:
        folder.put(path, plain)


def find_root(path: str | os.PathLike[str]) -> Path | None:
    """Return the nearest folder with a list that contains a path or is the path, or None.

    The path is used as spelled, so that a link in place of a file is detected. Its links are resolved only if it is in
    no such folder.
    """
    spelled = os.path.abspath(path)
    return _find_root(spelled) or _find_root(os.path.realpath(spelled))


def _find_root(path: str) -> Path | None:
    folder = path if os.path.isdir(path) else os.path.dirname(path)
    while not os.path.lexists(os.path.join(folder, LIST)):
        if folder == os.path.dirname(folder):
            return None
        folder = os.path.dirname(folder)
    return Path(folder)


def read_list(root: Path, key: Key | None = None) -> Mapping[bytes, str]:
    """Return the list of a folder as path inside -> kind. Raises VaultError for a list that is damaged or another
    file."""
    key, stat = key or find_key(), os.stat(root / LIST)
    return _read_list(root, key, key.id, stat.st_ino, stat.st_size, stat.st_mtime_ns)


@lru_cache(maxsize=16)
def _read_list(root: Path, key: Key, *_state: object) -> Mapping[bytes, str]:
    with Reader.of(root / LIST, key) as reader:
        if reader.place is None or reader.place.name != LIST.encode():
            raise Replaced(f"{root / LIST} is not the list of a folder: another file replaced it. {_FIX}")
        raw = reader.readall()
    if not raw.startswith(_LIST_HEADER):
        raise Replaced(f"{root / LIST} has a later format than this Octavo reads")
    pairs = (entry.partition(b" ") for entry in raw[len(_LIST_HEADER) :].split(b"\0") if entry)
    return {name: kind.decode() for kind, _, name in pairs}


def check_file(path: str | os.PathLike[str], reader: Reader | None, key: Key | None = None) -> None:
    """Check that an opened file was encrypted at this path. `reader`: None for a plain file.

    Raises Replaced, with the path, for a file that is bound to another path or folder, a file that was moved out of
    its folder, and a plain or unbound file in place of a listed one.
    """
    place = None if reader is None else reader.place
    if place is None:
        _check_unbound(path, reader, key)
        return
    name, spelled, shown = os.fsdecode(place.name), os.path.abspath(path), os.fspath(path)
    real = os.path.realpath(spelled)
    # A link in a folder with a list may replace a file there, so the path as spelled is checked first; the resolved one
    # counts only if the spelled one is in no such folder.
    for candidate in (spelled, *([real] if real != spelled and _find_root(spelled) is None else [])):
        root = Path(candidate[: -len(name) - 1] or "/") if candidate.endswith(f"/{name}") else None
        if root is not None and (root / LIST).is_file():
            if _folder_id(root, key) == place.folder:
                return
            raise Replaced(f"{shown} is {name} of an encrypted folder other than {root}: it was replaced. {_FIX}")
    if spelled.endswith(f"/{name}"):
        raise Replaced(
            f"{shown} is {name} of an encrypted folder that has no {LIST}: the file was moved out of its folder, or "
            f"the list was removed. {_FIX}"
        )
    raise Replaced(
        f"{shown} was encrypted as {name} of its folder, but has another name here: it was swapped with another "
        f"file, renamed or moved out. {_FIX}"
    )


def check_plain(path: str | os.PathLike[str], error: type[Exception]) -> None:
    """Check that a plain file, which a library opens by its path, does not replace an encrypted one. Raises `error`."""
    try:
        check_file(path, None)
    except VaultError as cause:
        raise error(str(cause)) from cause


def _folder_id(root: Path, key: Key | None) -> bytes | None:
    """Return the id of a folder, by the header of its list."""
    key, stat = key or find_key(), os.stat(root / LIST)
    return _read_folder_id(root, key, key.id, stat.st_ino, stat.st_size, stat.st_mtime_ns)


@lru_cache(maxsize=64)
def _read_folder_id(root: Path, key: Key, *_state: object) -> bytes | None:
    with Reader.of(root / LIST, key) as reader:
        place = reader.place
    return place.folder if place is not None and place.name == LIST.encode() else None


def _check_unbound(path: str | os.PathLike[str], reader: Reader | None, key: Key | None) -> None:
    if (root := find_root(path)) is None:
        return
    if reader is None and key is None:
        try:
            find_key()
        except NoKey:  # without a key the list cannot be read, and plain files are trusted
            return
    name = os.path.relpath(os.path.abspath(path), root)
    if name.startswith(".."):
        name = os.path.relpath(os.path.realpath(path), os.path.realpath(root))
    kind = read_list(root, key).get(os.fsencode(name))
    if kind is None or kind == LINES or (reader is not None and kind == reader.tag.hex()):
        return
    what = "is not encrypted" if reader is None else "is another encrypted file without a bound name"
    raise Replaced(f"{os.fspath(path)} {what}, and {root / LIST} lists an encrypted one: it was replaced. {_FIX}")


def has_list(folder: Path) -> bool:
    """Return whether a folder was encrypted as a whole."""
    return os.path.lexists(folder / LIST)


def check_folder(folder: Path, deep: bool = True, added: bool = True, key: Key | None = None) -> None:
    """Check that a folder, if it is encrypted, has the files on its list.

    deep   check subfolders, too
    added  also reject files that are not on the list

    The content of a file is checked when it is opened.

    Raises Replaced with the first missing or added file, and VaultError for a list that cannot be read.
    """
    if (root := find_root(folder)) is None:
        return
    inside = os.path.relpath(os.path.abspath(folder), root)
    if inside.startswith(".."):
        inside = os.path.relpath(os.path.realpath(folder), os.path.realpath(root))
    head = b"" if inside == "." else os.fsencode(inside) + b"/"
    wanted = {name[len(head) :] for name in read_list(root, key) if name.startswith(head)}
    if not deep:
        wanted = {name for name in wanted if b"/" not in name}
    present = set(_walk_names(os.fsencode(folder), deep)) - ({LIST.encode()} if not head else set())
    list_name = f"{root / LIST}, the list of files that were encrypted together"
    if missing := sorted(wanted - present):
        raise Replaced(f"{_describe_files(folder, missing)} missing, although it is in {list_name}. {_FIX}")
    if added and (extra := sorted(present - wanted)):
        raise Replaced(
            f"{_describe_files(folder, extra)} added: not in {list_name}. Move it out, or encrypt the folder again "
            "with it (octavo encrypt SRC DST --old-key)"
        )


def _describe_files(folder: Path, names: list[bytes]) -> str:
    first = os.path.join(os.fspath(folder), os.fsdecode(names[0]))
    return f"{first} and {len(names) - 1} more are" if len(names) > 1 else f"{first} is"


def _walk_names(folder: bytes, deep: bool, head: bytes = b"") -> Iterator[bytes]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                if deep:
                    yield from _walk_names(entry.path, deep, head + entry.name + b"/")
            elif os.fsdecode(entry.name) not in _UNLISTED:
                yield head + entry.name


def open_decrypted(
    handle: int, path: str | os.PathLike[str], buffering: int = -1, key: Key | None = None, shown: object = None
) -> BinaryIO:
    """Return a file object that reads the plain text of the encrypted file at a path, with a buffer of one chunk unless
    `buffering` is 0. It takes over the handle, unless this raises. `shown`: the path in messages.

    Raises VaultError, also for a file that is not the one that was encrypted at this path (:func:`check_file`).
    """
    raw = Reader(handle, path if shown is None else shown, key)
    try:
        check_file(path, raw, key)
    except BaseException:
        raw.release()
        raise
    return cast(BinaryIO, raw if buffering == 0 else io.BufferedReader(raw, raw.chunk))
