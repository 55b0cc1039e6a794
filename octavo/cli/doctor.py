"""Shows what this machine can run, what it cannot, and how to fix it. Exit code 1 if something required is broken.

octavo doctor --all          all checks one by one
octavo doctor --families     what each model of images, audio and text can do here; --all adds its parts
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from octavo.cli import arguments, terminal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_json(parser)
    parser.add_argument(
        "--all", action="store_true", help="list all checks one by one, with the fix for absent optional packages"
    )
    parser.add_argument(
        "--families",
        action="store_true",
        help="list the models of images, audio and text in the installed transformers",
    )


def run(args: argparse.Namespace) -> int:
    if args.families:
        return families(args)
    from octavo import doctor

    log = (lambda text: terminal.note(f"{text} ...")) if sys.stderr.isatty() else (lambda text: None)
    with arguments.importing():
        report = doctor.examine(log)
    if args.json:
        terminal.show_json(report.to_json())
    else:
        show(report, everything=args.all)
    return 0 if report.healthy else 1


def families(args: argparse.Namespace) -> int:
    """List the models of images, audio and text: which train here, can only be planned, or are refused, and why."""
    with arguments.importing():
        from octavo.models.forward import survey
    rows = list(survey.survey())
    if args.json:
        terminal.show_json([one.to_json() for one in rows])
        return 0
    which = range(len(survey.COLUMNS)) if args.all else (0, len(survey.COLUMNS) - 1)
    terminal.show_table([survey.COLUMNS[i] for i in which], [[one.cells[i] for i in which] for one in rows])
    print(f"\n{survey.summary(rows)}")
    return 0


def show(report: Any, everything: bool) -> None:
    """Print the checks as a table, the meaning and the fix of each failure, and a line that sums up."""
    rows = _all_rows(report) if everything else _short_rows(report)
    terminal.show_table(("", "what", "found"), rows)
    for check in report.of("fail", "warn", *(["absent"] if everything else [])):
        print(f"\n{check.status}: {check.name}: {check.found}")
        if check.means:
            print(f"  means: {check.means}")
        if check.fix:
            print(f"  fix:   {check.fix}")
    failures = report.of("fail")
    print()
    if failures:
        count = "1 required thing does" if len(failures) == 1 else f"{len(failures)} required things do"
        print(f"{count} not work: {', '.join(check.name for check in failures)}.")
    else:
        print("Everything that is required works.")


def _all_rows(report: Any) -> list[tuple[str, str, str]]:
    return [(check.status, f"{check.area}: {check.name}", check.found) for check in report.checks]


def _short_rows(report: Any) -> list[tuple[str, str, str]]:
    """The passed checks of an area in one row; every other check in a row."""
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
