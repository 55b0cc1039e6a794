"""Decrypts what `octavo encrypt` or a run with run.encrypt wrote: a file, or a folder with all that is in it.

octavo decrypt secret/qwen models/qwen --key-file octavo.key
octavo decrypt runs/a/answers.jsonl.aes answers.jsonl      a list of encrypted lines

Every byte is checked: what was changed, cut, moved or is of another key is refused by name, and nothing is left behind.
What is not encrypted in a folder is copied as it is, and named; a file that is not, is refused. Nothing is overwritten.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from octavo.base import encryption
from octavo.base.encryption.encrypted_lines import is_list
from octavo.base.encryption.file_format import HEADER, was_encrypted
from octavo.base.encryption.folders import has_list
from octavo.base.safe_read import printable
from octavo.cli import encrypt_decrypt, terminal

_STATE = "state.json"  # a checkpoint's; octavo.checkpoint, which has the name, imports torch


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SRC", type=Path, help="a file or a folder")
    parser.add_argument("target", metavar="DST", type=Path, help="where it goes; must not be there")


def run(args: argparse.Namespace) -> int:
    encryption.find()
    work = _Decryption()
    encrypt_decrypt.convert(args.source, args.target, work, "decrypting")
    print(f"{printable(args.target)}: {encrypt_decrypt.count_summary(work.counts)}")
    if work.plain:
        terminal.note(f"not encrypted, and copied as they are: {work.plain[0]}{_others(work.plain)}")
    return 0


class _Decryption:
    """Decrypts what is encrypted, after a look at the head and the end of every file."""

    def __init__(self) -> None:
        self.counts = {"decrypted": 0, "copied as they are": 0}
        self.plain: list[str] = []

    def begin(self, source: Path, files: list[Path], made: Path | None) -> None:
        """Raises VaultError for a file that is damaged, exchanged, missing or added, and where nothing is encrypted."""
        for folder in (source, *sorted(source.rglob("*"))):
            if made is not None and (folder == source or has_list(folder)):
                encryption.check_folder(folder)
        encrypted = 0
        for file in files:
            if encryption.is_encrypted(file):
                with encryption.Reader.of(file) as reader:
                    encryption.check_file(file, reader)
            elif not is_list(file):
                encryption.check_file(file, None)
                _refuse_damaged(file)
                continue
            encrypted += 1
        if not encrypted:
            what = "nothing in it is encrypted" if made is not None else "it is not encrypted, or its head is damaged"
            raise encryption.Damaged(f"{source} cannot be decrypted: {what}. Name what is, or take it from a copy")

    def named(self, file: Path) -> str | None:
        """A list of lines without its ending; the list of a folder's files is none of them."""
        if file.name == encryption.LIST and encryption.is_encrypted(file):
            return None
        return file.name.removesuffix(encryption.SUFFIX) if is_list(file) else file.name

    def write(self, opened: BinaryIO, out: BinaryIO, file: Path, path: Path) -> Iterator[int]:
        """As :class:`octavo.cli.encrypt_decrypt.Conversion` has it."""
        encrypted = encrypt_decrypt.is_encrypted(opened)
        listed = not encrypted and is_list(file)
        self.counts["decrypted" if encrypted or listed else "copied as they are"] += 1
        if listed:
            for size, line in encrypt_decrypt.lines(opened, file):
                out.write(line)
                yield size
            return
        if not encrypted:
            self.plain.append(printable(file))
        plain = encryption.open_decrypted(os.dup(opened.fileno()), file) if encrypted else opened
        for piece in encrypt_decrypt.pieces(plain):
            out.write(piece)
            yield len(piece)

    def finish(self) -> None:
        """Nothing more is written."""


def _refuse_damaged(file: Path) -> None:
    """Raises Damaged for a plain file that was an encrypted one: what is left of its head says so, its name, or the
    list of a checkpoint that it belongs to."""
    with file.open("rb") as stored:
        head = stored.read(HEADER)
    why = ""
    if was_encrypted(head, encryption.find()):
        why = "its head is that of an encrypted file, and was changed or cut"
    elif file.suffix == encryption.SUFFIX and head:
        why = "its first line is not an encrypted one"
    elif encryption.is_encrypted(file.with_name(_STATE)):
        why = f"{_STATE} of its checkpoint is encrypted, and it is not: its head was changed, or it was exchanged"
    if why:
        raise encryption.Damaged(f"{file} is damaged: {why}. Take the file from a copy")


def _others(names: list[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""
