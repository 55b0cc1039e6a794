"""Trains in high precision, in high precision with another seed, and in FP8 on the same data, and compares the runs.

Before the first run it prints what the trial is expected to decide; --power prints only that. --factorial trains every
combination of components in FP8 and reports the cost of each.
Writes report.html (self-contained), report.json and PNG plots. Exit code: 0 for pass or warn, 1 for fail, 3 for
undecided: there is no evidence against FP8, and the report lists the runs that would decide. Existing runs are reused,
so runs can be added later.
  octavo compare run.yaml
  octavo compare run.yaml --recipes blockwise,tensorwise --out trial
  octavo compare run.yaml --forks 3 --savings
  octavo compare run.yaml --seeds 6 --power
  octavo compare run.yaml --factorial image_encoder,foundation --seeds 3
"""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import Any

from octavo.base import target_folder
from octavo.base.wording import nearest
from octavo.cli import arguments, launch_ranks, terminal
from octavo.config import RECIPES, Config, override
from octavo.config.sections.names import canonical_name
from octavo.config.sections.rl import BEYOND_SFT


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_config(parser)
    # The defaults 0 and 1 select the smallest trial; each option adds runs to it.
    parser.add_argument("--recipes", metavar="A,B", help="FP8 recipes to compare (default: the recipe of the file)")
    parser.add_argument(
        "--out", metavar="DIR", help="output folder for the report and the runs (default: <run.dir>-compare)"
    )
    parser.add_argument("--fresh", action="store_true", help="retrain all runs")
    parser.add_argument(
        "--jobs",
        type=arguments.positive,
        default=1,
        metavar="N",
        help="number of runs to train in parallel (default 1)",
    )
    parser.add_argument(
        "--nproc",
        metavar="N",
        type=launch_ranks.processes,
        default=1,
        help="number of processes per run, or auto for one per GPU (default 1)",
    )
    parser.add_argument(
        "--savings", action="store_true", help="also train one run per memory saving, to measure its cost"
    )
    parser.add_argument(
        "--forks", type=arguments.natural, default=0, metavar="N",
        help="number of forks of the high-precision run after two thirds of its steps, in each precision, e.g. 3; the "
        "verdict on the loss is based on them (default 0; not for phases rl and preference)",
    )  # fmt: skip
    parser.add_argument(
        "--seeds", type=arguments.positive, default=1, metavar="N",
        help="number of runs in each precision, in pairs with the same seed (default 1, which gives no interval)",
    )  # fmt: skip
    parser.add_argument(
        "--factorial", metavar="A,B",
        help="two to four components: train every combination of them in FP8 with --seeds seeds, and report the cost "
        "of each component (see docs/trials.md)",
    )  # fmt: skip
    parser.add_argument(
        "--power", action="store_true",
        help="print what this trial is expected to decide and which runs it needs, without training",
    )  # fmt: skip
    parser.add_argument("--verbose", action="store_true", help="print the plan layer by layer, with all notes")
    arguments.add_json(parser)


def run(args: argparse.Namespace) -> int:
    cfg = arguments.config(args)
    if args.nproc != 1 and args.jobs > 1:
        raise arguments.UsageError(
            "--jobs trains runs in parallel and --nproc distributes each run; use only one of them"
        )
    recipes = parse_recipes(cfg, args.recipes)
    components = parse_factorial(args.factorial)
    cfg = arguments.require_files(cfg, args.file)

    from octavo.cli.train import plan_printer

    with arguments.importing():
        from octavo import report, rl  # noqa: F401  runs import it; here garbage collection is off
        from octavo.report.trial import design, factorial_cells

    nproc = 1 if args.nproc == 1 else launch_ranks.resolve_process_count(args.nproc)
    directory = args.out or f"{cfg.run.dir}-compare"
    # Checked before the first run, because the report is written after the last one.
    target_folder.check_target(directory, arguments.UsageError)
    options = {"fresh": args.fresh, "savings": args.savings, "forks": args.forks, "seeds": args.seeds}
    options["factorial"] = components
    if args.power:
        return print_design(design.design(cfg, recipes, directory, **options), args.json)
    execution = {"jobs": args.jobs, "nproc": nproc, "describe_plan": plan_printer(args.verbose)}
    verdict = report.compare(cfg, recipes, directory, console=terminal.console(), **options, **execution)
    code = print_verdict(verdict, args.json)
    log = terminal.note if args.json else print
    for component in factorial_cells.costly_components(verdict.effects):
        command = _bisect_command(component, args, verdict.data)
        log(f"{component} costs more than its margin; to find the cause, run {command}")
    log(f"report: {Path(directory) / 'report' / 'report.html'}")
    log(f"next: {_next(code, args, cfg)}{arguments.key_option(args)}")
    return code


def print_design(design: Any, as_json: bool) -> int:
    """Print what a trial is expected to decide and which runs it needs."""
    if as_json:
        terminal.show_json(design.to_json())
        return 0
    print("\n".join(design.lines))
    runs = design.to_json()["runs"]
    print(f"{len(runs)} runs, {sum(run['trained'] for run in runs)} of them already trained:")
    for number, run in enumerate(runs, 1):
        print(f"  {number:>3}  {run['label']}{', already trained' if run['trained'] else ''}")
    return 0


def _bisect_command(component: str, args: argparse.Namespace, data: Any) -> str:
    """Return the command that searches with only this component in FP8."""
    factorial = data["factorial"]
    recipe = [f"fp8.recipe={args.recipes}", "fp8.plan=null"] if args.recipes else []
    others = [name for name in (*factorial["components"], *factorial["left_out"]) if name != component]
    off = [f"fp8.{name}.recipe=off" for name in others]
    return shlex.join(["octavo", "bisect", args.file, *arguments.overrides(args), *recipe, *off])


def parse_factorial(text: str | None) -> tuple[str, ...]:
    """Parse the components of a factorial trial, without importing torch."""
    if text is None:
        return ()
    from octavo.report import ReportError
    from octavo.report.trial import factorial_cells

    try:
        return factorial_cells.check_components([name.strip() for name in text.split(",") if name.strip()])
    except ReportError as error:
        raise arguments.UsageError(f"--{error}") from error


def _next(code: int, args: argparse.Namespace, cfg: Config) -> str:
    """Return the command to run next."""
    options = [*(["--out", args.out] * bool(args.out)), *(["--nproc", str(args.nproc or "auto")] * (args.nproc != 1))]
    command = shlex.join(["octavo", "compare", args.file, *arguments.overrides(args), *options])
    if code == 0:
        return shlex.join(["octavo", "train", args.file, *arguments.overrides(args)])
    if code == 1:
        return f"see the report for the failed checks, then try another recipe: {command} --recipes ..."
    if cfg.train.phase in BEYOND_SFT:
        return f"{command} --seeds {args.seeds + 2}"
    if args.factorial:
        recipe = ["--recipes", args.recipes] if args.recipes else []
        further = shlex.join([*recipe, "--factorial", args.factorial, "--seeds", str(args.seeds + 2)])
        return f"follow the advice of each undecided claim above; for more seeds: {command} {further}"
    return f"follow the advice of each undecided claim above, then run {command} --fresh"


def parse_recipes(cfg: Config, text: str | None) -> list[str] | None:
    """Parse the recipes to compare, and check each against the configuration."""
    if text is None:
        return None
    names = list(dict.fromkeys(canonical_name(name.strip()) for name in text.split(",") if name.strip()))
    if not names:
        raise arguments.UsageError("--recipes is empty; name at least one, e.g. --recipes blockwise")
    for name in names:
        if name == "off":
            raise arguments.UsageError("--recipes: off is always the reference; remove it")
        if name not in (*RECIPES, "auto"):
            close = nearest(name, RECIPES[1:])
            hint = f"did you mean {close}? " if close else ""
            raise arguments.UsageError(
                f"--recipes: unknown recipe {name!r}; {hint}recipes are {', '.join(RECIPES[1:])}"
            )
        override(cfg, [f"fp8.recipe={name}"])
    return names


def print_verdict(verdict: Any, as_json: bool) -> int:
    """Print the verdict with its claims and reasons. Returns 0 for pass and warn, 1 for fail, 3 for undecided."""
    if as_json:
        terminal.show_json(summary(verdict))
    else:
        print("\n".join(verdict.lines))
        if verdict.effects:
            columns = ("in FP8", "effect on", "effect", "95 % interval", "verdict")
            terminal.show_table(columns, [_row(effect) for effect in verdict.effects], right=(2, 3))
    return int(verdict.exit_code)


def _row(effect: Any) -> tuple[str, ...]:
    """Format an effect as a table row: points of accuracy, per cent of a loss."""
    accuracy = effect.name.endswith("accuracy")
    digits = 2 if accuracy else 3
    ends = "" if effect.low is None else f"{100 * effect.low:+.{digits}f} to {100 * effect.high:+.{digits}f}"
    figure = "" if effect.low is None else f"{100 * effect.figure:+.{digits}f}"
    return effect.run, "accuracy, points" if accuracy else "loss, %", figure, ends, effect.status


def summary(verdict: Any) -> dict[str, Any]:
    """Return the verdict as JSON; report.json in the report folder has every figure."""
    return {
        "status": verdict.status,
        "line": verdict.line,
        "reasons": list(verdict.reasons),
        "checks": [check.to_json() for check in verdict.checks],
        "power": verdict.data["power"],
        "factorial": verdict.data["factorial"],
    }
