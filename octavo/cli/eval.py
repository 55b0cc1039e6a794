"""Evaluates a run, a model folder or an adapter on held-out data: loss, and exact match of each answer.

octavo eval runs/first
octavo eval runs/first --step 200 --recipe off         the same weights in high precision
octavo eval ./served --config run.yaml                 a plain or FP8 folder, on data.eval of the file
octavo eval runs/lora/adapter --base ./Qwen3-VL-8B --config run.yaml
octavo eval runs/grpo --answers 200                    also generate answers, and report their rewards and lengths
octavo eval runs/lora --base both                      on the FP8 base and on its high-precision weights
"""

from __future__ import annotations

import argparse
import functools
from typing import Any

from octavo.cli import arguments, generate, terminal

BOTH = "both"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", metavar="TARGET", help="a run, a Hugging Face folder, or an adapter folder")
    parser.add_argument(
        "--config", metavar="FILE.yaml", help="configuration with data.eval; required unless TARGET is a run"
    )
    parser.add_argument(
        "--answers", metavar="N", type=arguments.natural, default=None,
        help="also generate greedy answers to the last question of the first N rows (0: all rows), and report their "
        "rewards (as configured, or exact_match)",
    )  # fmt: skip
    parser.add_argument(
        "--max-new-tokens",
        type=arguments.positive,
        metavar="N",
        help="length limit for --answers (default: rl.max_new_tokens, or 64)",
    )
    generate.add_target_options(parser, base="FOLDER|both")
    arguments.add_json(parser)


def run(args: argparse.Namespace) -> int:
    both = args.base == BOTH
    if both and args.answers is not None:
        raise arguments.UsageError("--base both does not generate answers; remove --answers or --base both")
    if args.max_new_tokens is not None and args.answers is None:
        raise arguments.UsageError("--max-new-tokens applies to generated answers: add --answers N, or remove it")
    if both and args.load_in_fp8 == "off":
        raise arguments.UsageError("--base both evaluates with an FP8 base and without; remove --load-in-fp8 off")
    cfg = None
    if args.config is not None:
        from octavo.config import load_config

        cfg = load_config(args.config)
    # This imports torch, which is slow, so all arguments are checked before.
    target = generate.inspect_target(args, None if both else args.base)

    from octavo.train import artifacts

    work: Any = artifacts.compare_bases if both else artifacts.evaluate_target
    if args.answers is not None:
        from octavo import rl

        work = functools.partial(rl.evaluate_target, answers=args.answers, max_new_tokens=args.max_new_tokens)
    with terminal.progress("evaluating", bytes=False) as progress:
        result = work(
            target, cfg, load_in_fp8=args.load_in_fp8, recipe=args.recipe, backend=args.backend, step=args.step,
            log=terminal.note, progress=progress,
        )  # fmt: skip
    if args.json:
        terminal.show_json(result)
    elif both:
        show_bases(result)
    else:
        show_rows([result])
    return 0


def show_rows(rows: list[dict[str, Any]]) -> None:
    """Print a table with one evaluation per row."""
    from octavo.train.forward.evaluation import judged_by_exact_match  # imports torch

    shown = [dict(row) for row in rows]
    for row in shown:
        if (share := row.get("exact_match")) is not None and judged_by_exact_match(row):
            row["exact_match"] = f"{100 * share:.1f} %"
        else:
            row.pop("exact_match", None)
    names = [name.replace("_", " ") for name in shown[0]]
    right = [i for i, name in enumerate(names) if name != "base"]
    terminal.show_table(names, [[terminal.number(value) for value in row.values()] for row in shown], right=right)


def show_bases(result: dict[str, Any]) -> None:
    """Print the evaluations on both bases and their differences."""
    show_rows(result["bases"])
    from octavo.train.forward.evaluation import token_loss  # imports torch

    gap, weights = result["gap"], result["weights"]
    sqnr = "" if weights["sqnr_db"] is None else f", {weights['sqnr_db']:.1f} dB geometric mean"
    exact = f" and exact match {100 * gap['exact_match']:+.2f} points" if "exact_match" in gap else ""
    print(f"\nOn the FP8 base the loss is {token_loss(gap):+.4g} nats{exact} compared with its high-precision weights.")
    print(
        f"{weights['count']} FP8 weights differ from them by {weights['relative']:.2%} on average{sqnr}, at most by "
        f"{weights['worst']['relative']:.2%} ({weights['worst']['name']})."
    )
