"""Writes a tiny checkpoint of a real architecture with random weights: config, safetensors, tokenizer, processor.

octavo tiny qwen3_vl ./tiny-qwen3-vl
"""

from __future__ import annotations

import argparse

from octavo.base.model_families import tiny_families
from octavo.cli import arguments


def add_arguments(parser: argparse.ArgumentParser) -> None:
    families = sorted(tiny_families())
    parser.add_argument("family", metavar="FAMILY", choices=families, help=f"one of {', '.join(families)}")
    parser.add_argument("directory", metavar="DIR", help="output folder; must not contain another checkpoint")
    parser.add_argument(
        "--seed", type=arguments.natural, default=0, metavar="N", help="seed of the random weights (default 0)"
    )


def run(args: argparse.Namespace) -> int:
    from octavo.models.tiny import tiny

    path = tiny.write(args.family, args.directory, seed=args.seed)
    print(f"wrote a tiny {args.family} to {path}")
    return 0
