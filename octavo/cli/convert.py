"""Converts between Hugging Face folders and DCP checkpoints, for those who train by MindSpeed-MM's workflow.

octavo convert hf_to_dcp ./Qwen3-VL-8B-Instruct ./dcp                     DST/release, latest_checkpointed_iteration.txt
octavo convert hf_to_dcp ./Qwen3-VL-8B-Instruct ./dcp --is-lora-base      keys of a PEFT model's base
octavo convert lora_hf_to_dcp ./adapter ./dcp-lora
octavo convert dcp_to_hf ./dcp ./back                                     bit for bit what it was
octavo convert dcp_to_hf ./trained ./out --like ./Qwen3-VL-8B-Instruct    what was trained there

Streams tensor by tensor. A conversion that was killed goes on where it was, by the same command; DST appears whole or
not at all. Every tensor has a checksum, which is compared on the way back.
"""

from __future__ import annotations

import argparse
import time

from octavo.cli import arguments, terminal

COMMANDS = ("hf_to_dcp", "dcp_to_hf", "lora_hf_to_dcp")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("command", metavar="WHAT", choices=COMMANDS, help=", ".join(COMMANDS))
    parser.add_argument("source", metavar="SRC", help="the folder to convert; it is only read")
    parser.add_argument("destination", metavar="DST", help="a directory that does not exist yet")
    parser.add_argument("--is-lora-base", action="store_true", help="hf_to_dcp: keys of the base of a PEFT model")
    parser.add_argument(
        "--tie-weights", action="store_true", help="hf_to_dcp: write lm_head too, where it is only the embeddings'"
    )
    parser.add_argument("--to-bf16", action="store_true", help="values in BF16; FP8 codes times their scales")
    parser.add_argument("--like", metavar="FOLDER", help="dcp_to_hf: the folder that a trained checkpoint came from")
    parser.add_argument("--workers", type=arguments.positive, metavar="N", help="files at a time; default 4")
    arguments.add_json(parser)


def run(args: argparse.Namespace) -> int:
    own = {"is_lora_base": "hf_to_dcp", "tie_weights": "hf_to_dcp", "like": "dcp_to_hf"}
    for name, command in own.items():
        if getattr(args, name) and args.command != command:
            raise arguments.UsageError(f"--{name.replace('_', '-')} belongs to {command}; leave it out")

    from octavo.checkpoint import convert

    more = {
        "hf_to_dcp": {"lora_base": args.is_lora_base, "tie_weights": args.tie_weights},
        "dcp_to_hf": {"like": args.like},
        "lora_hf_to_dcp": {},
    }[args.command]
    began = time.monotonic()
    with terminal.progress(args.command) as progress:
        done = getattr(convert, args.command)(
            args.source, args.destination, to_bf16=args.to_bf16, workers=args.workers, say=terminal.note,
            progress=progress, **more,
        )  # fmt: skip
    seconds = time.monotonic() - began
    if args.json:
        terminal.show_json({**vars(done), "directory": str(done.directory), "seconds": seconds})
    else:
        print(
            f"{done.directory}: {done.tensors} tensors, {done.bytes / 1e9:.3g} GB in {done.files} files, "
            f"{seconds:.1f} s"
        )
    return 0
