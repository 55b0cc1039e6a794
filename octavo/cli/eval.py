"""Evaluates a run on its held-out data: loss, and exact match per question.

octavo eval runs/first
octavo eval runs/first --step 200 --recipe off      the same weights in high precision
"""

from __future__ import annotations

import argparse
from pathlib import Path

from octavo.cli import arguments, terminal
from octavo.config import RECIPES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="a run directory")
    parser.add_argument("--step", type=arguments.positive, metavar="N", help="this checkpoint (default: the newest)")
    parser.add_argument("--recipe", metavar="NAME", choices=RECIPES, help="another recipe than the run's, e.g. off")
    arguments.add_json(parser)


def run(args: argparse.Namespace) -> int:
    if not Path(args.run).is_dir():
        raise arguments.UsageError(f"there is no folder {args.run}; name the run.dir of an octavo train")

    from octavo import train

    found = train.evaluate_run(args.run, args.step, args.recipe, say=terminal.note)
    if args.json:
        terminal.show_json(found)
    else:
        shown = dict(found) | {"exact_match": f"{100 * found['exact_match']:.1f} %"}
        names = [name.replace("_", " ") for name in shown]
        terminal.show_table(names, [[terminal.number(value) for value in shown.values()]], right=range(len(names)))
    return 0
