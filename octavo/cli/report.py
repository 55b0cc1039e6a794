"""Writes the page of a run, finished or not: curves, held-out figures and answers, FP8 health, memory, plan and proof.
For several runs the page compares their curves, last figures and differing settings. A running training writes and
updates RUN/page.html itself.

octavo report runs/first
octavo report runs/first runs/second -o compared.html
"""

from __future__ import annotations

import argparse
from pathlib import Path

from octavo.cli.arguments import UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", metavar="RUN", nargs="+", help="a run directory, as octavo train wrote it")
    parser.add_argument(
        "-o", "--out", metavar="OUT.html", help="the page (default: RUN/page.html; for several runs, runs.html here)"
    )


def run(args: argparse.Namespace) -> int:
    out = Path(args.out or (f"{args.runs[0]}/page.html" if len(args.runs) == 1 else "runs.html"))
    if out.suffix != ".html":
        raise UsageError(f"-o {out}: a page must end with .html; its picture is written next to it, as .png")
    if lost := [run for run in args.runs if not Path(run).is_dir()]:
        raise UsageError(
            f"there is no run directory {', '.join(lost)}; name a directory that octavo train wrote (run.dir)"
        )

    from octavo.report.run import run_page

    page, image = run_page.write_page(run_page.read_runs(args.runs), out)
    print(f"wrote {page}, {image}")
    return 0
