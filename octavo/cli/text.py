"""Writes a plain-text dataset for pretraining from the source and documentation of the installed Python, split by file.

octavo text ./text
"""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", metavar="DIR", help="output folder, for train.jsonl and test.jsonl")


def run(args: argparse.Namespace) -> int:
    from octavo.data.builtin import text

    dataset = text.write(args.directory)
    print(
        f"wrote {dataset.rows['train']} training documents and {dataset.rows['test']} held-out documents to "
        f"{args.directory}"
    )
    return 0
