"""Plots how the gap of forks grows with their length: mean and 95 % interval by recipe."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from octavo.report.run.plots import PALETTE, STYLE


def draw(growth: Mapping[str, Any], title: str, bar: float, path: Path) -> None:
    """`growth`: recipe -> steps after the fork, and the gaps of all forks at each; `bar`: the gap that is allowed."""
    from octavo.report.evidence.claims import mean_gap

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(8, 3.6), layout="constrained")
        axes = figure.subplots()
        for number, (recipe, curve) in enumerate(growth.items()):
            points = [(step, mean_gap(gaps)) for step, gaps in zip(curve["steps"], curve["gaps"], strict=True)]
            known = [(step, one) for step, one in points if one is not None]
            if not known:
                continue
            at = np.array([step for step, _ in known]) + 6 * (number - (len(growth) - 1) / 2)
            middle, half = (np.array([100 * getattr(one, of) for _, one in known]) for of in ("estimate", "half"))
            color = PALETTE[f"fp8-{number}"]
            axes.errorbar(at, middle, half, color=color, marker="o", markersize=4, capsize=2, label=recipe)
        axes.axhline(100 * bar, color=PALETTE["soft"], linestyle="--", linewidth=1)
        axes.axhline(0, color=PALETTE["ink"], linewidth=0.8)
        axes.set(title=title, xlabel="steps after the fork", ylabel="% (95 % intervals)")
        axes.legend(ncols=len(growth))
        figure.savefig(path, dpi=150)
