"""The plots of phases rl and preference: the figures of each step, in FP8 and in high precision.

Every run is a pale, smoothed line; the mean over several seeds is a strong one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from octavo.report.evidence.rl_claims import Panel, pair_runs
from octavo.report.evidence.run_reader import RunRecord, common_steps
from octavo.report.evidence.trial_claims import Sides
from octavo.report.evidence.trial_spec import Run
from octavo.report.run.plots import PALETTE, WIDE, legend_at_title, smooth, window_for


@dataclass(frozen=True)
class Side:
    """The runs of one precision, one per seed; ``color`` is a name in ``PALETTE``."""

    label: str
    color: str
    records: Sequence[RunRecord]
    dashed: bool = False


def pair_sides(records: Sequence[tuple[Run, RunRecord]]) -> list[tuple[Side, Side]]:
    """Return pairs of an FP8 recipe and high precision, over the seeds that both have; FP8 runs cycle through five
    colours."""
    reference = next((run, record) for run, record in records if run.kind == "reference")
    sides = []
    for number, fp8 in enumerate((run, record) for run, record in records if run.kind == "fp8"):
        fp8_records, high_records = zip(*pair_runs(Sides(fp8, reference, records)), strict=True)
        sides.append(
            (Side(fp8[0].label, f"fp8-{number % 5}", fp8_records), Side("high precision", "base", high_records, True))
        )
    return sides


def unpaired_sides(records: Sequence[tuple[Run, RunRecord]]) -> list[Side]:
    """Return the high-precision runs with seeds that FP8 was not trained with; they show the effect of the
    seed alone."""
    seeds = {run.cfg.run.seed for run, _ in records if run.kind in ("fp8", "seed")}
    unpaired = [(run, record) for run, record in records if run.kind == "noise" and run.cfg.run.seed not in seeds]
    return [Side(run.label, "noise", [record]) for run, record in unpaired]


def learning_figure(sides: Sequence[Side], panels: Sequence[Panel], width: float = WIDE) -> Figure:
    """Return a figure with a panel for each quantity that any run recorded at two steps or more; a single figure is in
    a table."""
    records = [record for side in sides for record in side.records]
    shown = [panel for panel in panels if any(_count_points(record, panel) > 1 for record in records)]
    across = 2 if width >= WIDE else 1
    rows = max(1, -(-len(shown) // across))
    figure = Figure(figsize=(width, 0.5 + 2.3 * rows), layout="constrained")
    all_axes = figure.subplots(rows, across, squeeze=False).flatten()
    for axes, panel in zip(all_axes, shown, strict=False):
        for side in sides:
            _draw_side(axes, side, [(r.steps, r.figures[panel.key]) for r in side.records if panel.key in r.figures])
        values = np.concatenate([line.get_ydata() for line in axes.get_lines()])
        values = values[np.isfinite(values)]
        if panel.log and values.size and values.min() > 0:
            axes.set_yscale("log")
        axes.set_title(panel.title, fontsize=10)
        axes.set(ylabel=panel.unit, xlabel="step")
        axes.margins(x=0.01)
    for axes in all_axes[len(shown) :]:
        axes.set_axis_off()
    if shown:
        handles, labels = all_axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper right", ncols=min(len(labels), 2 * across))
    return figure


def _count_points(record: RunRecord, panel: Panel) -> int:
    return int(np.isfinite(record.figures[panel.key]).sum()) if panel.key in record.figures else 0


def reward_gap_figure(pairs: Sequence[tuple[Side, Side]], panel: Panel, width: float = WIDE) -> Figure:
    """Plot FP8 minus high precision, step by step, in pairs with the same seed."""
    figure = Figure(figsize=(width, 2.9), layout="constrained")
    axes = figure.subplots()
    for fp8, high in pairs:
        gaps = []
        for record, reference in zip(fp8.records, high.records, strict=True):
            if panel.key in record.figures and panel.key in reference.figures:
                record_at, reference_at = common_steps(record, reference)
                gaps.append(
                    (
                        record.steps[record_at],
                        record.figures[panel.key][record_at] - reference.figures[panel.key][reference_at],
                    )
                )
        _draw_side(axes, fp8, gaps)
    axes.axhline(0, color=PALETTE["base"], lw=1, ls=(0, (4, 2)))
    axes.margins(x=0.01)
    title = f"{panel.title}: FP8 minus high precision" if width >= WIDE else f"{panel.title}: difference"
    axes.set(title=f"{title}, seed by seed", xlabel="step", ylabel=panel.unit)
    if axes.get_legend_handles_labels()[1]:
        legend_at_title(axes, width, 4 if width >= WIDE else 2)
    return figure


def _draw_side(axes: Axes, side: Side, curves: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
    """Draw each curve (steps, values) and the mean of all curves at their common steps; sparse curves, such as
    evaluations, have a dot at each value."""
    if not curves:
        return
    color, style = PALETTE[side.color], (0, (4, 2)) if side.dashed else "-"
    curves = [(steps[np.isfinite(values)], values[np.isfinite(values)]) for steps, values in curves]
    rare = max(len(steps) for steps, _ in curves) <= 12
    by_step: list[dict[int, float]] = []
    for steps, values in curves:
        drawn = values if rare else smooth(values, window_for(len(values)))
        by_step.append(dict(zip(steps.tolist(), drawn.tolist(), strict=True)))
        if len(curves) > 1:
            axes.plot(steps, drawn, color=color, lw=0.8, alpha=0.35, marker="o" if rare else "", ms=2.5)
    common = sorted(set.intersection(*(set(curve) for curve in by_step)))
    mean = [float(np.mean([curve[step] for curve in by_step])) for step in common]
    axes.plot(common, mean, color=color, lw=1.9, ls=style, label=side.label, marker="o" if rare else "", ms=4)
