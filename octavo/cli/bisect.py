"""Finds which layer, GEMM or feature breaks a run, by short runs on the same data.

A run is broken if it raises, its loss is not finite, or it is worse than high precision by a margin. The search halves
the set of suspects; the answer is the smallest set that breaks the run, and a configuration that works (works.yaml).
An interrupted search continues: runs that are already trained are read. Exit code: 0 with an answer, 1 without.
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
    parser.add_argument("--out", metavar="DIR", help="folder of the search (default: <run.dir>-bisect)")
    parser.add_argument(
        "--by", choices=("loss", "time"), default="loss", help="what decides whether a run is broken (default loss)"
    )
    parser.add_argument(
        "--margin", type=arguments.share, metavar="X",
        help="how much worse than high precision counts as broken, a share (default 0.02; by time 0.05)",
    )  # fmt: skip
    parser.add_argument(
        "--steps", type=arguments.positive, metavar="N", help="most steps of each run (default: train.steps)"
    )
    parser.add_argument(
        "--from", dest="start", metavar="CHECKPOINT", help="a checkpoint of a run, from which all runs continue"
    )
    parser.add_argument("--fresh", action="store_true", help="train all runs again")
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
        log(f"next: octavo train {directory / 'works.yaml'}")
    return int(answer.status == bisect.UNSOLVED)
