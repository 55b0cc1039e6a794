"""The plots of one or more runs: one panel per figure with one line per run, and the health of one run by component.

On a page each panel is a separate picture; the PNG file next to it has all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from octavo.config.sections.rl import BEYOND_SFT
from octavo.report.evidence import rl_claims
from octavo.report.evidence.rl_claims import Panel
from octavo.report.run.history import History
from octavo.report.run.plots import PALETTE, smooth, window_for
from octavo.train.forward.evaluation import judged_by_exact_match

COLORS = ("fp8-0", "base", "fp8-1", "fp8-2", "fp8-3", "fp8-4")
STYLES = ("-", (0, (4, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2)))
MAX_LINES = len(COLORS) * len(STYLES)  # number of distinguishable lines

_LOSS = Panel("loss", "Loss", "loss", "nats per token")
_RIGHT = Panel("eval/exact_match", "Held-out answers equal to the reference", "equal", "share")
_RATES = (
    Panel("lr", "Learning rate", "rate", ""),
    Panel("grad_norm", "Gradient norm", "norm", ""),
    Panel("tokens_per_s", "Tokens per second", "tokens/s", ""),
    Panel("seconds", "Seconds per step", "seconds", ""),
    Panel("fp8_share", "Linear FLOPs in FP8", "share", "share"),
)
#: keys of evaluation figures that a trial's page shows under another name
_JUDGED = {
    "exact_match": "eval/exact_match",
    "held_out_reward": "eval/reward",
    "held_out_accuracies": "eval/rewards/accuracies",
}
_HEALTH = (
    Panel("sqnr", "Lowest SQNR of a layer", "sqnr", "dB"),
    Panel("underflow", "Highest underflow of a layer", "underflow", "share"),
    Panel("saturation", "Highest saturation of a layer", "saturation", "share"),
    Panel("cosine", "Lowest cosine of a weight gradient", "cosine", ""),
)
#: rates are smoothed by medians, so that steps with measurements or evaluations do not look like slow periods; values
#: of the schedule are not smoothed
_MEDIAN, _EXACT = ("tokens_per_s", "seconds"), ("lr", "fp8_share")


@dataclass(frozen=True)
class Line:
    """A run with its label, colour and stroke."""

    label: str
    history: History
    color: str
    style: str | tuple = "-"


def make_lines(labels: Sequence[str], histories: Sequence[History]) -> list[Line]:
    """Return a line per run, each with its colour; from the seventh run on the stroke changes."""
    return [
        Line(label, history, COLORS[n % len(COLORS)], STYLES[n // len(COLORS)])
        for n, (label, history) in enumerate(zip(labels, histories, strict=True))
    ]


def has_comparable_losses(history: History) -> bool:
    """Return whether the losses of steps and of held-out data are comparable: not in phases rl and preference."""
    return history.cfg.train.phase not in BEYOND_SFT


def shows_exact_match(history: History) -> bool:
    """Return whether exact match is a verdict on a run, and not only a figure in its files."""
    return judged_by_exact_match((*history.figures, *history.judged))


def select_panels(phase: str) -> tuple[Panel, ...]:
    """Return the panels of a phase: its objective first, then speed."""
    panels = rl_claims.PANELS.get(phase)
    if panels is None:
        return (_LOSS, _RIGHT, *_RATES)
    judged = [panel._replace(key=_JUDGED.get(panel.key, panel.key)) for panel in panels]
    return (*judged, _LOSS._replace(unit=""), *_RATES)


def visible_panels(lines: Sequence[Line], phase: str) -> list[Panel]:
    """Return the panels of a phase for which any run has two figures or more; exact match only where it is a verdict.
    A single figure is no curve: the page has it in a table."""
    curves = {panel: [line.history.curve(panel.key) for line in lines] for panel in select_panels(phase)}
    panels = [panel for panel, sides in curves.items() if any(curve and len(curve[0]) > 1 for curve in sides)]
    exact = all(shows_exact_match(line.history) for line in lines)
    return [panel for panel in panels if exact or panel.key != _RIGHT.key]


def curves_figure(lines: Sequence[Line], panels: Sequence[Panel]) -> Figure:
    """Draw all panels in one figure."""
    rows = max(1, -(-len(panels) // 2))
    figure = Figure(figsize=(9, 0.4 + 2.1 * rows), layout="constrained")
    all_axes = list(figure.subplots(rows, 2, squeeze=False).flatten())
    for axes, panel in zip(all_axes, panels, strict=False):
        _draw_lines(axes, lines, panel)
    for axes in all_axes[len(panels) :]:
        axes.set_axis_off()
    if len(lines) > 1:
        labelled = [pair for axes in all_axes for pair in zip(*axes.get_legend_handles_labels(), strict=True)]
        handles = {label: handle for handle, label in labelled}
        figure.legend(handles.values(), handles, loc="outside upper left", ncols=min(len(handles), 3))
    return figure


def panel_figure(lines: Sequence[Line], panel: Panel) -> Figure:
    """Draw one panel as a separate figure; the page places as many side by side as fit."""
    figure, axes = _small_figure()
    _draw_lines(axes, lines, panel)
    return figure


def health_figures(history: History) -> list[tuple[str, Figure]]:
    """Draw a panel for each health figure, with a line per component."""
    figures = []
    for panel in _HEALTH:
        if any(panel.key in series for series in history.health.values()):
            figure, axes = _small_figure()
            for number, (component, series) in enumerate(history.health.items()):
                if panel.key in series:
                    curve = series[panel.key].curve
                    axes.plot(*curve, color=PALETTE[COLORS[number]], lw=1.4, marker="o", ms=3, label=component)
            _finish_axes(axes, panel)
            figures.append((panel.key, figure))
    return figures


def _small_figure() -> tuple[Figure, Axes]:
    figure = Figure(figsize=(4.6, 2.3), layout="constrained")
    return figure, figure.subplots()


def _draw_lines(axes: Axes, lines: Sequence[Line], panel: Panel) -> None:
    """Draw raw values in pale and smoothed values in strong lines; the loss panel shows held-out losses as dots."""
    for line in lines:
        color, label = PALETTE[line.color], line.label
        if (curve := line.history.curve(panel.key)) is not None:
            steps, values = curve
            rare, window = len(steps) <= 12, window_for(len(steps))
            plain = rare or window == 1 or panel.key in _EXACT
            if not plain:
                axes.plot(steps, values, color=color, lw=0.6, alpha=0.3)
                values = (_medians if panel.key in _MEDIAN else smooth)(values, window)
            axes.plot(steps, values, color=color, ls=line.style, lw=1.6, marker="o" if rare else "", ms=3, label=label)
        held = line.history.curve("eval/loss") if panel.key == "loss" and has_comparable_losses(line.history) else None
        if held is not None:
            axes.plot(*held, color=color, lw=0, marker="o", ms=4.5, mfc=PALETTE["paper"])
    _finish_axes(axes, panel)


def _medians(values: np.ndarray, window: int) -> np.ndarray:
    """Return centred medians; the window shrinks near the ends."""
    half = max(window, 7) // 2
    return np.array([np.median(values[max(0, n - half) : n + half + 1]) for n in range(len(values))])


def _finish_axes(axes: Axes, panel: Panel) -> None:
    values = np.concatenate([np.asarray(line.get_ydata(), dtype=float) for line in axes.get_lines()])
    low, high = (float(values.min()), float(values.max())) if values.size else (0.0, 0.0)
    if low > 0 and (panel.log or (panel.key == "loss" and high > 20 * low)):
        axes.set_yscale("log")
    if low == high == 0:  # a flat line at 0 sits on the axis, instead of between impossible negative values
        axes.set_ylim(-0.05, 1)
    axes.set_title(panel.title, fontsize=10)
    axes.set(ylabel=panel.unit, xlabel="step")
    axes.margins(x=0.02)
