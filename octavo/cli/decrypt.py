"""Decrypts a file or a whole folder that was written by `octavo encrypt` or a run with run.encrypt.

octavo decrypt secret/qwen models/qwen --key-file octavo.key
octavo decrypt runs/a/answers.jsonl.aes answers.jsonl      a file of encrypted lines

Every byte is checked: a file that was changed, truncated, moved or encrypted with another key is an error, and no
output is left. Unencrypted files of a folder are copied unchanged and listed; an unencrypted single file is an error.
Nothing is overwritten.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from octavo.base import encryption
from octavo.base.encryption.encrypted_lines import is_encrypted_lines
from octavo.base.encryption.file_format import MAX_HEADER_BYTES, looks_encrypted
from octavo.base.encryption.folders import has_list
from octavo.base.safe_read import printable
from octavo.cli import encrypt_decrypt, terminal

_STATE = "state.json"  # of a checkpoint; octavo.checkpoint defines this name but imports torch


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SRC", type=Path, help="file or folder to decrypt")
    parser.add_argument("target", metavar="DST", type=Path, help="output; must not exist")


def run(args: argparse.Namespace) -> int:
    encryption.find_key()
    work = _Decryption()
    encrypt_decrypt.convert(args.source, args.target, work, "decrypting")
    print(f"{printable(args.target)}: {encrypt_decrypt.count_summary(work.counts)}")
    if work.plain:
        terminal.note(f"not encrypted, copied unchanged: {work.plain[0]}{_others(work.plain)}")
    return 0


class _Decryption:
    """Decrypts encrypted files, after checking the header and the end of every file."""

    def __init__(self) -> None:
        self.counts = {"decrypted": 0, "copied as they are": 0}
        self.plain: list[str] = []

    def begin(self, source: Path, files: list[Path], new_folder: Path | None) -> None:
        """Check the source. Raises VaultError for a file that is damaged, replaced, missing or added, and if nothing is
        encrypted."""
        for folder in (source, *sorted(source.rglob("*"))):
            if new_folder is not None and (folder == source or has_list(folder)):
                encryption.check_folder(folder)
        encrypted = 0
        for file in files:
            if encryption.is_encrypted(file):
                with encryption.Reader.of(file) as reader:
                    encryption.check_file(file, reader)
            elif not is_encrypted_lines(file):
                encryption.check_file(file, None)
                _refuse_damaged(file)
                continue
            encrypted += 1
        if not encrypted:
            what = (
                "nothing in it is encrypted"
                if new_folder is not None
                else "it is not encrypted, or its header is damaged"
            )
            raise encryption.Damaged(
                f"{source} cannot be decrypted: {what}. Name an encrypted file or folder, or restore it from a backup"
            )

    def named(self, file: Path) -> str | None:
        """Return the name of the target: without the suffix for encrypted lines, None for a folder's list of files."""
        if file.name == encryption.LIST and encryption.is_encrypted(file):
            return None
        return file.name.removesuffix(encryption.SUFFIX) if is_encrypted_lines(file) else file.name

    def write(self, opened: BinaryIO, out: BinaryIO, file: Path, path: Path) -> Iterator[int]:
        """See :class:`octavo.cli.encrypt_decrypt.Conversion`."""
        encrypted = encrypt_decrypt.is_encrypted(opened)
        listed = not encrypted and is_encrypted_lines(file)
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
        """Do nothing: all files are written."""


def _refuse_damaged(file: Path) -> None:
    """Raise Damaged for a plain file that was an encrypted one, according to the rest of its header, its name, or the
    state of its checkpoint."""
    with file.open("rb") as stored:
        head = stored.read(MAX_HEADER_BYTES)
    why = ""
    if looks_encrypted(head, encryption.find_key()):
        why = "it has the header of an encrypted file, which was changed or truncated"
    elif file.suffix == encryption.SUFFIX and head:
        why = "its first line is not encrypted"
    elif encryption.is_encrypted(file.with_name(_STATE)):
        why = (
            f"{_STATE} of its checkpoint is encrypted, and this file is not: its header was changed, or it was replaced"
        )
    if why:
        raise encryption.Damaged(f"{file} is damaged: {why}. Restore the file from a backup")


def _others(names: list[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""
