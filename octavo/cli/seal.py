"""Writes the permuted twin of a model folder, a data set or an adapter, by a key that training never sees.

octavo seal key seal.key                                                    32 random bytes, for your eyes alone
octavo seal model ./Qwen3-VL-8B-Instruct ./twin --key-file seal.key
octavo seal data rows.jsonl ./sealed-rows --model ./Qwen3-VL-8B-Instruct --key-file seal.key train.seq_length=4096
octavo seal adapter ./adapter ./sealed-adapter --model ./twin --key-file seal.key
octavo seal text "What is this?" --model ./Qwen3-VL-8B-Instruct --key-file seal.key

A sealed run takes the twin, the sealed rows and `data.sealed: true`; `octavo unseal` gives its weights back for the
plain model. Settings of data (key=value) are given here, since rows become numbers here. What all this hides and what
it does not, a permutation being no encryption, is in docs/confidential.md.
"""

from __future__ import annotations

import argparse
from typing import Any

from octavo import vault
from octavo.cli import arguments, terminal

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
        vault.new_secret(args.source)
        return _say(args, {"key_file": args.source}, f"{args.source}: a new key. Who loses it unseals nothing")

    from octavo import sealing

    key = sealing.find_key()
    if args.what == "text":
        words = sealing.seal_text(args.source, args.model, key)
        return _say(args, {"text": words}, words)
    if args.what == "adapter":
        made = sealing.seal_adapter(args.source, args.target, args.model, key)
        return _say(args, {"directory": str(made), "key": key.fingerprint}, f"{made}: sealed, key {key.fingerprint}")
    with terminal.progress("seal") as progress:
        if args.what == "data":
            rows = sealing.seal_data(args.source, args.target, args.model, key, args.settings, progress=progress)
            words = f"{rows.directory}: {rows.rows} rows, {rows.left} of them left out, key {key.fingerprint}"
            return _say(args, {**vars(rows), "directory": str(rows.directory), "key": key.fingerprint}, words)
        done = sealing.seal_model(args.source, args.target, key, progress=progress)
    tried = "not tried: even few of its blocks are too large" if done.difference is None else (
        f"answers as the plain one (random weights, logits within {done.difference:.0e})"
    )  # fmt: skip
    words = f"{done.directory}: {done.tensors} tensors, {done.bytes / 1e9:.3g} GB, key {key.fingerprint}; {tried}"
    return _say(args, {**vars(done), "directory": str(done.directory), "key": key.fingerprint}, words)


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
        print(words)
    return 0
