"""Writes an HTML page about a run, finished or not: curves, held-out figures and answers, FP8 health, memory, plan,
proof.

For several runs the page compares curves, final figures and differing settings. During training, RUN/page.html is
updated automatically.

octavo report runs/first
octavo report runs/first runs/second -o compared.html
"""

from __future__ import annotations

import argparse
from pathlib import Path

from octavo.cli.arguments import UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", metavar="RUN", nargs="+", help="run directory of octavo train")
    parser.add_argument(
        "-o", "--out", metavar="OUT.html", help="output file (default: RUN/page.html, or runs.html for several runs)"
    )


def run(args: argparse.Namespace) -> int:
    out = Path(args.out or (f"{args.runs[0]}/page.html" if len(args.runs) == 1 else "runs.html"))
    if out.suffix != ".html":
        raise UsageError(f"-o {out}: the name must end with .html; a .png of the same name is written next to it")
    if missing := [run for run in args.runs if not Path(run).is_dir()]:
        raise UsageError(
            f"there is no run directory {', '.join(missing)}; name a directory that octavo train wrote (run.dir)"
        )

    from octavo.report.run import run_page

    page, image = run_page.write_page(run_page.read_runs(args.runs), out)
    print(f"wrote {page}, {image}")
    return 0
