"""Copies the example configurations into a folder.

octavo examples examples
octavo plan examples/qwen3_vl_8b_lora_24gb.yaml --shape qwen3_vl_8b --card 24GB
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import octavo
from octavo.base import atomic_write, target_folder
from octavo.base.wording import count_noun
from octavo.cli.arguments import UsageError

#: in the repository a link to examples/, in a wheel a folder
SOURCE = Path(octavo.__file__).parent / "examples"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", metavar="DIR", help="output folder, new or empty")


def run(args: argparse.Namespace) -> int:
    target = Path(args.directory)
    if not target_folder.is_free(target):
        raise UsageError(f"{target} exists and is not empty; choose a new folder")
    with atomic_write.new_folder(target, UsageError, replace=False) as folder:
        shutil.copytree(SOURCE, folder, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"), dirs_exist_ok=True)
        atomic_write.sync_tree(folder)
    written = sorted(file for file in target.rglob("*") if file.is_file())
    print(f"wrote {count_noun(len(written), 'file')} to {target}; {target / 'README.md'} describes each one")
    return 0
