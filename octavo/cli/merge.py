"""Merges the adapter of a LoRA run, or of a PEFT folder, into its base, as a complete model folder.

octavo merge runs/lora merged
octavo merge runs/lora merged-fp8 --format fp8 --base high
octavo merge runs/lora merged --format auto
octavo merge my-adapter merged --base Qwen3-VL-8B-Instruct

By default the adapter is merged into the weights that it was trained on: the dequantized FP8 codes if the base was
loaded in FP8. For an FP8 format, the part of the adapter's change that survives rounding is measured for each weight; a
merge that would round the adapter away is rejected, and nothing is written.

fp8 is the FP8 format that fits the model, as in octavo export. auto is the same if the adapter survives, else bf16.
"""

from __future__ import annotations

import argparse
import shlex

from octavo.cli import arguments, terminal
from octavo.cli.export import FORMATS, add_shared, device


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="RUN_OR_ADAPTER", help="run directory of LoRA training, or PEFT folder")
    parser.add_argument("directory", metavar="DIR", help="output folder: new, empty, or an earlier export")
    formats = (*FORMATS, "auto")
    parser.add_argument(
        "--format", metavar="NAME", choices=formats, default="bf16", help=f"one of {', '.join(formats)} (default bf16)"
    )
    parser.add_argument(
        "--base",
        metavar="fp8|high|DIR",
        help="base to merge into: the FP8 codes of training (fp8), the high-precision weights of the base folder "
        "(high), or another folder (default: fp8 if the base was loaded in FP8)",
    )
    parser.add_argument("--anyway", action="store_true", help="write FP8 even if it rounds the adapter away")
    add_shared(parser)


def run(args: argparse.Namespace) -> int:
    from octavo.train.artifacts import merge_model

    with terminal.progress("merge") as progress:
        merged = merge_model(
            args.path, args.directory, args.format, base=args.base, anyway=args.anyway, include=args.include,
            step=args.step, device=device(args.device), log=terminal.note, progress=progress,
        )  # fmt: skip
    if args.json:
        terminal.show_json(merged.to_json())
    else:
        for sentence in merged.sentences():
            terminal.say(sentence)
        terminal.say(f"next: octavo verify {shlex.quote(str(args.directory))}{arguments.key_option(args)}")
    return 0
