"""A plot of each suite: for every case the candidates as bars of their ratio against the baseline.

The scripts in ``benchmarks/`` draw on the same :func:`canvas`.
"""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from octavo.bench.record import Result, Row

BAR, PAPER, INK, SOFT = 0.19, "#fdfdfc", "#22262b", "#6b7178"
FASTER, SLOWER, BASE = "#1d7f79", "#c8571b", "#a9b4c0"


def draw(result: Result, suite: str, path: Path) -> bool:
    """Draw one suite into the PNG file ``path``; where no row has a ratio, there is nothing to draw, and no file."""
    rows = [r for r in result.rows if r.suite == suite and result.ratio(r) is not None]
    if rows:
        _figure(result, suite, rows).savefig(path, dpi=110)
    else:
        path.unlink(missing_ok=True)  # of an earlier run, whose figures are gone
    return bool(rows)


def canvas(width: float, height: float, columns: int = 1) -> tuple[Figure, list[Axes]]:
    """An empty figure in inches, and its axes beside each other."""
    figure = Figure(figsize=(width, height), facecolor=PAPER, layout="constrained")
    found = [figure.add_subplot(1, columns, column + 1, facecolor=PAPER) for column in range(columns)]
    for axes in found:
        axes.tick_params(length=0, labelsize=7)
        axes.spines[["top", "right", "left"]].set_visible(False)
    return figure, found


def _figure(result: Result, suite: str, rows: list[Row]) -> Figure:
    cases = list(dict.fromkeys(r.case for r in rows))
    lines: list[tuple[str, float | None]] = []
    for case in cases:
        lines.append((case, None))
        lines += [(r.candidate, result.ratio(r)) for r in rows if r.case == case]
    figure, (axes,) = canvas(9, 1.2 + BAR * len(lines))
    for y, (name, ratio) in enumerate(lines):
        if ratio is None:
            axes.text(0, y, name, va="center", fontsize=7.5, fontweight="bold", color=INK)
            continue
        axes.barh(y, ratio, height=0.72, color=FASTER if ratio >= 1 else SLOWER)
        axes.text(ratio, y, f" {ratio:.2f}x", va="center", fontsize=7, color=INK)
    axes.axvline(1, color=BASE, linewidth=1)
    axes.set_yticks([y for y, (_, r) in enumerate(lines) if r is not None])
    axes.set_yticklabels([name for name, r in lines if r is not None], fontsize=7, color=SOFT)
    axes.set_ylim(len(lines), -1)
    axes.set_xlim(0, 1.15 * max(r for _, r in lines if r is not None))
    baseline = " or ".join(dict.fromkeys(r.baseline for r in rows))
    size = ", small sizes: says nothing about FP8" if result.small else ""
    axes.set_title(f"{suite} on {result.device}: times faster than {baseline}{size}", loc="left", fontsize=9, color=INK)
    return figure
