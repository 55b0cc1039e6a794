"""Writes a small checkpoint of a real architecture: config, safetensors, tokenizer, processor. Random weights.

octavo tiny qwen3_vl ./tiny-qwen3-vl
"""

from __future__ import annotations

import argparse

from octavo.cli import arguments


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "family",
        metavar="FAMILY",
        help="qwen3_vl, qwen3_vl_moe, qwen3_5, qwen3_5_moe, qwen2_vl, qwen2_5_vl, internvl, mistral3, "
        "llava_onevision, llavaonevision1_5, smolvlm, gemma3, glm4v, glm46v, glm4v_moe, glm_ocr, "
        "ernie4_5_vl_moe, nvila, nvila_lite, qwen2_audio, qwen3, qwen3_moe, llama, mpt",
    )
    parser.add_argument("directory", metavar="DIR", help="folder to write; must not hold another checkpoint")
    parser.add_argument("--seed", type=arguments.natural, default=0, help="seed of the random weights (default 0)")


def run(args: argparse.Namespace) -> int:
    from octavo.models.tiny import tiny

    path = tiny.write(args.family, args.directory, seed=args.seed)
    print(f"wrote a tiny {args.family} to {path}")
    return 0
