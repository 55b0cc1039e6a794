"""The canvas and colours shared by the plots of the scripts in ``benchmarks/`` and of the report."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure

PAPER, INK, SOFT = "#fdfdfc", "#22262b", "#6b7178"
FASTER, SLOWER, BASE = "#1d7f79", "#c8571b", "#a9b4c0"


def canvas(width: float, height: float, columns: int = 1) -> tuple[Figure, list[Axes]]:
    """An empty figure in inches, and its axes side by side."""
    figure = Figure(figsize=(width, height), facecolor=PAPER, layout="constrained")
    panels = [figure.add_subplot(1, columns, column + 1, facecolor=PAPER) for column in range(columns)]
    for axes in panels:
        axes.tick_params(length=0, labelsize=7)
        axes.spines[["top", "right", "left"]].set_visible(False)
    return figure, panels
