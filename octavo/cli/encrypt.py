"""Encrypts a file, or a folder with all its content: a model, data, or a run directory (AES-256-GCM).

octavo encrypt --new-key octavo.key                        create a key that only you can read
octavo encrypt models/qwen secret/qwen --key-file octavo.key
octavo encrypt old new --old-key old.key --key-file new.key   re-encrypt with another key

The files of a folder are bound to their paths in it: swapped, missing or added files are detected when the folder is
read or decrypted. Copy and move the folder as a whole, including its files.octavo.

File names do not change. With the key (--key-file, OCTAVO_KEY_FILE or OCTAVO_KEY) every command reads encrypted files
like plain ones. Files that are already encrypted are copied unchanged. Nothing is overwritten, and SRC is not deleted.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from octavo.base import encryption
from octavo.base.encryption.encrypted_lines import is_encrypted_lines
from octavo.base.encryption.file_format import MAX_HEADER_BYTES, Place, header_tag
from octavo.base.encryption.folders import LINES, find_root, has_list
from octavo.base.encryption.key import from_file, write_new
from octavo.base.safe_read import printable
from octavo.base.seal_note import NOTE, ONE_KEY_ONE_PURPOSE, fingerprint
from octavo.cli import arguments, encrypt_decrypt


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SRC", nargs="?", type=Path, help="file or folder to encrypt")
    parser.add_argument("target", metavar="DST", nargs="?", type=Path, help="output; must not exist")
    parser.add_argument(
        "--new-key", metavar="FILE", type=Path, help="create a key in FILE, readable only by you, and exit"
    )
    parser.add_argument(
        "--old-key", metavar="FILE", type=Path, help="key of SRC, to re-encrypt its files with another key"
    )


def run(args: argparse.Namespace) -> int:
    if args.new_key is not None:
        if args.source is not None:
            raise arguments.UsageError("--new-key only creates a key; encrypt in a second command")
        key = write_new(args.new_key)
        print(f"wrote {args.new_key}, key {key.id.hex()}. Keep a backup: without the key, encrypted files are lost")
        return 0
    if args.source is None or args.target is None:
        raise arguments.UsageError("name a source and a target: octavo encrypt SRC DST")
    key, old = encryption.find_key(), None if args.old_key is None else from_file(args.old_key)
    _check_purpose(args.source, old)
    work = _Encryption(key, old)
    encrypt_decrypt.convert(args.source, args.target, work, "encrypting")
    source, target = printable(args.source), printable(args.target)
    counts = encrypt_decrypt.count_summary(work.counts)
    print(f"{target}: {counts} (key {key.id.hex()}). {source} is unchanged: delete it if you do not need it")
    return 0


class _Encryption:
    """Encrypts plain files and files that the old key opens. Each folder with a list of its files, and the whole
    folder, gets a new list; without an old key, encrypted folders stay unchanged."""

    def __init__(self, key: encryption.Key, old: encryption.Key | None) -> None:
        self.key, self.old = key, old
        self.counts = {"encrypted": 0, "copied as they are": 0}
        self._folders: dict[Path, encryption.Folder] = {}
        self._kinds: dict[Path, str] = {}
        self._single = False

    def begin(self, source: Path, files: list[Path], new_folder: Path | None) -> None:
        """Check the source. Raises Replaced for files that are missing from a folder with a list or are not on the
        list, and Refused for a part of such a folder, whose files cannot be read without the rest."""
        self._single = new_folder is None
        roots = [folder for folder in (source, *sorted(source.rglob("*"))) if has_list(folder)]
        if self.old is None and source not in roots and find_root(source) is not None:
            self._refuse_part(source, files)
        for root in roots:
            with suppress(encryption.WrongKey):  # a third key's files are copied unchanged and cannot be checked
                encryption.check_folder(root, added=self.old is None, key=self.old or self.key)
        if new_folder is not None:
            rewritten = roots if self.old is not None else []
            bound = [source, *rewritten] if self.old is not None or source not in roots else []
            self._folders = {
                root: encryption.Folder(new_folder / root.relative_to(source), key=self.key) for root in bound
            }

    def _refuse_part(self, source: Path, files: list[Path]) -> None:
        if any(map(encryption.is_encrypted, files)):
            raise encrypt_decrypt.Refused(
                f"{printable(source)} is part of {printable(find_root(source))}, which is encrypted as a whole: "
                "its files are bound to their paths there. Copy the whole folder, or bind them again with --old-key"
            )

    def named(self, file: Path) -> str | None:
        """Return the name of the target, which does not change; None for a list that is written again."""
        return None if self.old is not None and file.name == encryption.LIST else file.name

    def write(self, opened: BinaryIO, out: BinaryIO, file: Path, path: Path) -> Iterator[int]:
        """See :class:`octavo.cli.encrypt_decrypt.Conversion`."""
        plain: BinaryIO = opened
        listed, encrypted = is_encrypted_lines(file), encrypt_decrypt.is_encrypted(opened)
        if listed and self.old is not None:
            for size, line in encrypt_decrypt.lines(opened, file, self.old):
                out.write(encryption.encrypt_line(line, self.key))
                yield size
            self._record(path, LINES)
            return
        if encrypted and self.old is not None:
            plain = encryption.open_decrypted(os.dup(opened.fileno()), file, key=self.old)
        elif encrypted or listed:
            kind = LINES if listed else self._check_and_get_tag(file)
            for piece in encrypt_decrypt.pieces(opened):
                out.write(piece)
                yield len(piece)
            self._record(path, kind, "copied as they are")
            return
        else:
            # A list encrypted with another key cannot be read, so it does not show whether the file was replaced.
            with suppress(encryption.WrongKey):
                encryption.check_file(file, None, self.old or self.key)
        writer = encryption.Writer(out, key=self.key, place=self._place(file, path))
        for piece in encrypt_decrypt.pieces(plain):
            writer.write(piece)
            yield len(piece)
        writer.finish()
        self._record(path, writer.tag.hex())

    def finish(self) -> None:
        """Write the lists of folders, inner folders first: their lists are files of the outer folders."""
        for folder in sorted(self._folders.values(), key=lambda folder: -len(folder.root.parts)):
            inside = {path: kind for path, kind in self._kinds.items() if path.is_relative_to(folder.root)}
            folder.write_list(inside)
            with encryption.Reader.of(folder.root / encryption.LIST, self.key) as reader:
                self._kinds[folder.root / encryption.LIST] = reader.tag.hex()

    def _place(self, file: Path, path: Path) -> Place | None:
        """Return the place that a file is bound to: its path in the innermost folder with a list."""
        for root in file.parents:
            if root in self._folders:
                return self._folders[root].place(path)
        return None

    def _check_and_get_tag(self, file: Path) -> str:
        """Return the tag of an encrypted file that is copied unchanged. With its key, its place is checked first."""
        try:
            with encryption.Reader.of(file, self.key) as reader:
                encryption.check_file(file, reader, self.key)
                if self._single and reader.place is not None:
                    self._refuse_part(file, [file])
        except encryption.WrongKey:
            pass
        with file.open("rb") as stored:
            return header_tag(stored.read(MAX_HEADER_BYTES)).hex()

    def _record(self, path: Path, kind: str, how: str = "encrypted") -> None:
        self._kinds[path] = kind
        self.counts[how] += 1


def _check_purpose(source: Path, old: encryption.Key | None) -> None:
    """Raise Refused if a folder in the source was sealed with the same key, according to its note."""
    key_id = fingerprint(encryption.process_secret()).encode()
    for file in source.rglob(NOTE) if source.is_dir() else [source.with_name(NOTE)]:
        raw = file.read_bytes() if file.is_file() else b""
        if encryption.has_magic(raw):
            try:
                raw = encryption.decrypt(raw, file, old)
            except encryption.WrongKey:  # a third key's files are copied unchanged and cannot be checked
                continue
        if key_id in raw:
            raise encrypt_decrypt.Refused(
                f"{file.parent} was sealed with the key that is used here for files. {ONE_KEY_ONE_PURPOSE}"
            )
