"""Encrypts a file, or a folder with all that is in it: a model, data, a run directory (AES-256-GCM).

octavo encrypt --new-key octavo.key                        make a key, for this user alone
octavo encrypt models/qwen secret/qwen --key-file octavo.key
octavo encrypt old new --old-key old.key --key-file new.key   encrypt anew with another key

Names stay; every command reads what is encrypted as if it was not, given the key (--key-file, OCTAVO_KEY_FILE or
OCTAVO_KEY). What is encrypted already is copied as it is. Nothing is overwritten, and SRC stays: delete it yourself.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from octavo import vault
from octavo.cli import arguments, ciphered
from octavo.sealed import NOTE, ONE_PURPOSE, fingerprint


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SRC", nargs="?", type=Path, help="a file or a folder")
    parser.add_argument("target", metavar="DST", nargs="?", type=Path, help="where it goes; must not be there")
    parser.add_argument("--new-key", metavar="FILE", type=Path, help="make a key and write it to FILE, readable by you")
    parser.add_argument("--old-key", metavar="FILE", type=Path, help="what is encrypted in SRC, with this key, is anew")


def run(args: argparse.Namespace) -> int:
    if args.new_key is not None:
        if args.source is not None:
            raise arguments.UsageError("--new-key makes a key and nothing else; encrypt with it in a second command")
        key = vault.write_new(args.new_key)
        print(f"wrote {args.new_key}, the key {key.id.hex()}. Keep a copy elsewhere: without it nothing is read again")
        return 0
    if args.source is None or args.target is None:
        raise arguments.UsageError("name what is encrypted and where it goes: octavo encrypt SRC DST")
    key, old = vault.find(), None if args.old_key is None else vault.from_file(args.old_key)
    _check_purpose(args.source, old)
    written = {"encrypted": 0, "copied as they are": 0}

    def write(opened: BinaryIO, out: BinaryIO, file: Path) -> Iterator[int]:
        plain: BinaryIO = opened
        listed = vault.is_list(file)
        if listed and old is not None:
            for size, line in ciphered.lines(opened, file, old):
                out.write(vault.encrypted_line(line, key))
                yield size
            written["encrypted"] += 1
            return
        if ciphered.is_encrypted(opened) and old is not None:
            plain = vault.opened(os.dup(opened.fileno()), file, key=old)
        elif ciphered.is_encrypted(opened) or listed:
            written["copied as they are"] += 1
            for piece in ciphered.pieces(opened):
                out.write(piece)
                yield len(piece)
            return
        writer = vault.Writer(out, key=key)
        for piece in ciphered.pieces(plain):
            writer.write(piece)
            yield len(piece)
        writer.finish()
        written["encrypted"] += 1

    ciphered.convert(args.source, args.target, write, lambda file: file.name, "encrypting")
    told = ", ".join(f"{count} {how}" for how, count in written.items() if count)
    print(f"{args.target}: {told} (key {key.id.hex()}). {args.source} is as it was: delete it where it is not needed")
    return 0


def _check_purpose(source: Path, old: vault.Key | None) -> None:
    """Raises Refused where what is encrypted was sealed with the same key, as its note says."""
    own = fingerprint(vault.given()).encode()
    for file in source.rglob(NOTE) if source.is_dir() else [source.with_name(NOTE)]:
        raw = file.read_bytes() if file.is_file() else b""
        if vault.begins(raw):
            try:
                raw = vault.decrypted(raw, file, old)
            except vault.WrongKey:  # of a third key: it is copied as it is, and nothing of it can be seen
                continue
        if own in raw:
            raise ciphered.Refused(f"{file.parent} was sealed with the key that is given for files. {ONE_PURPOSE}")
