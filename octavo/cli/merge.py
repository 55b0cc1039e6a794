"""Merges the adapters of a LoRA run, or of a PEFT folder, into a complete model folder.

octavo merge runs/lora merged
octavo merge runs/lora merged-fp8 --format fp8-block --base high
octavo merge my-adapter merged --base Qwen3-VL-8B-Instruct

By default the adapter is merged into the weights of training: the values of the FP8 codes if the base was loaded in
FP8. For an FP8 format, how much of the adapter's change survives the rounding is measured on the codes, weight by
weight; a merge that would round the adapter away is refused, and nothing is written.
"""

from __future__ import annotations

import argparse

from octavo.cli import terminal
from octavo.cli.export import FORMATS, add_shared, device


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="RUN_OR_ADAPTER", help="a run of octavo train with lora, or a PEFT folder")
    parser.add_argument("directory", metavar="DIR", help="folder to write: new, empty, or an earlier export")
    parser.add_argument(
        "--format", metavar="NAME", choices=FORMATS, default="bf16", help=f"{', '.join(FORMATS)}; default bf16"
    )
    parser.add_argument(
        "--base",
        metavar="fp8|high|DIR",
        help="base to merge into: the FP8 codes of training, the base folder's high-precision weights, or another "
        "folder (default: fp8 if training used codes)",
    )
    parser.add_argument("--anyway", action="store_true", help="write FP8 even if it rounds the adapter away")
    add_shared(parser)


def run(args: argparse.Namespace) -> int:
    from octavo.train.artifacts import merge_model

    with terminal.progress("merge") as progress:
        done = merge_model(
            args.path, args.directory, args.format, base=args.base, anyway=args.anyway, include=args.include,
            step=args.step, device=device(args.device), log=terminal.note, progress=progress,
        )  # fmt: skip
    if args.json:
        terminal.show_json(done.to_json())
    else:
        for sentence in done.sentences():
            terminal.say(sentence)
    return 0
