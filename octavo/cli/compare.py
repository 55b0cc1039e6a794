"""The trial, three runs: high precision, high precision with another seed, and FP8, on the same data.

Writes report.html (one file, opens offline), report.json and PNG plots. Exit code: 0 pass or warn, 1 fail,
3 undecided: nothing speaks against FP8, and the report says what more would decide. More runs can be asked for later:
those that are there are read.
  octavo compare run.yaml
  octavo compare run.yaml --recipes blockwise,tensorwise --out trial
  octavo compare run.yaml --forks 3 --savings
"""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import Any

from octavo.cli import arguments, launch, terminal
from octavo.config import RECIPES, Config, override
from octavo.config.phases import BEYOND_SFT
from octavo.config.problems import nearest
from octavo.config.words import one_word


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_config(parser)
    parser.add_argument("--recipes", metavar="A,B", help="FP8 recipes to try (default: the file's own)")
    parser.add_argument("--out", metavar="DIR", help="folder of the report and the runs (default: <run.dir>-compare)")
    parser.add_argument("--fresh", action="store_true", help="train runs again that were trained before")
    parser.add_argument(
        "--jobs", type=arguments.positive, default=1, metavar="N", help="runs that train at a time (default 1)"
    )
    parser.add_argument(
        "--nproc", metavar="N", type=launch.processes, default=1, help="processes of each run, or auto: one a GPU"
    )
    parser.add_argument(
        "--savings", action="store_true", help="train also what tells what each memory saving cost, a run for each"
    )
    parser.add_argument(
        "--forks", type=arguments.natural, default=0, metavar="N",
        help="forks of high precision at two thirds of the run, in each precision, say 3: they decide the loss "
        "(default 0; phases rl and preference, where held-out answers decide, have none)",
    )  # fmt: skip
    parser.add_argument(
        "--seeds", type=arguments.positive, default=1, metavar="N",
        help="whole runs in each precision, in pairs of one seed (default 1, which makes no interval)",
    )  # fmt: skip
    parser.add_argument("--verbose", action="store_true", help="show the plan layer by layer, with all its notes")
    arguments.add_json(parser)


def run(args: argparse.Namespace) -> int:
    cfg = arguments.config(args)
    if args.nproc != 1 and args.jobs > 1:
        raise arguments.UsageError("--jobs trains runs beside each other, --nproc each over processes; give one")
    recipes = chosen(cfg, args.recipes)
    cfg = arguments.need_files(cfg, args.file)

    from octavo.cli.train import teller

    with arguments.importing():
        from octavo import report, rl  # noqa: F401  the runs need it, and it is imported fastest here

    nproc = 1 if args.nproc == 1 else launch.how_many(args.nproc)
    directory = args.out or f"{cfg.run.dir}-compare"
    how = {"fresh": args.fresh, "jobs": args.jobs, "savings": args.savings}
    how |= {"forks": args.forks, "seeds": args.seeds, "nproc": nproc, "tell": teller(args.verbose)}
    verdict = report.compare(cfg, recipes, directory, console=terminal.console(), **how)
    code = conclude(verdict, args.json)
    say = terminal.note if args.json else print
    say(f"report: {Path(directory) / 'report' / 'report.html'}")
    say(f"next: {_next(code, args, cfg)}")
    return code


def _next(code: int, args: argparse.Namespace, cfg: Config) -> str:
    """The command that a person would want now."""
    own = [*(["--out", args.out] * bool(args.out)), *(["--nproc", str(args.nproc or "auto")] * (args.nproc != 1))]
    same = shlex.join(["octavo", "compare", args.file, *arguments.overrides(args), *own])
    if code == 0:
        return shlex.join(["octavo", "train", args.file, *arguments.overrides(args)])
    if code == 1:
        return f"open the report: it says what failed; then another recipe, {same} --recipes ..."
    if cfg.train.phase in BEYOND_SFT:
        return f"{same} --seeds {args.seeds + 2}"
    return f"do what each undecided claim says above, then {same} --fresh"


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
