"""Writes the tables of docs/studies.md from the result files, at the places that the page marks.

    python -m benchmarks.studies tables

A place begins with `<!-- table: NAME -->` and ends with `<!-- end -->`. NAME is a study (its rows), `STUDY power` (the
estimate of the last design), `STUDY cost`, or another name in :data:`MORE`. The place of a study without a result file
stays as it is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PAGE, RESULTS = ROOT / "docs" / "studies.md", ROOT / "benchmarks" / "results"
Result = Mapping[str, Any]
PLACE = re.compile(r"(<!-- table: ([\w ]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def written(page: str, results: Path = RESULTS) -> str:
    """The page with its tables as the result files have them."""

    def fill(place: re.Match[str]) -> str:
        name, _, word = place[2].partition(" ")
        file = results / f"study_{name}.json"
        study = Path(__file__).with_name(f"{name}.py")
        if not study.is_file() or word not in MORE:
            raise SystemExit(f"the place of {place[2]!r}: there is no {study if word in MORE else f'table {word!r}'}")
        if not file.is_file():  # not run yet
            return place[0]
        result = json.loads(file.read_text(encoding="utf-8"))
        return f"{place[1]}{MORE[word](result)}\n{place[3]}"

    return PLACE.sub(fill, page)


def rows(result: Result) -> str:
    lines = ["| design | of what | gap, 95 % interval | bar | units | |", "|---|---|---|---|---|---|"]
    for one in result["rows"]:
        bar = ("+-" if one.get("both_sides") else "") + percent(one["margin"], sign=False)
        cells = (one["design"], one["what"], interval(one), bar, str(one["units"]))
        lines.append(f"| {' | '.join((*cells, verdict(one)))} |")
    return "\n".join(lines)


def interval(one: Mapping[str, Any]) -> str:
    if "estimate" not in one:
        single = f"{percent(one['gaps'][0])}, one unit" if len(one["gaps"]) == 1 else "none: no unit"
        return "; ".join(one.get("failed", ())) or single
    return f"{percent(one['estimate'])} ({percent(one['low'])} to {percent(one['high'])})"


def verdict(one: Mapping[str, Any]) -> str:
    if one["status"] != "undecided" or "estimate" not in one:
        return str(one["status"])
    needed = one["needed"]
    return "undecided" + (": at or beyond the bar" if needed is None else f": {needed:,} units would decide")


def percent(share: float, sign: bool = True) -> str:
    """Three significant digits of what matters: thousandths of a per cent below 1 %."""
    value = 100 * share
    digits = 3 if abs(value) < 1 else 2 if abs(value) < 100 else 0
    text = f"{value:{'+' if sign else ''}.{digits}f}"
    return f"{text} %" if sign else f"{value:g} %"


def power(result: Result) -> str:
    lines = ["| design | units | assumed standard deviation | expected interval | chance to pass | units for 80 % |",
             "|---|---|---|---|---|---|"]  # fmt: skip
    for one in result["power"][-1]["designs"]:
        needed = "more than 100,000" if one["units_for_80"] is None else f"{one['units_for_80']:,}"
        cells = (
            one["design"], str(one["units"]), f"{100 * one['spread']:g} % ({one['source']})",
            f"+-{100 * one['half_width']:.3g} %", f"{100 * one['chance']:.0f} %", needed,
        )  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def cost(result: Result) -> str:
    whole = "all" if result["trained"] == result["units"] else f"{result['trained']} of"
    failed = f", {len(result['failed'])} failed" if result["failed"] else ""
    return f"`{result['command']}`: {whole} {result['units']} units{failed}, {result['cpu_hours']:.2f} CPU hours."


def cells(result: Result) -> str:
    lines = ["| in FP8 | questions right | held-out loss |", "|---|---|---|"]
    lines += [f"| {name} | {100 * one['right']:.2f} % | {one['loss']:.4f} |" for name, one in result["cells"].items()]
    return "\n".join(lines)


def routing(result: Result) -> str:
    lines = ["| between | experts of a token that are others | choices that moved | busiest expert, over the mean |",
             "|---|---|---|---|"]  # fmt: skip
    for one in result["routing"]:
        found_of = (one["flips"], one["load_moved"])
        shown = (
            "none" if of is None else "{:.2f} % ({:.2f} to {:.2f})".format(*(100 * x for x in of)) for of in found_of
        )
        busiest = " and ".join(f"{value:.3f}" for value in one.get("busiest", ())) or "none"
        lines.append(f"| {one['what']} | {' | '.join(shown)} | {busiest} |")
    return "\n".join(lines)


def equal(result: Result) -> str:
    """What FP8 costs at equal weights, by recipe and by layer: the order of the result file."""
    lines = ["| in FP8 | layers | gap of the loss (standard error) | windows | gradient: error | mean cosine |"]
    lines.append("|---|---|---|---|---|---|")
    for one in result["equal"]:
        if "ties" in one:
            continue  # in the table of updates
        gap = "" if "gap" not in one else f"{percent(one['gap'])} ({100 * one['error']:.3f})"
        name, layers = one["what"].partition("-")[2].replace("_", r"\_"), one.get("layers", "")
        gradient = f"{one['gradient_error']:.3f} | {one['cosine']:.3f}"
        lines.append(f"| {name} | {layers} | {gap} | {one.get('windows', '')} | {gradient} |")
    return "\n".join(lines)


def updates(result: Result) -> str:
    """What a first update does to the weights that lie in the middle between two FP8 values."""
    lines = [
        "| all weights moved by 1e-7 | gap in FP8 (standard error) | the same weights in high precision | middle "
        "between two FP8 values |",
        "|---|---|---|---|",
    ]
    for one in result["equal"]:
        if "ties" in one:
            way = one["what"].rpartition("-")[2]
            gap = f"{percent(one['gap'])} ({100 * one['error']:.3f})"
            lines.append(
                f"| {way} the gradient | {gap} | {percent(one['gap_in_high_precision'])} | {100 * one['ties']:.1f} % |"
            )
    return "\n".join(lines)


def growth(result: Result) -> str:
    """The mean gap over the forks by the step of continued training."""
    curves = {what: curve for what, curve in result["growth"].items() if len(curve["steps"]) > 1}
    steps = sorted({step for curve in curves.values() for step in curve["steps"]})
    lines = [f"| gap after steps | {' | '.join(map(str, steps))} | forks |", "|---" * (len(steps) + 2) + "|"]
    for what, curve in curves.items():
        mean = {step: sum(gaps) / len(gaps) for step, gaps in zip(curve["steps"], curve["gaps"], strict=True)}
        shown = [percent(mean[step]) if step in mean else "" for step in steps]
        lines.append(f"| {what} | {' | '.join(shown)} | {len(curve['gaps'][-1])} |")
    return "\n".join(lines)


def parts(result: Result) -> str:
    lines = [
        "| in FP8 | gap after 40 steps, by seed | the trained weights in high precision, by seed |",
        "|---|---|---|",
    ]
    for one in result["parts"]:
        shown = (", ".join(map(percent, one[key])) or "not run" for key in ("gaps", "in_high_precision"))
        lines.append(f"| {one['part']} | {' | '.join(shown)} |")
    return "\n".join(lines)


MORE: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "": rows, "power": power, "cost": cost, "cells": cells, "routing": routing,
    "equal": equal, "updates": updates, "growth": growth, "parts": parts,
}  # fmt: skip


def main() -> None:
    if not PAGE.is_file():
        raise SystemExit(f"there is no {PAGE}, whose tables these are")
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"wrote the tables of {PAGE.relative_to(ROOT)}")
