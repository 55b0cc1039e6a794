"""The picture of the study `smollm2`: how the gap of forks grows, and what each part costs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from octavo.report.run.plots import PALETTE, STYLE


def draw(result: Mapping[str, object], bar: float, path: Path) -> None:
    with matplotlib.rc_context(STYLE):
        parts = [part for part in result["parts"] if part["gaps"]]
        parts = parts if len(parts) > 1 else []  # the first is everything in FP8
        figure = Figure(figsize=(10 if parts else 6, 4.6), layout="constrained")
        axes = figure.subplots(1, 2 if parts else 1, squeeze=False)[0]
        _draw_growth(axes[0], result["growth"], bar)
        if parts:
            _draw_parts(axes[1], parts)
        figure.savefig(path, dpi=150)


def _draw_growth(axes: Axes, growth: Mapping[str, object], bar: float) -> None:
    """The mean gap by step, and the range of the seeds."""
    for number, (what, curve) in enumerate((what, curve) for what, curve in growth.items() if len(curve["steps"]) > 1):
        middle = np.array([100 * np.mean(gaps) for gaps in curve["gaps"]])
        low, high = (np.array([100 * of(gaps) for gaps in curve["gaps"]]) for of in (min, max))
        color = PALETTE[f"fp8-{number % 4}"]
        style = ("-", ":", "--")[number // 4]
        axes.errorbar(
            np.array(curve["steps"]) + 0.6 * number,
            middle,
            (middle - low, high - middle),
            color=color,
            linestyle=style,
            marker="o",
            markersize=3,
            capsize=2,
            label=f"{what} ({len(curve['gaps'][-1])})",
        )
    axes.axhline(100 * bar, color=PALETTE["soft"], linestyle="--", linewidth=1)
    axes.axhline(0, color=PALETTE["ink"], linewidth=0.8)
    axes.set(title="Continued training: loss above high precision's", xlabel="step", ylabel="% (range of the seeds)")
    axes.legend(fontsize=7, ncol=2, handlelength=3.5, loc="upper center", bbox_to_anchor=(0.5, -0.17))


def _draw_parts(axes: Axes, parts: list[Mapping[str, object]]) -> None:
    """One point a seed, by what is in FP8."""
    shown = parts[::-1]
    for y, part in enumerate(shown):
        axes.plot(
            [100 * gap for gap in part["gaps"]], [y] * len(part["gaps"]), "o", color=PALETTE["fp8-0"], markersize=4
        )
    axes.axvline(0, color=PALETTE["ink"], linewidth=0.8)
    axes.set_yticks(range(len(shown)), [part["part"] for part in shown], fontsize=8)
    axes.set(title="Blockwise after 40 steps, with this in FP8", xlabel="% above high precision, one point a seed")
