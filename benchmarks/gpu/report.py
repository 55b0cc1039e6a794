"""Compares GPU figures with their targets: a table with the measured figure, limit and verdict, and a plot.

    python -m octavo.bench report DIR [DIR ...]      folders written by make gpu or octavo bench --out DIR

A speed is the time of the baseline over the time of the fastest candidate of a recipe, as a measured plan would choose
it, summed over the cases. Each device has its own table; the plot is written to the first folder. Figures of a CPU are
shown without a verdict, to check that all of them exist.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from benchmarks.gpu.targets import TARGETS
from octavo.bench.record import NOISE, Result, Row, budget_table, columns_table, kernel_table, notes

HEAD = ("what", "best known elsewhere", "measured", "limit", "verdict")
NONE = "They say nothing about FP8 on a GPU: no verdict."


def main(words: Sequence[str]) -> int:
    """Print the tables and draw the plots; 1 where there is nothing to report."""
    if not words or words[0].startswith("-"):
        print("usage: python -m octavo.bench report DIR [DIR ...]")
        return 2
    folders = [Path(word) for word in words]
    try:
        results, outcomes = read(folders)
    except (ValueError, KeyError, TypeError, OSError) as error:
        print(f"these are not figures of make gpu or octavo bench: {error}")
        return 1
    if outcomes:
        print(f"GPU tests: {', '.join(f'{count} {name}' for name, count in sorted(outcomes.items()))}")
    for result in results:
        print("\n".join(["", *page(result)]))
        path = folders[0] / f"report_{'_'.join(result.device.lower().split())}{'_small' * result.small}.png"
        print(_drawn(result, path))
    if not results:
        print(f"no figures in {', '.join(words)}")
    return int(not results)


def read(folders: Sequence[Path]) -> tuple[list[Result], Counter[str]]:
    """What was measured, a result for each device; and what became of the tests. Raises ValueError for other files."""
    results: dict[tuple[str, bool], Result] = {}
    outcomes: Counter[str] = Counter()
    known = {field.name for field in fields(Row)}
    for where, job in _jobs(folders):
        outcomes.update(test["outcome"] for test in job.get("tests", {}).values())
        outcomes.update({"lost": len(job["lost"])} if job.get("lost") and "tests" in job else {})
        if job.get("rows"):
            key = (where.get("device", "unknown"), where.get("small", True))
            rows = [Row(**{name: row[name] for name in known & row.keys()}) for row in job["rows"]]
            results.setdefault(key, Result(*key)).rows.extend(rows)
    return list(results.values()), outcomes


def _jobs(folders: Sequence[Path]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """(where it ran, what it found) of each job, or of each suite that `octavo bench` wrote into a file of its own."""
    for folder in folders:
        for path in sorted(folder.glob("*.json")):
            file = json.loads(path.read_text(encoding="utf-8"))
            wrote = file.get("command") if isinstance(file, dict) else None  # other scripts' figures are passed over
            if wrote == "octavo bench":
                yield file, file
            for job in file["jobs"].values() if wrote == "make gpu" else ():
                yield file["calls"].get(job["call"], {}), job


def counts(result: Result) -> bool:
    """Whether the figures say anything about FP8 on a GPU."""
    return result.device != "cpu" and not result.small


def table(result: Result) -> list[tuple[str, ...]]:
    """Cells under :data:`HEAD`."""
    lines = []
    for target in TARGETS:
        value = target.of(result)
        if value is None:
            verdict = "not measured"
        elif not counts(result):
            verdict = "none"
        else:
            verdict = "reached" if target.reached(value) else "missed"
        shown = "" if value is None else f"{value:.2f}{target.unit}"
        lines.append((target.what, target.known, shown, target.bound(), verdict))
    return lines


def page(result: Result) -> list[str]:
    """The table of one device, and what has to be known of it."""
    cells = [HEAD, *table(result)]
    text = [f"{result.device}, against the figures set for one H200", *_set(cells)]
    if not counts(result):
        size = "small sizes" if result.device != "cpu" else "a CPU, where FP8 is emulated"
        text.append(f"These are figures of {size}. {NONE}")
    else:
        verdicts = Counter(line[-1] for line in cells[1:])
        text.append(", ".join(f"{count} {verdict}" for verdict, count in verdicts.items()))
    if noisy := sum(row.spread > NOISE for row in result.rows):
        text.append(f"{noisy} of {len(result.rows)} rows vary by more than {100 * NOISE:.0f} % between quartiles")
    tables = {
        "where the time of a step goes": budget_table(result),
        "where the time of a call goes, by kernel": kernel_table(result),
        "steps against each compiled step in high precision": columns_table(result),
    }
    for title, cells in tables.items():
        text += ["", title, *_set(cells)] if cells else []
    return [*text, *notes(result)]


def _set(cells: Sequence[Sequence[str]]) -> list[str]:
    """A table in lines, column below column."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells]


def _drawn(result: Result, path: Path) -> str:
    try:
        draw(result, path)
    except ImportError as error:
        return f"no plot: {error}; pip install matplotlib, and ask again"
    except OSError as error:
        return f"no plot: {path} cannot be written ({error.strerror})"
    return f"plot: {path}"


def draw(result: Result, path: Path) -> None:
    """Each figure as a part of its limit, into a PNG file. Raises ImportError without matplotlib."""
    from benchmarks.plot_canvas import BASE, FASTER, INK, SLOWER, SOFT, canvas

    figure, (axes,) = canvas(8, 0.9 + 0.3 * len(TARGETS))
    for y, target in enumerate(TARGETS):
        if (value := target.of(result)) is None:
            axes.text(0, y, " not measured", va="center", fontsize=7, color=SOFT)
            continue
        part = value / target.limit if target.least else target.limit / value
        colour = (FASTER if target.reached(value) else SLOWER) if counts(result) else BASE
        axes.barh(y, part, height=0.7, color=colour)
        axes.text(
            max(part, 1.0), y, f"  {value:.2f}{target.unit}, {target.bound()}", va="center", fontsize=7, color=INK
        )
    axes.axvline(1, color=INK, linewidth=1)
    axes.set_yticks(range(len(TARGETS)), [target.what for target in TARGETS], fontsize=7, color=SOFT)
    axes.set_ylim(len(TARGETS), -1)
    axes.set_xlim(0, 1.35 * max(1.0, axes.get_xlim()[1]))
    title = f"{result.device}: figures as parts of those to reach{'' if counts(result) else '. ' + NONE}"
    axes.set_title(title, loc="left", fontsize=9, color=INK)
    figure.savefig(path, dpi=110)
