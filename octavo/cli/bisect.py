"""Finds the layer, GEMM or feature that breaks a run, with short runs on the same data.

A run is broken if it raises an error, its loss is not finite, or it is worse than high precision by a margin. The
search is a bisection over candidates. It prints the smallest set that breaks the run, and writes a configuration that
works (works.yaml). An interrupted search can be continued: finished runs are reused. Exit code: 0 with an answer, 1
without.
  octavo bisect run.yaml
  octavo bisect run.yaml --steps 100 --margin 0.01
  octavo bisect run.yaml --from runs/first/milestones/step_200
  octavo bisect run.yaml --by time
"""

from __future__ import annotations

import argparse
from pathlib import Path

from octavo.base import target_folder
from octavo.cli import arguments, terminal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_config(parser)
    parser.add_argument("--out", metavar="DIR", help="output folder (default: <run.dir>-bisect)")
    parser.add_argument(
        "--by", choices=("loss", "time"), default="loss", help="criterion for a broken run (default loss)"
    )
    parser.add_argument(
        "--margin", type=arguments.share, metavar="X",
        help="relative difference from high precision above which a run is broken (default 0.02, with --by time 0.05)",
    )  # fmt: skip
    parser.add_argument(
        "--steps", type=arguments.positive, metavar="N", help="maximum number of steps per run (default: train.steps)"
    )
    parser.add_argument("--from", dest="start", metavar="CHECKPOINT", help="checkpoint that all runs start from")
    parser.add_argument("--fresh", action="store_true", help="retrain all runs")
    arguments.add_json(parser)


def run(args: argparse.Namespace) -> int:
    cfg = arguments.require_files(arguments.config(args), args.file)
    with arguments.importing():
        from octavo import bisect

    directory = Path(args.out or f"{cfg.run.dir}-bisect")
    target_folder.check_target(directory, arguments.UsageError)
    answer = bisect.bisect(
        cfg, directory, args.by, args.margin, args.steps, args.start, terminal.console(stderr=args.json), args.fresh
    )
    log = terminal.note if args.json else print
    if args.json:
        terminal.show_json(bisect.document(answer))
    else:
        print(answer.sentence)
    log(f"page: {directory / 'bisect.html'}")
    if answer.works is not None:
        log(f"next: octavo train {directory / 'works.yaml'}{arguments.key_option(args)}")
    return int(answer.status == bisect.UNSOLVED)
