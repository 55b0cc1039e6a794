"""Prints the layers of a plan: recipe, backend and reason of each, grouped by component."""

from __future__ import annotations

import os
import textwrap
from collections import Counter
from collections.abc import Sequence
from typing import Any


def show(plan: Any, notes: Sequence[str], everything: bool, why: bool = False) -> None:
    """Print the layers by component, then notes."""
    from octavo.fp8 import planning

    print("\n".join(layers(plan, everything)))
    print()
    if why:
        for sentence in backends(plan):
            print(sentence)
        print("\n".join(planning.totals(plan.rows)))
    for note in notes:
        print(f"note: {note}")


def backends(plan: Any) -> list[str]:
    """List the backend of each GEMM with the reason, and why others were rejected, in lines of 80 characters."""
    groups: dict[Any, list[str]] = {}
    for line in plan.backends():
        key = (line.recipe, line.gemm, line.backend, line.reason, line.rejected)
        groups.setdefault(key, []).append(f"{line.shape[0]}\u00a0x\u00a0{line.shape[1]}")  # non-breaking spaces
    wrapped: list[str] = []
    for (recipe, gemm, backend, reason, rejected), shapes in groups.items():
        lines = [f"{recipe}, {gemm} on {backend}, {reason}: {', '.join(shapes)}"]
        lines += [f"  {name} is not used: {why}" for name, why in rejected]
        wrapped += [part for text in lines for part in textwrap.wrap(text, 80, subsequent_indent=2 * _INDENT)]
    return [part.replace("\u00a0", " ") for part in wrapped]


_INDENT = "  "
_NAME = 32  # width of the name column; a longer name is printed on a separate line


def layers(plan: Any, everything: bool = False) -> list[str]:
    """Format a plan's layers in lines of 80 characters, grouped by component. The most common reason and the common
    prefix of names are printed once per component; layers that differ only in their numbers share a line."""
    from octavo.fp8 import planning

    rows = [_line(row) for row in plan.rows] if everything else planning.lines(plan.rows)
    parts = {name: [row[1:] for row in rows if row[0] == name] for name in dict.fromkeys(row[0] for row in rows)}
    shapes = {row[2]: row[2].partition(" (")[0] for row in rows}  # "1536 x 2048 (128 experts, 8 per token)"
    widths = [max(map(len, shapes.values())), *(max(len(row[n]) for row in rows) for n in (3, 4))]
    out: list[str] = []
    for component, layer_rows in parts.items():
        shared = os.path.commonprefix([row[0].split(".")[:-1] for row in layer_rows])
        common = Counter(row[5] for row in layer_rows for _ in range(int(row[2]))).most_common(1)[0][0]
        text = f"{component} ({'.'.join(shared)}): {common}" if shared else f"{component}: {common}"
        out += ["", *textwrap.wrap(text, 80, subsequent_indent=2 * _INDENT)]
        for name, shape, count, recipe, backend, reason in layer_rows:
            name = ".".join(name.split(".")[len(shared) :])
            cells = (shapes[shape].ljust(widths[0]), count.rjust(widths[1]), recipe.ljust(widths[2]), backend)
            if len(name) > _NAME:
                out.append(_INDENT + name)
                name = ""
            out.append(f"{_INDENT}{name:<{_NAME}}  {'  '.join(cells)}".rstrip())
            details = [shape.partition(" (")[2].rstrip(")"), "" if reason == common else reason]
            text = "; ".join(filter(None, details))
            out += textwrap.wrap(text, 80, initial_indent=2 * _INDENT, subsequent_indent=2 * _INDENT)
    return out[1:]


def _line(row: Any) -> tuple[str, ...]:
    recipe = row.recipe.summary() if row.fp8 else "-"
    backend = row.backend.backend.name if row.backend else "-"
    return row.component, row.name, f"{row.shape[0]} x {row.shape[1]}", "1", recipe, backend, row.reason
