"""Shows what this machine can run, what it cannot run, and how to fix it.

octavo doctor                on a machine without an accelerator: what runs here, and what would run on which GPU
octavo doctor --all          import every package, and list every check
octavo doctor --families     list which model families can be trained here; with --all, by component

Exit code 1 if something required is broken.
"""

from __future__ import annotations

import argparse
import itertools
from typing import TYPE_CHECKING

from octavo.cli import arguments, terminal

if TYPE_CHECKING:  # --help must not wait for torch
    from octavo.doctor import Report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_json(parser)
    parser.add_argument(
        "--all",
        action="store_true",
        help="import every package and list every check, with the fix for missing optional packages",
    )
    parser.add_argument(
        "--families",
        action="store_true",
        help="list the vision, audio and text models of the installed transformers",
    )


def run(args: argparse.Namespace) -> int:
    if args.families:
        return families(args)
    from octavo import doctor
    from octavo.base import environment

    # The imports take more time than everything else, and on a machine without an accelerator seldom matter.
    thorough = args.all or args.json or bool(environment.find_drivers())
    stages = itertools.count()
    with arguments.importing(), terminal.progress("doctor", bytes=False) as progress:
        report = doctor.examine(lambda text: progress(next(stages), doctor.STAGES, text), every_package=thorough)
    if args.json:
        terminal.show_json(report.to_json())
    elif not thorough:
        print("\n".join(describe_cpu_machine(report)))
    else:
        show(report, everything=args.all)
    return 0 if report.healthy else 1


def families(args: argparse.Namespace) -> int:
    """List the vision, audio and text models: which train here, can only be planned, or are not supported, and why."""
    with arguments.importing():
        from octavo.models.forward import survey
    rows = list(survey.survey())
    if args.json:
        terminal.show_json([row.to_json() for row in rows])
        return 0
    columns = range(len(survey.COLUMNS)) if args.all else (0, len(survey.COLUMNS) - 1)
    terminal.show_table([survey.COLUMNS[i] for i in columns], [[row.cells[i] for i in columns] for row in rows])
    print(f"\n{survey.summary(rows)}")
    return 0


def describe_cpu_machine(report: Report) -> list[str]:
    """Return what a machine without an accelerator runs, and what GPUs would run: at most 12 lines if no check failed
    or warns, else more, with the fix of each."""
    from octavo.base.recipe_specs import NAMES
    from octavo.doctor.other_gpus import GPUS, INSTALL, describe_gpu

    passed = {(check.area, check.name): check for check in report.of("ok")}
    runnable = [name for name in NAMES if ("fp8", f"reference {name} on cpu") in passed]
    missing = [package for package, check in _optional_versions().items() if check is None]
    cpu = passed.get(("devices", "cpu"))
    lines = [
        f"here: {'a CPU' if cpu is None else cpu.found}; no GPU. FP8 is emulated: correct, but slow",
        f"  forward and backward tried, close to high precision: {', '.join(runnable) or 'no recipe'}",
        "with a GPU (* the kernel applies the scales, not the tensor core):",
        *(f"  {describe_gpu(gpu)}" for gpu in GPUS),
        f"to use one: an NVIDIA driver, then {INSTALL}",
        f"optional packages that are not installed: {', '.join(missing) or 'none'}",
        "to import every package and list every check: octavo doctor --all",
    ]
    return [*lines, *_problem_lines(report), _summary(report)]


def _optional_versions() -> dict[str, str | None]:
    from octavo.base import environment
    from octavo.doctor import packages

    return {package.distribution: environment.version(package.distribution) for package in packages.OPTIONAL}


def show(report: Report, everything: bool) -> None:
    """Print the checks as a table, the meaning and fix of each failure, and a summary line."""
    rows = _all_rows(report) if everything else _short_rows(report)
    terminal.show_table(("", "what", "found"), rows)
    print("\n".join([*_problem_lines(report, *(["absent"] if everything else [])), "", _summary(report)]))


def _problem_lines(report: Report, *further: str) -> list[str]:
    """Return the meaning and fix of each check that failed or warns, or has one of the ``further`` statuses."""
    lines: list[str] = []
    for check in report.of("fail", "warn", *further):
        lines += ["", f"{check.status}: {check.name}: {check.found}"]
        lines += [f"  means: {check.means}"] * bool(check.means) + [f"  fix:   {check.fix}"] * bool(check.fix)
    return lines


def _summary(report: Report) -> str:
    failures = report.of("fail")
    if not failures:
        return "All required checks passed."
    count = "1 required check" if len(failures) == 1 else f"{len(failures)} required checks"
    return f"{count} failed: {', '.join(check.name for check in failures)}."


def _all_rows(report: Report) -> list[tuple[str, str, str]]:
    return [(check.status, f"{check.area}: {check.name}", check.found) for check in report.checks]


def _short_rows(report: Report) -> list[tuple[str, str, str]]:
    """Return one row for the passed checks of an area, and one row for every other check."""
    rows: list[tuple[str, str, str]] = []
    for area in dict.fromkeys(check.area for check in report.checks):
        checks = [check for check in report.checks if check.area == area]
        good = [check for check in checks if check.status == "ok"]
        if len(good) > 3:
            rows.append(("ok", area, ", ".join(check.name for check in good)))
        else:
            rows += [("ok", f"{area}: {check.name}", check.found) for check in good]
        rows += [(c.status, f"{area}: {c.name}", c.found) for c in checks if c.status in ("fail", "warn")]
        rows += [(c.status, f"{area}: {c.name}", f"{c.found}: {c.means}") for c in checks if c.status == "absent"]
    return rows
