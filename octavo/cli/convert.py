"""Converts between Hugging Face folders and DCP checkpoints, for users of MindSpeed-MM's workflow.

octavo convert hf_to_dcp ./Qwen3-VL-8B-Instruct ./dcp                     DST/release, latest_checkpointed_iteration.txt
octavo convert hf_to_dcp ./Qwen3-VL-8B-Instruct ./dcp --is-lora-base      key names of the base of a PEFT model
octavo convert lora_hf_to_dcp ./adapter ./dcp-lora
octavo convert dcp_to_hf ./dcp ./back                                     bit-identical to the original
octavo convert dcp_to_hf ./trained ./out --like ./Qwen3-VL-8B-Instruct    a checkpoint trained with MindSpeed-MM

MindSpeed-MM's command line is also accepted: octavo convert Qwen3VLConverter hf_to_dcp --hf_dir X --dcp_dir Y.

Tensors are streamed one at a time. If a conversion is killed, the same command resumes it; DST is created only when it
is complete. Every tensor has a checksum, which is verified when it is converted back.
"""

from __future__ import annotations

import argparse
import time

from octavo.base import target_folder
from octavo.base.byte_size import format_bytes
from octavo.base.wording import count_noun, did_you_mean
from octavo.cli import arguments, terminal

COMMANDS = ("hf_to_dcp", "dcp_to_hf", "lora_hf_to_dcp")
#: the command in MindSpeed-MM's guide: `mm-convert Qwen3VLConverter hf_to_dcp --hf_dir X --dcp_dir Y`
CONVERTER = "Qwen3VLConverter"
MINDSPEED_FOLDERS, MINDSPEED_SWITCHES = (
    ("hf_dir", "dcp_dir", "load_dir", "save_dir", "model_assets_dir"),
    ("is_lora_base", "to_bf16"),
)
_TRUE, _FALSE = ("true", "True"), ("false", "False")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = f"WHAT is {', '.join(COMMANDS)}; SRC is the folder to convert, DST the folder to create"
    parser.add_argument("words", metavar="WHAT SRC DST", nargs="+", help=what)
    parser.add_argument("--is-lora-base", action="store_true", help="hf_to_dcp: use the key names of a PEFT base model")
    parser.add_argument(
        "--tie-weights", action="store_true", help="hf_to_dcp: also write lm_head if it is tied to the embeddings"
    )
    parser.add_argument("--to-bf16", action="store_true", help="convert values to BF16; FP8 codes are dequantized")
    parser.add_argument(
        "--like", metavar="FOLDER", help="dcp_to_hf: folder of the original model, for its configuration and tokenizer"
    )
    parser.add_argument(
        "--workers", type=arguments.positive, metavar="N", help="number of files to process in parallel (default 4)"
    )
    mindspeed = parser.add_argument_group(f"MindSpeed-MM's options, after {CONVERTER}")
    for name in MINDSPEED_FOLDERS:
        mindspeed.add_argument(f"--{name}", metavar="DIR")
    for name in MINDSPEED_SWITCHES:
        mindspeed.add_argument(f"--{name}", dest=f"mindspeed_{name}", metavar="true|false", choices=[*_TRUE, *_FALSE])
    arguments.add_json(parser)


def _resolve_arguments(args: argparse.Namespace) -> None:
    """Set ``args.command``, ``source`` and ``destination`` from either command line. Raises UsageError for a missing,
    extra or repeated argument."""
    words = list(args.words)
    # MindSpeed-MM names the converter class first.
    if words[0].endswith("Converter"):
        if words[0] != CONVERTER:
            raise arguments.UsageError(f"converter {words[0]} is not supported; only {CONVERTER} is")
        words.pop(0)
    args.command, *folders = words or [""]
    if args.command not in COMMANDS:
        near = did_you_mean(args.command, COMMANDS)
        raise arguments.UsageError(f"{args.command or CONVERTER}: expected one of {', '.join(COMMANDS)}.{near}")
    folder_names = ("load_dir", "save_dir") if args.command == "dcp_to_hf" else ("hf_dir", "dcp_dir")
    for name in MINDSPEED_FOLDERS:
        if getattr(args, name) is not None and name not in (
            *folder_names,
            *(["model_assets_dir"] if folder_names[0] == "load_dir" else []),
        ):
            raise arguments.UsageError(f"--{name} does not belong to {args.command}; leave it out")
    named = [getattr(args, name) for name in folder_names]
    if folders and any(named):
        raise arguments.UsageError(
            f"{' '.join(folders)} and --{folder_names[0]}, --{folder_names[1]} name the same folders; keep one"
        )
    folders = folders or named
    if len(folders) != 2 or None in folders:
        usage = f"--{folder_names[0]} SRC --{folder_names[1]} DST"
        raise arguments.UsageError(
            f"{args.command} takes two folders: octavo convert {args.command} SRC DST, or {usage}"
        )
    args.source, args.destination = folders
    target_folder.check_target(args.destination, arguments.UsageError)
    if args.like and args.model_assets_dir:
        raise arguments.UsageError("--like and --model_assets_dir name the same folder; keep one")
    args.like = args.like or args.model_assets_dir
    for name in MINDSPEED_SWITCHES:
        value = getattr(args, f"mindspeed_{name}")
        setattr(args, name, getattr(args, name) or value in _TRUE)


def run(args: argparse.Namespace) -> int:
    _resolve_arguments(args)
    restricted = {"is_lora_base": "hf_to_dcp", "tie_weights": "hf_to_dcp", "like": "dcp_to_hf"}
    for name, command in restricted.items():
        if getattr(args, name) and args.command != command:
            raise arguments.UsageError(f"--{name.replace('_', '-')} belongs to {command}; leave it out")

    from octavo.checkpoint import convert

    # MindSpeed-MM requires the option, so its users pass it even if that folder is not read.
    if args.model_assets_dir and convert.was_converted_by_octavo(args.source):
        terminal.note(
            f"{args.source} was converted by Octavo and contains the model's files: --model_assets_dir is not needed"
        )
        args.like = None
    options = {
        "hf_to_dcp": {"lora_base": args.is_lora_base, "tie_weights": args.tie_weights},
        "dcp_to_hf": {"like": args.like},
        "lora_hf_to_dcp": {},
    }[args.command]
    start = time.monotonic()
    with terminal.progress(args.command) as progress:
        done = getattr(convert, args.command)(
            args.source, args.destination, to_bf16=args.to_bf16, workers=args.workers, log=terminal.note,
            progress=progress, **options,
        )  # fmt: skip
    seconds = time.monotonic() - start
    if args.json:
        terminal.show_json({**vars(done), "directory": str(done.directory), "seconds": seconds})
    else:
        print(
            f"{done.directory}: {count_noun(done.tensors, 'tensor')}, {format_bytes(done.bytes)} in "
            f"{count_noun(done.files, 'file')}, {seconds:.1f} s"
        )
    return 0
