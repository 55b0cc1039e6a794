"""Shows what this machine can run, what it cannot run, and how to fix it.

octavo doctor --all          list every check
octavo doctor --families     list which model families can be trained here; with --all, by component

Exit code 1 if something required is broken.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from octavo.cli import arguments, terminal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_json(parser)
    parser.add_argument(
        "--all", action="store_true", help="list every check, with the fix for missing optional packages"
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

    log = (lambda text: terminal.note(f"{text} ...")) if sys.stderr.isatty() else (lambda text: None)
    with arguments.importing():
        report = doctor.examine(log)
    if args.json:
        terminal.show_json(report.to_json())
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


def show(report: Any, everything: bool) -> None:
    """Print the checks as a table, the meaning and fix of each failure, and a summary line."""
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
        count = "1 required check" if len(failures) == 1 else f"{len(failures)} required checks"
        print(f"{count} failed: {', '.join(check.name for check in failures)}.")
    else:
        print("All required checks passed.")


def _all_rows(report: Any) -> list[tuple[str, str, str]]:
    return [(check.status, f"{check.area}: {check.name}", check.found) for check in report.checks]


def _short_rows(report: Any) -> list[tuple[str, str, str]]:
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
