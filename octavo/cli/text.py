"""Writes a data set of plain text for pretraining: source and documentation of the installed Python, split by file.

octavo text ./text
"""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", metavar="DIR", help="folder to write: train.jsonl and test.jsonl")


def run(args: argparse.Namespace) -> int:
    from octavo.data.builtin import text

    dataset = text.write(args.directory)
    print(
        f"wrote {dataset.rows['train']} documents to train on and {dataset.rows['test']} held out to {args.directory}"
    )
    return 0
