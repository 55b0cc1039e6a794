"""Writes a sealed (permuted) copy of a model folder, a dataset or an adapter. Training does not need the key.

octavo seal key seal.key                                                    32 random bytes, readable only by you
octavo seal model ./Qwen3-VL-8B-Instruct ./twin --key-file seal.key
octavo seal data rows.jsonl ./sealed-rows --model ./Qwen3-VL-8B-Instruct --key-file seal.key train.seq_length=4096
octavo seal adapter ./adapter ./sealed-adapter --model ./twin --key-file seal.key
octavo seal text "What is this?" --model ./Qwen3-VL-8B-Instruct --key-file seal.key

Sources may be encrypted with another key (--files-key). Outputs are not encrypted; encrypt them with octavo encrypt.
A sealed run uses the sealed model, the sealed rows and `data.sealed: true`; `octavo unseal` restores its weights for
the plain model. Data settings (key=value) are passed to this command, because it tokenizes the rows. A permutation is
not encryption: docs/confidential.md describes what it hides and what it does not.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.base import encryption, target_folder
from octavo.base.byte_size import format_bytes
from octavo.base.encryption.folders import find_root
from octavo.base.encryption.key import new_secret
from octavo.base.seal_note import ONE_KEY_ONE_PURPOSE
from octavo.base.wording import count_noun
from octavo.cli import arguments, terminal

if TYPE_CHECKING:
    from octavo import sealing

WHATS = ("key", "model", "data", "adapter", "text")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", metavar="WHAT", choices=WHATS, help=f"one of {', '.join(WHATS)}")
    add_shared(parser)
    parser.add_argument(
        "settings", metavar="key=value", nargs="*", help="for data: settings such as train.seq_length=4096"
    )
    parser.add_argument(
        "--model",
        metavar="FOLDER",
        help="for data and text: folder of the plain model; for adapter: of the sealed model",
    )


def add_shared(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that seal and unseal share."""
    parser.add_argument("source", metavar="SRC", help="source folder or file; for key: output file; for text: the text")
    parser.add_argument("target", metavar="DST", nargs="?", help="output folder, must not exist; not for key and text")
    parser.add_argument("--files-key", metavar="FILE", help="key of encrypted sources")
    arguments.add_json(parser)


def run(args: argparse.Namespace) -> int:
    needs_model = args.what in ("data", "adapter", "text")
    no_target = args.what in ("key", "text")
    # Without a target, argparse takes the first setting as DST.
    if args.what == "data" and args.target is not None and "=" in args.target:
        args.target, args.settings = None, [args.target, *args.settings]
    check(args, no_target, needs_model, key=args.what != "key")
    if args.settings and args.what != "data":
        raise arguments.UsageError(f"{args.settings[0]} is a setting of seal data; remove it")

    if args.what == "key":
        target_folder.check_target(args.source, arguments.UsageError)
        new_secret(args.source)
        return _print_result(
            args, {"key_file": args.source}, f"{args.source}: a new key. Without it nothing can be unsealed"
        )

    from octavo import sealing

    key, encrypted = keys(args)
    if args.what == "text":
        words = sealing.seal_text(args.source, args.model, key)
        return _print_result(args, {"text": words}, words)
    if args.what == "adapter":
        adapter = sealing.seal_adapter(args.source, args.target, args.model, key)
        warn_plain(encrypted, adapter)
        return _print_result(
            args, {"directory": str(adapter), "key": key.fingerprint}, f"{adapter}: sealed, key {key.fingerprint}"
        )
    with terminal.progress("seal") as progress:
        if args.what == "data":
            rows = sealing.seal_data(args.source, args.target, args.model, key, args.settings, progress=progress)
            warn_plain(encrypted, rows.directory)
            words = f"{rows.directory}: {rows.rows} rows, {rows.left} of them skipped, key {key.fingerprint}"
            return _print_result(args, {**vars(rows), "directory": str(rows.directory), "key": key.fingerprint}, words)
        done = sealing.seal_model(args.source, args.target, key, progress=progress)
    warn_plain(encrypted, done.directory)
    tried = "not tested: even a few blocks are too large" if done.difference is None else (
        f"answers like the plain model (random weights, logits within {done.difference:.0e})"
    )  # fmt: skip
    size = f"{count_noun(done.tensors, 'tensor')}, {format_bytes(done.bytes)}"
    words = f"{done.directory}: {size}, key {key.fingerprint}; {tried}"
    return _print_result(args, {**vars(done), "directory": str(done.directory), "key": key.fingerprint}, words)


def keys(args: argparse.Namespace) -> tuple[sealing.Key, Path | None]:
    """Return the sealing key, removed from the environment so that it opens no file, and an encrypted file among the
    sources or None. Raises UsageError for a key that is used for both purposes."""
    from octavo import sealing
    from octavo.data.storage.cache import list_row_files

    key = sealing.find_key()
    for name in (encryption.FILE, encryption.VALUE):
        os.environ.pop(name, None)
    if args.files_key is not None:
        os.environ[encryption.FILE] = os.path.abspath(args.files_key)
        if sealing.find_key().fingerprint == key.fingerprint:
            raise arguments.UsageError(f"--files-key {args.files_key} is the key that seals. {ONE_KEY_ONE_PURPOSE}")
    places = [Path(name) for name in (None if args.what == "text" else args.source, args.model) if name is not None]
    roots = (root / encryption.LIST for place in places if (root := find_root(place)) is not None)
    if (encrypted := next(roots, None)) is None:
        files = [file for place in places for file in (*list_row_files(place), *place.glob("*.safetensors"))]
        encrypted = next(filter(encryption.is_encrypted, files), None)
    if encrypted is not None and args.files_key is None:
        raise arguments.UsageError(
            f"{encrypted} is encrypted: name its key with --files-key FILE. The sealing key does not open files"
        )
    return key, encrypted


def warn_plain(encrypted: Path | None, target: object) -> None:
    """Print a note if a source was encrypted and the output is not."""
    if encrypted is not None:
        terminal.note(f"{encrypted} is encrypted, but {target} is not: run octavo encrypt on it if needed")


def check(args: argparse.Namespace, no_target: bool, needs_model: bool, key: bool) -> None:
    """Check that the command has the arguments that it needs, and no others. Raises UsageError."""
    if no_target != (args.target is None):
        raise arguments.UsageError(f"{args.what} takes {'no DST' if no_target else 'SRC and DST'}")
    if needs_model != (args.model is not None):
        raise arguments.UsageError(f"{args.what} {'needs' if needs_model else 'takes no'} --model FOLDER")
    if not key and args.key_file is not None:
        raise arguments.UsageError(f"{args.what} takes the name of a new file as SRC, and no --key-file")


def _print_result(args: argparse.Namespace, document: dict[str, Any], words: str) -> int:
    if args.json:
        terminal.show_json(document)
    else:
        terminal.say(words)
    return 0
