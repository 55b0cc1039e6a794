"""Decrypts what `octavo encrypt` or a run with run.encrypt wrote: a file, or a folder with all that is in it.

octavo decrypt secret/qwen models/qwen --key-file octavo.key
octavo decrypt runs/a/answers.jsonl.aes answers.jsonl      a list of encrypted lines

Every byte is checked: what was changed, cut, moved or is of another key is refused by name, and nothing is left behind.
What is not encrypted is copied as it is. Nothing is overwritten.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from octavo import vault
from octavo.cli import ciphered


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SRC", type=Path, help="a file or a folder")
    parser.add_argument("target", metavar="DST", type=Path, help="where it goes; must not be there")


def run(args: argparse.Namespace) -> int:
    vault.find()
    written = {"decrypted": 0, "copied as they are": 0}

    def write(opened: BinaryIO, out: BinaryIO, file: Path) -> Iterator[int]:
        encrypted = ciphered.is_encrypted(opened)
        listed = not encrypted and vault.is_list(file)
        written["decrypted" if encrypted or listed else "copied as they are"] += 1
        if listed:
            for size, line in ciphered.lines(opened, file):
                out.write(line)
                yield size
            return
        plain = vault.opened(os.dup(opened.fileno()), file) if encrypted else opened
        for piece in ciphered.pieces(plain):
            out.write(piece)
            yield len(piece)

    ciphered.convert(args.source, args.target, write, _named, "decrypting")
    print(f"{args.target}: {', '.join(f'{count} {how}' for how, count in written.items() if count)}")
    return 0


def _named(file: Path) -> str:
    """A list of lines without its ending."""
    return file.name.removesuffix(vault.SUFFIX) if vault.is_list(file) else file.name
