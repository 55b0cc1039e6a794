"""The trial: high precision, high precision with another seed, and each FP8 recipe, on the same data.

Writes report.html (one file, opens offline), report.json and PNG plots. Exit code: 0 pass or warn, 1 fail,
3 undecided: nothing speaks against FP8, and the report says what more would decide.
  octavo compare run.yaml
  octavo compare run.yaml --recipes blockwise,tensorwise --out trial
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from octavo.cli import arguments, terminal
from octavo.config import RECIPES, Config, override
from octavo.config.problems import nearest
from octavo.config.sections import one_word


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_config(parser)
    parser.add_argument("--recipes", metavar="A,B", help="FP8 recipes to try (default: the file's own)")
    parser.add_argument("--out", metavar="DIR", help="folder of the report and the runs (default: <run.dir>-compare)")
    parser.add_argument("--fresh", action="store_true", help="train runs again that were trained before")
    parser.add_argument(
        "--jobs", type=arguments.positive, default=1, metavar="N", help="runs that train at a time (default 1)"
    )
    parser.add_argument(
        "--no-savings", action="store_true", help="leave out the runs that tell what each memory saving cost"
    )
    parser.add_argument(
        "--forks", type=arguments.natural, metavar="N",
        help="forks of high precision at two thirds of the run, in each precision; they decide the loss "
        "(default 3; phases rl and preference, where held-out answers decide, have none)",
    )  # fmt: skip
    parser.add_argument(
        "--seeds", type=arguments.positive, default=1, metavar="N",
        help="whole runs in each precision, in pairs of one seed (default 1, which makes no interval)",
    )  # fmt: skip
    arguments.add_json(parser)


def run(args: argparse.Namespace) -> int:
    cfg = arguments.config(args)
    recipes = chosen(cfg, args.recipes)

    from octavo import report

    directory = args.out or f"{cfg.run.dir}-compare"
    how = {"fresh": args.fresh, "jobs": args.jobs, "savings": not args.no_savings}
    how |= {"forks": args.forks, "seeds": args.seeds}
    verdict = report.compare(cfg, recipes, directory, console=terminal.console(), **how)
    terminal.note(f"report: {Path(directory) / 'report' / 'report.html'}")
    return conclude(verdict, args.json)


def chosen(cfg: Config, text: str | None) -> list[str] | None:
    """The recipes to try, each checked against the configuration now and not after the first run has trained."""
    if text is None:
        return None
    names = list(dict.fromkeys(one_word(name.strip()) for name in text.split(",") if name.strip()))
    if not names:
        raise arguments.UsageError("--recipes is empty; name at least one, e.g. --recipes blockwise")
    for name in names:
        if name == "off":
            raise arguments.UsageError("--recipes: off is the reference of every recipe; leave it out")
        if name not in (*RECIPES, "auto"):
            close = nearest(name, RECIPES[1:])
            hint = f"did you mean {close}? " if close else ""
            raise arguments.UsageError(f"--recipes: unknown {name!r}; {hint}there are {', '.join(RECIPES[1:])}")
        override(cfg, [f"fp8.recipe={name}"])
    return names


def conclude(verdict: Any, as_json: bool) -> int:
    """Says the verdict with its claims and reasons; 0 for pass and warn, 1 for fail, 3 where it is undecided."""
    if as_json:
        terminal.show_json(summary(verdict))
    else:
        print("\n".join(verdict.lines))
    return int(verdict.exit_code)


def summary(verdict: Any) -> dict[str, Any]:
    """A verdict for programs; report.json in the report folder holds every figure."""
    return {
        "status": verdict.status,
        "line": verdict.line,
        "reasons": list(verdict.reasons),
        "checks": [check.to_json() for check in verdict.checks],
    }
