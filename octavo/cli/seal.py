"""Writes the permuted twin of a model folder, a data set or an adapter, by a key that training never sees.

octavo seal key seal.key                                                    32 random bytes, for your eyes alone
octavo seal model ./Qwen3-VL-8B-Instruct ./twin --key-file seal.key
octavo seal data rows.jsonl ./sealed-rows --model ./Qwen3-VL-8B-Instruct --key-file seal.key train.seq_length=4096
octavo seal adapter ./adapter ./sealed-adapter --model ./twin --key-file seal.key
octavo seal text "What is this?" --model ./Qwen3-VL-8B-Instruct --key-file seal.key

What is read may be encrypted, with a key of its own: --files-key. What is written is plain: octavo encrypt it.
A sealed run takes the twin, the sealed rows and `data.sealed: true`; `octavo unseal` gives its weights back for the
plain model. Settings of data (key=value) are given here, since rows become numbers here. What all this hides and what
it does not, a permutation being no encryption, is in docs/confidential.md.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.base import encryption, target_folder
from octavo.base.encryption.folders import root_of
from octavo.base.encryption.key import new_secret
from octavo.base.seal_note import ONE_PURPOSE
from octavo.cli import arguments, terminal

if TYPE_CHECKING:
    from octavo import sealing

WHATS = ("key", "model", "data", "adapter", "text")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", metavar="WHAT", choices=WHATS, help=", ".join(WHATS))
    add_shared(parser)
    parser.add_argument("settings", metavar="key=value", nargs="*", help="data: settings such as train.seq_length=4096")
    parser.add_argument("--model", metavar="FOLDER", help="data, text: the plain model; adapter: the sealed one")


def add_shared(parser: argparse.ArgumentParser) -> None:
    """The arguments of seal and unseal."""
    parser.add_argument("source", metavar="SRC", help="what is read; of key the file to write, of text the text")
    parser.add_argument("target", metavar="DST", nargs="?", help="a folder that does not exist yet; none of key, text")
    parser.add_argument("--files-key", metavar="FILE", help="the key of what is read, where that is encrypted")
    arguments.add_json(parser)


def run(args: argparse.Namespace) -> int:
    needs_model = args.what in ("data", "adapter", "text")
    alone = args.what in ("key", "text")
    if args.what == "data" and args.target is not None and "=" in args.target:
        args.target, args.settings = None, [args.target, *args.settings]
    check(args, alone, needs_model, key=args.what != "key")
    if args.settings and args.what != "data":
        raise arguments.UsageError(f"{args.settings[0]} belongs to seal data; leave it out")

    if args.what == "key":
        target_folder.check_target(args.source, arguments.UsageError)
        new_secret(args.source)
        return _say(args, {"key_file": args.source}, f"{args.source}: a new key. Who loses it unseals nothing")

    from octavo import sealing

    key, encrypted = keys(args)
    if args.what == "text":
        words = sealing.seal_text(args.source, args.model, key)
        return _say(args, {"text": words}, words)
    if args.what == "adapter":
        made = sealing.seal_adapter(args.source, args.target, args.model, key)
        say_plain(encrypted, made)
        return _say(args, {"directory": str(made), "key": key.fingerprint}, f"{made}: sealed, key {key.fingerprint}")
    with terminal.progress("seal") as progress:
        if args.what == "data":
            rows = sealing.seal_data(args.source, args.target, args.model, key, args.settings, progress=progress)
            say_plain(encrypted, rows.directory)
            words = f"{rows.directory}: {rows.rows} rows, {rows.left} of them left out, key {key.fingerprint}"
            return _say(args, {**vars(rows), "directory": str(rows.directory), "key": key.fingerprint}, words)
        done = sealing.seal_model(args.source, args.target, key, progress=progress)
    say_plain(encrypted, done.directory)
    tried = "not tried: even few of its blocks are too large" if done.difference is None else (
        f"answers as the plain one (random weights, logits within {done.difference:.0e})"
    )  # fmt: skip
    words = f"{done.directory}: {done.tensors} tensors, {done.bytes / 1e9:.3g} GB, key {key.fingerprint}; {tried}"
    return _say(args, {**vars(done), "directory": str(done.directory), "key": key.fingerprint}, words)


def keys(args: argparse.Namespace) -> tuple[sealing.Key, Path | None]:
    """The key that seals, which opens no file from here on, and of what is read an encrypted file, if there is one, of
    which this process has the key then. Raises UsageError for a key of both purposes."""
    from octavo import sealing
    from octavo.data.storage.cache import files_of

    key = sealing.find_key()
    for name in (encryption.FILE, encryption.VALUE):
        os.environ.pop(name, None)
    if args.files_key is not None:
        os.environ[encryption.FILE] = os.path.abspath(args.files_key)
        if sealing.find_key().fingerprint == key.fingerprint:
            raise arguments.UsageError(f"--files-key {args.files_key} is the key that seals. {ONE_PURPOSE}")
    places = [Path(name) for name in (None if args.what == "text" else args.source, args.model) if name is not None]
    roots = (root / encryption.LIST for place in places if (root := root_of(place)) is not None)
    if (encrypted := next(roots, None)) is None:
        files = [file for place in places for file in (*files_of(place), *place.glob("*.safetensors"))]
        encrypted = next(filter(encryption.is_encrypted, files), None)
    if encrypted is not None and args.files_key is None:
        raise arguments.UsageError(
            f"{encrypted} is encrypted: name its key with --files-key FILE. The key that seals opens no files"
        )
    return key, encrypted


def say_plain(encrypted: Path | None, target: object) -> None:
    """What is written is plain, as of every command that is asked for a folder, though what was read is not."""
    if encrypted is not None:
        terminal.note(f"{encrypted} is encrypted, and {target} is not: octavo encrypt it where that matters")


def check(args: argparse.Namespace, alone: bool, needs_model: bool, key: bool) -> None:
    """That what is asked for has its arguments. Raises UsageError."""
    if alone != (args.target is None):
        raise arguments.UsageError(f"{args.what} takes {'no DST' if alone else 'SRC and DST'}")
    if needs_model != (args.model is not None):
        raise arguments.UsageError(f"{args.what} {'needs' if needs_model else 'takes no'} --model FOLDER")
    if not key and args.key_file is not None:
        raise arguments.UsageError(f"{args.what} takes the name of a new file as SRC, and no --key-file")


def _say(args: argparse.Namespace, document: dict[str, Any], words: str) -> int:
    if args.json:
        terminal.show_json(document)
    else:
        terminal.say(words)
    return 0
