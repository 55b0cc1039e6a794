"""Exports a run or a model folder in BF16 or FP8, as a checkpoint that vLLM, SGLang and transformers can load.

octavo export runs/first ./served --format fp8
octavo export ./Qwen3-VL-8B-Instruct ./Qwen3-VL-8B-FP8 --format fp8-dynamic --include image_encoder
octavo export ./Qwen3-8B-FP8 ./Qwen3-8B-BF16 --format bf16

bf16         weights in BF16
fp8          fp8-block, or fp8-dynamic if it takes more layers or keeps the codes of training; prints which and why
fp8-block    DeepSeek's format: 128 x 128 blocks, dynamic activation scales; layers of other sizes stay in BF16
fp8-dynamic  compressed-tensors: one scale per output channel, dynamic activation scales per token; any size
fp8-tensor   compressed-tensors: one scale per tensor, shared by q, k and v and by gate and up

Weights that were trained in FP8 with the blocks of the format keep the codes of training. The number of layers in FP8
is printed, and why the others stay in BF16. A format in which no layer can be written is refused.
"""

from __future__ import annotations

import argparse
import shlex

from octavo.cli import arguments, terminal

FORMATS = ("bf16", "fp8", "fp8-block", "fp8-dynamic", "fp8-tensor")
INCLUDE = ("image_encoder", "image_projector", "audio_encoder", "audio_projector")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="RUN_OR_MODEL", help="run directory or model folder")
    parser.add_argument("directory", metavar="DIR", help="output folder: new, empty, or an earlier export")
    parser.add_argument("--format", metavar="NAME", choices=FORMATS, required=True, help=f"one of {', '.join(FORMATS)}")
    parser.add_argument(
        "--max-shard-size", metavar="SIZE", default="5GB", help="maximum size of a weight file (default 5GB)"
    )
    add_shared(parser)


def add_shared(parser: argparse.ArgumentParser) -> None:
    """Add the options that export and merge share."""
    parser.add_argument(
        "--include", metavar="COMPONENT", choices=INCLUDE, nargs="+", action="extend", default=[],
        help=f"components to write in FP8 in addition to the language model: {', '.join(INCLUDE)}",
    )  # fmt: skip
    parser.add_argument(
        "--step",
        type=arguments.positive,
        metavar="N",
        help="step of the checkpoint to use, for a run (default: the newest)",
    )
    parser.add_argument("--device", metavar="NAME", help="cpu or cuda (default: a GPU if there is one)")
    arguments.add_json(parser)


def run(args: argparse.Namespace) -> int:
    from octavo.checkpoint.export.files import parse_size
    from octavo.train.artifacts import export_model

    try:
        largest = parse_size(args.max_shard_size)
    except ValueError as error:
        raise arguments.UsageError(f"--max-shard-size: {error}") from None
    with terminal.progress("export") as progress:
        exported = export_model(
            args.source, args.directory, args.format, include=args.include, largest=largest, step=args.step,
            device=device(args.device), log=terminal.note if args.json else terminal.say, progress=progress,
        )  # fmt: skip
    if args.json:
        terminal.show_json(exported.to_json())
    else:
        terminal.say(f"next: octavo verify {shlex.quote(str(args.directory))}{arguments.key_option(args)}")
    return 0


def device(name: str | None) -> str | None:
    """Return a device that torch knows and this machine has. Raises UsageError."""
    import torch

    from octavo.base import accelerator

    if name is None:
        return None
    try:
        kind = torch.device(name).type
    except RuntimeError:
        raise arguments.UsageError(f"--device {name} is not a device; use cpu or {accelerator.ABSENT_GPU}") from None
    if kind not in ("cpu", accelerator.default_device().type):
        raise arguments.UsageError(f"--device {name} is not available on this machine; remove it, or use cpu")
    return name
