"""Trains, compares and queries a model in high precision and in FP8, in a few minutes on a laptop.

Creates the digits dataset and a tiny Qwen3-VL, trains it in high precision and in FP8, judges held-out accuracy, writes
the report, and asks the FP8 model about a held-out image. With --real it trains adapters of SmolLM2-135M, with its
pretrained weights, and judges held-out loss; `make real` writes that model. Finished runs in DIR are reused. Exit code:
0; 1 if the verdict is fail, 3 if it is undecided.
"""

from __future__ import annotations

import argparse

from octavo.cli import arguments, compare, terminal

# Options that --power has no use for. None, so that an option with the value of its default is not taken for absent.
_RUN = {"dir": None, "steps": None, "seed": None, "fresh": False}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--real", action="store_true", help="train LoRA on SmolLM2-135M in build/smollm2 (make real)")
    parser.add_argument("--dir", metavar="DIR", help="output folder (default: demo, or demo-real with --real)")
    parser.add_argument(
        "--steps",
        type=arguments.positive,
        metavar="N",
        help="number of training steps (default 500, or 20 with --real)",
    )
    parser.add_argument("--seed", type=arguments.natural, metavar="N", help="of weights and data (default 0)")
    parser.add_argument("--fresh", action="store_true", help="retrain all runs")
    parser.add_argument("--power", action="store_true", help="print what the demo can decide, and train nothing")
    arguments.add_json(parser)
    parser.set_defaults(**_RUN)


def run(args: argparse.Namespace) -> int:
    # with --json, stdout carries only the verdict, and progress goes to stderr
    console = terminal.console(stderr=args.json)
    from octavo.report.demo.handwriting import HANDWRITING
    from octavo.report.demo.pretrained import PRETRAINED

    task = PRETRAINED if args.real else HANDWRITING
    if args.power:
        if ignored := [f"--{name}" for name, default in _RUN.items() if getattr(args, name) != default]:
            raise arguments.UsageError(f"{', '.join(ignored)}: --power trains nothing; leave out one of them")
        power = task.power()
        if args.json:
            terminal.show_json(power.to_json())
        else:
            for line in power.lines:
                console.print(line, highlight=False, soft_wrap=True)
        return 0
    from octavo.report.demo import demo

    directory, steps = args.dir or task.directory, args.steps or task.steps
    verdict = demo.run(directory, steps, fresh=args.fresh, console=console, seed=args.seed or 0, task=task)
    if args.json:
        terminal.show_json(compare.summary(verdict))
    return demo.exit_code(verdict)
